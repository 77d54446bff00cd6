"""When a function runs, what it should do happens inside it: a call of another function, or a change of state.

`kind="call"`: every call of `parent` contains a call of `child`, at any depth. Catches a branch that silently skips
work: an engine that never calls its optimizer, a forward that bypasses the wrapper, a collective that one rank omits.
`kind="change"`: an update changes the parameters that it should, a step gives them gradients, `zero_grad` clears
them (`_changes.py`). Catches a frozen head, an optimizer that holds other tensors than the model, a detached layer.

Source: TrainCheck §3.2, the EventContain relation. Differs in that all pairs come from one walk up the call tree, and
that a child which a nearer function explains is left to that function's rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import numpy as np
import polars as pl

from proctor.invariants.condition import AGREE, BEYOND, UNTOLD, Precondition, barred
from proctor.invariants.invariant import Hypothesis, Standing, Support
from proctor.invariants.relations import CALLED, Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations._surveys import Fold
from proctor.invariants.relations.contain import changes as _changes
from proctor.invariants.relations.contain import drawn as _drawn
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.schema import CallFlag
from proctor.invariants.trace import Trace

# Of torch's own functions, those that call back into the program.
_TORCH_PARENTS: Final = re.compile(
    r"torch\.(optim\.Optimizer\.step|optim\.lr_scheduler\.LRScheduler\.step|autograd\.backward"
    r"|amp\.GradScaler\.(step|unscale_)|nn\.parallel\.DistributedDataParallel\.forward|nn\.utils\.clip_grad_\w+"
    r"|distributed\.fsdp\..*\.forward|utils\.checkpoint\.checkpoint|utils\.data\.DataLoader\.__next__)"
)
# What training is made of: expected inside a library's function whatever model it trains.
_MACHINERY: Final = re.compile(
    r"torch\.(optim\.(Optimizer|lr_scheduler\.LRScheduler)\.(step|zero_grad)|distributed\.(?!new_group|init|destroy|get_)\w+"
    r"|nn\.utils\.clip_grad_\w+|amp\.GradScaler\.\w+|Tensor\.backward|autograd\.\w+|utils\.checkpoint\.checkpoint"
    r"|nn\.parallel\.DistributedDataParallel\.\w+|nn\.Module\.zero_grad|utils\.data\.DataLoader\.\w+)"
)
# Not what a model is made of: a program of the same classes may have GELU for Tanh. Nor arithmetic and bookkeeping,
# which depend on the data.
_CHILDREN: Final = re.compile(
    rf"{_MACHINERY.pattern}|torch\.nn\.Module\.(load_state_dict|train|eval)|torch\.(save|load|autocast\.__enter__|no_grad\.__enter__)"
)
_SAVE: Final = "torch.save"
_MAX_CHILDREN: Final = 400  # of a parent with more, none is followed: it is the whole program
_PER_CIRCUMSTANCE: Final = 8  # calls of a parent that are looked at, of each distinct circumstance
_PER_FUNCTION: Final = 64  # and of all circumstances in a process
_FEATURES: Final = 48  # columns of arguments
_MIN_PASSED: Final = 4
_SIMPLE: Final = re.compile(r"[A-Za-z_][\w.\-]{0,23}")
_FIELDS: Final = ("first", "phase", "training", "self", "grad", "autocast", "recompute")


@register
class EventContain(Relation):
    """A call contains a call, or a change of state."""

    name = "contain"
    code = "PR102"
    narrowing: ClassVar[frozenset[str]] = frozenset({"family"})
    reads_signatures: ClassVar[bool] = False
    absence: ClassVar[bool] = True
    upstream: ClassVar[int] = 4

    folds: ClassVar[Mapping[str, Fold]] = {"n": "sum", "lacking": "sum", "often": "any", "some": "any", "every": "all"}

    def survey(self, trace: Trace) -> pl.DataFrame:
        changes = _changes.survey(trace).with_columns(pl.lit("change").alias("what"))
        return self.merge([_survey_calls(trace), changes])

    def settle(self, survey: pl.DataFrame) -> list[Hypothesis]:
        if survey.is_empty():
            return []
        return _settle_calls(survey) + _changes.settle(survey.filter(pl.col("what") == "change"))

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        calls = [(i, h) for i, h in enumerate(hypotheses) if h["kind"] == "call"]
        changes = [(i, h) for i, h in enumerate(hypotheses) if h["kind"] == "change"]
        parts, features = [], list[str]()
        if calls:
            frame, features = _call_examples(trace, calls)
            parts.append(frame)
        if changes:
            parts.append(_changes.examples(trace, changes))
        fields = (*_FIELDS, *_changes.FIELDS, *features, "family")
        scope = ("family", *_changes.SCOPE)
        return Examples(_stack(parts, fields, scope), fields, scope)

    def keep(self, hypothesis: Hypothesis, support: Support, precondition: Precondition) -> bool:
        """Not what calls contain in the beginning alone, where later ones contradict it: where a warm-up ends differs from run to run."""
        beginning = any(c.field == "first" and c.value == "first" for clause in precondition.any_of for c in clause)
        return support.passed >= _MIN_PASSED and not (hypothesis["kind"] == "call" and beginning and support.excluded)

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """Which functions call which is how a program and its options are; what an update changes is not."""
        return _changes.standing(hypothesis) if hypothesis["kind"] == "change" else Standing.HABIT

    def upstream_of(self, hypothesis: Hypothesis) -> int:
        return CALLED if hypothesis["kind"] == "call" else self.upstream

    def needs(self, hypothesis: Hypothesis) -> Needs:
        if hypothesis["kind"] == "change":
            return _changes.needs(hypothesis)
        return Needs(frozenset({hypothesis.text("parent"), hypothesis.text("child")}))

    def reads_of(self, hypothesis: Hypothesis) -> Reads:
        """What a call changes is held against norms: small changes are excused."""
        return "numbers" if hypothesis["kind"] == "change" else "calls"

    def say(self, hypothesis: Hypothesis) -> str:
        if hypothesis["kind"] == "change":
            return _changes.say(hypothesis)
        models = sorted({word.split("/")[0].removeprefix("__main__.") for word in hypothesis.text("family").split()})
        where = f" of {', '.join(models)}" if models else ""
        return f"every call of {hypothesis['parent']} calls {hypothesis['child']}, in programs{where} with {hypothesis['layout']}"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        if hypothesis["kind"] == "change":
            return _changes.detail(hypothesis, example)
        parent, child = hypothesis.text("parent"), hypothesis.text("child")
        rank = trace.processes[example["proc"]].rank
        where = f"on rank {rank} " if trace.processes[example["proc"]].world > 1 else ""
        when = f"in step {example['step']}" if example["step"] >= 0 else "before training"
        return Detail(
            expected=f"{parent} calls {child}",
            seen=f"{child} not called {where}{when}: this call of {parent} ended without it",
            function=child,
            module=parent,
            advice=f"Look in {parent} for the branch or early return that skips {child}, and at what its condition was computed from.",
        )


# -- calls in calls ---------------------------------------------------------------------------------------------------


def _user(name: str) -> bool:
    return not name.startswith("torch.")


def _roles(trace: Trace) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """By function code: may be a parent, may be a child."""
    names = trace.functions
    parents = [bool(n) and (_user(n) or _TORCH_PARENTS.fullmatch(n) is not None) for n in names]
    children = [bool(n) and (_user(n) or _CHILDREN.fullmatch(n) is not None) for n in names]
    return np.array(parents, dtype=bool), np.array(children, dtype=bool)


def _pairs(trace: Trace) -> pl.DataFrame:
    """Calls and what they contain: row, fn (of the call), child."""
    return _frames.memo(trace, "contained", lambda t: _frames.contained(t, *_roles(t)))


def _sensible(parent: str, child: str) -> bool:
    """Whether a pair can say something: torch's own nesting is torch's business."""
    return parent != child and (_user(parent) or _user(child) or child.startswith("torch.distributed."))


def _survey_calls(trace: Trace) -> pl.DataFrame:
    """What is counted of calls: what, parent, child, family, layout, n, often, lacking.

    what: `calls` of the parent itself; `pair`, calls of the parent that contain the child at any depth, by family (""
    where it does not matter) and layout of the program; `direct`, calls of the parent that call the child themselves.
    often: some process calls the parent more than once, unlike main. lacking: of `pair`, calls without the child that chance would have given.
    """
    pairs, up, fn = _pairs(trace), _frames.enclosing(trace), trace.calls["fn"].to_numpy()
    names = pl.DataFrame({"fn": pl.Series(range(len(trace.functions)), dtype=pl.UInt32), "name": trace.functions})
    calls = trace.calls.group_by("proc", "fn").len("n").group_by("fn").agg(pl.col("n").sum(), (pl.col("n") > 1).any().alias("often"))
    rows = pairs["row"].to_numpy()
    own = _own_pairs(trace)
    inside = pairs.with_columns(pl.Series("fn", fn[rows]), pl.Series("proc", trace.calls["proc"].to_numpy()[rows]))
    inside = inside.group_by("proc", "fn", "child").len("n").join(trace.families, on="proc").join(_frames.layouts(trace), on="proc")
    inside = inside.join(own, on=["fn", "child"], how="left")
    inside = inside.join(_drawn.lacking(trace, *_roles(trace)), on=["proc", "fn", "child"], how="left")
    inside = inside.with_columns(pl.when("own").then(pl.lit("")).otherwise("family").alias("family")).group_by("fn", "child", "family", "layout").agg(pl.col("n", "lacking").sum())
    inner = np.flatnonzero(up >= 0)
    direct = pl.DataFrame({"row": up[inner], "child": fn[inner]}, schema={"row": pl.Int64, "child": pl.UInt32}).unique()
    direct = direct.with_columns(pl.Series("fn", fn[direct["row"].to_numpy()])).group_by("fn", "child").len("n")
    parts = {"calls": calls, "pair": inside, "direct": direct}
    both = pl.concat([part.with_columns(pl.lit(what).alias("what")) for what, part in parts.items()], how="diagonal_relaxed")
    both = both.join(names.rename({"name": "parent"}), on="fn").join(names.select(pl.col("fn").alias("child"), pl.col("name").alias("_child")), on="child", how="left")
    return both.select("what", "parent", pl.col("_child").alias("child"), "family", "layout", pl.col("n").cast(pl.Int64), "often", pl.col("lacking").fill_null(0))


def _settle_calls(survey: pl.DataFrame) -> list[Hypothesis]:
    calls = survey.filter(pl.col("what") == "calls").select("parent", pl.col("n").alias("all"), "often")
    pairs = survey.filter(pl.col("what") == "pair")
    counted = pairs.group_by("parent", "child").agg(pl.col("n", "lacking").sum()).join(calls, on="parent").sort("parent", "child")
    direct = survey.filter(pl.col("what") == "direct").join(calls, on="parent")
    implies: dict[str, set[str]] = {}
    # Trivial nesting (Linear.forward calls linear) explains too, so that only the outer name is left.
    for known in (counted, direct):
        for f, c in known.filter(pl.col("n") == pl.col("all")).group_by("parent").agg("child").iter_rows():
            implies.setdefault(f, set()).update(c)
    places = pairs.group_by("parent", "child").agg(pl.struct("family", "layout").unique().sort().alias("where"))
    bounds: dict[tuple[str, str], list[dict[str, str]]] = {(f, c): where for f, c, where in places.iter_rows()}
    found: list[Hypothesis] = []
    eligible = counted.filter(pl.col("often") & (pl.col("parent") != pl.col("child"))).with_columns(_drawn.by_chance().alias("chance"))
    for parent, children, counts, chances in eligible.group_by("parent", maintain_order=True).agg("child", "n", "chance").iter_rows():
        if len(children) > _MAX_CHILDREN:
            continue
        count = dict(zip(children, counts, strict=True))
        for child, chance in zip(children, chances, strict=True):
            nearer = (m for m in children if m != child and count[m] == count[child] and child in implies.get(m, ()))
            explained = any(m not in implies.get(child, ()) for m in nearer)
            # Whether a state is saved depends on how training goes: it is the best so far, or it is not.
            saves = child == _SAVE or _SAVE in implies.get(child, ())
            if not explained and not saves and not chance and _sensible(parent, child):
                found += [Hypothesis.of("contain", kind="call", parent=parent, child=child, **where) for where in bounds[parent, child]]
    return found


def _own_pairs(trace: Trace) -> pl.DataFrame:
    """Pairs that are a library's own doing: fn, child, own.

    Any other rule is of one family and one layout for good. `__main__.Encoder` and `__main__.train` are shared by programs
    that have nothing else in common, and a library that does a thing in two layouts may not in the third, so that what
    several of them do alike is no law.
    """
    names, pairs = trace.functions, _pairs(trace)
    distinct = pl.DataFrame({"fn": trace.calls["fn"].gather(pairs["row"]), "child": pairs["child"]}).unique()
    own = [_own_library(names[f], names[c]) for f, c in distinct.iter_rows()]
    return distinct.with_columns(pl.Series("own", own, dtype=pl.Boolean))


def _call_examples(trace: Trace, hypotheses: Sequence[tuple[int, Hypothesis]]) -> tuple[pl.DataFrame, list[str]]:
    code = trace.function_code
    known = [(i, h) for i, h in hypotheses if h.text("parent") in code]
    wanted = pl.DataFrame(
        {
            "hyp": [i for i, _ in known],
            "fn": [code[h.text("parent")] for _, h in known],
            "child": [code.get(h.text("child"), len(code)) for _, h in known],
            "_child": [h.text("child") for _, h in known],
            "family": [h.text("family") for _, h in known],
            "layout": [h.text("layout") for _, h in known],
        },
        schema={"hyp": pl.UInt32, "fn": pl.UInt32, "child": pl.UInt32, "_child": pl.String, "family": pl.String, "layout": pl.String},
    )
    sample, features = _sample(trace)
    places = trace.families.join(_frames.layouts(trace), on="proc")
    free = wanted.filter(pl.col("family") == "").join(places.drop("family"), on="layout")
    bound = wanted.filter(pl.col("family") != "").join(places, on=["family", "layout"])
    wanted = pl.concat([free, bound], how="diagonal").join(_gone(trace, set(wanted["_child"])), on=["proc", "_child"], how="anti")
    rows = wanted.select("hyp", "fn", "child", "proc").join(sample, on=["fn", "proc"])
    inside = _pairs(trace).with_columns(pl.lit(value=True).alias("passed"))
    rows = rows.join(inside, on=["row", "child"], how="left", maintain_order="left").with_columns(pl.col("passed").fill_null(value=False))
    return rows.with_columns(pl.when(pl.col("passed") | ~pl.col("_gap")).then("passed").alias("passed")), features


def _own_library(parent: str, child: str) -> bool:
    """A library's own doing, whatever program uses it; anything else is known of one kind of program only."""
    library = parent.split(".")[0]
    if parent.endswith(".forward"):  # a module does what it was built for
        return False
    if library in ("torch", "__main__") or child.endswith(".forward"):  # which model runs is the program's choice
        return False
    return child.split(".")[0] == library or _MACHINERY.fullmatch(child) is not None


def _sample(trace: Trace) -> tuple[pl.DataFrame, list[str]]:
    return _frames.memo(trace, "parent calls", _take_sample)


def _take_sample(trace: Trace) -> tuple[pl.DataFrame, list[str]]:
    """Some calls of each possible parent, of all circumstances: row, fn, proc, seq, step, site, _gap and fields."""
    parents, _ = _roles(trace)
    pairs = _pairs(trace)
    content = pairs.group_by("row").agg(pl.col("child").hash().sum().alias("_content"))
    calls = trace.calls.with_row_index("row").filter(
        pl.Series(parents[trace.calls["fn"].to_numpy()]) & ((pl.col("flags") & int(CallFlag.RAISED)) == 0)
    )
    calls = calls.join(content, on="row", how="left", maintain_order="left")
    told = trace.contexts.select(
        "ctx", "step", "phase",
        pl.when("grad").then(pl.lit("true")).otherwise(pl.lit("false")).alias("grad"),
        pl.when(pl.col("autocast") == "").then(pl.lit("none")).otherwise("autocast").alias("autocast"),
        pl.when("recompute").then(pl.lit("true")).otherwise(pl.lit("false")).alias("recompute"),
    )
    calls = calls.join(told, on="ctx", how="left", maintain_order="left").with_columns(*_step_inside(trace, calls))
    # Where in the run a call is that spans several steps, as an episode does, is chance: it need not begin where a warm-up ends.
    calls = calls.with_columns(pl.when("_spans").then(pl.lit("several")).when(pl.col("step") > 0).then(pl.lit("later")).otherwise(pl.lit("first")).alias("first"))
    circumstance = ["proc", "fn", "_content", "first", "phase", "grad", "autocast", "recompute"]
    calls = _frames.first_of_each(calls, [*circumstance, "args", _frames.news(trace)], _PER_CIRCUMSTANCE)
    calls = _frames.first_of_each(calls, [*circumstance, _frames.news(trace)], _PER_FUNCTION)
    features = _features(trace, calls["args"].unique().to_list())
    calls = calls.join(features, on="args", how="left", maintain_order="left").with_columns(_gaps(trace, calls).alias("_gap"))
    names = [c for c in features.columns if c not in ("args", "training", "self", BEYOND)]
    return calls.select("row", "fn", "proc", "seq", "step", "site", "_gap", BEYOND, *_FIELDS, *names), names


def _step_inside(trace: Trace, calls: pl.DataFrame) -> tuple[pl.Expr, pl.Expr]:
    """The step that a call is about: the one that begins inside it, where just one does; and whether several do (`_spans`)."""
    steps = trace.calls.select("ctx").join(trace.contexts.select("ctx", "step"), on="ctx", how="left", maintain_order="left")["step"]
    inside = pl.DataFrame({"row": pl.Series(_frames.enclosing(trace), dtype=pl.Int64), "_last": steps}).filter(pl.col("row") >= 0)
    last = calls.select(pl.col("row").cast(pl.Int64)).join(inside.group_by("row").agg(pl.col("_last").max()), on="row", how="left", maintain_order="left")["_last"]
    one = pl.when(pl.lit(last) == pl.col("step") + 1).then(pl.col("step") + 1).otherwise("step").alias("step")
    return one, (pl.lit(last) > pl.col("step") + 1).fill_null(value=False).alias("_spans")


def _features(trace: Trace, codes: Sequence[int]) -> pl.DataFrame:
    """Simple facts about arguments: flags, names, classes; no numbers and no shapes, which do not transfer.

    The commonest are columns, and which these are differs from window to window; the others are named (`BEYOND`).
    """
    table: dict[str, dict[int, str]] = {}
    for code in codes:
        for path, value in trace.features[code].items():
            if path.endswith(".name") or path.count("[") > 1:
                continue
            if isinstance(value, bool):
                table.setdefault(path, {})[code] = "true" if value else "false"
            elif isinstance(value, str) and (_SIMPLE.fullmatch(value) or path == "0.type") and not path.endswith((".path", ".device")):
                table.setdefault(path, {})[code] = value
            elif value is None and path.endswith(".value"):
                table.setdefault(path, {})[code] = "None"
    for code in codes:
        missing = trace.left_out.get(code, frozenset())
        for path in table if "" in missing else missing & table.keys():
            table[path].setdefault(code, UNTOLD)
    standard = {"training": table.pop("0.training", {}), "self": table.pop("0.type", {})}
    paths = sorted(sorted(table), key=lambda p: -len(table[p]))
    beyond: dict[int, list[str]] = {}
    for path in paths[_FEATURES:]:
        for code in table[path]:
            beyond.setdefault(code, []).append(f"argument {path}")
    rest = {code: barred(*fields) for code, fields in beyond.items()}
    columns = standard | {f"argument {p}": table[p] for p in sorted(paths[:_FEATURES])} | {BEYOND: rest}
    return pl.DataFrame(
        {
            "args": pl.Series(codes, dtype=pl.UInt32),
            **{name: pl.Series([values.get(c) for c in codes], dtype=pl.String) for name, values in columns.items()},
        }
    )


def _gone(trace: Trace, functions: set[str]) -> pl.DataFrame:
    """Functions that a note says are not observed from some moment on: proc, _child."""
    pairs = [(i, word) for i, p in enumerate(trace.processes) for note in p.notes for word in note.split() if word in functions]
    return pl.DataFrame(pairs, schema={"proc": pl.UInt16, "_child": pl.String}, orient="row").unique()


def _gaps(trace: Trace, calls: pl.DataFrame) -> pl.Series:
    """Whether a call ran across steps that were not sampled, or on behind a window that others follow, so that what it contains is not all known."""
    seen = _frames.seen_steps(trace).filter(pl.col("step") >= 0).sort("proc", "step")
    whole = seen.group_by("proc").agg((pl.col("step").max() - pl.col("step").min() + 1 != pl.len()).alias("_holes"))
    holes = whole.filter(pl.col("_holes") | (not trace.ends))["proc"]
    if holes.is_empty():
        return pl.Series("_gap", np.zeros(calls.height, dtype=bool))
    # Its end is before the first later call that is not inside it; between the two steps there must be no hole.
    times = trace.calls.select("proc", "t", "ctx").join(trace.contexts.select("ctx", "step"), on="ctx").sort("t").select("proc", "t", pl.col("step").alias("_next"))
    ends = calls.select("proc", "step", (pl.col("t") + pl.col("dur")).alias("t")).with_row_index("_i").sort("t")
    ends = ends.join_asof(times, on="t", by="proc", strategy="forward", check_sortedness=False)
    rank = seen.with_columns(pl.int_range(pl.len()).over("proc").alias("_at"))
    ends = ends.join(rank, on=["proc", "step"], how="left").join(
        rank.rename({"step": "_next", "_at": "_at_next"}), on=["proc", "_next"], how="left"
    )
    gap = (pl.col("_at_next") - pl.col("_at")) != (pl.col("_next") - pl.col("step"))
    return ends.sort("_i").select((pl.col("proc").is_in(holes.implode()) & gap.fill_null(value=True)).alias("_gap"))["_gap"]


def _stack(parts: Sequence[pl.DataFrame], fields: Sequence[str], scope: Sequence[str]) -> pl.DataFrame:
    types: dict[str, Any] = {"hyp": pl.UInt32, "passed": pl.Boolean, "proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32}
    frame = pl.concat(parts, how="diagonal") if parts else pl.DataFrame()
    frame = frame.with_columns(pl.lit(None, dtype=types.get(c, pl.String)).alias(c) for c in (*types, *fields) if c not in frame.columns)
    frame = frame.with_columns(pl.when(pl.col(f).is_not_null()).then(pl.lit(value=True)).alias(f + AGREE) for f in scope)
    private = [c for c in ("_name", "_module", "_optimizer", "_cause", BEYOND) if c in frame.columns]
    return frame.select(*(pl.col(c).cast(t) for c, t in types.items()), *fields, *(f + AGREE for f in scope), *private)
