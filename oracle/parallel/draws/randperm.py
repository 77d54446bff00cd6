"""`randperm`: every rank makes the whole permutation, O(whole), and keeps its part."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from proctor.oracle.parallel.draws import Draw, Elementwise, Place, register
from proctor.oracle.parallel.streams.keyed import Bits


class _Permutation(Elementwise):
    """The stable order of 64-bit numbers; torch's own shuffle in the stock stream."""

    name = "randperm"

    def keyed(self, bits: Bits, dtype: torch.dtype) -> torch.Tensor:
        """The numbers to be sorted."""
        pair = bits.words(2, domain=1).astype(np.uint64)
        return torch.from_numpy(((pair[:, 0] << np.uint64(32)) | pair[:, 1]).view(np.int64))

    def kernel(self, out: torch.Tensor, *, generator: torch.Generator) -> None:
        """The permutation."""
        out.copy_(torch.randperm(len(out), generator=generator, dtype=out.dtype))


_PERMUTATION = _Permutation()


@register("randperm.generator_out")
class RandPerm(Draw):
    """A permutation of n; its place says which n where the rank holds a part."""

    def __call__(self, place: Place, n: int, *, generator: Any = None, out: torch.Tensor) -> torch.Tensor:
        """See `Draw`."""
        stream, box, ident = place(out.resize_(n) if out.numel() == 0 else out)
        drawn = stream.whole(_PERMUTATION, box.shape, torch.int64 if stream.kind == "keyed" else out.dtype, (), ident)
        if stream.kind == "keyed":
            drawn = torch.argsort(drawn, stable=True)
        return out.copy_(drawn[torch.from_numpy(box.indices[0])])
