"""What parameters of a candidate are in a reference, found by the values that both begin with.

`mapped.py` asks it for parameters that have no name in common with the reference. In: the reference's parameters before the first step, and recordings of
the candidate's ranks. Out: `Found`, with what each is and how its parts lie; what fits nothing, or two things, is left out and said.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from proctor.oracle.plans.fuse import FuseRule
from proctor.oracle.store import RankRecord
from proctor.oracle.tensors import Entry

Array = npt.NDArray[Any]
Row = tuple[str, int]
_SHOWN: Final = 4


@dataclass
class Found:
    """Names of a candidate in the reference.

    Attributes:
        renames: parameters that are one of the reference's, or a part of it.
        fused: those that are several, or a transpose.
        modules: paths.
        unclear: what fits nowhere or in several ways, one sentence each.
        options: parameters of the reference that something unclear may be.
    """

    renames: dict[str, str] = field(default_factory=dict)
    fused: dict[str, FuseRule] = field(default_factory=dict)
    modules: dict[str, str] = field(default_factory=dict)
    unclear: list[str] = field(default_factory=list)
    options: set[str] = field(default_factory=set)


def find(reference: Mapping[str, Array], ranks: Mapping[int, RankRecord]) -> Found:
    """Look for all parameters whose names the reference does not have.

    Args:
        reference: parameters before the first step.
        ranks: of the candidate.
    """
    out = Found()
    living = {rank: alive(record) for rank, record in ranks.items()}
    held = {rank: [e for e in record.entries if e.kind == "param" and e.step == 0 and e.span is None and _head(e.name) in living[rank]] for rank, record in ranks.items()}
    names = {e.name for entries in held.values() for e in entries}
    free = {name: values for name, values in reference.items() if name not in names}
    if not free or names <= reference.keys():
        return out
    table, clash = _table(free), set[str]()
    unknown: dict[str, list[tuple[int, Entry, Array]]] = {}
    for rank, entries in held.items():
        for e in entries:
            if e.name not in reference:
                unknown.setdefault(e.name, []).append((rank, e, ranks[rank].array(e)))
    for name, parts in unknown.items():
        rules = {rule for _, _, values in parts if (rule := _by_rows(name, values, free, table)) is not None}
        if len(rules) == 1 and len({type(r) for r in rules}) == 1:
            _keep(out, name, next(iter(rules)))
        elif len(rules) > 1:
            clash.add(name)
    for name, parts in unknown.items():
        if name not in out.renames and name not in out.fused and name not in clash:
            _beside(out, name, [values for _, _, values in parts], free)
    _modules(out)
    _left_over(out, {n: [v for _, _, v in p] for n, p in unknown.items()}, free)
    _modules(out)
    for name in unknown:
        if name not in out.renames and name not in out.fused:
            out.unclear.append(_said(name, unknown[name][0][2], free, out))
    return out


def alive(record: RankRecord) -> set[str]:
    """Heads of the names of what runs or trains on a rank: a whole model that another one was made from does neither."""
    return {_head(e.name) for e in (*record.entries, *record.evaluations) if e.kind in ("main_grad", "input", "output")}


def _head(name: str) -> str:
    return name.partition(".")[0]


def _keep(out: Found, name: str, rule: FuseRule) -> None:
    if len(rule.to) == 1 and not rule.transpose:
        out.renames[name] = rule.to[0]
    else:
        out.fused[name] = rule


def _table(free: Mapping[str, Array]) -> dict[tuple[str, int, bytes], Row | None]:
    """Rows, and columns, of all matrices: where each is, `None` where it is in two places."""
    table: dict[tuple[str, int, bytes], Row | None] = {}
    for name, values in free.items():
        if values.ndim >= 2:
            for i, row in enumerate(_rows(values)):
                key = (str(values.dtype), len(row), row)
                table[key] = None if key in table else (name, i)
    return table


def _rows(values: Array) -> Iterator[bytes]:
    flat = np.ascontiguousarray(values).reshape(values.shape[0], -1)
    return (row.tobytes() for row in flat)


def _by_rows(name: str, values: Array, free: Mapping[str, Array], table: Mapping[tuple[str, int, bytes], Row | None]) -> FuseRule | None:
    """What a matrix is made of, as far as each of its rows is in one place only."""
    if values.ndim < 2:
        return None
    for transpose in (False, True) if values.ndim == 2 else (False,):
        turned = values.T if transpose else values
        where = [table.get((str(values.dtype), len(row), row)) for row in _rows(turned)]
        if not where or any(w is None for w in where):
            continue
        found = [w for w in where if w is not None]
        to = tuple(dict.fromkeys(n for n, _ in found))
        runs = 1 + sum(a[0] != b[0] for a, b in itertools.pairwise(found))
        have, whole = len(found), sum(free[n].shape[0] for n in to)
        if runs % len(to):
            continue
        groups = 0 if runs == len(to) else runs // len(to) * whole // have
        rule = FuseRule(name, to, groups, transpose)
        split = rule.split(values, [free[n].shape[0] for n in to]) if len(to) > 1 else [np.ascontiguousarray(turned)]
        first = [next(i for n, i in found if n == one) for one in to]
        if split is not None and all(np.array_equal(part, free[n][start : start + len(part)]) for part, n, start in zip(split, to, first, strict=True)):
            return rule
    return None


def _beside(out: Found, name: str, parts: list[Array], free: Mapping[str, Array]) -> None:
    """A vector as the matrix of the same module is made, or equal to one vector of the reference and no other."""
    owner, _, leaf = name.rpartition(".")
    weight = next((w for w in (*out.fused, *out.renames) if w.rpartition(".")[0] == owner and w != name), None)
    if weight is not None:
        rule = out.fused.get(weight) or FuseRule(weight, (out.renames[weight],))
        to = tuple(".".join(filter(None, [n.rpartition(".")[0], leaf])) for n in rule.to)
        whole = [free[n] for n in to if n in free]
        like = FuseRule(name, to, rule.groups)
        fits = len(whole) == len(to) and all(_holds(like, values, whole) for values in parts)
        if fits:
            _keep(out, name, like)
            return
    equal = [n for n, v in free.items() if v.ndim == 1 and n not in out.renames.values() and all(_within(p, v) for p in parts)]
    if len(equal) == 1 and all(not bool((p == p.ravel()[0]).all()) for p in parts if p.size):
        out.renames[name] = equal[0]


def _holds(rule: FuseRule, values: Array, whole: list[Array]) -> bool:
    split = rule.split(values, [len(v) for v in whole]) if len(whole) > 1 else [values]
    return split is not None and all(_within(part, v) for part, v in zip(split, whole, strict=True))


def _within(part: Array, whole: Array) -> bool:
    """Whether a vector is the whole, or one of its even blocks."""
    n = len(part) if part.ndim else 0
    if part.ndim != 1 or whole.ndim != 1 or not n or len(whole) % n or part.dtype != whole.dtype:
        return part.shape == whole.shape and np.array_equal(part, whole)
    return bool((whole.reshape(-1, n) == part).all(axis=1).any())


def _modules(out: Found) -> None:
    """Modules follow their parameters, and what is around them where all that is in it agrees."""
    votes: dict[str, Counter[str]] = {}
    alike = [(here, there) for here, there in out.renames.items() if _leaf(here) == _leaf(there)]
    pairs = [(_up(here), _up(there)) for here, there in alike]
    out.modules.update({here: there for here, there in pairs if here})
    around = {(_up(h), _up(t)) for h, t in pairs} | {(_up(_up(name)), _up(_up(to))) for name, rule in out.fused.items() for to in rule.to if _leaf(name) == _leaf(to)}
    while around := {(h, t) for h, t in around if h and t}:
        for here, there in around:
            votes.setdefault(here, Counter())[there] += 1
        around = {(_up(h), _up(t)) for h, t in around}
    homes = Counter(t for found in votes.values() if len(found) == 1 for t in found)
    for here, found in votes.items():
        (there, _), *more = found.most_common()
        if not more and homes[there] == 1:
            out.modules.setdefault(here, there)


def _left_over(out: Found, unknown: Mapping[str, list[Array]], free: Mapping[str, Array]) -> None:
    """In modules that are known: what is called alike there, then what is the only one of its kind on both sides; with equal values."""
    for by_name in (True, False):
        taken = {*out.renames.values(), *(t for rule in out.fused.values() for t in rule.to)}
        left = {n: parts for n, parts in unknown.items() if n not in out.renames and n not in out.fused}
        for name, parts in left.items():
            home = _home(out, name)
            if home is None:
                continue
            here, there = home
            leaf = name.rpartition(".")[2]
            options = [n for n, v in free.items() if n not in taken and n.startswith(f"{there}.") and n.rpartition(".")[2] == leaf and all(_fits(p, v) for p in parts)]
            if by_name:
                options = [n for n in options if n[len(there) :] == name[len(here) :]]
            rivals = [n for n, p in left.items() if n != name and n not in out.renames and n.startswith(f"{here}.") and n.rpartition(".")[2] == leaf and p[0].shape == parts[0].shape]
            if len(options) == 1 and (by_name or not rivals):
                out.renames[name] = options[0]
                taken.add(options[0])


def _fits(part: Array, whole: Array) -> bool:
    return (part.shape == whole.shape and np.array_equal(part, whole)) or _within(part, whole)


def _home(out: Found, name: str) -> tuple[str, str] | None:
    """The nearest module around a parameter that is known, and what the reference calls it."""
    path = _up(name)
    while path and path not in out.modules:
        path = _up(path)
    return (path, out.modules[path]) if path else None


def _leaf(path: str) -> str:
    return path.rpartition(".")[2]


def _up(path: str) -> str:
    return path.rpartition(".")[0]


def _said(name: str, values: Array, free: Mapping[str, Array], out: Found) -> str:
    taken = {*out.renames.values(), *(t for rule in out.fused.values() for t in rule.to)}
    options = [n for n, v in free.items() if n not in taken and v.dtype == values.dtype and v.shape == values.shape and np.array_equal(v, values)]
    out.options.update(options)
    if options:
        return f"parameter {name} may be {' or '.join(options[:_SHOWN])}{' or another' if len(options) > _SHOWN else ''}: say it in a plan, [[rename]]"
    return f"parameter {name} {list(values.shape)}: its values are in no parameter of the reference that the candidate lacks"
