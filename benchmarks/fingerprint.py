"""What a fingerprint costs, beside reading the same memory: `python benchmarks/fingerprint.py [MEGABYTES…]`.

All rows of a table are measured in one process, one after another in each round, so that a busy machine slows them
alike; a row's ratio is the median over rounds of its speed to that of reading in the same round. `best` is the
fastest round. CPU time of the thread, so that being descheduled does not count.
"""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable

import torch

from proctor.instrument.observe import content, on_device
from proctor.instrument.observe import fingerprint as adapter
from proctor.native import _native

ROUNDS = 15
SLOW_ROUNDS = 3  # sha256 and torch ops
ROUND_BYTES = 64 << 20  # small buffers are repeated up to this


def device_ops(t: torch.Tensor) -> None:
    """The path of CUDA tensors, on the CPU and without the summary."""
    with content.unseen():
        on_device._hash_words(t.view(-1).view(torch.int32 if t.element_size() == 4 else torch.int16), 0, 1, 0)


def candidates(t: torch.Tensor) -> dict[str, Callable[[], object]]:
    address, nbytes = t.data_ptr(), t.numel() * t.element_size()
    width, kind = content.formats()[t.dtype]
    rows: dict[str, Callable[[], object]] = {"read (sum of 64-bit words)": lambda: _native.read_sum(address, nbytes)}
    for simd in reversed(_native.fingerprint_backends()):
        for summary in (True, False):
            rows[f"fingerprint {simd}{' + summary' if summary else ''}"] = lambda simd=simd, summary=summary: (
                _native.fingerprint_buffer(address, nbytes, width, kind, summary=summary, simd=simd)
            )
    rows["hashlib.sha256"] = lambda: hashlib.sha256(memoryview(t.view(torch.uint8).numpy())).digest()
    rows["torch int64 ops"] = lambda: device_ops(t)
    return rows


def table(dtype: torch.dtype, megabytes: int) -> None:
    nbytes = megabytes << 20
    t = torch.randn(nbytes // dtype.itemsize, dtype=torch.float32).to(dtype)
    repeat = max(1, ROUND_BYTES // nbytes)
    rows = candidates(t)
    speeds: dict[str, list[float]] = {name: [] for name in rows}
    for round_ in range(-1, ROUNDS):  # one to warm up
        for name, run in rows.items():
            slow = not name.startswith(("read", "fingerprint a"))
            if slow and round_ >= SLOW_ROUNDS:
                continue
            times = max(1, repeat // 16) if slow else repeat
            start = time.thread_time()
            for _ in range(times):
                run()
            if round_ >= 0:
                speeds[name].append(times * nbytes / (time.thread_time() - start) / 1e9)
    reading = next(iter(speeds.values()))
    print(f"\n{str(dtype).removeprefix('torch.')}, {megabytes} MiB            median GB/s   best GB/s   of reading")
    for name, values in speeds.items():
        ratio = statistics.median(v / r for v, r in zip(values, reading))
        print(f"  {name:32s} {statistics.median(values):9.2f} {max(values):11.2f} {ratio:11.2f}")


def many() -> None:
    """Overhead of a tensor in the recorder's call."""
    print("\nfingerprint_all                      µs per tensor")
    for numel in (16, 4096, 262144):
        tensors = [torch.nn.Parameter(torch.randn(numel)) for _ in range(200)]
        times = []
        for _ in range(50):
            start = time.thread_time()
            adapter.fingerprint_all(tensors)
            times.append((time.thread_time() - start) / len(tensors))
        print(f"  200 float32 tensors of {numel:7d} {statistics.median(times) * 1e6:12.2f}")


def main() -> None:
    torch.set_num_threads(1)
    for megabytes in [int(a) for a in sys.argv[1:]] or [256, 1]:
        for dtype in (torch.float32, torch.bfloat16):
            table(dtype, megabytes)
    many()


if __name__ == "__main__":
    main()
