"""`proctor explain PR2xx`: notices about the monitoring itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from proctor.cli.explain.own import OWN
from proctor.cli.page import test as _page_test
from proctor.verify.lifecycle import monitor
from proctor.verify.lifecycle.policy import Policy
from proctor.verify.paging import gate


@pytest.mark.parametrize("code", sorted(OWN))
def test_each_code_of_a_notice_is_explained(proctor, code):
    done, out, _ = proctor("explain", code.lower())
    assert done == 0
    title, _, text = out.partition("\n\n")
    assert title.startswith(f"{code} ") and len(text) > 100


def test_no_code_is_forgotten():
    sources = [*Path(monitor.__file__).parent.glob("*.py"), *Path(gate.__file__).parent.glob("*.py"), Path(_page_test.__file__)]
    told = {code for path in sources for code in re.findall(r'"(PR2\d\d)"', path.read_text(encoding="utf-8"))}
    assert told == set(OWN)


def test_the_numbers_in_the_texts_are_those_of_the_policy():
    texts = " ".join(own.text for own in OWN.values())
    for name, seconds in re.findall(r"`(\w+_s)` \((\d+) s\)", texts):
        assert getattr(Policy(), name) == float(seconds), name


def test_an_unknown_code_names_the_known_ones(proctor):
    done, _, err = proctor("explain", "PR250")
    assert done == 2
    assert "test_happens" in err and "PR202 silent rank" in err
