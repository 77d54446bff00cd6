"""Ranks agree on collectives: the i-th call of a group is the same call on every member, and no member stops calling.

`what` says in which respect the members' calls are compared: function, arguments (operation, root), tensor (dtype, shape),
step, caller (the function that makes the call), variable (whose value or gradient is sent), result (bits of what all hold afterwards), count (calls in all), pair
(a send and the receive that takes it). `what="turn"`: nobody waits in a collective for a rank that does not come.
Catches a collective that a branch skips on one rank, the wrong group, ranks of different lengths of data, a stuck job,
told while it is stuck.

Source: ours; mismatches of collectives are what torch's own debug wrapper (TORCH_DISTRIBUTED_DEBUG=DETAIL) looks for, at
the cost of a second collective for each. Differs in that nothing is communicated: the ranks' records are laid beside
each other afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.condition import AGREE
from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, _surveys, register
from proctor.invariants.relations.agree.waiting import (
    PATIENCE_S,
    STUCK,
    longest_call_s,
    patience_s,
    stuck_row,
)
from proctor.invariants.relations.views import collectives as _collectives
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.absence import alone
from proctor.invariants.trace import Trace

_ONE_SHAPE: Final = ("all_reduce", "broadcast", "reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather", "reduce_scatter")
_REDUCTIONS: Final = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather")
_CLAIMS: Final = {
    "function": "the i-th collective of a group is the same function on all its ranks",
    "arguments": "a collective has the same operation and the same root on all ranks of its group",
    "tensor": "a collective is given tensors of one dtype and shape by all ranks of its group",
    "step": "the i-th collective of a group is called in the same training step on all its ranks",
    "caller": "the i-th reduction or gathering of a group is called by the same function on all its ranks",
    "variable": "the i-th collective of a group is given the same variable on all its ranks",
    "result": "all ranks of a group hold the same bits after an all_reduce, a broadcast or an all_gather",
    "count": "all ranks of a group call a collective function the same number of times",
    "pair": "what a rank sends has the dtype and shape that its peer receives",
    "turn": "no rank is waited for in vain: every rank of a group makes the call that the others wait in",
}
_ADVICE: Final = {
    "step": "One rank makes one call more or less than the others: look for a branch on the rank, on the data or on the loss around it, and for ranks with different numbers of batches.",
    "caller": "Two calls that have nothing to do with each other meet: one rank skips, or adds, a collective, or calls it on the wrong group.",
    "turn": "Look for a branch, an early exit or an exception on the rank that does not come, and for ranks with different numbers of batches.",
    "variable": "The ranks go through their variables in different orders: look for a set, a dict filled in another order, or a sort by something that differs.",
    "result": "The ranks' calls did not meet, or a rank's buffer is not contiguous or is written while the call runs.",
}
_FIELDS: Final = ("group", "axis", "fn", "phase", "p2p", "programs", "family")
_SCOPE: Final = ("p2p", "programs")
_HABITS: Final = ("step", "caller", "count", "variable")  # that may be otherwise where ranks run different programs
_KEEP: Final = 6  # passing examples of one function of one group
_KEEP_FAILING: Final = 20  # of one group: what follows a call that was skipped fails for the same reason
LEAST_S: Final = 3.0  # a wait that nothing can end


@register
class Agree(Relation):
    """Ranks make the same collective calls, in the same order."""

    name = "agree"
    code = "PR110"
    upstream: ClassVar[int] = 2
    ahead: ClassVar[int] = 0
    reads: ClassVar[Reads] = "records"
    waits: ClassVar[bool] = True
    across_ranks: ClassVar[bool] = True
    reach: ClassVar[int | None] = None  # calls are counted from the beginning
    folds: ClassVar[Mapping[str, _surveys.Fold]] = {"longest": "max"}
    standing: ClassVar[Standing] = Standing.LAW

    def survey(self, trace: Trace) -> pl.DataFrame:
        whats = [what for what, view in _VIEWS.items() if view(trace)["passed"].any()]
        if not whats:
            return pl.DataFrame()
        longest = longest_call_s(trace)
        return pl.DataFrame({"what": whats, "longest": [longest if w == "turn" else 0.0 for w in whats]})

    def settle(self, survey: pl.DataFrame) -> list[Hypothesis]:
        found = []
        for what, longest in survey.select("what", "longest").iter_rows() if survey.width else ():
            more = {"patience": str(patience_s(longest))} if what == "turn" else {}
            found.append(Hypothesis.of("agree", what=what, **more))
        return found

    def idle(self, trace: Trace) -> bool:
        return alone(trace)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        parts = []
        for i, h in enumerate(hypotheses):
            rows = _turns(trace, float(h.text("patience") or PATIENCE_S[-1])) if h["what"] == "turn" else _VIEWS[h.text("what")](trace)
            said: dict[str, pl.Expr] = {"hyp": pl.lit(i, dtype=pl.UInt32)}
            if h["what"] not in _HABITS:  # true of any program
                said |= {c: pl.lit(None) for c in (*_SCOPE, *(c + AGREE for c in _SCOPE))}
            parts.append(rows.with_columns(**said))
        return Examples(_stack(parts), _FIELDS, _SCOPE)

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """Which part of the program makes a call, and in which of its steps, is up to the program (`join`, uneven data)."""
        what = hypothesis["what"]
        return Standing.REPLICAS if what == "result" else Standing.CHOICE if what in _HABITS else self.standing

    def needs(self, hypothesis: Hypothesis) -> Needs:
        values = {"result": {"sent", "received"}}.get(hypothesis.text("what"), {"sent"})
        more = _collectives.BACKWARD if hypothesis["what"] == "turn" else frozenset[str]()
        return Needs(_collectives.FUNCTIONS | more, values=frozenset(values))

    def say(self, hypothesis: Hypothesis) -> str:
        return _CLAIMS[hypothesis.text("what")]

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        what, name = hypothesis.text("what"), _collectives.name_of(example["_fn"])
        return Detail(
            expected=f"{name} (call {example['_item'] + 1} of {example['_group']}): {_WANTED[what]}",
            seen=example["_seen"],
            function=name,
            module=example["_caller"],
            sides=tuple(map(tuple, example["_sides"] or ())),
            advice=_ADVICE.get(what, "Look at what decides whether, and with what, this rank calls the collective."),
        )


_WANTED: Final = {
    "function": "the same function on all ranks",
    "arguments": "the same operation and root on all ranks",
    "tensor": "the same dtype and shape on all ranks",
    "step": "in the same step on all ranks",
    "caller": "called by the same function on all ranks",
    "variable": "the same variable on all ranks",
    "result": "the same bits on all ranks",
    "count": "as many calls on every rank",
    "pair": "the dtype and shape that are received",
    "turn": "every rank makes the call",
}


# -- the i-th call of a group ------------------------------------------------------------------------------------------


def _calls(trace: Trace) -> pl.DataFrame:
    """Calls of groups of several ranks, one row a member and call, in order; `_lossy`: a rank of the run lost records."""
    rows = _members(trace).filter(pl.col("fn") != _collectives.DDP)
    return rows


def _members(trace: Trace) -> pl.DataFrame:
    """As `_calls`, and the backward passes of DistributedDataParallel."""
    return _frames.memo(trace, "agree members", _find_members)


def _find_members(trace: Trace) -> pl.DataFrame:
    rows = _collectives.sent(trace).filter(pl.col("fn").is_in([*_collectives.SYMMETRIC, _collectives.DDP]) & (pl.col("size") != 1))
    talk = _frames.replicated_runs(trace).select("run", pl.when("p2p").then(pl.lit("true")).otherwise(pl.lit("false")).alias("p2p")).unique()
    return rows.join(talk, on="run").sort("run", "group", "members", "item", "rank")


_CALL: Final = ["run", "group", "members", "item"]


def _compared(trace: Trace) -> dict[str, pl.DataFrame]:
    """For each view that compares what members say of a call: one row a call that several made, passed if all say the same."""
    return _frames.memo(trace, "agree compared", _compare_all)


def _compare_all(trace: Trace) -> dict[str, pl.DataFrame]:
    calls = _calls(trace)
    same = (pl.col("fn").n_unique() == 1).over(_CALL).alias("_same")
    whole = [condition.all().over(_CALL).alias(name) for name, condition in _WHOLE.items()]
    calls = calls.with_columns(same, *whole)
    told = pl.concat(
        calls.filter(among).with_columns(said.alias("_said"), pl.lit(view).alias("_view")) for view, (said, among) in _SAID.items()
    )
    found = _verdicts(trace, told.drop_nulls("_said"), ["_view"])
    parts = found.partition_by("_view", as_dict=True, include_key=False)
    return {view: parts.get((view,), found.clear().drop("_view")) for view in _SAID}


def _verdicts(trace: Trace, rows: pl.DataFrame, apart: Sequence[str] = ()) -> pl.DataFrame:
    """Args: rows: with what each says in `_said`. apart: columns that divide them into rows that have nothing to do with each other."""
    one = pl.col("_said").n_unique() == 1
    # The minority is to blame; where there is none, the last rank.
    votes = pl.len().over(*apart, *_CALL, "_said")
    odd = rows.with_columns(votes.alias("_votes")).sort(*apart, *_CALL, "_votes", pl.col("rank") * -1)
    found = odd.group_by(*apart, *_CALL, maintain_order=True).agg(
        one.alias("passed"),
        pl.len().alias("_n"),
        pl.col("size").first(),
        *(pl.col(c).first() for c in ("proc", "step", "seq", "site")),
        pl.col("fn").first().alias("_fn"),
        pl.col("caller").first().alias("_caller"),
        pl.col("rank").alias("_ranks"),
        pl.col("_said").alias("_says"),
        *(pl.when(pl.col(f).n_unique() == 1).then(pl.col(f).first()).alias(f) for f in ("fn", "phase", "family")),
        *((pl.col(f).n_unique() == 1).alias(f + AGREE) for f in ("fn", "phase", "family")),
        pl.col("p2p").first(),
    )
    return _shown(trace, found.filter(pl.col("_n") > 1), apart)


def _shown(trace: Trace, found: pl.DataFrame, apart: Sequence[str] = ()) -> pl.DataFrame:
    """Thinned, with fields and texts; `apart` as for `_verdicts`."""
    ok = pl.col("passed").fill_null(value=True)
    found = found.filter(
        pl.when(ok).then(pl.int_range(pl.len()).over(*apart, "run", "group", "_fn", "phase", ok, _frames.news(trace)) < _KEEP)
        .otherwise((~ok).cum_sum().over(*apart, "run", "group", "members", _frames.news(trace)) <= _KEEP_FAILING)
    )
    found = found.join(_collectives.axes(trace, found), on=["run", "members"], how="left", maintain_order="left")
    worlds = trace.procs.group_by("run").agg(pl.col("world").max())
    found = found.join(worlds, on="run", how="left", maintain_order="left")
    labels = pl.when(pl.col("size") == pl.col("world")).then(pl.lit("world")).otherwise(pl.lit("part"))
    alike = pl.when("family" + AGREE).then(pl.lit("alike")).otherwise(pl.lit("different"))
    found = found.with_columns(labels.alias("group"), alike.alias("programs"), pl.concat_str(pl.lit("the group of ranks "), "members").alias("_group"))
    seen = [
        "" if ok is not False else _sides(ranks, says)
        for ok, ranks, says in found.select("passed", "_ranks", "_says").iter_rows()
    ]
    parted = [
        None if ok is not False else [who for _, who in _parted(ranks, says)]
        for ok, ranks, says in found.select("passed", "_ranks", "_says").iter_rows()
    ]
    return found.with_columns(
        pl.Series("_seen", seen, dtype=pl.String),
        pl.Series("_sides", parted, dtype=pl.List(pl.List(pl.Int32))),
        pl.col("item").alias("_item"),
    )


def _parted(ranks: Sequence[int], says: Sequence[str]) -> list[tuple[str, list[int]]]:
    """What is said and by which ranks, the fewest first."""
    sides: dict[str, list[int]] = {}
    for rank, text in sorted(zip(ranks, says, strict=True)):
        sides.setdefault(text, []).append(rank)
    return sorted(sides.items(), key=lambda side: (len(side[1]), side[1]))


def _sides(ranks: Sequence[int], says: Sequence[str]) -> str:
    few = _parted(ranks, says)[:4]
    return " against ".join(f"{text} on rank {', '.join(map(str, who[:8]))}{' …' if len(who) > 8 else ''}" for text, who in few)


_ROOT: Final = pl.when(pl.col("root") >= 0).then(pl.concat_str(pl.lit(" root "), "root")).otherwise(pl.lit(""))
_WHOLE: Final = {  # what must be so of all members of a call
    "_training": pl.col("step") >= 0,
    "_named": pl.col("caller") != "",
    "_known": pl.col("variable").is_not_null(),
}
_SAID: Final = {  # by view: what is compared, null where it is not known, and of which calls
    "function": (pl.col("fn"), pl.lit(value=True)),
    "arguments": (pl.concat_str("op", _ROOT).str.strip_chars(), ((pl.col("op") != "") | (pl.col("root") >= 0)) & pl.col("_same")),
    "tensor": (pl.concat_str("dtype", pl.lit(" "), "shape"), pl.col("fn").is_in(_ONE_SHAPE) & pl.col("_same")),
    "step": (pl.concat_str(pl.lit("step "), "step"), pl.col("_training") & pl.col("_same")),
    "caller": (pl.col("caller"), pl.col("fn").is_in(_REDUCTIONS) & pl.col("_named") & pl.col("_same")),
    "variable": (pl.col("variable"), pl.col("fn").is_in(_ONE_SHAPE) & pl.col("_known") & pl.col("_same")),
}  # fmt: skip


def _results(trace: Trace) -> pl.DataFrame:
    rows = _collectives.received(trace).filter(pl.col("size") != 1)
    rows = rows.with_columns(pl.concat_str(pl.lit("bits "), pl.col("fp")).alias("_said"), pl.lit("false").alias("p2p"))
    same = rows.filter((pl.col("fn").n_unique() == 1).over(_CALL))
    return _verdicts(trace, same.with_columns(pl.col("site").fill_null(0)))


def _counts(trace: Trace) -> pl.DataFrame:
    """One row a member of a group in runs that ended: passed if it made as many calls as the others."""
    done = [i for i, p in enumerate(trace.processes) if p.finished]
    rows = _calls(trace).with_columns(pl.col("proc").is_in(done).alias("_done"))
    mine = ["run", "group", "members", "proc"]
    rows = rows.with_columns((pl.len().over(mine) == pl.col("item").max().over(mine) + 1).alias("_all"))
    # A member that left no record at all, on another host perhaps, or is there twice, may have called as often as the others.
    ranks = _frames.replicated_runs(trace).group_by("run").agg((pl.col("rank").n_unique() == pl.col("world").max()).alias("_complete"))
    seen = (pl.col("_complete") | (pl.col("proc").n_unique() == pl.col("size").max())).all()
    kept = (pl.col("_done") & pl.col("_all") & ~pl.col("lossy")).all()
    groups = rows.join(ranks, on="run").group_by("run", "group", "members").agg((kept & seen).alias("_known"))
    counts = rows.sort("item").group_by("run", "group", "members", "size", "proc", "rank", "p2p", "family", "fn", maintain_order=True).agg(
        pl.len().alias("_count"), pl.col("step", "seq", "site", "phase", "item").last(), pl.col("caller").last().alias("_caller")
    )
    who = ["run", "group", "members", "fn"]
    whole = counts.join(groups, on=["run", "group", "members"]).filter(pl.col("_known"))
    # A rank that never calls the function has no row: the others are to be told.
    most = (pl.col("_count") == pl.col("_count").max().over(who)) & (pl.len().over(who) == pl.col("size"))
    text = pl.concat_str("_count", pl.lit(" calls of "), "fn")
    whole = whole.with_columns(most.alias("passed"), pl.col("fn").alias("_fn"), text.alias("_text"))
    sides = whole.group_by(who).agg(pl.col("rank").alias("_ranks"), pl.col("_text").alias("_says"), (pl.col("family").n_unique() == 1).alias("family" + AGREE))
    return _shown(trace, whole.join(sides, on=who, maintain_order="left"))


def _pairs(trace: Trace) -> pl.DataFrame:
    """One row a send and its receive: passed if dtype and shape are the same."""
    rows = _collectives.sent(trace).filter(pl.col("fn").is_in([*_collectives.SENDS, *_collectives.RECEIVES]) & (pl.col("peer") >= 0))
    sends = rows.filter(pl.col("fn").is_in(_collectives.SENDS)).with_columns(pl.col("rank").alias("from"), pl.col("peer").alias("to"))
    takes = rows.filter(pl.col("fn").is_in(_collectives.RECEIVES)).with_columns(pl.col("peer").alias("from"), pl.col("rank").alias("to"))
    way = ["run", "group", "members", "from", "to", "tag", "item"]
    said = pl.concat_str("dtype", pl.lit(" "), "shape")
    takes = takes.select(*way, said.alias("_takes"), pl.col("rank").alias("_taker"), pl.col("family").alias("_family"))
    both = sends.with_columns(said.alias("_gives")).join(takes, on=way).drop_nulls(["_gives", "_takes"])
    both = both.with_columns(
        (pl.col("_gives") == pl.col("_takes")).alias("passed"), pl.lit("true").alias("p2p"),
        (pl.col("family") == pl.col("_family")).fill_null(value=False).alias("family" + AGREE),
        pl.concat_list("rank", "_taker").alias("_ranks"), pl.concat_list("_gives", "_takes").alias("_says"),
        pl.col("fn").alias("_fn"), pl.col("caller").alias("_caller"),
    )  # fmt: skip
    return _shown(trace, both.sort(way))


# -- turns ------------------------------------------------------------------------------------------------------------


def _turns(trace: Trace, longest_s: float) -> pl.DataFrame:
    """Calls that all members made, passed; and waits that do not end, failed."""
    rows = _members(trace)
    met = rows.group_by(_CALL, maintain_order=True).agg(
        pl.len().alias("_n"), *(pl.col(c).first() for c in ("proc", "step", "seq", "site", "size", "fn", "phase", "family", "p2p")),
        (pl.col("family").n_unique() == 1).alias("family" + AGREE), pl.col("caller").first().alias("_caller"),
    )  # fmt: skip
    met = met.filter(pl.col("_n") == pl.col("size")).with_columns(
        pl.lit(value=True).alias("passed"), pl.col("fn").alias("_fn"),
        pl.lit(None, dtype=pl.List(pl.Int32)).alias("_ranks"), pl.lit(None, dtype=pl.List(pl.String)).alias("_says"),
    )  # fmt: skip
    met = _shown(trace, met)
    patience_s = min(longest_s, trace.hang_after_s)
    stuck = _collectives.stuck(trace, least_s=min(LEAST_S, patience_s), patience_s=patience_s)
    if not stuck:
        return met
    return pl.concat([met, pl.DataFrame([stuck_row(trace, s) for s in stuck], schema=STUCK, orient="row")], how="diagonal_relaxed")


def _stack(parts: Sequence[pl.DataFrame]) -> pl.DataFrame:
    types: dict[str, Any] = {"hyp": pl.UInt32, "passed": pl.Boolean, "proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32}
    more: dict[str, Any] = {"_fn": pl.String, "_group": pl.String, "_item": pl.Int32, "_caller": pl.String, "_seen": pl.String}
    more["_sides"] = pl.List(pl.List(pl.Int32))
    pairs = [f + AGREE for f in ("fn", "phase", "family", *_SCOPE)]
    columns = {**types, **dict.fromkeys(_FIELDS, pl.String), **dict.fromkeys(pairs, pl.Boolean), **more}
    even = []
    for part in parts:
        own = frozenset(part.columns)
        unsaid = {f + AGREE: pl.lit(value=True) for f in _SCOPE}
        even.append(part.select((pl.col(c) if c in own else unsaid.get(c, pl.lit(None))).cast(t).alias(c) for c, t in columns.items()))
    return pl.concat(even) if even else pl.DataFrame(schema=columns)


_VIEWS: Final[dict[str, Callable[[Trace], pl.DataFrame]]] = {
    **{view: partial(lambda t, view: _compared(t)[view], view=view) for view in _SAID},
    "result": lambda t: _frames.memo(t, "agree result", _results),
    "count": lambda t: _frames.memo(t, "agree count", _counts),
    "pair": lambda t: _frames.memo(t, "agree pair", _pairs),
    "turn": lambda t: _turns(t, PATIENCE_S[-1]),
}
