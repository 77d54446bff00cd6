"""Both streams on a GPU. Written for torch 2.13 and not run: there was no GPU. (NVRTC compiles the kernel.)

keyed: `_philox_uniform_` and `_philox_normal_` take a key and a position for each row, so a shard costs what it holds. Other numbers than on a CPU (torch takes
other bits of a word), the same on every GPU and mesh. What is drawn from words (`randint`, `randperm`) is drawn on the CPU and copied.

stock: what torch draws on one GPU. A kernel of torch has T = 256·min(⌈n/256⌉, processors·⌊threads of a processor/256⌋) threads; thread t draws elements t, t + T, …,
four of them from one block of Philox, whose subsequence is t (`aten/src/ATen/native/cuda/DistributionTemplates.h`). So element g is component ⌊g/T⌋ mod 4 of
block ⌊g/T⌋ div 4 of subsequence g mod T, and one kernel, compiled when it is first used, computes it for whatever elements a rank holds. T depends on
the GPU: the reference must be of the same model.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.box import Box, Longs
from proctor.oracle.parallel.streams.keyed import Bits

CHUNK: Final = 1 << 24  # elements at a time
BLOCK: Final = 4  # numbers of one block of Philox
_THREADS: Final = 256  # of a block of a kernel
_DTYPES: Final = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}

_SOURCE: Final = """
#include <curand_kernel.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>
extern "C" __global__ void draw(TYPE* out, const long long* starts, const long long* of, const float* arguments) {
  const long long length = of[0], count = of[1], threads = of[2];
  const TYPE a = (TYPE)arguments[0], b = (TYPE)arguments[1];
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x) {
    const long long g = starts[i / length] + i % length, turn = g / threads;
    curandStatePhilox4_32_10_t state;
    curand_init((unsigned long long)of[3], g % threads, (unsigned long long)of[4] + turn / 4 * 4, &state);
    const float4 four = curand_KIND4(&state);
    const float number = (&four.x)[turn % 4];
    const TYPE x = (TYPE)(number * SCALE + SHIFT);
    out[i] = EXPRESSION;
  }
}
"""


class DeviceBits(Bits):
    """Random numbers of some positions of one draw, made where the tensor is.

    Args:
        key, starts, length: as for `Bits`.
        device: of the tensor.
    """

    def __init__(self, key: int, starts: Longs, length: int, device: torch.device) -> None:
        super().__init__(key, starts, length)
        self._device = device

    def unit(self, double: bool = False) -> torch.Tensor:
        """See `Bits.unit`."""
        return self._drawn("_philox_uniform_", double)

    def normal(self, double: bool = False) -> torch.Tensor:
        """See `Bits.normal`."""
        return self._drawn("_philox_normal_", double)

    def log_unit(self, double: bool = False) -> torch.Tensor:
        """See `Bits.log_unit`."""
        return -torch.log(1 - self.unit(double).double())

    def below(self, p: float) -> torch.Tensor:
        """See `Bits.below`."""
        return self.unit(double=True) < p

    def _drawn(self, operation: str, double: bool) -> torch.Tensor:
        """[count] of each row from the block of four in which it begins; a number of 64 bits takes two of 32."""
        ahead = self._starts % BLOCK
        width = self._length + int(ahead.max())
        keys = np.empty((len(self._starts), 1, 2), np.uint64)
        keys[..., 0] = self._key
        keys[:, 0, 1] = (self._starts - ahead) * (2 if double else 1)
        rows = torch.empty((len(keys), width), dtype=torch.float64 if double else torch.float32, device=self._device)
        getattr(torch.ops.aten, operation)(rows, torch.from_numpy(keys).to(self._device))
        if not ahead.any():
            return rows.reshape(-1)
        columns = torch.from_numpy(ahead[:, None] + np.arange(self._length)).to(self._device)
        return rows.gather(1, columns).reshape(-1)


def threads_of(size: int, processors: int, resident: int) -> int:
    """Threads of torch's kernel.

    Args:
        size: elements of the whole.
        processors: of the GPU.
        resident: threads that one of them holds.
    """
    return _THREADS * min(-(-size // _THREADS), processors * (resident // _THREADS))


def moved_on(size: int, threads: int) -> int:
    """By how much torch moves a generator's offset for a tensor."""
    return BLOCK * ((size - 1) // (threads * BLOCK) + 1)


def fill_stock(generator: torch.Generator, draw: Any, out: torch.Tensor, box: Box, args: tuple[Any, ...]) -> None:
    """A rank's part of what torch would draw on one GPU; the generator moves on as there.

    Args:
        generator: of the device.
        draw: a rule of `draws`.
        out: the shard.
        box: where it lies.
        args: of the operation.

    Raises:
        OracleError: no rule says how torch draws this on a GPU.
    """
    kind, expression = draw.curand
    if not kind or out.dtype not in _DTYPES or not out.is_contiguous() or box.size >= 1 << 31:
        what = "not contiguous" if not out.is_contiguous() else f"{out.dtype}"
        raise OracleError(f"the stock stream does not know how a GPU draws {draw.name} ({what}, {box.size} elements)", hint='give rng="keyed"')
    if box.size == 0:
        return
    properties = torch.cuda.get_device_properties(out.device)
    threads = threads_of(box.size, properties.multi_processor_count, properties.max_threads_per_multi_processor)
    seed, offset = np.array([generator.initial_seed()], np.uint64).view(np.int64)[0], generator.get_offset()
    generator.set_offset(offset + moved_on(box.size, threads))
    runs, flat = box.runs(), out.view(-1)
    arguments = torch.tensor([float(a) for a in (*args, 0.0)][:2], device=out.device)
    for length in np.unique(runs.lengths):
        these = np.flatnonzero(runs.lengths == length)
        starts, count = torch.from_numpy(runs.starts[these]).to(out.device), int(length) * len(these)
        of = torch.tensor([int(length), count, threads, int(seed), offset], dtype=torch.int64, device=out.device)
        part = torch.empty(count, dtype=out.dtype, device=out.device)
        blocks = min(-(-count // _THREADS), 1 << 16)
        _kernel(kind, expression, out.dtype)(grid=(blocks, 1, 1), block=(_THREADS, 1, 1), args=[part, starts, of, arguments])
        where = torch.from_numpy((runs.offsets[these][:, None] + np.arange(length)).reshape(-1)).to(out.device)
        flat[where] = part


@functools.cache
def _kernel(kind: str, expression: str, dtype: torch.dtype) -> Any:
    scale, shift = ("(float)(TYPE)(b - a)", "(float)a") if kind == "uniform" else ("arguments[1]", "arguments[0]")
    source = _SOURCE.replace("KIND", kind).replace("SCALE", scale).replace("SHIFT", shift).replace("EXPRESSION", expression)
    headers = [str(folder) for folder in Path(torch.__file__).parents[1].glob("nvidia/*/include")]  # of torch's wheels
    return torch.cuda._compile_kernel(source.replace("TYPE", _DTYPES[dtype]), "draw", cuda_include_dirs=headers)
