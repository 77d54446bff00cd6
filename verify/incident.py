"""Violations of one cause become one incident: what started it first, what followed from it after.

Two violations are one cause when they start within a step of each other and touch the same variable, function,
module subtree or deviating ranks, when one's function calls the other's, or when one relation says the same of two functions. What starts later and touches the same
variable, function, module or deviating ranks is taken for the earlier one's consequence.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import polars as pl

from proctor.invariants.invariant import Invariant
from proctor.invariants.relations import Relation
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import Incident, Violation
from proctor.verify.wording import clean, count, short_name

STORM: Final = 20  # more rules than this that start at one step are one incident
_MAX_TITLE: Final = 200
_CALL_DEPTH: Final = 6  # levels of callers looked through

_LIBRARY_NAME: Final = re.compile(r"\btorch(?:\.\w+){2,}")
_ASIDE: Final = re.compile(r"\s*\([^()]*\)$")  # numbers in brackets at the end: evidence, not a name for it
_PLAIN_WORD: Final = re.compile(r"[a-z]+(?=\s|$)")

Key = tuple[str, object]


def group(
    violations: Sequence[Violation],
    *,
    upstream: Mapping[str, int] | None = None,
    calls: frozenset[tuple[str, str]] = frozenset(),
    ranks: int = 1,
) -> list[Incident]:
    """Group violations into incidents, the earliest first; inside one, the most upstream first.

    Args:
        violations: in any order.
        upstream: rank of each relation, and of rules where theirs differs (`nearness`), lower is nearer to the cause.
        calls: pairs of functions (caller, callee) seen in the trace.
        ranks: ranks that were recorded; violations on the same few of them deviate together.
    """
    order = upstream or {}
    items = sorted(violations, key=lambda v: urgency(v, order))
    sets = _Sets(len(items))
    tight = [own_keys(v, ranks) for v in items]
    wide = [keys | module_keys(v) for v, keys in zip(items, tight, strict=True)]
    for members in _index(wide).values():
        for a, b in pairwise(members):  # in order of first step: neighbours suffice
            if start(items[b]) - start(items[a]) <= 1:
                sets.join(a, b)
    _join_callers(items, calls, sets)
    storms = _join_storms(items, sets)
    for members in _index(tight).values():  # consequences: any later start
        for b in members[1:]:
            sets.join(members[0], b)
    found: dict[int, list[int]] = defaultdict(list)
    for i in range(len(items)):
        found[sets.root(i)].append(i)
    return [
        Incident(
            title=title(items[members[0]], beside=max(0, len(storms.intersection(members)) - 1)),
            first_step=items[members[0]].step,
            violations=[items[m] for m in members],
        )
        for _, members in sorted(found.items())
    ]


def title(violation: Violation, beside: int = 0) -> str:
    """The cause in words: what was seen, on what, since when; and how many rules broke with it in a storm."""
    seen = _ASIDE.sub("", clean(violation.seen).strip().rstrip(".")) or clean(violation.text)
    subject = clean(violation.variable or short_name(violation.function) or violation.module)
    known = (_tensor(subject), short_name(subject), violation.function, violation.module)
    if subject and not any(k and k.lower() in seen.lower() for k in known):
        seen = f"{subject}: {seen}"
    text = clean(_LIBRARY_NAME.sub(lambda m: short_name(m.group()), seen), _MAX_TITLE)
    if _PLAIN_WORD.match(text) and not text.startswith(_tensor(subject) or " "):
        text = text[0].upper() + text[1:]
    if violation.step is not None:
        since = "before the first step" if violation.step < 0 else f"step {violation.step}"
        prefix = ("from " if violation.count > 1 else "at ") if violation.step >= 0 else ""
        text += f" ({prefix}{since})"
    return text + (f", and {count(beside, 'more rule')} at once" if beside else "")


def callers(trace: Trace, violations: Sequence[Violation]) -> frozenset[tuple[str, str]]:
    """Pairs (caller, callee) among the functions that these violations name, at the steps where they start."""
    codes = {trace.function_code[v.function] for v in violations if v.function in trace.function_code}
    codes.discard(0)
    steps = sorted({v.step for v in violations if v.step is not None})
    if len(codes) < 2 or not steps:
        return frozenset()
    contexts = trace.contexts.filter(pl.col("step").is_in(steps))["ctx"].unique()
    involved = sorted(codes)
    here = pl.col("ctx").is_in(contexts.implode()) & pl.col("fn").is_in(involved) & (pl.col("parent") > 0)
    chain = trace.calls.filter(here).select("proc", "parent", pl.col("fn").alias("callee"))
    table = trace.calls.select("proc", pl.col("seq").alias("parent"), "fn", pl.col("parent").alias("up"))
    pairs: set[tuple[str, str]] = set()
    for _ in range(_CALL_DEPTH):
        joined = chain.unique().join(table, on=["proc", "parent"], how="inner")
        if not joined.height:
            break
        for caller, callee in joined.filter(pl.col("fn").is_in(involved)).select("fn", "callee").unique().iter_rows():
            if caller != callee:
                pairs.add((trace.functions[caller], trace.functions[callee]))
        chain = joined.filter(pl.col("up") > 0).select("proc", pl.col("up").alias("parent"), "callee")
    return frozenset(pairs)


def nearness(relations: Mapping[str, Relation], rules: Iterable[Invariant]) -> dict[str, int]:
    """How near to the cause violations are, by relation, and by rule where that differs: the `upstream` of `group` and `urgency`."""
    own = ((rule.id, relations[rule.relation].upstream_of(rule.hypothesis)) for rule in rules if rule.relation in relations)
    return {name: relation.upstream for name, relation in relations.items()} | dict(own)


def urgency(v: Violation, upstream: Mapping[str, int]) -> tuple[Any, ...]:
    """Order of violations of one cause: the earliest first, then the most upstream, the gravest, the best supported."""
    return (
        start(v),
        upstream.get(v.id, upstream.get(v.relation, 5)),
        -v.severity.level,
        -v.support.programs,
        -v.support.passed,
        v.code,
        v.id,
    )


def start(v: Violation) -> int:
    """Step for ordering; what has no step (the whole run) comes before everything, as setup does."""
    return -1 if v.step is None else v.step


def _tensor(variable: str) -> str:
    """Name of the tensor: `fc.weight` of its gradient `fc.weight.grad`, too; the first of several."""
    return variable.partition(" ")[0].rstrip(",").removesuffix(".grad")


def _owner(path: str) -> str:
    """What encloses it: `layers.0.fc` of `layers.0.fc.weight`."""
    return path.rpartition(".")[0]


def deviating(v: Violation, ranks: int) -> frozenset[int]:
    """The ranks that are unlike the others: fewer than half of those compared, or those on which it failed.

    Empty where that says nothing: no majority, or all `ranks` that were recorded.
    """
    if v.sides:
        return minority(v.sides)
    found = frozenset(rank for _, rank in v.places if rank is not None)
    return found if len(found) < ranks else frozenset()


def minority(sides: Sequence[Sequence[int]]) -> frozenset[int]:
    """The ranks outside of the side that more than half of them are on; empty without such a side."""
    most = max(sides, key=len, default=())
    if 2 * len(most) <= sum(map(len, sides)):
        return frozenset()
    return frozenset(rank for side in sides for rank in side if side is not most)


def own_keys(v: Violation, ranks: int) -> set[Key]:
    """What it touches: two violations that share one of these are one cause, whenever they start."""
    keys: set[Key] = set()
    tensor = _tensor(v.variable)
    if tensor:
        keys.add(("variable", tensor))
    if v.function:
        keys.add(("function", v.function))
    if _owner(tensor):
        keys.add(("module", _owner(tensor)))
    few = deviating(v, ranks)
    if few:
        keys.add(("ranks", few))
    return keys


def module_keys(v: Violation) -> set[Key]:
    """What encloses it, and what is said of it: two violations that share one of these and start within a step are one cause."""
    # A violation's `module` may be a class: what encloses `torch.nn.Linear` says nothing about the model.
    keys: set[Key] = {("module", v.module)} if v.module else set()
    if v.function and not v.variable:
        keys.add(("said", f"{v.relation} {v.seen}"))
    path = _owner(_tensor(v.variable))
    while path:  # every enclosing module: siblings of one subtree meet there
        keys.add(("module", path))
        path = _owner(path)
    return keys


def _index(keys: Sequence[set[Key]]) -> dict[Key, list[int]]:
    found: dict[Key, list[int]] = defaultdict(list)
    for i, own in enumerate(keys):
        for key in own:
            found[key].append(i)
    return found


def _join_callers(items: Sequence[Violation], calls: Iterable[tuple[str, str]], sets: _Sets) -> None:
    by_function: dict[str, list[int]] = defaultdict(list)
    for i, v in enumerate(items):
        by_function[v.function].append(i)
    for caller, callee in calls:
        both = sorted({*by_function.get(caller, ()), *by_function.get(callee, ())})
        for a, b in pairwise(both):
            if start(items[b]) - start(items[a]) <= 1:
                sets.join(a, b)


def _join_storms(items: Sequence[Violation], sets: _Sets) -> set[int]:
    by_step: dict[int, list[int]] = defaultdict(list)
    for i, v in enumerate(items):
        by_step[start(v)].append(i)
    storms: set[int] = set()
    for members in by_step.values():
        if len({items[i].id for i in members}) > STORM:
            storms.update(members)
            for other in members[1:]:
                sets.join(members[0], other)
    return storms


class _Sets:
    """Union-find in which the root of a set is its earliest member."""

    def __init__(self, n: int) -> None:
        self.up = list(range(n))

    def root(self, i: int) -> int:
        while self.up[i] != i:
            self.up[i] = self.up[self.up[i]]
            i = self.up[i]
        return i

    def join(self, a: int, b: int) -> None:
        low, high = sorted((self.root(a), self.root(b)))
        self.up[high] = low
