"""What the command line knows of relations is what there is."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from proctor.oracle.selfcheck import registry
from proctor.oracle.selfcheck.program import registry as programs
from proctor.oracle.selfcheck.run import NAMES


def test_every_relation_is_known_by_name():
    assert set(NAMES) == set(registry()) | {"resume"}
    assert set(programs()) == {"configured", "determinism", "ranks", "saved", "tokens", "vary"}


def test_every_relation_says_what_it_claims():
    for name, relation in {**registry(), **programs()}.items():
        assert relation.name == name and relation.claim and relation.timeout_s > 0
