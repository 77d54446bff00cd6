"""Whether two runs begin with the same parameters, and in which way they do not: other values, or the right ones cut wrongly."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from proctor.oracle.judging.verdicts import TensorVerdict, not_compared
from proctor.oracle.merging.assemble import Assembler
from proctor.oracle.merging.reference import Key, Reference, constant
from proctor.oracle.merging.replicas import same_bits
from proctor.oracle.numbers.dtypes import as_float
from proctor.oracle.plans.mesh import rank_text

Array = npt.NDArray[Any]

NEAR: Final = 1e-3  # relative: casts and sums of initial values, not another initialisation
MOST: Final = 0.5  # of the parameters: above it the runs are initialised in different ways, and no parameter stands out
TELLING: Final = 8  # values of a parameter, below which a shard may have them by chance


class Beginning:
    """Parameters of both sides before the first step.

    Args:
        reference: that is trusted.
        assembler: of the candidate.

    Attributes:
        otherwise: parameters with other values than the reference's, or whose shards make up no whole.
        miscut: where they are few and all of this kind: those whose shards hold values of the reference's parameter, of which some are held nowhere.
    """

    def __init__(self, reference: Reference, assembler: Assembler) -> None:
        self._reference, self._assembler = reference, assembler
        mine = [k for k in reference.order if k[2] == "param" and k[0] == 0]
        found = [k for k in sorted(mine, key=lambda k: constant(reference.array(reference.entries[k]))) if self._off(k)]
        self.otherwise = [k[3] for k in found]
        self._share = len(found) / len(mine) if mine else 0.0
        wrong = [v for k in found if (v := self._miscut(k)) is not None] if self._share <= MOST else []
        self.miscut = wrong if len(wrong) == len(found) else []

    def reason(self) -> str:
        """Why nothing can be compared."""
        off = self.otherwise
        names = ", ".join(off[:3]) + (f" and {len(off) - 3} more" if len(off) > 3 else "")
        reason = f"the two runs do not begin with the same parameters ({names}; {self._share:.0%} of them): "
        return reason + "record both with --generate, or say in a plan how they are cut"

    def _off(self, key: Key) -> bool:
        merged = self._assembler.merge(key)
        if merged is None:
            return False
        entry = self._reference.entries[key]
        theirs = self._reference.array(entry)
        if merged.full is not None and same_bits(merged.full, theirs):
            return False
        a, b = as_float(theirs, entry.dtype), None if merged.full is None else as_float(merged.full, merged.pieces[0].entry.dtype)
        return b is None or a.shape != b.shape or float(np.linalg.norm(a - b)) > NEAR * float(np.linalg.norm(a))

    def _miscut(self, key: Key) -> TensorVerdict | None:
        """That the shards of a parameter hold its values and nobody has some of them; where all are there, only their order is not known."""
        entry = self._reference.entries[key]
        theirs = self._reference.array(entry)
        held = self._assembler.pieces.get(key, [])
        arrays = [self._assembler.ranks[rank].array(e) for rank, e in held if e.dtype == entry.dtype]
        if constant(theirs) or theirs.size < TELLING or len(arrays) < len(held) or not all(bool(np.isin(a, theirs).all()) for a in arrays):
            return None
        lost = int((~np.isin(theirs, np.concatenate([a.ravel() for a in arrays]))).sum())
        if not lost:
            return None
        ranks = rank_text(sorted({rank for rank, _ in held}))
        note = f"it is cut wrongly: what {ranks} hold are values of it, but nobody has {lost:,} of the reference's {theirs.size:,}"
        return not_compared("shape", note, step=0, call=0, kind="param", name=key[3], order=float(entry.order), cls=entry.cls, source=held[0][1].source or entry.source)
