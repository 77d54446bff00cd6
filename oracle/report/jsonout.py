"""The comparison as one JSON object, schema 1; infinite and NaN numbers are null. Scripts depend on it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

import msgspec

from proctor.oracle.judging.verdicts import ReplicaConflict, TensorVerdict
from proctor.oracle.report import Report
from proctor.oracle.report._wording import module

SCHEMA: Final = 1


def render(report: Report) -> str:
    """The object, indented."""
    verdict = report.verdict
    content = {
        "schema": SCHEMA,
        "verdict": verdict.verdict,
        "reason": verdict.reason,
        "first": _tensor(verdict.first) if verdict.first is not None else None,
        "culprit": msgspec.to_builtins(verdict.culprit) if verdict.culprit is not None else None,
        "tensors": [_tensor(t) for t in verdict.tensors],
        "replicas": [_replica(r) for r in verdict.replicas],
        "unchecked": list(verdict.unchecked),
        "notes": list(verdict.notes),
        "checked": verdict.checked,
        "steps": {"compared": verdict.steps[0], "recorded": verdict.steps[1]},
        "reference": report.reference,
        "candidate": report.candidate,
        "mesh": report.mesh,
        "samples": report.samples,
        "mode": report.mode,
        **({"proof": asdict(report.proof)} if report.proof is not None else {}),
    }
    return msgspec.json.format(msgspec.json.encode(content), indent=2).decode() + "\n"


def _tensor(tensor: TensorVerdict) -> dict[str, Any]:  # Any: JSON
    return {
        "name": tensor.name,
        "kind": tensor.kind,
        "rel_err": tensor.rel_err,
        "tolerance": tensor.tolerance,
        "ratio": tensor.ratio,
        "verdict": tensor.verdict,
        "ranks": tensor.ranks,
        "module": module(tensor),
        "source": tensor.source,
        "step": tensor.step,
        "phase": tensor.phase,
        "call": tensor.call,
        "slot": tensor.slot,
        "class": tensor.cls,
        "abs_err": tensor.abs_err,
        "layout": tensor.layout,
        "order": tensor.order,
        "note": tensor.note,
    }


def _replica(item: ReplicaConflict) -> dict[str, Any]:  # Any: JSON
    return {
        "name": item.name,
        "kind": item.kind,
        "axis": item.axis,
        "ranks": item.ranks,
        "majority": item.majority,
        "rel_err": item.rel_err,
        "ratio": item.ratio,
        "module": module(item),
        "source": item.source,
        "step": item.step,
        "phase": item.phase,
        "call": item.call,
        "slot": item.slot,
        "class": item.cls,
        "note": item.note,
    }
