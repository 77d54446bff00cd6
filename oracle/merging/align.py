"""Which tensor of the reference a tensor of the candidate is: names over stages, and calls over replicas.

Names. A plan's renames come first. Then content decides: a parameter that does not hold what the reference's parameter
of that name holds, but exactly what another one holds, is that other one: a stage that counts its layers from 0, a stage
class of its own, the second copy of a tied weight. Modules follow their parameters (TTrace §4.1, Figure 5).

Calls. A data-parallel replica's microbatch is one of the reference's accumulation steps. How they are dealt out (blocks or
in turn) is read off the values that cross the first modules, which are equal where the assignment is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from proctor.oracle.merging.locate import locate, take
from proctor.oracle.merging.padding import without
from proctor.oracle.numbers.dtypes import as_float
from proctor.oracle.plans.plan import Plan
from proctor.oracle.store import RankRecord
from proctor.oracle.tensors import Entry

Array = npt.NDArray[Any]
Values = Callable[[Entry], Array]

PARAMETERS: Final = ("param", "main_grad", "param_after", "opt_state")
BUFFERS: Final = ("buffer", "buffer_after")  # before the first step, and after one that changed it
_VOTERS: Final = 16  # tensors that say how calls are dealt out


class Calls(NamedTuple):
    """Calls of the reference that a rank's calls are.

    Args:
        ratio: calls of the reference for one of the rank's, by module; 1 where both call as often.
        place: which of them the rank has.
        in_turn: dealt out in turn, not in blocks.
    """

    ratio: int = 1
    place: int = 0
    in_turn: bool = False

    def of(self, call: int, mine: int, theirs: int, within: int = 1) -> int:
        """The reference's call.

        Args:
            call: of the rank.
            mine: how often the rank calls the module in a step.
            theirs: how often the reference does.
            within: how often one forward of the whole model does (`within`): those stay together, in their order.
        """
        if theirs == mine:
            return call
        forward, place = divmod(call, within)
        if mine and theirs == mine * self.ratio:
            return (forward * self.ratio + self.place if self.in_turn else self.place * (mine // within) + forward) * within + place
        if theirs and mine > theirs and mine % theirs == 0:
            return forward // (mine // theirs) * within + place
        return call


class Naming:
    """Canonical names of one rank's tensors.

    Args:
        renames: parameters by name, where content says so.
        prefixes: module path → module path of the reference.
        plan: its renames come first.

    Attributes:
        unused: parameters of the rank that only double others, and take no part.
    """

    unused: frozenset[str] = frozenset()

    def __init__(
        self, renames: Mapping[str, str], prefixes: Mapping[str, str], plan: Plan | None, coords: Mapping[str, int]
    ) -> None:
        self.renames, self.prefixes, self._plan, self._coords = dict(renames), dict(prefixes), plan, coords

    def __call__(self, entry: Entry) -> str:
        name = self.planned(entry.name)
        if entry.kind in PARAMETERS or entry.kind in BUFFERS:
            if name in self.renames:
                return self.renames[name]
            path, _, leaf = name.rpartition(".")
            return f"{self._module(path)}.{leaf}".lstrip(".")
        return self._module(name) if entry.kind != "scalar" else name

    def module(self, path: str) -> str:
        """The canonical path of a module."""
        return self._module(self.planned(path))

    def planned(self, name: str) -> str:
        """After the plan's renames only."""
        return self._plan.canonical(name, self._coords) if self._plan is not None else name

    def _module(self, path: str) -> str:
        head, tail = path, ""
        while True:
            if head in self.prefixes:
                return ".".join(filter(None, [self.prefixes[head], tail]))
            if not head:
                return path
            head, _, last = head.rpartition(".")
            tail = f"{last}.{tail}".rstrip(".")


def kept_names(
    reference: Mapping[str, tuple[Entry, Values]], rank: RankRecord, plan: Plan | None, coords: Mapping[str, int]
) -> set[str]:
    """Parameters that a rank calls as the reference does, and that hold what they hold there."""
    plain = Naming({}, {}, plan, coords)
    mine = (e for e in rank.entries if e.kind == "param" and e.step == 0)
    return {plain.planned(e.name) for e in mine if _same(e, rank, reference.get(plain.planned(e.name)))}


def name_tensors(
    reference: Mapping[str, tuple[Entry, Values]],
    rank: RankRecord,
    plan: Plan | None,
    coords: Mapping[str, int],
    taken: set[str],
) -> Naming:
    """Find the canonical names of a rank's tensors.

    Args:
        reference: the reference's parameters before the first step, with how to read them.
        rank: of the candidate.
        plan: its renames.
        coords: where the rank stands.
        taken: `kept_names` of all ranks: what is held under its own name is not another parameter's home.
    """
    plain = Naming({}, {}, plan, coords)
    renames: dict[str, str] = {}
    votes: dict[str, Counter[str]] = {}
    mine = [e for e in rank.entries if e.kind == "param" and e.step == 0]
    kept = kept_names(reference, rank, plan, coords)
    for entry in mine:
        name = plain.planned(entry.name)
        if name in kept:
            path = name.rpartition(".")[0]
            votes.setdefault(path, Counter())[path] += 1
            continue
        other = [n for n, held in reference.items() if n not in taken and _same(entry, rank, held, telling=True)]
        tied = not other and [n for n, held in reference.items() if _same(entry, rank, held, telling=True)]
        if tied and len(tied) == 1:
            renames[name] = tied[0]
        if len(other) == 1:
            renames[name] = other[0]
            here, there = _without_common_end(name, other[0])
            votes.setdefault(here, Counter())[there] += 1
    prefixes = {h: v.most_common(1)[0][0] for h, v in votes.items() if v.most_common(1)[0][0] != h}
    naming = Naming(renames, prefixes, plan, coords)
    naming.unused = _unused(mine, rank, naming)
    return naming


def _unused(mine: Sequence[Entry], rank: RankRecord, naming: Naming) -> frozenset[str]:
    """Parameters of models that neither run nor train on the rank, and are others by what they hold: the whole of which stages are copies."""
    alive = {e.name.partition(".")[0] for e in rank.entries if e.kind in ("main_grad", "input", "output")}
    return frozenset(e.name for e in mine if naming(e) != naming.planned(e.name) and e.name.partition(".")[0] not in alive)


def _same(entry: Entry, rank: RankRecord, held: tuple[Entry, Values] | None, *, telling: bool = False) -> bool:
    """Whether a shard is exactly a part of a parameter of the reference.

    Args:
        telling: values that are all alike say nothing.
    """
    if held is None:
        return False
    theirs, values = held
    if len(theirs.shape) != len(entry.shape):
        return False
    local = rank.array(entry)
    if entry.dtype != theirs.dtype or local.size == 0:
        return not telling and entry.shape == theirs.shape
    if telling and bool((local == local.ravel()[0]).all()):
        return False
    full = values(theirs)
    if entry.shape == theirs.shape:
        return bool(np.array_equal(local, full))
    found = locate(as_float(local, entry.dtype), as_float(full, theirs.dtype), padded=True, slices=True)
    return found is not None and bool(np.array_equal(without(local, found.part.kept), take(full, found.part.places)))


def _without_common_end(a: str, b: str) -> tuple[str, str]:
    left, right = a.split("."), b.split(".")
    while left and right and left[-1] == right[-1]:
        left.pop()
        right.pop()
    return ".".join(left), ".".join(right)


def count_calls(entries: Sequence[Entry], naming: Callable[[Entry], str], step: int) -> dict[str, int]:
    """How often each module was called in a step."""
    out: dict[str, int] = {}
    for entry in entries:
        if entry.step == step and entry.kind in ("output", "input") and not entry.recompute:
            name = naming(entry)
            out[name] = max(out.get(name, 0), entry.call + 1)
    return out


def within(name: str, mine: Mapping[str, int], theirs: Mapping[str, int]) -> int:
    """How often one forward of the model calls a module of it, where the rank's forwards are to the reference's as its calls of the module are; else 1.

    Args:
        name: of the module.
        mine: calls by module of the rank.
        theirs: calls by module in the reference.
    """
    model = "" if "" in theirs else name.partition(".")[0]
    forwards, calls = (mine.get(model, 0), theirs.get(model, 0)), (mine.get(name, 0), theirs.get(name, 0))
    if not all((*forwards, *calls)) or calls[1] % forwards[1] or calls[0] * forwards[1] != calls[1] * forwards[0]:
        return 1
    return calls[1] // forwards[1]


def deal_calls(
    theirs: Mapping[str, int],
    mine: Mapping[str, int],
    samples: Sequence[tuple[Entry, Array, Mapping[int, Array], int, int]],
    replica: int | None,
) -> Calls:
    """How a rank's calls are those of the reference.

    Args:
        theirs: calls by module in the reference.
        mine: calls by module of the rank.
        samples: tensors of the rank: entry, values, the reference's values by call, calls of the rank's module, and those of them `within` one forward.
        replica: the rank's place among the data-parallel replicas, where a plan says it.
    """
    ratios = Counter(theirs[n] // c for n, c in mine.items() if n in theirs and c and theirs[n] % c == 0)
    ratio = ratios.most_common(1)[0][0] if ratios else 1
    if ratio <= 1:
        return Calls()
    options = [Calls(ratio, p, turn) for turn in (False, True) for p in range(ratio)]
    if replica is not None and replica < ratio:
        options.sort(key=lambda c: c.place != replica)
    cost = dict.fromkeys(options, 0.0)
    for entry, values, full, calls, inside in samples[:_VOTERS]:
        for option in options:
            other = full.get(option.of(entry.call, calls, calls * ratio, inside))
            found = locate(values, other) if other is not None else None
            cost[option] += min(1.0, found.error) if found is not None else 1.0
    return min(options, key=lambda o: cost[o])
