"""JSON: the one object of the CLI contract, and one line a violation for `violations.jsonl`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.invariants.files import UNREADABLE, read_file
from proctor.invariants.verdict import CheckResult, Incident, Silenced, Violation
from proctor.verify import wording
from proctor.verify.report import Report

# 1: first version.
REPORT_SCHEMA: Final = 1
MAX_REPORT_BYTES: Final = 256 * 1024 * 1024


def render(report: Report) -> str:
    """One JSON object, ASCII only, so that no locale can break it."""
    return json.dumps(tree(report), allow_nan=False) + "\n"


def tree(report: Report) -> dict[str, Any]:
    """The report as plain data; its keys are the contract, more may follow."""
    result = report.result or CheckResult("", [], 0, 0, 0, [], 0, 0)
    return {
        "schema": REPORT_SCHEMA,
        "verdict": wording.state(report.result, report.exit_code),
        "exit_code": report.exit_code,
        "run": result.run,
        "packs": list(report.packs),
        "steps": result.steps,
        "ranks": result.ranks,
        "violations": [msgspec.to_builtins(v) for v in result.violations],
        "incidents": [
            {"title": i.title, "first_step": i.first_step, "violations": [v.id for v in i.violations]}
            for i in result.incidents
        ],
        "checked": result.checked,
        "not_triggered": result.not_triggered,
        "unknown": result.unknown,
        "notes": result.notes,
        "silenced": [msgspec.to_builtins(s) for s in result.silenced],
    }


def lines(violations: Sequence[Violation]) -> str:
    """One JSON object a line."""
    return "".join(json.dumps(msgspec.to_builtins(v), allow_nan=False) + "\n" for v in violations)


class _Incident(msgspec.Struct):
    title: str
    first_step: int | None
    violations: list[str]


class _Saved(msgspec.Struct):
    schema: int
    violations: list[Violation]
    incidents: list[_Incident]
    checked: int
    not_triggered: int
    unknown: int
    exit_code: int = 0
    run: str = ""
    packs: list[str] = []
    steps: int = 0
    ranks: int = 0
    notes: list[str] = []
    silenced: list[Silenced] = []


def read(path: Path) -> tuple[CheckResult, int, list[str]] | None:
    """A saved JSON report: result, exit code and packs; `None` when there is none that we can read."""
    try:
        saved = msgspec.json.decode(read_file(path, MAX_REPORT_BYTES), type=_Saved)
    except (OSError, *UNREADABLE):
        return None
    if saved.schema > REPORT_SCHEMA:
        return None
    by_id = {v.id: v for v in saved.violations}
    incidents = [
        Incident(i.title, i.first_step, [by_id[v] for v in i.violations if v in by_id]) for i in saved.incidents
    ]
    result = CheckResult(
        run=saved.run,
        incidents=[i for i in incidents if i.violations],
        checked=saved.checked,
        not_triggered=saved.not_triggered,
        unknown=saved.unknown,
        notes=saved.notes,
        steps=saved.steps,
        ranks=saved.ranks,
        silenced=saved.silenced,
    )
    return result, saved.exit_code, saved.packs
