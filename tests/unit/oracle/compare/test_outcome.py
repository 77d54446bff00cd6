"""oracle/recording/outcome.py: what is recorded and compared again."""

from __future__ import annotations

from typing import Any

import pytest

from proctor.oracle.judging.verdicts import Verdict
from proctor.oracle.recording.outcome import Compared, record_and_compare
from proctor.oracle.report import Report


@pytest.mark.parametrize(("given", "alike", "seeds"), [(None, True, [None]), (None, False, [None, 0]), (7, False, [7])])
def test_parameters_are_generated_only_where_the_runs_begin_otherwise(given: int | None, alike: bool, seeds: list[int | None]) -> None:
    used: list[int | None] = []

    def record(seed: int | None) -> Any:
        used.append(seed)
        return seed, seed

    def compare(_: Any, seed: Any) -> Compared:
        return Compared(Report(Verdict(verdict="inconclusive", alike=alike, reason=str(seed))), None)

    assert record_and_compare(record, compare, given).report.verdict.reason == str(seeds[-1])
    assert used == seeds
