"""Which outputs must be the reference's whole although no plan says so: those of modules that got all of it and hold all of it.

A module whose inputs are the reference's on a rank, and whose parameters that rank holds as a whole, computes the reference's output there or is
wrong. What looks like the whole and follows from something that is cut may be an addend, or a part of a batch.
"""

from __future__ import annotations

from proctor.oracle.merging.assemble import Assembler
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.numbers.difference import compare
from proctor.oracle.numbers.dtypes import is_floating
from proctor.oracle.numbers.tolerance import Mode
from proctor.oracle.tensors import Entry


class Certain:
    """Asks of one rank's output whether its place is beyond doubt.

    Args:
        reference: that is trusted.
        assembler: of the candidate.
        mode: of tolerances.
    """

    def __init__(self, reference: Reference, assembler: Assembler, mode: Mode) -> None:
        self._reference, self._assembler, self._mode = reference, assembler, mode
        self._modules: dict[tuple[int, str], bool] = {}
        self._inputs: dict[tuple[int, int, int, str], bool] = {}

    def __call__(self, rank: int, key: Key, entry: Entry) -> bool:
        """Whether a rank's output must be the whole of the reference's."""
        step, call, kind, name, _ = key
        if kind != "output" or entry.shape != self._reference.entries[key].shape or not entry.shape:
            return False
        place = (rank, step, call, name)
        if place not in self._inputs:
            self._inputs[place] = self._holds_all(rank, name) and self._got_all(rank, step, call, name)
        return self._inputs[place]

    def _holds_all(self, rank: int, module: str) -> bool:
        if (rank, module) not in self._modules:
            inside = f"{module}." if module else ""
            whole = True
            for k, target in self._reference.entries.items():
                if k[0] == 0 and k[2] == "param" and k[3].startswith(inside):
                    mine = [e for r, e in self._assembler.pieces.get(k, ()) if r == rank]
                    whole = whole and bool(mine) and all(e.shape == target.shape and e.placement is None for e in mine)
            self._modules[rank, module] = whole
        return self._modules[rank, module]

    def _got_all(self, rank: int, step: int, call: int, module: str) -> bool:
        keys = [(step, call, "input", module, slot) for slot in self._reference.slots.get((step, call, "input", module), ())]
        if not keys:
            return False
        record = self._assembler.ranks[rank]
        for key in keys:
            target = self._reference.entries[key]
            mine = [e for r, e in self._assembler.pieces.get(key, ()) if r == rank]
            if len(mine) != 1 or mine[0].shape != target.shape or mine[0].dtype != target.dtype:
                return False
            sums = compare(record.array(mine[0]), self._reference.array(target), target.dtype)
            if sums.mismatch or (not is_floating(target.dtype) and not sums.bit_equal):
                return False
            if sums.error > self._reference.tolerance(key, sums, self._mode).absolute:
                return False
        return True
