"""Where several ranks are given one batch: the loader that gave it to them.

In: a `Scene` of ranks that are given the same. Out: a `Cause`, or None where no loader is seen to give it.
"""

from __future__ import annotations

from typing import Final

import polars as pl

from proctor.invariants.schema import Value
from proctor.invariants.verdict import Cause
from proctor.verify.blame.scene import Call, Scene

_NEXT: Final = "torch.utils.data.DataLoader.__next__"
_BEGIN: Final = "torch.utils.data.DataLoader.__iter__"


def explain(scene: Scene) -> Cause | None:
    """The loader that gives these ranks the same."""
    rank = scene.odd[0]
    roots = scene.roots(rank)
    given = None if not roots else _by_content(scene, roots[0]) or _latest(scene, rank, _NEXT, roots[0].seq)
    if given is None:
        return None
    begun = _latest(scene, rank, _BEGIN, given.seq)
    since = f", whose iterator is made at {begun.source.rpartition('/')[2]}" if begun is not None and begun.source != given.source else ""
    text = f"{given}{since}, gives the same batch to {scene.said(scene.odd)}: its dataset or sampler does not divide the data by rank."
    made = begun if begun is not None else given
    return Cause(text, given.function, made.source)


def _by_content(scene: Scene, root: Call) -> Call | None:
    """The call of a loader that gave what a model is given, told by its content."""
    trace, proc = scene.trace, scene.procs[root.rank]
    handed = trace.values.filter((pl.col("kind") == int(Value.HANDED)) & (pl.col("proc") == proc) & (pl.col("seq") <= root.seq) & (pl.col("fp") != 0))
    wanted = handed.filter(pl.col("seq") == root.seq)["fp"]
    found = handed.filter(pl.col("fp").is_in(wanted.implode()) & (pl.col("seq") < root.seq)).sort("seq")
    loaded = trace.calls.filter((pl.col("proc") == proc) & (pl.col("fn") == trace.function_code.get(_NEXT, -1)))
    found = found.join(loaded.select("seq"), on="seq", how="semi")
    return _call(scene, root.rank, int(found["seq"][-1])) if found.height else None


def _latest(scene: Scene, rank: int, function: str, before: int) -> Call | None:
    """The last call of a function before another call, in whichever step."""
    calls = scene.trace.calls
    rows = calls.filter((pl.col("proc") == scene.procs[rank]) & (pl.col("fn") == scene.trace.function_code.get(function, -1)) & (pl.col("seq") < before))
    return _call(scene, rank, int(rows["seq"].max())) if rows.height else None  # type: ignore[arg-type]


def _call(scene: Scene, rank: int, seq: int) -> Call:
    row = scene.trace.calls.filter((pl.col("proc") == scene.procs[rank]) & (pl.col("seq") == seq)).row(0, named=True)
    return Call(rank, seq, scene.trace.functions[row["fn"]], "", scene.trace.sites[row["site"]])
