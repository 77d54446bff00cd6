"""Training loops as rows for `write_run`, and what a relation makes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from helpers.runs import write_run
from proctor.infer.engine import infer
from proctor.invariants.invariant import Invariant
from proctor.invariants.relations import Detail, Relation
from proctor.invariants.trace import Trace

STEP, ZERO_GRAD, BACKWARD = (
    "torch.optim.Optimizer.step",
    "torch.optim.Optimizer.zero_grad",
    "torch.Tensor.backward",
)
ROOT = 2  # CallFlag.ROOT


def tensor(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    return {"T": dtype, "s": list(shape), "d": "cpu"}


def call(fn: str, *args: Any, ret: Any = None, **more: Any) -> dict[str, Any]:
    """A row of calls; `named` are keyword arguments."""
    given = {"a": list(args), "k": more.pop("named", {})}
    return {"fn": fn, "args": given, "ret": "null" if ret is None else ret, **more}


def loop(
    steps: int = 6,
    *,
    body: Sequence[str] = ("zero_grad", "forward", "backward", "step"),
    skip: Mapping[int, Sequence[str]] | None = None,
    clears: bool = True,
    model: str = "__main__.Net",
    extra: Sequence[Mapping[str, Any]] = (),
    **process: Any,
) -> dict[str, Any]:
    """One process that trains; `skip` leaves out parts of some steps, `clears=False` keeps the old gradient."""
    optimizer = {"O": "torch.optim.Adam", "v": "#0", "a": {}}
    rows = {
        "zero_grad": lambda: call(ZERO_GRAD, optimizer),
        "forward": lambda: call(
            f"{model}.forward", {"M": model, "p": "", "t": 1}, tensor(8, 4), ret=tensor(8, 2), flags=ROOT
        ),
        "backward": lambda: call(BACKWARD, tensor()),
        "step": lambda: call(STEP, optimizer),
    }
    var = {"model": model, "name": "fc.weight", "attr": "grad", "module": "torch.nn.Linear", "kind": "weight"}
    meta = {"dtype": "float32", "optimizer": "#0", "requires_grad": True}
    calls: list[dict[str, Any]] = [dict(row, step=-1, phase="init") for row in extra]
    states: list[dict[str, Any]] = [
        {"var": dict(var, attr="data"), "meta": meta, "step": -1, "phase": "init", "fp": 1},
        {"var": var, "meta": meta, "step": -1, "phase": "init", "flags": 1},
    ]
    for step in range(steps):
        for part in body:
            if part in (skip or {}).get(step, ()):
                continue
            row = rows[part]() if part in rows else call(part)
            calls.append({**row, "step": step})
            seq = len(calls)
            if part == "zero_grad" and clears:
                states.append({"var": var, "meta": meta, "step": step, "seq": seq, "call": seq, "flags": 1})
            if part == "backward":
                states.append(
                    {"var": var, "meta": meta, "step": step, "seq": seq, "call": seq, "fp": 100 + step}
                )
    return {"calls": calls, "states": states, **process}


def load(tmp: Path, *runs: Sequence[Mapping[str, Any]]) -> Trace:
    """Each argument is the processes of one run."""
    start = len(list(tmp.glob("run*")))
    return Trace.load([write_run(tmp / f"run{start + i}", list(run)) for i, run in enumerate(runs)])


def learn(relation: Relation, trace: Trace) -> list[Invariant]:
    return infer(trace, [relation], strict=True)[0]


def violations(
    relation: Relation, rules: Sequence[Invariant], trace: Trace
) -> dict[str, list[dict[str, Any]]]:
    """Failing examples by the text of the rule."""
    frame = relation.examples(trace, [rule.hypothesis for rule in rules]).frame
    columns = frozenset(frame.columns)
    found = {}
    for i, rule in enumerate(rules):
        bad = frame.filter((pl.col("hyp") == i) & rule.precondition.holds(columns) & ~pl.col("passed"))
        if bad.height:
            found[rule.text] = bad.sort("step", "seq").to_dicts()
    return found


def details(relation: Relation, rules: Sequence[Invariant], trace: Trace) -> list[Detail]:
    bad = violations(relation, rules, trace)
    return [relation.detail(trace, r.hypothesis, bad[r.text][0]) for r in rules if r.text in bad]


def holds(relation: Relation, rules: Sequence[Invariant], trace: Trace) -> int:
    """Examples that meet their rule's precondition and passed."""
    frame = relation.examples(trace, [rule.hypothesis for rule in rules]).frame
    columns = frozenset(frame.columns)
    return sum(
        frame.filter((pl.col("hyp") == i) & rule.precondition.holds(columns) & pl.col("passed")).height
        for i, rule in enumerate(rules)
    )
