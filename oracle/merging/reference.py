"""The trusted side of a comparison: its tensors by key, its repetition, its noise samples.

It is held against itself first. A reference that gives another result when it runs again, or that has NaN in it, decides
nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.oracle.merging.replicas import same_bits
from proctor.oracle.numbers.difference import Difference, compare
from proctor.oracle.numbers.dtypes import as_float, is_floating
from proctor.oracle.numbers.slopes import slopes
from proctor.oracle.numbers.tolerance import Estimate, Mode, TensorKey, Tolerance, tolerance, unit_roundoff
from proctor.oracle.store import RankRecord, Recording
from proctor.oracle.tensors import Entry

Array = npt.NDArray[Any]
Key = tuple[int, int, str, str, str]  # step, call, kind, name, slot: of the reference

# The first tensor of the forward pass in which two runs of one program part may do so by the order of a reduction: some u of its
# norm. (A gradient that is zero but for rounding may differ wholly.)
ROUGH_U: Final = 1e4
ROUGH: Final = 0.05

_CROSSING: Final = ("input", "output", "grad_input", "grad_output")

# Phases of a step, earlier ones first.
RANKING = {
    "param": 0, "buffer": 0, "input": 1, "output": 1, "score": 1, "choice": 1, "dropped": 1, "mask": 1, "logprob": 1, "scalar": 2, "buffer_after": 2, "grad_output": 3, "grad_input": 3, "main_grad": 4, "opt_state": 5, "param_after": 6,
}  # fmt: skip


class Reference:
    """Tensors of a reference.

    Args:
        recording: made with samples.
        run: of it, "" the one that is trusted; `placed` tells where things lie, and is not to be judged by.
    """

    def __init__(self, recording: Recording, run: str = "") -> None:
        self.recording, self.run = recording, run or recording.trusted
        self.ranks = recording.ranks(self.run)
        self.samples = [recording.ranks(name) for name in recording.noise()]
        self._strict = [recording.ranks(name) for name in recording.strict()]
        self.allows_fp8 = True
        self.again = recording.ranks("again") if "again" in recording.runs() else None
        self.entries: dict[Key, Entry] = {}
        self.owner: dict[Key, int] = {}
        self.notes: list[str] = []
        for key, (rank, entry) in _owned(self.ranks).items():
            self.entries[key], self.owner[key] = entry, rank
        self._drop_second_copies()
        self._by_entry = {id(e): self.owner[k] for k, e in self.entries.items()}
        self.order = sorted(self.entries, key=lambda k: (k[0], RANKING.get(k[2], 9), self.owner[k], self.entries[k].order))
        self.last = max((e.order for e in self.entries.values()), default=0)
        self.calls: dict[str, int] = {}
        for step, call, kind, name, _ in self.entries:
            if step == 0 and kind in ("input", "output"):
                self.calls[name] = max(self.calls.get(name, 0), call + 1)
        self.slots: dict[tuple[int, int, str, str], list[str]] = {}
        for step, call, kind, name, slot in self.order:
            self.slots.setdefault((step, call, kind, name), []).append(slot)
        self._others: list[dict[Key, Entry]] = [_keyed(s) for s in self.samples]
        self._estimate = Estimate()

    def _drop_second_copies(self) -> None:
        """In a pipeline that is the reference, the last stage's copy of a tied weight is the first stage's parameter."""
        if len(self.ranks) < 2:
            return
        seen: dict[tuple[tuple[int, ...], bytes], int] = {}
        second: set[str] = set()
        for key, entry in self.entries.items():
            if key[2] != "param" or key[0]:
                continue
            values = self.ranks[self.owner[key]].array(entry)
            if not constant(values):
                owner = seen.setdefault((entry.shape, values.tobytes()), self.owner[key])
                if owner != self.owner[key]:
                    second.add(key[3])
        kinds = ("param", "main_grad", "opt_state", "param_after")
        self.entries = {k: e for k, e in self.entries.items() if k[2] not in kinds or k[3] not in second}

    def array(self, entry: Entry) -> Array:
        return self.ranks[self._by_entry[id(entry)]].array(entry)

    def floats(self, entry: Entry) -> Array:
        return as_float(self.array(entry), entry.dtype)

    def parameters(self) -> dict[str, tuple[Entry, Any]]:
        """Parameters before the first step, with how to read them."""
        return {k[3]: (e, self.array) for k, e in self.entries.items() if k[2] == "param" and k[0] == 0}

    def first_cast(self) -> Key | None:
        """The first output of a module that casts to 8 bits inside; `None` where there is none, or nothing to choose."""
        found = (k for k in self.order if k[0] == 0 and k[2] == "output" and self.entries[k].fp8)
        return min(found, key=lambda k: self.entries[k].order, default=None) if self._strict else None

    def allow_fp8(self, allowed: bool) -> None:
        """Whether tolerances leave room for 8-bit casts that fall out otherwise, as they do where each shard has a scale of its own."""
        if allowed != self.allows_fp8:
            self.samples, self._strict = self._strict, self.samples
            self._others = [_keyed(s) for s in self.samples]
            self._estimate, self.allows_fp8 = Estimate(), allowed

    def problem(self, mode: Mode) -> str:
        """Why it cannot be trusted; "" when it can."""
        if not self.samples:
            return "the reference was recorded without noise samples, so no tolerance is known: record it with --samples 4"
        for key in self.order:
            entry = self.entries[key]
            if is_floating(entry.dtype) and key[2] not in ("input", "buffer") and bool(np.isnan(self.floats(entry)).any()):
                return f"the reference itself has NaN in {key[2]} {key[3]}{slot_text(key[4])}: nothing can be compared with it"
        if self.again is None:
            self.notes.append("the reference was recorded once only: whether it is deterministic was not checked")
            return ""
        again = _keyed(self.again)
        rough = 0
        for key in self.order:
            entry, other = self.entries[key], again.get(key)
            if other is None:
                return f"the reference is not deterministic: its second run has no {key[2]} {key[3]}"
            if key[2] in ("choice", "buffer"):
                continue  # by scores that are compared; some buffers are never written, and hold what was in memory
            a, b = self.array(entry), self.again[self.owner[key]].array(other)
            if a.shape != b.shape or a.dtype != b.dtype:
                return f"the reference is not deterministic: {key[2]} {key[3]} has another shape in its second run"
            if same_bits(a, b):
                continue
            sums = compare(b, a, entry.dtype) if is_floating(entry.dtype) else None
            # Where runs differ by chance the noise runs do too, and are no measure: what differs first may only be rounded differently.
            first = rough == 0 and sums is not None and key[2] in ("param", "input", "output")
            chance = first and sums is not None and not sums.relative < min(ROUGH, ROUGH_U * unit_roundoff(entry.precision))
            if sums is None or chance or sums.error > self.tolerance(key, sums, mode).absolute:
                return (
                    f"the reference is not deterministic: {key[2]} {key[3]}{slot_text(key[4])} differs between two runs of it "
                    "by more than rounding (unseeded data, dropout or initialisation?)"
                )
            rough += 1
        if rough:
            self.notes.append(f"the reference is not deterministic bit for bit ({rough} tensors differ within their tolerance)")
        return ""

    def tolerance(self, key: Key, difference: Difference, mode: Mode) -> Tolerance:
        """What a tensor may differ by, from the noise samples."""
        entry, place = self.entries[key], TensorKey(*key)
        self._estimate.mode = mode
        if place not in self._estimate:
            mine = self.array(entry)
            for sample, (ranks, keyed) in enumerate(zip(self.samples, self._others, strict=True)):
                other = keyed.get(key)
                if other is not None and other.shape == entry.shape and other.dtype == entry.dtype:
                    moved = ranks[self.owner[key]].array(other)
                    self._estimate.add(place, sample, compare(moved, mine, entry.dtype), entry.dtype)
        fp8 = "float8_e4m3fn" if entry.fp8 and self.allows_fp8 else ""
        signal = None
        before = (key[0], 0, "param", key[3], "") if key[2] == "param_after" else None
        if before is not None and before in self.entries and self.entries[before].shape == entry.shape:
            signal = compare(self.array(entry), self.array(self.entries[before]), entry.dtype).error
        found = self._estimate.tolerance(place, difference, entry.precision, fp8=fp8, signal=signal)
        if found is not None and difference.error > found.absolute and (few := telling(self.floats(entry))) < difference.n:
            found = self._estimate.tolerance(place, msgspec.structs.replace(difference, n=few), entry.precision, fp8=fp8, signal=signal)
        return found if found is not None else tolerance(0.0, difference.size, entry.precision, key[2], n=difference.n, mode=mode, fp8=fp8)

    def largest(self, key: Key) -> float:
        """By how much an element of a tensor moved at most in the noise samples; infinite where that is not known."""
        entry, worst = self.entries[key], -1.0
        mine = np.ascontiguousarray(self.array(entry))
        for ranks, keyed in zip(self.samples, self._others, strict=True):
            other = keyed.get(key)
            if other is not None and other.shape == entry.shape and other.dtype == entry.dtype:
                moved = np.ascontiguousarray(ranks[self.owner[key]].array(other))
                worst = max(worst, compare(moved, mine, entry.dtype).max_diff)
        return worst if worst >= 0 else math.inf

    def sampled_shapes(self, key: Key) -> list[tuple[int, ...]]:
        """The shapes that a tensor has in the noise samples; () where one lacks it."""
        return [keyed[key].shape if key in keyed else () for keyed in self._others]

    def slopes(self, key: Key, dim: int, parts: int) -> tuple[list[float], int]:
        """Mean over the noise samples of each part's squared slope, and how many samples there are."""
        place, cut = TensorKey(*key), f"{dim}:{parts}"
        known = self._estimate.get(place)
        if known is None or cut not in known.slopes:
            entry = self.entries[key]
            mine = self.array(entry)
            for ranks, keyed in zip(self.samples, self._others, strict=True):
                other = keyed.get(key)
                if other is not None and other.shape == entry.shape and other.dtype == entry.dtype:
                    moved = ranks[self.owner[key]].array(other)
                    self._estimate.add_slopes(place, cut, slopes(moved, mine, entry.dtype, dim, parts).alphas, entry.dtype)
            known = self._estimate.get(place)
        return (known.slopes[cut], known.slope_samples[cut]) if known is not None and cut in known.slopes else ([], 0)

    def not_seen(self, seen: set[Key], compiled: Collection[str] = ()) -> list[str]:
        """Modules of the reference that the candidate has no tensor of.

        Args:
            seen: tensors that the candidate has.
            compiled: modules that it compiles, whose inside nobody sees.
        """
        have = {k[3] for k in seen if k[2] == "output"}
        hidden = [k for k in self.entries if k[2] in _CROSSING and k not in seen and k[3] not in have and any(_within(k[3], r) for r in compiled)]
        modules = {k[3] for k in hidden}
        mine = sorted({k[3] for k in self.entries if k[2] == "output"} - have - modules)
        regions = sorted({next(r or "the model" for r in compiled if _within(m, r)) for m in modules})
        shown = ", ".join(regions[:3]) + (f" and {len(regions) - 3} more" if len(regions) > 3 else "")
        inside = [f"inside torch.compile: {len(hidden):,} tensors of {len(modules):,} modules in {shown}"] if modules else []
        return inside + [f"module {name or '(root)'}: the candidate has none of this name" for name in mine]


def _within(module: str, region: str) -> bool:
    return module != region and (not region or module.startswith(f"{region}."))


def constant(values: Array) -> bool:
    """Whether all elements are alike, so that content tells nothing of places."""
    return values.size == 0 or bool((values == values.ravel()[0]).all())


def telling(values: Array) -> int:
    """How many elements a norm is made of: (Σx²)²/Σx⁴, n for alike ones, 1 where one is far larger than all others."""
    squares = np.square(values.astype(np.float64).ravel())
    total = float(squares.sum())
    if not total > 0 or not math.isfinite(total):
        return values.size
    return math.ceil(total / float(squares @ (squares / total)) * (1 - 1e-9))  # rounding of the sums is no further element


def _keyed(ranks: Mapping[int, RankRecord]) -> dict[Key, Entry]:
    return {key: entry for key, (_, entry) in _owned(ranks).items()}


def _owned(ranks: Mapping[int, RankRecord]) -> dict[Key, tuple[int, Entry]]:
    """Tensors by key, each with the rank that has it."""
    out: dict[Key, tuple[int, Entry]] = {}
    for rank, record in ranks.items():
        for entry in record.entries:
            if entry.recompute:
                continue
            key = (entry.step, entry.call, entry.kind, entry.name, entry.slot)
            # Of a pipeline, what comes out of the model comes out of its last stage.
            if key not in out or entry.kind in ("output", "grad_output"):
                out[key] = rank, entry
    return out


def slot_text(slot: str) -> str:
    """A place in nested values, for a sentence."""
    return f"[{slot}]" if slot else ""
