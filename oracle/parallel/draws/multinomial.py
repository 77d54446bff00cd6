"""`multinomial`: choices of routers and samplers. Rows may be cut, categories not."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from proctor.errors import MappingError
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.draws import Draw, Elementwise, Place, register, rule
from proctor.oracle.parallel.streams.keyed import Bits


class _Samples(Elementwise):
    """With replacement: each sample is the first category whose cumulated probability exceeds a uniform number."""

    name = "multinomial with replacement"

    def keyed(self, bits: Bits, dtype: torch.dtype) -> torch.Tensor:
        """Uniform numbers of 53 bits."""
        return bits.unit(double=True)

    def kernel(self, out: torch.Tensor, *, generator: torch.Generator) -> None:
        """Uniform numbers that cost what the kernel's own do: two draws of 32 bits each."""
        out.uniform_(generator=generator)


_SAMPLES = _Samples()


@register("multinomial")
class Multinomial(Draw):
    """Without replacement the n largest of p/q, q exponential: torch's own method; with it, see `_Samples`."""

    def __call__(
        self, place: Place, probabilities: torch.Tensor, count: int, replacement: bool = False, *, generator: Any = None
    ) -> torch.Tensor:
        """See `Draw`."""
        if not replacement or count == 1:
            q = rule("exponential_")(_by_rows(place, probabilities.shape), torch.empty_like(probabilities), 1.0)
            scores = torch.div(probabilities, q)
            return scores.argmax(-1, keepdim=True) if count == 1 else scores.topk(count).indices
        where = _by_rows(place, probabilities.shape)(probabilities)
        stream, rows, ident = where
        shape = (*rows.shape[:-1], count)
        box = Box(shape, (*rows.indices[:-1], np.arange(count)))
        uniform = torch.empty(box.local, dtype=torch.float64)
        stream.fill(_SAMPLES, uniform, box, (), ident)
        return _search(probabilities, uniform)


def _by_rows(place: Place, shape: torch.Size) -> Place:
    def found(tensor: torch.Tensor) -> Any:  # as Place
        stream, box, ident = place(tensor)
        if len(box.indices[-1]) != box.shape[-1]:
            raise MappingError(f"multinomial: its categories are cut ({len(box.indices[-1])} of {box.shape[-1]}), cut its rows only")
        return stream, box, ident

    return found


def _search(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """As torch's kernel: cumulated in the dtype of the probabilities, normalised, then a binary search."""
    if not uniform.numel():
        return torch.empty(uniform.shape, dtype=torch.int64)
    rows = probabilities.reshape(-1, probabilities.shape[-1])
    out = []
    for row, wanted in zip(rows, uniform.reshape(len(rows), -1)):
        array = row.float().numpy() if row.dtype in (torch.bfloat16, torch.float16) else row.numpy()
        table = np.cumsum(array, dtype=array.dtype)  # one after the other, as the kernel adds
        table /= table[-1]
        table[-1] = 1
        out.append(torch.from_numpy(np.searchsorted(table.astype(np.float64), wanted.numpy(), side="left").astype(np.int64)))
    return torch.stack(out).reshape(uniform.shape)
