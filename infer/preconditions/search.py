"""Which conditions tell the passing examples of one hypothesis from the failing ones? (TrainCheck §3.6)

Works on the distinct rows of one hypothesis. A condition is two bitsets, the passing and the failing rows that meet
it, so a conjunction is an `&` of Python ints and many groups of rows are
tested at once by matrix products.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from proctor.infer.preconditions.compress import AGREES, DIFFERS, UNSET, Array, Circumstances
from proctor.infer.preconditions.tree import leaves
from proctor.invariants.condition import UNTOLD, Condition, Kind

MAX_CLAUSES = 6
MAX_UNCOVERED = 0.05  # share of the passing examples that may be left without a clause
# The search ends with one of these; a hypothesis that no search of this size separates is superficial.
_MAX_VALUES = 32  # constants of one field, those of most rows
_MAX_SPLITS = 64  # conditions that a group is split by
_MAX_DEPTH = 3  # conditions that define a subgroup, before what its members share
_MAX_PARENTS = 16  # unsafe subgroups that are split further
_MAX_GROUPS = 400  # subgroups looked at
_TREE_DEPTH = 4

MIXED = -1  # instead of a code: the records of an example do not share a value
_RANK = {Kind.CONSISTENT: 0, Kind.UNEQUAL: 0, Kind.CONSTANT: 1, Kind.EXIST: 2}


class Literal(NamedTuple):
    """A candidate condition and the rows that meet it."""

    order: tuple[bool, int, int, str]  # preferred first: not a scope field, field, kind, value
    conditions: tuple[Condition, ...]
    passing: int
    failing: int


_Candidate = tuple[Kind, str, tuple[Condition, ...], Array]


class Clause(NamedTuple):
    """A safe conjunction: no failing row meets it."""

    literals: tuple[Literal, ...]
    passing: int  # rows that meet it

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return tuple(dict.fromkeys(c for literal in self.literals for c in literal.conditions))


class Search:
    """The search for one hypothesis that both passed and failed.

    Args:
        seen: distinct rows of all hypotheses.
        rows: those of this one.
        scope: indices of fields that are used only where no other condition separates.
        min_support: passing examples that each clause needs.
    """

    def __init__(self, seen: Circumstances, rows: slice, scope: Sequence[int], min_support: int) -> None:
        self.seen, self.rows, self.scope, self.min_support = seen, rows, frozenset(scope), min_support
        self.passed = seen.passed_N[rows]
        self.weight = seen.count_N[rows][self.passed]
        self.total = int(self.weight.sum())
        self.n_pass = len(self.weight)
        self.every_passing = (1 << self.n_pass) - 1
        self.every_failing = (1 << (len(self.passed) - self.n_pass)) - 1
        # No condition tells these from failing rows, so no clause can cover them.
        self.hopeless = pack(seen.contradicted_N[rows][self.passed])
        self.target = self.every_passing & ~self.hopeless

    @property
    def contradicted(self) -> bool:
        return self._many(self.hopeless)

    def run(self) -> list[Clause]:
        """Safe clauses that cover the passing rows but for a few; empty if there are none."""
        whole = self.clause(self.target)
        clauses = [whole] if whole else self._split()
        return [] if self._many(self.every_passing & ~union(clauses)) else clauses

    def support(self, rows: int) -> int:
        """Passing examples behind a bitset of rows."""
        return int(self.weight[unpack(rows, self.n_pass)].sum()) if rows else 0

    def _many(self, uncovered: int) -> bool:
        return uncovered != 0 and self.support(uncovered) >= MAX_UNCOVERED * self.total

    def _enough(self, rows: int) -> bool:
        return rows.bit_count() >= self.min_support or self.support(rows) >= self.min_support

    # -- candidate conditions ---------------------------------------------------------------------------------

    @cached_property
    def literals(self) -> list[Literal]:
        """Conditions that at least one failing row violates, one for each distinct effect, preferred first."""
        codes_NK, agree_NK = self.seen.codes_NK[self.rows], self.seen.agree_NK[self.rows]
        varied = (codes_NK != codes_NK[0]).any(axis=0) | (agree_NK != agree_NK[0]).any(axis=0)
        named: list[tuple[tuple[bool, int, int, str], tuple[Condition, ...]]] = []
        met: list[Array] = []
        for k in np.flatnonzero(varied).tolist():
            for kind, value, conditions, mask in self._of_field(k, codes_NK[:, k], agree_NK[:, k]):
                named.append(((k in self.scope, k, _RANK[kind], value), conditions))
                met.append(mask)
        if not met:
            return []
        met_NL = np.stack(met, axis=1)
        both = zip(named, _pack_columns(met_NL[self.passed]), _pack_columns(met_NL[~self.passed]))
        unique: dict[tuple[int, int], Literal] = {}
        for (order, conditions), passing, failing in sorted(both, key=lambda one: one[0][0]):
            if passing and failing != self.every_failing:
                unique.setdefault((passing, failing), Literal(order, conditions, passing, failing))
        return list(unique.values())

    def _of_field(self, k: int, codes_N: Array, agree_N: Array) -> Iterator[_Candidate]:
        name, paired = self.seen.fields[k], self.seen.paired[k]
        if paired:
            yield Kind.CONSISTENT, "", (Condition(name, Kind.CONSISTENT),), agree_N == AGREES
            yield Kind.UNEQUAL, "", (Condition(name, Kind.UNEQUAL),), agree_N == DIFFERS
        rows = np.bincount(codes_N[self.passed])
        values = np.flatnonzero(rows)
        if len(values) > _MAX_VALUES:
            values = np.sort(np.argsort(-rows, kind="stable")[:_MAX_VALUES])
        for code in values.tolist():
            met_N = codes_N == code
            if code == UNSET and paired:
                met_N &= agree_N == AGREES
            conditions = constant(self.seen, k, code)
            if conditions:
                yield Kind.CONSTANT, "" if code == UNSET else self.seen.values[k][code - 1], conditions, met_N
        if codes_N.min() == UNSET:
            yield Kind.EXIST, "", (Condition(name, Kind.EXIST),), codes_N != UNSET

    # -- one clause -------------------------------------------------------------------------------------------

    def clause(self, group: int) -> Clause | None:
        """The weakest safe conjunction that a group of rows shares; `None` without one, or with too few examples."""
        shared = [literal for literal in self.literals if literal.passing & group == group]
        left = self.every_failing
        for literal in shared:
            left &= literal.failing
        if left:
            return None
        chosen = _weakest(shared, self.every_failing)
        passing = self.every_passing
        for literal in chosen:
            passing &= literal.passing
        return Clause(chosen, passing) if self._enough(passing) else None

    # -- several clauses --------------------------------------------------------------------------------------

    def _split(self) -> list[Clause]:
        """Clauses of subgroups: rows that share one more condition at each level, the largest first."""
        found: dict[Clause, None] = {}
        parents, looked_at = [self.target], {self.target}
        for _ in range(_MAX_DEPTH):
            groups = self._subgroups(parents, looked_at)
            safe = self._safe(groups)
            best = self._disjunction(found, (g for g, is_safe in zip(groups, safe) if is_safe))
            if self.target & ~union(best) == 0:
                return best
            unsafe = (g for g, is_safe in zip(groups, safe) if not is_safe and self._enough(g))
            parents = sorted(unsafe, key=int.bit_count, reverse=True)[:_MAX_PARENTS]
        return self._disjunction(found, self._leaves())

    def _subgroups(self, parents: list[int], looked_at: set[int]) -> list[int]:
        """Parts of each parent that share one more condition, each part once, until there are enough."""
        groups: list[int] = []
        for parent in parents:
            parts = {part: None for lit in self.literals if (part := parent & lit.passing) not in looked_at}
            parts.pop(0, None)
            groups += sorted(parts, key=int.bit_count, reverse=True)[:_MAX_SPLITS]
            looked_at.update(parts)
            if len(looked_at) > _MAX_GROUPS:
                break
        return groups

    def _safe(self, groups: list[int]) -> list[bool]:
        """Of each group, whether no failing row meets all that the group shares: two matrix products for all."""
        if not groups:
            return []
        n_fail = self.every_failing.bit_count()
        shared_LG = np.ones((len(self.literals), len(groups)), dtype=bool)
        for low, high in _blocks(self.n_pass):
            lacks_LP = 1 - _matrix([lit.passing for lit in self.literals], low, high)
            shared_LG &= lacks_LP @ _matrix(groups, low, high).T == 0
        safe_G = np.ones(len(groups), dtype=bool)
        weight_LG = shared_LG.astype(np.float32)
        for low, high in _blocks(n_fail):
            violates_LF = 1 - _matrix([lit.failing for lit in self.literals], low, high)
            safe_G &= (violates_LF.T @ weight_LG > 0).all(axis=0)
        answer: list[bool] = safe_G.tolist()
        return answer

    def _leaves(self) -> list[int]:
        """Passing rows by leaf of a shallow decision tree; what each leaf shares is a clause if it is safe.

        A path may say that a condition is *not* met, which no precondition can say; what its rows share instead,
        such as the other value of a two-valued field, is found from the rows.
        """
        if not self.literals:
            return []
        ours = np.flatnonzero(unpack(self.target, self.n_pass))
        passing = _matrix([lit.passing for lit in self.literals], 0, self.n_pass).T[ours]
        failing = _matrix([lit.failing for lit in self.literals], 0, self.every_failing.bit_count()).T
        groups = []
        for rows in leaves(passing, failing, _TREE_DEPTH):
            member = np.zeros(self.n_pass, dtype=bool)
            member[ours[rows]] = True
            groups.append(pack(member))
        return groups

    def _disjunction(self, clauses: dict[Clause, None], groups: Iterable[int]) -> list[Clause]:
        """Few clauses that cover most: greedy, then without those that turned out to be redundant.

        Args:
            clauses: those found so far; those of the groups are added.
            groups: subgroups of the passing rows.
        """
        clauses.update((clause, None) for clause in map(self.clause, groups) if clause)
        left, chosen = self.target, list[Clause]()
        while left and len(chosen) < MAX_CLAUSES:
            best = max(
                clauses, key=lambda c: ((c.passing & left).bit_count(), -len(c.literals)), default=None
            )
            if best is None or not best.passing & left:
                break
            chosen.append(best)
            left &= ~best.passing
        reached = union(chosen)
        for clause in list(chosen):
            rest = [c for c in chosen if c is not clause]
            if union(rest) == reached:
                chosen = rest
        return chosen


def _weakest(shared: list[Literal], every_failing: int) -> tuple[Literal, ...]:
    """Greedy set cover of the failing rows, then without what is not needed. `shared` is safe as a whole."""
    left, chosen = every_failing, list[Literal]()
    for in_scope in (False, True):
        pool = [literal for literal in shared if literal.order[0] == in_scope]
        while left and pool:
            best = min(
                pool, key=lambda lit: (left & lit.failing).bit_count()
            )  # the first of equals is preferred
            if left & best.failing == left:
                break
            chosen.append(best)
            left &= best.failing
    for literal in sorted(chosen, key=lambda lit: lit.order, reverse=True):
        kept = every_failing
        for other in chosen:
            kept &= other.failing if other is not literal else every_failing
        if not kept:
            chosen.remove(literal)
    return tuple(sorted(chosen, key=lambda lit: lit.order))


def constant(seen: Circumstances, k: int, code: int) -> tuple[Condition, ...]:
    """CONSTANT as conditions; none where nothing is known. A null of several records may also mean that they differ, so *not set* takes two."""
    name = seen.fields[k]
    if code == MIXED or (code != UNSET and seen.values[k][code - 1] == UNTOLD):
        return ()
    if code != UNSET:
        return (Condition(name, Kind.CONSTANT, seen.values[k][code - 1]),)
    unset = Condition(name, Kind.CONSTANT, None)
    return (Condition(name, Kind.CONSISTENT), unset) if seen.paired[k] else (unset,)


def union(clauses: Sequence[Clause]) -> int:
    """Passing rows that meet at least one clause."""
    rows = 0
    for clause in clauses:
        rows |= clause.passing
    return rows


_BLOCK = 1 << 15  # rows of a matrix product at a time


def _blocks(rows: int) -> Iterator[tuple[int, int]]:
    return ((low, min(low + _BLOCK, rows)) for low in range(0, rows, _BLOCK))


def _matrix(bitsets: Sequence[int], low: int, high: int) -> Array:
    """Rows `low` to `high` of some bitsets as 0 and 1, one bitset a line."""
    mask = (1 << (high - low)) - 1
    size = (high - low + 7) // 8
    raw = b"".join([(bits >> low & mask).to_bytes(size, "little") for bits in bitsets])
    packed = np.frombuffer(raw, dtype=np.uint8).reshape(len(bitsets), size)
    return np.unpackbits(packed, axis=1, count=high - low, bitorder="little").astype(np.float32)


def _pack_columns(mask_NL: Array) -> list[int]:
    packed = np.packbits(mask_NL.T, axis=1, bitorder="little")
    size, raw = packed.shape[1], packed.tobytes()
    return (
        [int.from_bytes(raw[at : at + size], "little") for at in range(0, len(raw), size)]
        if size
        else [0] * len(packed)
    )


def pack(mask: Array) -> int:
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def unpack(bits: int, length: int) -> Array:
    raw = np.frombuffer(bits.to_bytes((length + 7) // 8, "little"), dtype=np.uint8)
    return np.unpackbits(raw, count=length, bitorder="little").astype(bool)
