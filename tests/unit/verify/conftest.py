from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.relations import ALL
from helpers.runs import write_run

from proctor.invariants.invariant import Invariant
from proctor.invariants.pack import Pack
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import CheckResult
from proctor.verify.checker import check


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., CheckResult]:
    """Write processes as a run and check rules on it."""

    def _judge(processes: list[dict[str, Any]], rules: list[Invariant]) -> CheckResult:
        run = write_run(tmp_path / f"run{len(list(tmp_path.iterdir()))}", processes)
        return check(Trace.load([run]), [Pack(rules)], relations=ALL)

    return _judge
