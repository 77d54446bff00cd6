"""Nanoseconds a call: bare, through a tap that is off, and recorded; paired rounds in one process.

    python benchmarks/tap.py [--calls 20000] [--rounds 15]

Thread CPU time, median over rounds of the difference to the bare call of the same round. Draining is timed apart.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from proctor.native import ACTIVE, Recorder, Tap


def plain(x: object) -> None:
    return None


def timed(function: Callable[..., object], arguments: tuple[object, ...], calls: int) -> float:
    began = time.thread_time_ns()
    for _ in range(calls):
        function(*arguments)
    return (time.thread_time_ns() - began) / calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    recorder = Recorder()
    recorder.set_tensor_types(torch.Tensor, torch.nn.Parameter)
    recorder.set_probes(torch.is_grad_enabled, torch.is_autocast_enabled, torch.get_autocast_dtype, ("cpu",))
    x = torch.ones(4, 4)
    cases: dict[str, tuple[Callable[..., object], tuple[object, ...]]] = {
        "python f(1)": (plain, (1,)),
        "python f(tensor)": (plain, (x,)),
        "torch.add(4x4, 4x4)": (torch.add, (x, x)),
    }
    print(f"recorder: {ACTIVE}\n{'call':22} {'bare ns':>8} {'off +ns':>8} {'recorded +ns':>13} {'drain ns/row':>13}")
    for name, (function, arguments) in cases.items():
        tap = Tap(recorder, function, recorder.intern(0, name))
        off, on, bare, drain = [], [], [], []
        for _ in range(args.rounds):
            base = timed(function, arguments, args.calls)
            recorder.enabled = False
            off.append(timed(tap, arguments, args.calls) - base)
            recorder.enabled = True
            on.append(timed(tap, arguments, args.calls) - base)
            recorder.enabled = False
            bare.append(base)
            began = time.thread_time_ns()
            rows = len(recorder.drain()["seq"])
            drain.append((time.thread_time_ns() - began) / max(rows, 1))
        print(f"{name:22} {statistics.median(bare):8.0f} {statistics.median(off):8.0f} {statistics.median(on):13.0f} {statistics.median(drain):13.2f}")


if __name__ == "__main__":
    main()
