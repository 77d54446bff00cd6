"""Are the outputs of all ranks those of the reference? First by arithmetic, which refutes; the proof comes after that.

An output is a parameter's gradient as the optimizer takes it, and the parameter after the update. Two programs are different when
a finite field says so and doubles do; where the field alone says so, a law that it does not have may be what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from proctor.oracle.prove.domains import Domain
from proctor.oracle.prove.leaves import Alignment, content, elements
from proctor.oracle.prove.machine import Machine, Seen
from proctor.oracle.prove.tape import Array, Tape

MOVED = 1e-5  # of how far an update moves
RELATIVE = 1e-7  # of a tensor's largest value; rounding of a step in doubles is 1e-13, epsilon of Adam shows at 1e-9
ROUNDING = 1e-12  # of the largest gradient of a step: what is below it on both sides is 0, rounded
SEEDS = (1, 2)
DEGREE = 4096  # of the formulas of a step, roughly: what the probability is computed with


class Output(msgspec.Struct):
    """One output of one rank beside the reference's.

    Attributes:
        what: "grad" or "after".
        name: of the parameter, as the reference calls it.
        rank: of the candidate.
        field: equal in every field that was tried; None where it was not.
        doubles: equal in double precision.
        error: the largest difference in doubles, over the largest value.
        example: (position in the reference's parameter, value there, value of the rank).
        factor: the rank's values are the reference's times this, 0 where they are not.
    """

    what: str
    name: str
    rank: int
    field: bool | None = None
    doubles: bool = True
    error: float = 0.0
    example: tuple[int, float, float] | None = None
    factor: float = 0.0


class Runs(msgspec.Struct):
    """Both sides in one domain."""

    reference: Machine
    candidate: Machine

    @classmethod
    def of(cls, domain: Domain, reference: Tape, candidate: Sequence[Tape], alignment: Alignment, seen: tuple[Seen | None, Seen | None] = (None, None), named: tuple[Seen | None, Seen | None] = (None, None)) -> Runs:
        """Run both.

        Raises:
            Stuck: ranks wait for each other.
        """
        there = Machine([reference], domain, elements(domain, reference, reference, None), seen[0], named[0])
        there.run()
        leaves = {key: value for tape in candidate for key, value in elements(domain, tape, reference, alignment).items()}
        here = Machine(candidate, domain, leaves, seen[1], named[1])
        here.run()
        return cls(there, here)

    def pairs(self, alignment: Alignment) -> Iterator[tuple[str, str, int, Array, Array, Array]]:
        """(what, name, rank, positions, reference's elements, rank's elements) of every output that both have."""
        for rank, marks in enumerate(self.candidate.marks):
            for mark, value in marks.items():
                what, _, own = mark.partition(" ")
                name, index = alignment.of.get((rank, own)), alignment.index.get((rank, own))
                there = self.reference.marks[0].get(f"{what} {name}")
                if name is None or index is None or there is None or index.size != value.size:
                    continue
                keep = index >= 0
                yield what, name, rank, index[keep], there.reshape(-1)[index[keep]], value.reshape(-1)[keep]


def compared_doubles(runs: Runs, alignment: Alignment, before: Mapping[str, Array]) -> list[Output]:
    """Outputs in double precision; what an update does is measured by how far it moves, not by how large a parameter is."""
    found, nothing = [], _nothing(runs, alignment)
    most = max((float(np.abs(there - before[name].reshape(-1)[at]).max(initial=0.0)) for what, name, _, at, there, _ in runs.pairs(alignment) if what == "after" and name in before), default=0.0)
    for what, name, rank, at, there, here in runs.pairs(alignment):
        scale = there - before[name].reshape(-1)[at] if what == "after" and name in before else there
        size = float(np.abs(scale).max(initial=0.0))
        off = np.abs(there - here)
        off = np.where(np.isnan(there) & np.isnan(here), 0.0, off)
        worst = int(np.argmax(np.where(np.isnan(off), np.inf, off))) if off.size else 0
        error = float(off[worst]) / (size or 1.0) if off.size else 0.0
        output = Output(what, name, rank, None, bool(error <= (MOVED if what == "after" else RELATIVE)), error)
        if (name, rank) in nothing:  # both gradients are rounding; Adam makes an update of it
            output.doubles = what == "grad" or not off.size or bool(off[worst] <= MOVED * most)
        if not output.doubles:
            output.example = int(at[worst]), float(there[worst]), float(here[worst])
            output.factor = _factor(there, here) if what == "grad" else 0.0
        found.append(output)
    return found


def _nothing(runs: Runs, alignment: Alignment) -> set[tuple[str, int]]:
    """Parameters, and ranks, whose gradients are rounding on both sides, beside the step's largest: such as of a key's bias under softmax."""
    sizes = [(name, rank, float(np.abs(np.concatenate([there, here])).max(initial=0.0))) for what, name, rank, _, there, here in runs.pairs(alignment) if what == "grad"]
    most = max((size for _, _, size in sizes if np.isfinite(size)), default=0.0)
    return {(name, rank) for name, rank, size in sizes if size <= ROUNDING * most}


def _factor(there: Array, here: Array) -> float:
    big = np.abs(there) > 1e-3 * np.abs(there).max(initial=0.0)
    if not big.any() or not np.isfinite(here).all():
        return 0.0
    ratios = here[big] / there[big]
    middle = float(np.median(ratios))
    return middle if middle and np.allclose(ratios, middle, rtol=1e-5) else 0.0


def compared_field(runs: Runs, alignment: Alignment) -> dict[tuple[str, str, int], bool]:
    """Which outputs are equal in a field."""
    return {(what, name, rank): bool(np.array_equal(there, here)) for what, name, rank, _, there, here in runs.pairs(alignment)}


def starting_values(reference: Tape) -> dict[str, Array]:
    """Parameters of the reference as the step begins."""
    found = {held.name: content(reference, held.window) for held in reference.held}
    return {name: values for name, values in found.items() if values is not None}


def not_covered(reference: Tape, runs: Runs, alignment: Alignment) -> list[str]:
    """Reference parameters with an update of which no rank has all elements."""
    found = []
    for mark in runs.reference.marks[0]:
        what, _, name = mark.partition(" ")
        if what != "after":
            continue
        size = runs.reference.marks[0][mark].size
        there = [index for (rank, own), index in alignment.index.items() if alignment.of[rank, own] == name]
        covered = np.unique(np.concatenate(there)) if there else np.zeros(0, np.int64)
        if (covered >= 0).sum() < size:
            found.append(name)
    return found
