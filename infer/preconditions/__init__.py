"""When does each hypothesis apply? The weakest safe precondition of each, or none (TrainCheck §3.5–3.7).

A precondition is *safe* if no failing example meets it. It is a disjunction of at most six conjunctions over the
fields of the examples, found on distinct rows (`compress`) with bitsets (`search`):

1. a hypothesis that never failed holds always, within its scope; all of these are done at once;
2. otherwise the conjunction of what all passing examples share is pruned to the weakest that is still safe;
3. if even the whole conjunction is unsafe, passing examples are split into subgroups, those that the most passing
   examples share first (Figure 5), and a shallow decision tree proposes more when that does not reach all of them.

Differs from the paper: the search is over distinct circumstances, not examples, so that a loop of a thousand equal
steps is not a thousand pieces of evidence; counts matter only for thresholds. Passing examples whose very
circumstances also failed may stay uncovered when they are few. Scope (`Examples.scope`) is added to each clause.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from threadpoolctl import threadpool_limits

from proctor.infer.preconditions.compress import AGREES, UNSET, Array, Circumstances, compress
from proctor.infer.preconditions.search import MIXED, Clause, Search, constant, union, unpack
from proctor.invariants.condition import Condition, Kind, Precondition
from proctor.invariants.relations import Examples

MIN_CLAUSE_SUPPORT = 3  # passing examples; fewer are a coincidence


class Why(StrEnum):
    """Why a hypothesis did not become a rule."""

    NEVER = "no passing example"
    RARE = "too few passing examples"
    CONTRADICTED = "passes and fails in the same circumstances"
    SUPERFICIAL = "nothing separates passing from failing"
    REFUSED = "refused by the relation"
    UNSTABLE = "fails on held-out runs too often"
    PRIVATE = "speaks of a private name of a library"


@dataclass(frozen=True)
class Outcome:
    """What the examples of one hypothesis say.

    passed: passing examples that meet the precondition, or all of them without one.
    excluded: failing examples; the precondition excludes every one of them.
    procs: processes in which such passing examples were seen.
    """

    precondition: Precondition | None
    why: Why | None = None
    passed: int = 0
    excluded: int = 0
    procs: tuple[int, ...] = ()


def infer_preconditions(
    examples: Examples, *, min_support: int = 1, min_clause_support: int = MIN_CLAUSE_SUPPORT
) -> dict[int, Outcome]:
    """Find the precondition of every hypothesis in the frame.

    Args:
        examples: rows of many hypotheses.
        min_support: passing examples without which a hypothesis is not looked at.
        min_clause_support: passing examples that each alternative of a precondition needs.

    Returns:
        outcome by hypothesis; those without a single decided example are not in it.
    """
    return decide(compress(examples), examples.scope, min_support=min_support, min_clause_support=min_clause_support)


def decide(
    seen: Circumstances, scope_fields: Iterable[str], *, min_support: int = 1, min_clause_support: int = MIN_CLAUSE_SUPPORT
) -> dict[int, Outcome]:
    """`infer_preconditions` on what is compressed already."""
    hyps, starts, ends = seen.slices()
    if not len(hyps):
        return {}
    passing = np.add.reduceat(np.where(seen.passed_N, seen.count_N, 0), starts)
    failing = np.add.reduceat(np.where(seen.passed_N, 0, seen.count_N), starts)
    first_M, last_M = np.searchsorted(seen.row_M, starts), np.searchsorted(seen.row_M, ends)
    scope = scope_of(seen, scope_fields)
    shared = _shared(seen, starts, scope)
    outcomes: dict[int, Outcome] = {}
    # Matrix products of a few hundred rows: threads of BLAS wait for each other longer than they compute
    # (case `noise` of benchmarks/infer_scale.py on a busy machine with 2 cores: 124 s with them, 14 s without).
    with threadpool_limits(1, user_api="blas"):
        for i, hyp in enumerate(hyps.tolist()):
            n_pass, n_fail = int(passing[i]), int(failing[i])
            if n_pass < max(1, min_support):
                outcomes[hyp] = Outcome(None, Why.RARE if n_pass else Why.NEVER, n_pass, n_fail)
            elif n_fail:
                outcomes[hyp] = _separate(
                    seen, slice(int(starts[i]), int(ends[i])), scope, min_clause_support
                )
            else:
                clause = _with_scope(seen, (), zip(scope, shared[i].tolist()))
                procs = np.unique(seen.proc_M[first_M[i] : last_M[i]])
                outcomes[hyp] = Outcome(Precondition((clause,)), None, n_pass, 0, tuple(procs.tolist()))
    return outcomes


def scope_of(seen: Circumstances, names: Iterable[str]) -> list[int]:
    """Indices of the scope fields."""
    wanted = frozenset(names)
    return [k for k, name in enumerate(seen.fields) if name in wanted]


def _separate(seen: Circumstances, rows: slice, scope: Sequence[int], min_support: int) -> Outcome:
    """One hypothesis that both passed and failed."""
    search = Search(seen, rows, scope, min_support)
    n_fail = int(seen.count_N[rows].sum()) - search.total
    if search.contradicted:
        return Outcome(None, Why.CONTRADICTED, search.total, n_fail)
    clauses = search.run()
    if not clauses:
        return Outcome(None, Why.SUPERFICIAL, search.total, n_fail)
    ours = rows.start + np.flatnonzero(search.passed)
    said = [_say(seen, clause, ours[unpack(clause.passing, search.n_pass)], scope) for clause in clauses]
    met = union(clauses)
    first, last = np.searchsorted(seen.row_M, (rows.start, rows.stop))
    in_met = np.isin(seen.row_M[first:last], ours[unpack(met, search.n_pass)])
    procs = tuple(np.unique(seen.proc_M[first:last][in_met]).tolist())
    # Sorted by what they say, not by how they were found, so that more of the same evidence keeps a rule's id.
    precondition = Precondition(tuple(sorted(said, key=_sort_key)))
    return Outcome(precondition, None, search.support(met), n_fail, procs)


def _say(seen: Circumstances, clause: Clause, rows: Array, scope: Sequence[int]) -> tuple[Condition, ...]:
    columns = ((k, settled(seen, k, rows)) for k in scope)
    common = [(k, int(codes[0]) if (codes == codes[0]).all() else MIXED) for k, codes in columns]
    return _with_scope(seen, clause.conditions, common)


def _with_scope(
    seen: Circumstances, conditions: Sequence[Condition], scope: Iterable[tuple[int, int]]
) -> tuple[Condition, ...]:
    """Add the constants that all passing examples of a clause share in the scope fields."""
    kept = dict.fromkeys(conditions)
    for k, code in scope:
        known = constant(seen, k, code)
        if known and code != UNSET:  # a value says more than that there is one, or that it is the same
            kept.pop(Condition(seen.fields[k], Kind.CONSISTENT), None)
            kept.pop(Condition(seen.fields[k], Kind.EXIST), None)
        kept.update(dict.fromkeys(known))
    return tuple(kept)


def _shared(seen: Circumstances, starts: Array, scope: Sequence[int]) -> Array:
    """By hypothesis, the code that all its rows share in each scope field; `MIXED` where they share none."""
    shared = np.full((len(starts), len(scope)), MIXED, dtype=np.int64)
    for at, k in enumerate(scope):
        codes = settled(seen, k, slice(None))
        low, high = np.minimum.reduceat(codes, starts), np.maximum.reduceat(codes, starts)
        shared[:, at] = np.where(low == high, low, MIXED)
    return shared


def settled(seen: Circumstances, k: int, rows: slice | Array) -> Array:
    """Codes of a field, `MIXED` where the records of an example do not share a value."""
    codes: Array = seen.codes_NK[rows, k]
    if seen.paired[k]:
        codes = np.where((codes == UNSET) & (seen.agree_NK[rows, k] != AGREES), MIXED, codes)
    return codes


def _sort_key(clause: tuple[Condition, ...]) -> list[tuple[str, str, bool, str]]:
    return [(c.field, c.kind, c.value is not None, c.value or "") for c in clause]
