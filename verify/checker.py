"""Check a trace against packs: which rules were broken, where first, and what could not be judged.

Offline and columnar: a relation is asked once for the examples of all its hypotheses, then rules that share a
precondition are judged together. A rule is *checked* when at least one example met its precondition and could be
decided, *not triggered* when none met it, *unknown* when all that met it were undecided.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import date
from typing import Any, Final

import numpy as np
import polars as pl

from proctor.invariants.codec.definition import foreign
from proctor.invariants.condition import AGREE, BEYOND, Precondition
from proctor.invariants.invariant import Hypothesis, Invariant, Severity
from proctor.invariants.pack import Pack
from proctor.invariants.relations import Detail, Relation, registry
from proctor.invariants.suppression import Known, Suppression
from proctor.invariants.trace import Process, Trace
from proctor.invariants.trace.windows import Window
from proctor.invariants.verdict import CheckResult, Evidence, Violation
from proctor.verify.blame import blame
from proctor.verify.coverage import Coverage, coverage
from proctor.verify.incident import callers, group, minority, nearness
from proctor.verify.rules import merge_rules
from proctor.verify.silence import expired, silence
from proctor.verify.wording import EXIT_CLEAN, EXIT_INCONCLUSIVE, EXIT_VIOLATED, fold

MAX_PLACES: Final = 500  # (step, rank) pairs kept for one violation
MAX_EVIDENCE: Final = 5
_MAX_NOTES: Final = 20  # sentences of one kind
_NO_EXAMPLES: Final[dict[str, pl.DataFrame]] = {}  # of each relation: examples without rows
_FEW_ROWS: Final = 1 << 13  # of examples: as a window has

Progress = Callable[[int, int, str], None]  # relations done, relations in all, the one that starts


_log = logging.getLogger(__name__)


def check(
    trace: Trace,
    packs: Sequence[Pack],
    *,
    progress: Progress | None = None,
    relations: Mapping[str, Relation] | None = None,
    suppressions: Sequence[Suppression] = (),
    baseline: AbstractSet[Known] = frozenset(),
    today: date | None = None,
) -> CheckResult:
    """Judge every rule of these packs on one trace.

    Args:
        trace: what was recorded.
        packs: rules; equal rules of several packs count once.
        progress: called before each relation.
        relations: instead of all known ones.
        suppressions: besides those of the packs.
        baseline: violations that are no news.
        today: for suppressions that end; the present day when absent.

    Returns:
        incidents, first and most upstream first, and counts of what held and what could not be judged.
    """
    known = registry() if relations is None else relations
    seen = coverage(trace)
    notes = list(seen.notes)
    skipped = sorted({text for pack in packs for text in pack.skipped})
    notes += fold(skipped, _MAX_NOTES)
    total = _Outcome(unknown=len(skipped))
    families: dict[str, list[Invariant]] = defaultdict(list)
    merged = {rule.id: rule for rule in merge_rules(packs)}
    for rule in merged.values():
        families[rule.relation].append(rule)
    for done, (name, rules) in enumerate(sorted(families.items())):
        if progress is not None:
            progress(done, len(families), name)
        relation = known.get(name)
        if relation is None:
            total.unknown += len(rules)
            notes.append(f"relation {name!r} is not known here; {len(rules)} of its rules were not checked")
            continue
        try:
            total.add(_judge(trace, relation, rules, seen))
        except Exception as error:  # noqa: BLE001  a relation's own failure must not hide what the others found
            total.unknown += len(rules)
            notes.append(f"relation {name} could not be evaluated: {_one_line(error)}; {len(rules)} rules are unknown")
            _log.info("relation %s could not be evaluated", name, exc_info=True)
    notes += _of_others(merged.values(), trace)
    ranks = len({(p.run, p.rank) for p in trace.processes})
    upstream = nearness(known, merged.values())
    ruled = [*suppressions, *(s for pack in packs for s in pack.suppressions)]
    notes += fold(expired(ruled, trace.programs, today), _MAX_NOTES)
    heard, silenced = silence(total.violations, trace.programs, ruled, baseline, today)
    heard = _once(heard, merged)
    return CheckResult(
        run=", ".join(trace.runs),
        incidents=group(heard, upstream=upstream, calls=callers(trace, heard), ranks=ranks),
        checked=total.checked,
        not_triggered=total.not_triggered,
        unknown=total.unknown,
        notes=notes,
        steps=trace.steps,
        ranks=ranks,
        silenced=silenced,
        held=frozenset(total.held),
    )


def _of_others(rules: Iterable[Invariant], trace: Trace) -> list[str]:
    """How many rules apply nowhere because what they speak of is something else in this program."""
    away: set[str] = set()
    number = 0
    for rule in rules:
        names = [strange(rule, process) for process in trace.processes] if rule.definitions else [""]
        if names and all(names):
            away, number = away | set(names), number + 1
    if not number:
        return []
    shown = ", ".join(sorted(away)[:3]) + (", …" if len(away) > 3 else "")
    return [f"{number} rules are of another program and were not checked: {shown} is defined otherwise here"]


def _once(violations: Sequence[Violation], rules: Mapping[str, Invariant]) -> list[Violation]:
    """One violation a hypothesis: packs that ask for it in different circumstances say the same, the best supported one first."""
    best: dict[Hypothesis, Violation] = {}
    for violation in violations:
        subject = rules[violation.id].hypothesis
        held = best.get(subject)
        loud = (violation.severity.level, violation.support.programs, violation.support.passed)
        if held is None or loud > (held.severity.level, held.support.programs, held.support.passed):
            best[subject] = violation
    kept = {v.id for v in best.values()}
    return [v for v in violations if v.id in kept]


def exit_code(result: CheckResult, fail_on: Severity | None, *, complete: bool) -> int:
    """The exit code of the CLI contract.

    Args:
        result: what was found.
        fail_on: least severity that counts; `None`: none does.
        complete: every rank left records.
    """
    if fail_on is not None and any(v.severity.level >= fail_on.level for v in result.violations):
        return EXIT_VIOLATED
    if result.checked == 0 or not complete:
        return EXIT_INCONCLUSIVE
    return EXIT_CLEAN


@dataclass
class _Outcome:
    checked: int = 0
    not_triggered: int = 0
    unknown: int = 0
    violations: list[Violation] = field(default_factory=list)
    held: list[str] = field(default_factory=list)  # ids of rules

    def add(self, other: _Outcome) -> None:
        self.checked += other.checked
        self.not_triggered += other.not_triggered
        self.unknown += other.unknown
        self.violations += other.violations
        self.held += other.held


@dataclass(frozen=True)
class Judged:
    """What a trace says of one rule: examples that met its precondition, and how they ended."""

    rule: Invariant
    met: int
    failed: int
    undecided: int
    violation: Violation | None = None
    blind: bool = False  # what it needs ends in these records

    @property
    def unknown(self) -> bool:
        return self.violation is None and (self.blind or 0 < self.undecided == self.met)


def _judge(trace: Trace, relation: Relation, rules: Sequence[Invariant], seen: Coverage) -> _Outcome:
    out = _Outcome()
    for judged in judge(trace, relation, rules, seen):
        if judged.violation is not None:
            out.checked += 1
            out.violations.append(judged.violation)
        elif judged.unknown:
            out.unknown += 1
        elif judged.met == 0:
            out.not_triggered += 1
        else:
            out.checked += 1
            if not judged.undecided:
                out.held.append(judged.rule.id)
    return out


def judge(
    trace: Trace, relation: Relation, rules: Sequence[Invariant], seen: Coverage, window: Window | None = None
) -> Iterator[Judged]:
    """Judge rules of one relation.

    Args:
        trace: what was recorded.
        relation: whose rules they are.
        rules: each once.
        seen: what the trace can show.
        window: of which the trace is; only examples of its core count.
    """
    hypotheses = list(dict.fromkeys(rule.hypothesis for rule in rules))
    code = {h: i for i, h in enumerate(hypotheses)}
    frame = _examples(trace, relation, hypotheses)
    if window is not None:
        frame = frame.filter(window.core(pl.col("step")))
    if getattr(relation, "absence", False):
        across = bool(getattr(relation, "across_ranks", False))
        runs = [p.run for p in trace.processes]
        frame = seen.doubt(frame, across_ranks=across, runs=runs, hypotheses=hypotheses)
    if seen.damaged:
        frame = seen.unsure(frame, [p.run for p in trace.processes])
    ends: dict[int, dict[int, int]] = {}
    if seen.dark or seen.cut:
        ends = {i: end for i, h in enumerate(hypotheses) if (end := seen.ends(relation, h))}
        if ends:
            frame = seen.darken(frame, ends, [p.run for p in trace.processes])
    frame = frame.sort("hyp", maintain_order=True)
    of_hyp = frame["hyp"].to_numpy()
    of_proc = frame["proc"].to_numpy()
    starts = np.searchsorted(of_hyp, np.arange(len(hypotheses)), "left")
    stops = np.searchsorted(of_hyp, np.arange(len(hypotheses)), "right")
    alike: dict[Precondition, list[Invariant]] = defaultdict(list)
    for rule in rules:
        alike[rule.precondition].append(rule)
    failed, undecided = ~frame["passed"].fill_null(value=True).to_numpy(), frame["passed"].is_null().to_numpy()
    spans = [[(starts[c], stops[c]) for c in sorted({code[rule.hypothesis] for rule in group_})] for group_ in alike.values()]
    for group_, met in zip(alike.values(), _met(frame, list(alike), spans), strict=True):
        for rule in group_:
            c = code[rule.hypothesis]
            rows = np.flatnonzero(met[starts[c] : stops[c]]) + starts[c]
            if rule.definitions and (away := [i for i, p in enumerate(trace.processes) if strange(rule, p)]):
                rows = rows[~np.isin(of_proc[rows], away)]
            failing = rows[failed[rows]]
            violation = _violation(trace, relation, rule, frame[failing]) if len(failing) else None
            # A rule that never applied is hidden only where there is nothing left to apply it to.
            blind = c in ends and bool(len(rows) > 0 or starts[c] == stops[c])
            yield Judged(rule, len(rows), len(failing), int(undecided[rows].sum()), violation, blind)


def _examples(trace: Trace, relation: Relation, hypotheses: Sequence[Hypothesis]) -> pl.DataFrame:
    if relation.name in _NO_EXAMPLES and relation.idle(trace):
        return _NO_EXAMPLES[relation.name]
    frame = relation.examples(trace, hypotheses).frame
    _NO_EXAMPLES.setdefault(relation.name, frame.clear())
    return frame


def strange(rule: Invariant, process: Process) -> str:
    """A name that the rule speaks of and that is something else in this program; "" where there is none."""
    return foreign(((d.name, d.sketches) for d in rule.definitions), process.definitions)


def _met(
    frame: pl.DataFrame, preconditions: Sequence[Precondition], spans: Sequence[Sequence[tuple[int, int]]]
) -> Iterator[np.ndarray[Any, Any]]:
    """Of each precondition, which rows meet it, at least of those in its spans."""
    columns = frozenset(frame.columns)
    holds = [p.holds(columns).fill_null(value=False).alias(str(i)) for i, p in enumerate(preconditions)]
    if frame.height <= _FEW_ROWS:  # one query for all costs less than small ones
        told = frame.select("hyp", *holds)
        yield from (told[str(i)].to_numpy() for i in range(len(holds)))
        return
    for i, (precondition, mine) in enumerate(zip(preconditions, spans, strict=True)):
        wanted = {"hyp"} | (columns & {BEYOND}) | {f for field_ in precondition.fields for f in (field_, field_ + AGREE) if f in columns}
        rows = np.concatenate([np.arange(start, end) for start, end in mine])
        met = np.zeros(frame.height, dtype=bool)
        met[rows] = frame.select(sorted(wanted))[rows].select("hyp", holds[i])[str(i)].to_numpy()
        yield met


def _violation(trace: Trace, relation: Relation, rule: Invariant, failing: pl.DataFrame) -> Violation:
    ranks = pl.Series([p.rank for p in trace.processes], dtype=pl.Int32)
    failing = failing.with_columns(ranks.gather(failing["proc"]).alias("_rank")).sort(
        "step", "_rank", "seq", nulls_last=True, maintain_order=True
    )
    examples = list(failing.head(MAX_EVIDENCE).iter_rows(named=True))
    details = [_detail(trace, relation, rule.hypothesis, row) for row in examples]
    first, detail = examples[0], details[0]
    where = failing.select("step", "_rank").unique(maintain_order=True)
    return Violation(
        id=rule.id,
        code=relation.code,
        relation=relation.name,
        severity=rule.severity,
        text=rule.text or relation.say(rule.hypothesis),
        when=rule.precondition.say(),
        step=first["step"],
        rank=min(minority(detail.sides), default=first["_rank"]),
        function=detail.function,
        variable=detail.variable,
        module=detail.module,
        source=_site(trace, first),
        expected=detail.expected,
        seen=detail.seen,
        support=rule.support,
        confirmed=where.height > 1,
        advice=detail.advice,
        count=failing.height,
        places=_places(where),
        evidence=[
            Evidence(row["step"], row["_rank"], d.seen, _site(trace, row)) for row, d in zip(examples, details, strict=True)
        ],
        tier=relation.tier(rule),
        false_alarm=rule.false_alarm,
        held=rule.evidence.passing,
        sides=detail.sides,
        cause=blame(trace, first, detail),
    )


def _detail(trace: Trace, relation: Relation, hypothesis: Hypothesis, row: Mapping[str, Any]) -> Detail:
    try:
        return relation.detail(trace, hypothesis, row)
    except Exception as error:  # noqa: BLE001  the violation stands even where it cannot be described
        _log.info("relation %s could not describe a violation", relation.name, exc_info=True)
        return Detail(expected="the rule to hold", seen=f"it failed (no description: {_one_line(error)})")


def _site(trace: Trace, row: Mapping[str, Any]) -> str:
    """The line of the user's code; of a state, which has none, that of the last call before it was read: of an update, for instance."""
    code = row.get("site") or _line_before(trace, row)
    return trace.sites[code] if code < len(trace.sites) else ""


def _line_before(trace: Trace, row: Mapping[str, Any]) -> int:
    """Code of the last line that a process had called something at when a row was made; 0 where there is none."""
    proc, step, seq = row.get("proc"), row.get("step"), row.get("seq")
    if proc is None or step is None:
        return 0
    lines = trace.views.setdefault("lines", {})  # (process, step) → the calls of that step that have a line
    if (proc, step) not in lines:
        of_step = trace.contexts.filter(pl.col("step") == step)["ctx"]
        calls = trace.calls.filter((pl.col("proc") == proc) & (pl.col("site") != 0) & pl.col("ctx").is_in(of_step.implode()))
        lines[proc, step] = calls.sort("seq").select("seq", "site").to_numpy()
    calls = lines[proc, step]
    before = calls[: np.searchsorted(calls[:, 0], seq, "right")] if seq else calls
    return int(before[-1, 1]) if len(before) else 0


def _places(where: pl.DataFrame) -> list[tuple[int | None, int | None]]:
    """At most `MAX_PLACES` (step, rank) pairs: every rank keeps its first and last, so a picture keeps its extent."""
    if where.height <= MAX_PLACES:
        pairs: list[tuple[int | None, int | None]] = where.rows()
        return pairs
    of_rank: list[list[int]] = (
        where.with_row_index("_i").group_by("_rank", maintain_order=True).agg("_i")["_i"].to_list()
    )
    kept: list[int] = []
    left = MAX_PLACES
    for position, rows in enumerate(sorted(of_rank, key=len)):  # the short ones leave their share to the long ones
        chosen = _spaced(len(rows), left // (len(of_rank) - position))
        kept += [rows[i] for i in chosen]
        left -= len(chosen)
    sampled: list[tuple[int | None, int | None]] = where[sorted(kept)].rows()
    return sampled


def _spaced(n: int, limit: int) -> list[int]:
    """Up to `limit` of n positions, first and last included, evenly spaced."""
    if n <= limit:
        return list(range(n))
    if limit < 2:
        return [0][:limit]
    return sorted({round(i * (n - 1) / (limit - 1)) for i in range(limit)})


def _one_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:160]}" if text else type(error).__name__
