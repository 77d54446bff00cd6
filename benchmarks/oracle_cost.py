"""What recording for the oracle costs a step, in time and memory: `python benchmarks/oracle_cost.py [--what step] [--rounds N]`.

`--what`: a training step (`step`), the same of which statistics are kept (`statistics`), a training step and an evaluation (`evaluation`), or two
forwards of a program that trains nothing (`forward`). One process trains a small transformer; bare work and recorded work alternate, each on its own copy of
the model, so that a busy machine slows both alike. CPU time of the process (writing included); `wall` is the clock's. Memory is the
largest resident set of a recorded step above that of a bare one, beside what was written to disk.
"""

from __future__ import annotations

import argparse
import copy
import gc
import resource
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from proctor.oracle.collect.collector import Collector
from proctor.oracle.collect.config import CollectConfig


def model(width: int, layers: int) -> nn.Module:
    """A stack of pre-norm encoder layers and a head."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    return nn.Sequential(nn.Linear(width, width), nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(width, 256))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """Forward, backward and update."""
    optimizer.zero_grad()
    nn.functional.cross_entropy(net(x).flatten(0, 1), y.flatten()).backward()
    optimizer.step()


def evaluate(net: nn.Module, x: torch.Tensor) -> None:
    """A forward without gradients."""
    with torch.no_grad():
        net(x)


WHAT: dict[str, dict[str, bool]] = {"step": {}, "statistics": {"statistics": True}, "evaluation": {}, "forward": {"forward": True}}  # options of the recording


def work(what: str, net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """What is measured."""
    if what != "forward":
        step(net, optimizer, x, y)
    for _ in range({"evaluation": 1, "forward": 2}.get(what, 0)):
        evaluate(net, x)


def recorded(what: str, folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
    """The same, recorded."""
    shutil.rmtree(folder, ignore_errors=True)
    collector = Collector(CollectConfig(folder=str(folder), **WHAT[what]))
    collector.install()
    collector.adopt([net])
    work(what, net, optimizer, x, y)
    collector.end()
    assert collector.info.done, collector.info.notes


def peak_mib() -> float:
    """The largest resident set so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", choices=WHAT, default="step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    x = torch.randn(args.rows, args.length, args.width)
    y = torch.randint(0, 256, (args.rows, args.length))
    ratios, walls, bare_s = [], [], []
    folder = Path(tempfile.mkdtemp())
    base = model(args.width, args.layers)
    written, before = 0, 0.0
    try:
        for round_ in range(args.rounds + 1):
            times = {}
            for name in ("bare", "recorded"):
                gc.collect()
                net = copy.deepcopy(base)
                optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
                step(net, optimizer, x, y)
                cpu, wall = time.process_time(), time.perf_counter()
                if name == "bare":
                    work(args.what, net, optimizer, x, y)
                else:
                    recorded(args.what, folder / "run", net, optimizer, x, y)
                times[name] = (time.process_time() - cpu, time.perf_counter() - wall)
                if round_ == 0 and name == "bare":
                    before = peak_mib()
                elif round_ == 0:
                    print(f"peak memory {peak_mib() - before:.0f} MiB above a bare step's", flush=True)
            if round_:  # the first one warms up
                ratios.append(times["recorded"][0] / times["bare"][0])
                walls.append(times["recorded"][1] / times["bare"][1])
                bare_s.append(times["bare"][0])
        written = sum(f.stat().st_size for f in (folder / "run").rglob("*.safetensors"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"bare {args.what} {1e3 * statistics.median(bare_s):.0f} ms CPU, {written / 2**20:.0f} MiB recorded")
    print(f"recorded ÷ bare: CPU {statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f}), wall {statistics.median(walls):.2f}")


if __name__ == "__main__":
    main()
