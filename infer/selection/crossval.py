"""Would a rule have been wrong about a healthy run that it was not learned from? Measured on what was learned from.

Each fold leaves out some programs, learns the preconditions of the others, and asks on how many of the runs left out
the rule applies and fails. Rules that no other program meets (their scope names one kind of program) are measured by
leaving out runs instead. Everything is computed from merged partials, so no run is read again.

A failure on a held-out run has refined the rule already, since the final precondition excludes it; a rule that needs
such refinement again and again will need it for the next program, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
from threadpoolctl import threadpool_limits

from proctor.infer.preconditions import Outcome, decide, scope_of, settled
from proctor.infer.preconditions.compress import AGREES, DIFFERS, UNSET, Array, Circumstances
from proctor.infer.preconditions.search import MIXED
from proctor.invariants.condition import Condition, Kind, Precondition

MIN_GROUPS: Final = 3  # programs or runs without which nothing can be left out
MAX_FOLDS: Final = 10
MAX_FAILED: Final = 0.1  # share of the held-out runs on which a rule may fail
Measured = tuple[int, int]  # held-out runs on which a rule applied, and of those on which it failed


def measure(
    seen: Circumstances,
    scope_fields: Sequence[str],
    outcomes: Mapping[int, Outcome],
    programs: Sequence[str],
    *,
    min_support: int,
) -> dict[int, Measured]:
    """Held-out runs by hypothesis that has a rule: on how many it applied, and on how many it failed.

    Args:
        seen: circumstances whose process is a run.
        scope_fields: see `Examples.scope`.
        outcomes: what all runs give.
        programs: of each run.
        min_support: see `infer_preconditions`.
    """
    rules = np.array(sorted(h for h, o in outcomes.items() if o.precondition is not None), dtype=np.int64)
    found: dict[int, Measured] = dict.fromkeys(rules.tolist(), (0, 0))
    if len(set(programs)) >= MIN_GROUPS:
        found |= _measure(seen, scope_fields, outcomes, rules, by_program(programs), min_support)
    rules = np.array([h for h in rules.tolist() if found[h][0] == 0], dtype=np.int64)
    if len(programs) >= MIN_GROUPS and len(rules):
        found |= _measure(seen, scope_fields, outcomes, rules, by_run(programs), min_support)
    return found


def too_often(tested: int, failed: int) -> bool:
    """Whether a rule fails on held-out runs more often than a rule may."""
    return failed > max(1, MAX_FAILED * tested)


def by_program(programs: Sequence[str]) -> list[int]:
    """Fold of each run; runs of one program are left out together."""
    names = {name: i for i, name in enumerate(sorted(set(programs)))}
    return [names[p] % MAX_FOLDS for p in programs]


def by_run(programs: Sequence[str]) -> list[int]:
    """Fold of each run; runs of one program are in different folds, as far as there are enough."""
    folds = [0] * len(programs)
    for place, run in enumerate(sorted(range(len(programs)), key=lambda i: (programs[i], i))):
        folds[run] = place % MAX_FOLDS
    return folds


def _measure(
    seen: Circumstances,
    scope_fields: Sequence[str],
    outcomes: Mapping[int, Outcome],
    rules: Array,
    folds: Sequence[int],
    min_support: int,
) -> dict[int, Measured]:
    hyp_M = seen.hyp_N[seen.row_M]
    fold_M = np.asarray(folds, dtype=np.int64)[seen.proc_M]
    wanted_M = np.isin(hyp_M, rules)
    disputed = np.array([h for h in rules.tolist() if outcomes[h].excluded], dtype=np.int64)
    disputed_M = np.isin(hyp_M, disputed)
    scope = scope_of(seen, scope_fields)
    tested: Counter[int] = Counter()
    failed: Counter[int] = Counter()
    with threadpool_limits(1, user_api="blas"):
        for fold in sorted(set(folds)):
            out_M = wanted_M & (fold_M == fold)
            here = np.unique(hyp_M[out_M])
            both_M = np.isin(hyp_M, here) & wanted_M
            calm = seen.only(both_M & ~disputed_M & ~out_M)
            tested.update(_calm(seen, calm, scope, out_M & ~disputed_M, min_support))
            learned = decide(
                seen.only(both_M & disputed_M & ~out_M), scope_fields, min_support=min_support, min_clause_support=min_support
            )
            rows = np.flatnonzero(out_M & disputed_M)
            bounds = np.flatnonzero(hyp_M[rows][1:] != hyp_M[rows][:-1]) + 1
            for mine in np.split(rows, bounds) if len(rows) else []:
                hyp = int(hyp_M[mine[0]])
                precondition = learned[hyp].precondition if hyp in learned else None
                if precondition is not None:
                    met = mine[holds(seen, seen.row_M[mine], precondition)]
                    bad = met[~seen.passed_N[seen.row_M[met]]]
                    tested[hyp] += len(np.unique(seen.proc_M[met]))
                    failed[hyp] += len(np.unique(seen.proc_M[bad]))
    return {h: (tested[h], failed[h]) for h in rules.tolist()}


def _calm(seen: Circumstances, calm: Circumstances, scope: Sequence[int], out_M: Array, min_support: int) -> Counter[int]:
    """Of rules that never failed: held-out runs that meet the scope which the others share."""
    hyps, starts, _ = calm.slices()
    rows = np.flatnonzero(out_M)
    if not len(hyps) or not len(rows):
        return Counter()
    enough = np.add.reduceat(calm.count_N, starts) >= max(1, min_support)
    hyp_R = seen.hyp_N[seen.row_M[rows]]
    at_R = np.clip(np.searchsorted(hyps, hyp_R), 0, len(hyps) - 1)
    met_R = (hyps[at_R] == hyp_R) & enough[at_R]
    for k in scope:
        codes = settled(calm, k, slice(None))
        low, high = np.minimum.reduceat(codes, starts), np.maximum.reduceat(codes, starts)
        shared = np.where(low == high, low, MIXED)[at_R]
        met_R &= (shared == MIXED) | (settled(seen, k, seen.row_M[rows]) == shared)
    pairs = np.unique(np.stack([hyp_R[met_R], seen.proc_M[rows[met_R]]]), axis=1)
    return Counter(pairs[0].tolist())


def holds(seen: Circumstances, rows: Array, precondition: Precondition) -> Array:
    """Which of these rows meet a precondition, as `Precondition.holds` says of an examples frame."""
    any_of = np.zeros(len(rows), dtype=bool)
    for clause in precondition.any_of:
        all_of = np.ones(len(rows), dtype=bool)
        for condition in clause:
            all_of &= _condition(seen, rows, condition)
        any_of |= all_of
    return ~any_of if precondition.inverted else any_of


def _condition(seen: Circumstances, rows: Array, condition: Condition) -> Array:
    k = seen.fields.index(condition.field)
    codes, agree = seen.codes_NK[rows, k], seen.agree_NK[rows, k]
    tests: dict[Kind, Callable[[], Array]] = {
        Kind.CONSTANT: lambda: codes == _code(seen, k, condition.value),
        Kind.CONSISTENT: lambda: agree == AGREES,
        Kind.UNEQUAL: lambda: agree == DIFFERS,
        Kind.EXIST: lambda: codes != UNSET,
    }
    return tests[condition.kind]()


def _code(seen: Circumstances, k: int, value: str | None) -> int:
    if value is None:
        return UNSET
    return seen.values[k].index(value) + 1 if value in seen.values[k] else MIXED
