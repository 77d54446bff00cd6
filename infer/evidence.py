"""Why is a rule believed? A few examples on either side of its precondition, and every run that supports it.

Called by the engine once preconditions are known, with the very examples that they were found on::

    found = evidence.collect(relation, trace, hypotheses, outcomes, examples)   # by index of the hypothesis
    rules, dropped = select(relation, hypotheses, outcomes, trace.processes, evidence=found, sources=sources(trace))

Evidence is plain data, a few hundred bytes a rule. Pieces of it that were collected from different shards merge
(`merge`, associative, commutative and idempotent; a shard is one or more whole runs, or a part of a run: counts of
one run from two parts are added up by `join_parts`). Where shards are read before any precondition is known, pass
`outcomes=None`: every hypothesis then gets evidence, and `settle` narrows it to its precondition later.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, Final

import msgspec
import polars as pl

from proctor.infer.preconditions import Outcome
from proctor.invariants.condition import AGREE, Precondition, clip
from proctor.invariants.invariant import Diversity, Evidence, Example, Hypothesis, RunSupport
from proctor.invariants.pack import Source
from proctor.invariants.relations import Detail, Examples, Relation
from proctor.invariants.trace import Trace

KEPT: Final = 3  # examples of either kind
_MAX_CHARS: Final = 240  # of a text
_MAX_FIELDS: Final = 12  # shown of an example besides those of the precondition
_MAX_SOURCE_BYTES: Final = 16 << 20


def collect(
    relation: Relation,
    trace: Trace,
    hypotheses: Sequence[Hypothesis],
    outcomes: Mapping[int, Outcome] | None,
    examples: Examples,
) -> dict[int, Evidence]:
    """Evidence of the hypotheses that have a precondition, or of all without `outcomes`; by index."""
    when = {i: o.precondition for i, o in outcomes.items()} if outcomes is not None else {}
    if outcomes is not None and not any(when.values()):
        return {}
    frame = examples.frame.filter(pl.col("passed").is_not_null()).with_row_index("_row")
    if outcomes is not None:
        chosen = pl.Series([i for i, p in when.items() if p is not None], dtype=frame["hyp"].dtype)
        frame = frame.filter(pl.col("hyp").is_in(chosen.implode()))
        split = {i: p for i, p in when.items() if p is not None and outcomes[i].excluded}
        frame = _meeting(frame, split)
    ids = run_ids(trace)
    procs = pl.DataFrame(
        {
            "proc": pl.Series(range(len(trace.processes)), dtype=frame["proc"].dtype),
            "_run": pl.Series([ids[p.run] for p in trace.processes], dtype=pl.String),
            "_program": pl.Series([p.program for p in trace.processes], dtype=pl.String),
            "_rank": pl.Series([p.rank for p in trace.processes], dtype=pl.Int64),
        }
    )
    slim = frame.select("hyp", "passed", "proc", "_row", *(c for c in ("step", "seq") if c in frame.columns))
    runs = _runs(slim, procs)
    rows = _few(slim, procs)
    full = frame.join(rows.select("_row", "_run", "_program", "_rank"), on="_row")
    shown: dict[int, tuple[list[Example], list[Example]]] = {}
    for row in full.iter_rows(named=True):
        hyp = row["hyp"]
        example = _example(relation, trace, hypotheses[hyp], row, examples.fields)
        shown.setdefault(hyp, ([], []))[0 if row["passed"] else 1].append(example)
    found = {}
    for hyp, supported in runs.items():
        passing, failing = shown.get(hyp, ([], []))
        whole = Evidence(first(passing), first(failing), supported)
        precondition = when.get(hyp)
        found[hyp] = whole if precondition is None else settle(whole, precondition)
    return found


def settle(evidence: Evidence, precondition: Precondition) -> Evidence:
    """Without passing examples outside of the precondition, and with the fields that tell only.

    These are the fields of the precondition, and those in which all failing examples differ from all passing ones.
    """
    passing = tuple(e for e in evidence.passing if meets(e, precondition))
    kept = set(precondition.fields) | set(separating(passing, evidence.failing)[:_MAX_FIELDS])

    def told(example: Example) -> Example:
        fields = tuple((k, v) for k, v in example.fields if k.removesuffix(AGREE) in kept)
        return msgspec.structs.replace(example, fields=fields)

    return Evidence(tuple(map(told, passing)), tuple(map(told, evidence.failing)), evidence.runs)


def separating(passing: Sequence[Example], failing: Sequence[Example]) -> list[str]:
    """Fields in which no failing example has the value of a passing one; the fewest values first."""
    if not passing or not failing:
        return []
    good, bad = [dict(e.fields) for e in passing], [dict(e.fields) for e in failing]
    names = sorted({k for fields in (*good, *bad) for k in fields})
    found = []
    for name in names:
        left, right = {f.get(name) for f in good}, {f.get(name) for f in bad}
        if not left & right:
            found.append((len(left) + len(right), name))
    return [name for _, name in sorted(found)]


def meets(example: Example, precondition: Precondition) -> bool:
    """Whether an example is one that a precondition speaks of, as far as its fields are known."""
    fields = dict(example.fields)
    return any(all(c.met(fields) for c in clause) for clause in precondition.any_of)


def merge(a: Evidence, b: Evidence) -> Evidence:
    """Evidence of one rule from different runs; a run that is in both counts once, by its larger numbers."""
    runs = {r.run: r for r in a.runs}
    for r in b.runs:
        held = runs.get(r.run, r)
        runs[r.run] = RunSupport(r.run, max(held.passed, r.passed), max(held.excluded, r.excluded))
    return Evidence(
        first((*a.passing, *b.passing)), first((*a.failing, *b.failing)), tuple(runs[k] for k in sorted(runs))
    )


def join_parts(a: Evidence, b: Evidence) -> Evidence:
    """Evidence of one rule from different records, also of one run: numbers are added up."""
    runs = {r.run: r for r in a.runs}
    for r in b.runs:
        held = runs.get(r.run, RunSupport(r.run, 0))
        runs[r.run] = RunSupport(r.run, held.passed + r.passed, held.excluded + r.excluded)
    return Evidence(
        first((*a.passing, *b.passing)), first((*a.failing, *b.failing)), tuple(runs[k] for k in sorted(runs))
    )


def first(examples: Iterable[Example]) -> tuple[Example, ...]:
    """The few to keep: the earliest of each program, programs in turn."""
    turn: dict[str, int] = {}
    ranked = []
    for example in sorted(set(examples)):
        turn[example.program] = turn.get(example.program, -1) + 1
        ranked.append((turn[example.program], example))
    return tuple(example for _, example in sorted(ranked)[:KEPT])


def diversity(evidence: Evidence, sources: Iterable[Source]) -> Diversity:
    """How many programs, and kinds of program, have passing examples."""
    by_id = {s.id: s for s in sources}
    seen = [by_id[r.run] for r in evidence.runs if r.passed and r.run in by_id]
    return Diversity(len({s.program for s in seen}), len({f for s in seen for f in s.families}))


def sources(trace: Trace) -> tuple[Source, ...]:
    """The runs of a trace, by id."""
    ids = run_ids(trace)
    families: dict[int, set[str]] = {run: set() for run in range(len(trace.runs))}
    for proc, family in trace.families.iter_rows():
        families[trace.processes[proc].run].add(family_id(family))
    programs = {p.run: p.program for p in trace.processes}
    records = [0] * len(trace.runs)
    for table in (trace.calls, trace.states):
        for proc, n in table.group_by("proc").len().iter_rows():
            records[trace.processes[proc].run] += n
    found = {
        ids[run]: Source(
            ids[run], programs.get(run, ""), Path(name).name[:_MAX_CHARS], tuple(sorted(families[run])), records[run]
        )
        for run, name in enumerate(trace.runs)
    }
    return tuple(found[k] for k in sorted(found))


def run_ids(trace: Trace) -> list[str]:
    """An id of each run that its copies share: a digest of `run.json`, or of its name where there is none."""
    return [_run_id(Path(name)) for name in trace.runs]


def family_id(family: str) -> str:
    """Digest of a family (`Trace.families`), which may be a long text."""
    return hashlib.sha256(family.encode()).hexdigest()[:8]


def _run_id(folder: Path) -> str:
    file = folder / "run.json"
    try:
        # A launcher started in the same second writes the same file: process folders have the process ids.
        names = "\n".join(sorted(p.name for p in (folder / "procs").iterdir()))
        blob = file.read_bytes() if file.stat().st_size <= _MAX_SOURCE_BYTES else b""
        blob += names.encode()
    except OSError:
        blob = str(folder).encode()
    return hashlib.sha256(blob).hexdigest()[:12]


def _meeting(frame: pl.DataFrame, split: Mapping[int, Precondition]) -> pl.DataFrame:
    """Without passing rows outside the precondition; hypotheses that never failed meet theirs everywhere."""
    if not split:
        return frame
    columns = frozenset(frame.columns)
    alike: dict[Precondition, list[int]] = {}
    for hyp, precondition in split.items():
        alike.setdefault(precondition, []).append(hyp)
    failed = ~pl.col("passed")
    mine = frame.filter(pl.col("hyp").is_in(list(split)))
    parts = [frame.filter(~pl.col("hyp").is_in(list(split)))]
    for precondition, hyps in alike.items():
        parts.append(mine.filter(pl.col("hyp").is_in(hyps)).filter(failed | precondition.holds(columns)))
    return pl.concat(parts)


def _runs(frame: pl.DataFrame, procs: pl.DataFrame) -> dict[int, tuple[RunSupport, ...]]:
    counts = frame.group_by("hyp", "proc").agg(pl.col("passed").sum().alias("good"), (~pl.col("passed")).sum().alias("bad"))
    counts = counts.join(procs, on="proc").group_by("hyp", "_run").agg(pl.col("good", "bad").sum()).sort("hyp", "_run")
    found: dict[int, list[RunSupport]] = {}
    for hyp, run, good, bad in counts.iter_rows():
        found.setdefault(hyp, []).append(RunSupport(run, good, bad))
    return {hyp: tuple(runs) for hyp, runs in found.items()}


def _few(frame: pl.DataFrame, procs: pl.DataFrame) -> pl.DataFrame:
    """Rows worth showing: for each hypothesis and outcome the earliest few of each program, programs in turn."""
    order = [c for c in ("step", "seq") if c in frame.columns]
    few = frame.group_by("hyp", "passed", "proc").agg(pl.all().bottom_k_by(order or "_row", KEPT)).explode("_row", *order)
    few = few.join(procs, on="proc").sort(*order, "_rank", "_program", "_run", nulls_last=True)
    few = few.with_columns(pl.int_range(pl.len()).over("hyp", "passed", "_program").alias("_turn"))
    few = few.sort("hyp", "passed", "_turn", *order, "_rank", "_program", nulls_last=True, maintain_order=True)
    return few.filter(pl.int_range(pl.len()).over("hyp", "passed") < KEPT)


def _example(
    relation: Relation, trace: Trace, hypothesis: Hypothesis, row: Mapping[str, Any], fields: Sequence[str]
) -> Example:
    try:
        detail = relation.detail(trace, hypothesis, row)
    except Exception:  # noqa: BLE001  it is written for failing rows; an example without words is one all the same
        detail = Detail("", "")
    site = row.get("site") or 0
    named = [(f, row.get(f)) for f in fields] + [(f + AGREE, row.get(f + AGREE)) for f in fields]
    shown = {k: _text(v) for k, v in named if v is not None}
    step = row.get("step")
    return Example(
        step=-1 if step is None else int(step),
        rank=int(row["_rank"]),
        program=row["_program"][:_MAX_CHARS],
        run=row["_run"],
        where=(detail.function or detail.variable)[:_MAX_CHARS],
        source=_place(trace.sites[site]) if 0 < site < len(trace.sites) else "",
        seen="" if row["passed"] else detail.seen[:_MAX_CHARS],
        expected=detail.expected[:_MAX_CHARS],
        fields=tuple(sorted(shown.items())),
    )


def _place(site: str) -> str:
    """File and line without the folders of one machine: a pack is shared."""
    path = PurePath(site)
    return str(PurePath(*path.parts[-2:]) if path.is_absolute() else path)[:_MAX_CHARS]


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return clip(str(value))
