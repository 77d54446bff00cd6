"""What comparing two tensors costs, beside reading the same memory: `python benchmarks/compare_kernel.py [MEGABYTES…]`.

MEGABYTES are those of both tensors together, 1024 by default. All rows of a table are measured in one process, one after
another in each round, so that a busy machine slows them alike; a row's ratio is the median over rounds of its speed to
that of reading in the same round. CPU time of the thread, so that being descheduled does not count; `wall` is the clock's.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from proctor.native import _native
from proctor.native.twins import compare as twin
from proctor.oracle.numbers.difference import compare
from proctor.oracle.numbers.dtypes import from_float

ROUNDS = 7
SLOW_ROUNDS = 1  # numpy, torch and scalar code
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float64")


def pair(dtype: str, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
    """A tensor and one that differs from it by rounding noise, `nbytes` together."""
    rng = np.random.default_rng(0)
    piece = rng.standard_normal(1 << 20, dtype=np.float32)
    pieces = piece, piece * (1 + np.float32(2e-3) * rng.standard_normal(1 << 20, dtype=np.float32))
    a, b = (x.astype(np.float64) if dtype == "float64" else from_float(x, dtype) for x in pieces)
    repeat = max(1, nbytes // 2 // a.nbytes)
    return np.tile(a, repeat), np.tile(b, repeat)


def torch_rows(a: np.ndarray, b: np.ndarray, dtype: str) -> dict[str, Callable[[], object]]:
    """The same by torch operations, where it is installed."""
    try:
        import torch
    except ImportError:
        return {}
    torch.set_num_threads(1)
    kind = getattr(torch, dtype)
    if dtype.startswith("float8"):
        return {}
    x, y = (torch.from_numpy(t.view(np.int16) if dtype == "bfloat16" else t).view(kind) for t in (a, b))

    def two_norms() -> None:
        (x - y).norm()
        y.norm()

    return {"torch.allclose": lambda: torch.allclose(x, y), "torch two norms": two_norms}


def table(dtype: str, megabytes: int) -> None:
    """Measure and print one dtype."""
    a, b = pair(dtype, megabytes << 20)
    nbytes = a.nbytes + b.nbytes
    rows: dict[str, Callable[[], object]] = {
        "read (sum of 64-bit words)": lambda: (_native.read_sum(a.ctypes.data, a.nbytes), _native.read_sum(b.ctypes.data, b.nbytes)),
        "proctor.oracle.compare": lambda: compare(a, b, dtype),
    }
    for simd in _native.fingerprint_backends():
        rows[f"kernel, {simd}"] = lambda simd=simd: _native.compare_buffers(a, b, dtype, simd=simd)
    rows["numpy twin"] = lambda: twin.compare_buffers(a, b, dtype)
    rows |= torch_rows(a, b, dtype)
    speeds: dict[str, list[float]] = {name: [] for name in rows}
    walls: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(-1, ROUNDS):  # one to warm up
        for name, run in rows.items():
            if name.startswith(("numpy", "torch", "kernel, scalar")) and not 0 <= round_ < SLOW_ROUNDS:
                continue
            start, clock = time.thread_time(), time.perf_counter()
            run()
            if round_ >= 0:
                speeds[name].append(nbytes / (time.thread_time() - start) / 1e9)
                walls[name].append(time.perf_counter() - clock)
    reading = next(iter(speeds.values()))
    print(f"\n{dtype}, {nbytes / 2**20:.0f} MiB      median GB/s   best GB/s   of reading   wall s")
    for name, values in speeds.items():
        ratio = statistics.median(v / r for v, r in zip(values, reading))
        print(f"  {name:28s} {statistics.median(values):8.2f} {max(values):11.2f} {ratio:12.2f} {min(walls[name]):8.3f}")


def several(parts: int = 2000, elements: int = 4096) -> None:
    """Overhead of a small tensor."""
    tensors: list[tuple[Any, Any]] = [pair("float32", 8 * elements) for _ in range(4)]
    start = time.thread_time()
    for i in range(parts):
        a, b = tensors[i % 4]
        compare(a[:elements], b[:elements], "float32")
    print(f"\n{elements} float32 elements: {(time.thread_time() - start) / parts * 1e6:.1f} µs a comparison")


def main() -> None:
    for megabytes in [int(a) for a in sys.argv[1:]] or [1024]:
        for dtype in DTYPES:
            table(dtype, megabytes)
    several()


if __name__ == "__main__":
    main()
