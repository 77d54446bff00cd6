"""Mistakes planted into recorded tapes, judged in this process: what doubles see is never equal in the field, nor proved."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from helpers.oracle.prove_programs import tensor_parallel

from proctor.oracle.prove.recording.world import tape_of

FILE = Path(__file__).resolve().parents[4] / "benchmarks" / "prove_mutants.py"


def test_no_mutant_that_doubles_see_is_equal_or_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("prove_mutants", FILE)
    assert spec is not None and spec.loader is not None
    mutants = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutants)
    program = ("three ranks", tape_of(tensor_parallel()), [tape_of(tensor_parallel(), rank, 3) for rank in range(3)])
    monkeypatch.setattr(mutants, "_PROGRAMS", [program])
    rows = [mutants.mutant(number, 7, number == 3) for number in range(12)]
    assert not [row for row in rows if row["bad"]]
    assert sum(not row["why"] and not row["doubles"] for row in rows) > 3
    assert len({row["kind"] for row in rows}) > 3
