"""Does the candidate drop what the reference drops?

While a step is recorded dropout keeps everything, so values can be compared. What that hides is compared by itself: the
probability of every module; that ranks which hold the same values would have dropped the same elements; and that
recomputation in the backward pass would drop what the first pass dropped. Masks themselves are not compared: they are other
ones wherever a computation is cut.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

from proctor.oracle.judging.verdicts import TensorVerdict
from proctor.oracle.merging.assemble import Assembler
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.merging.replicas import same_bits
from proctor.oracle.phases.generators import same_numbers
from proctor.oracle.plans.mesh import rank_text
from proctor.oracle.store import RankRecord
from proctor.oracle.tensors import Entry, Part

Sites = dict[str, Counter[tuple[float, ...]]]  # by module: the probabilities of each place of it that drops
Named = Callable[[int, str], str]  # rank, path → canonical path

DIGITS: Final = 6  # of a probability
HIDDEN: Final = ("attention", "recurrent", "bernoulli")  # places whose masks are not seen, or not placed
TWINS: Final = 40.0  # elements that two independent masks differ in on average, from which on they are never the same
LEAF: Final = re.compile(r"(Feature)?(Alpha)?Dropout[123]?d?")  # classes that do nothing else


class Dropouts:
    """What is dropped in a candidate and in a reference.

    Args:
        reference: that is trusted.
        assembler: of the candidate.
        named: canonical paths of the candidate's modules.
        ran: by rank the modules, by canonical path, that it called.
    """

    def __init__(self, reference: Reference, assembler: Assembler, named: Named, ran: Mapping[int, Iterable[str]]) -> None:
        self.reference, self.assembler, self._named = reference, assembler, named
        self._ran = {rank: set(modules) for rank, modules in ran.items()}
        self._ranks = assembler.ranks

    def judge(self) -> list[TensorVerdict]:
        """What is wrong."""
        masks = list(self._replicas())
        known = {(t.step, t.name) for t in masks}
        alike = (t for t in same_numbers(self.reference, self.assembler, self._named, self._verdict) if (t.step, t.name) not in known)
        found = [*self._probabilities(), *masks, *alike, *self._recomputed()]
        return [*found, *self._parts({(t.step, t.name) for t in found})]

    def kept(self, places: tuple[str, ...] = ("",)) -> int:
        """How many modules of the reference would drop something, at places that are called like one of these."""
        draws = (d for record in self.reference.ranks.values() for d in record.info.draws)
        return len({d.module for d in draws if d.p > 0 and d.slot.startswith(places)})

    def active(self) -> bool:
        """Whether anything is dropped on either side."""
        return any(d.p > 0 for ranks in (self._ranks, self.reference.ranks) for record in ranks.values() for d in record.info.draws)

    # -- probabilities --------------------------------------------------------------------------------------

    def _probabilities(self) -> Iterator[TensorVerdict]:
        shared = {k[3] for k in self.reference.entries if k[2] == "output"} & set().union(*self._ran.values())
        for step in range(self.reference.recording.info.steps):
            theirs = _sites(((record, lambda path: path) for record in self.reference.ranks.values()), step)
            mine = {
                rank: _sites([(record, lambda path, rank=rank: self._named(rank, path))], step)  # type: ignore[misc]
                for rank, record in self._ranks.items()
            }
            for module in sorted({*theirs, *(m for sites in mine.values() for m in sites)} & shared):
                here = {rank: sites.get(module, Counter()) for rank, sites in mine.items() if module in self._ran[rank]}
                wrong = self._unlike(module, theirs.get(module, Counter()), here)
                if wrong and not self._moved(module, theirs, mine):
                    yield self._verdict(step, module, wrong, _told(theirs.get(module), here[wrong[0]]))

    def _unlike(self, module: str, theirs: Counter[tuple[float, ...]], here: Mapping[int, Counter[tuple[float, ...]]]) -> list[int]:
        """Ranks on which a module drops otherwise; ranks may share a module that is more than a dropout, as stages do the model."""
        odd = [rank for rank, sites in here.items() if sites != theirs]
        if LEAF.fullmatch(self._class_of(module)):
            return odd
        together: Counter[tuple[float, ...]] = Counter()
        for sites in here.values():
            together |= sites
        return [] if together == theirs else odd

    def _moved(self, module: str, theirs: Sites, mine: Mapping[int, Sites]) -> bool:
        """Whether the module around it drops as much, elsewhere in its code."""
        around = module.rpartition(".")[0]
        together: Counter[tuple[float, ...]] = Counter()
        for sites in mine.values():
            together |= _within(sites, around)
        return together == _within(theirs, around)

    # -- masks ----------------------------------------------------------------------------------------------

    def _replicas(self) -> Iterator[TensorVerdict]:
        """Ranks that drop elements of the same values must drop the same ones, or they part."""
        masks = {
            rank: {(d.step, d.call, d.module): d.mask for d in record.info.draws if d.mask and not d.recompute}
            for rank, record in self._ranks.items()
        }
        said: set[tuple[int, str]] = set()
        for key, held in self.assembler.pieces.items():
            if key[2] != "input" or len(held) < 2 or (key[0], key[3]) in said or not LEAF.fullmatch(held[0][1].cls):
                continue
            drawn = [(rank, e, masks[rank].get((e.step, e.call + self._ranks[rank].dry.get(e.step, 0), e.name), "")) for rank, e in held]
            twins = self._twins(key, drawn)
            if twins:
                said.add((key[0], key[3]))
                note = f"{rank_text(twins)} hold different parts of the features and drop the same elements of them: their generators are alike"
                yield self._verdict(key[0], key[3], twins, note)
                continue
            for i, (rank, entry, mask) in enumerate(drawn):
                other = next(
                    (r for r, e, m in drawn[:i] if mask and m and m != mask and same_bits(self._ranks[r].array(e), self._ranks[rank].array(entry))),
                    None,
                )
                if other is not None:
                    said.add((key[0], key[3]))
                    note = f"ranks {other} and {rank} hold the same values and drop other elements of them: their generators are not alike"
                    yield self._verdict(key[0], key[3], [other, rank], note)
                    break

    def _parts(self, known: set[tuple[int, str]]) -> Iterator[TensorVerdict]:
        """Ranks that hold the same part of what is drawn (`--rng`) must be about to draw the same, or replicas part."""
        held: dict[tuple[str, str], list[tuple[int, Part]]] = {}
        for rank, record in self._ranks.items():
            for part in record.info.parts:
                held.setdefault((part.draw, part.held), []).append((rank, part))
        for drawn in held.values():
            (one, first), *others = drawn
            other = next((rank for rank, part in others if part.begins != first.begins), None)
            if other is not None and (first.step, first.module) not in known:
                known.add((first.step, first.module))
                note = f"ranks {one} and {other} draw other random numbers for the same values: their generators are not alike"
                yield self._verdict(first.step, first.module, [one, other], note)

    def _twins(self, key: Key, drawn: Sequence[tuple[int, Entry, str]]) -> list[int]:
        """Ranks that hold different parts of a tensor, other rows aside, and drawn with one mask: a reference draws for each element by itself."""
        drops = {rank: mask for rank, e, mask in drawn if mask and self._tell(rank, key, math.prod(e.shape))}
        places = {p.rank: tuple(i.tobytes() for i in p.places[1:]) for p in self.assembler.placed(key) if p.places is not None and p.firm and len(p.places) > 1}
        for rank, mask in drops.items():
            alike = [r for r, m in drops.items() if m == mask and r in places and rank in places and places[r] != places[rank]]
            if alike:
                return sorted({rank, *alike})
        return []

    def _tell(self, rank: int, key: Key, n: int) -> bool:
        """Whether two masks of so many elements are surely not the same by chance."""
        draws = [d.p for d in self._ranks[rank].info.draws if d.step == key[0] and self._named(rank, d.module) == key[3]]
        return bool(draws) and all(2 * p * (1 - p) * n > TWINS for p in draws)

    def _recomputed(self) -> Iterator[TensorVerdict]:
        for rank, record in self._ranks.items():
            first: dict[tuple[int, str, str], set[str]] = {}
            for d in record.info.draws:
                if d.mask and not d.recompute:
                    first.setdefault((d.step, d.module, d.slot), set()).add(d.mask)
            said: set[tuple[int, str]] = set()
            for d in record.info.draws:
                drawn = first.get((d.step, d.module, d.slot))
                if d.recompute and d.mask and drawn and d.mask not in drawn and (d.step, d.module) not in said:
                    said.add((d.step, d.module))
                    note = "recomputation in the backward pass drops other elements than the first forward pass did"
                    yield self._verdict(d.step, self._named(rank, d.module), [rank], note)

    # -- words ----------------------------------------------------------------------------------------------

    def _output(self, module: str, step: int) -> Key | None:
        return next((k for k in self.reference.entries if k[0] == step and k[2] == "output" and k[3] == module), None)

    def _class_of(self, module: str) -> str:
        key = self._output(module, 0)
        return self.reference.entries[key].cls if key is not None else ""

    def _verdict(self, step: int, module: str, ranks: Sequence[int], note: str) -> TensorVerdict:
        key = self._output(module, step)
        entry = self.reference.entries[key] if key is not None else None
        return TensorVerdict(
            step=step, kind="dropout", name=module, cls=entry.cls if entry else "", source=entry.source if entry else "",
            rel_err=1.0, abs_err=1.0, tolerance=0.0, ratio=float("inf"), verdict="bad", ranks=tuple(sorted(ranks)),
            order=float(entry.order if entry else self.reference.last), note=note,
        )  # fmt: skip


def _sites(records: Iterable[tuple[RankRecord, Callable[[str], str]]], step: int) -> Sites:
    """Of one side; probabilities of 0 drop nothing, and calls of one place are one place."""
    found: dict[str, dict[str, set[float]]] = {}
    for record, named in records:
        for d in record.info.draws:
            if d.step == step and d.p > 0 and not d.recompute:
                found.setdefault(named(d.module), {}).setdefault(d.slot, set()).add(round(d.p, DIGITS))
    return {module: Counter(tuple(sorted(p)) for p in slots.values()) for module, slots in found.items()}


def _within(sites: Sites, around: str) -> Counter[tuple[float, ...]]:
    out: Counter[tuple[float, ...]] = Counter()
    for module, places in sites.items():
        if not around or module == around or module.startswith(f"{around}."):
            out += places
    return out


def _told(theirs: Counter[tuple[float, ...]] | None, mine: Counter[tuple[float, ...]]) -> str:
    one, other = (" and ".join(f"{p:g}" for p in sorted({p for places in c or () for p in places})) for c in (mine, theirs))
    return f"it drops with probability {one}, the reference {f'with {other}' if other else 'nothing'}" if one else f"it drops nothing, the reference with probability {other}"

