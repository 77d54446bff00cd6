"""What a step by a plan costs: against tensor parallelism written by hand, and against DTensor.

    python benchmarks/parallel_cost.py [--rounds 30] [--json FILE] [--rows 4] [--time 16]
    python benchmarks/parallel_cost.py --ranks 64     # so many thread ranks: wall seconds of data parallel steps of a small net

One rank of TP 2 in one process; torch's fake process group stands for the other, so that what is measured is what the
program does between collectives: Python, hooks, dispatch. The model is the small block for which dispatch decides
(width 64, sequences of 16; with fewer tokens it decides more). Arms, in every round in another order and each warm (one step
before it is timed), CPU time, median of paired ratios with their quartiles:
  hand     the model with halved layers, and two autograd functions (copy and reduce) written into its forward, as Megatron-LM does
  plan     the unchanged model by `proctor.parallelize`
  styles   torch's `parallelize_module`
  dtensor  all parameters and activations DTensors
Also: a plan's step with nothing drawn against the same step without our kernels installed (interception).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from proctor.oracle import Plan
from proctor.oracle.parallel import intercept, parallelize, run_threads

WIDTH, HEADS, LAYERS, TIME, ROWS, TP = 64, 4, 4, 16, 4, 2


class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class Block(nn.Module):
    def __init__(self, parts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH // parts, bias=False)
        self.proj = nn.Linear(WIDTH // parts, WIDTH, bias=False)
        self.fc1 = nn.Linear(WIDTH, 4 * WIDTH // parts, bias=False)
        self.fc2 = nn.Linear(4 * WIDTH // parts, WIDTH, bias=False)
        self.hand = parts > 1

    def forward(self, x):
        h = self.norm1(x)
        h = Copy.apply(h) if self.hand else h
        q, k, v = self.qkv(h).unflatten(-1, (-1, 3, WIDTH // HEADS)).transpose(1, 2).unbind(3)
        # In plain operations: DTensor has no rule for the fused attention of a CPU.
        h = torch.softmax(q @ k.transpose(-1, -2) * (WIDTH // HEADS) ** -0.5, -1) @ v
        h = h.transpose(1, 2).flatten(2)
        h = self.proj(h)
        x = x + (Reduce.apply(h) if self.hand else h)
        h = self.norm2(x)
        h = Copy.apply(h) if self.hand else h
        h = self.fc2(F.gelu(self.fc1(h)))
        return x + (Reduce.apply(h) if self.hand else h)


class Net(nn.Module):
    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(parts) for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def plan() -> Plan:
    found = Plan(f"tp={TP}").style("colwise", r"layers\.\d+\.(qkv|fc1)", "tp")
    return found.style("rowwise", r"layers\.\d+\.(proj|fc2)", "tp", bias=False)


def by_styles(mesh) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    layers = {"layers.*.qkv": ColwiseParallel(), "layers.*.fc1": ColwiseParallel(), "layers.*.proj": RowwiseParallel(), "layers.*.fc2": RowwiseParallel()}
    return parallelize_module(Net(), mesh, layers)


def all_dtensor(mesh) -> nn.Module:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    model = Net()
    for name, parameter in list(model.named_parameters()):
        module = model.get_submodule(name.rpartition(".")[0])
        where = Shard(0) if "qkv" in name or "fc1" in name else Shard(1) if "proj" in name or "fc2" in name else Replicate()
        module.register_parameter(name.rpartition(".")[2], nn.Parameter(distribute_tensor(parameter.data, mesh, [where])))
    return model


def stepper(model: nn.Module, x: torch.Tensor) -> Callable[[], float]:
    parameters = list(model.parameters())  # as an optimizer has them

    def step() -> float:
        for number in range(6):  # the first is of caches that another program has filled
            if number == 1:
                before = time.process_time()
            for parameter in parameters:
                parameter.grad = None
            out = model(x)
            out.sum().backward()
        return (time.process_time() - before) / 5

    return step


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def on_threads(ranks: int) -> list[tuple[float, float]]:
    """Seconds of each of four forwards and backwards, as rank 0 sees them: of the clock, and of CPU of all ranks."""

    def rank(_: int) -> list[tuple[float, float]]:
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        parallelize(model, Plan(f"dp={ranks}").style("batch", "", "dp"), seed=0, check=False)
        taken = []
        for _ in range(4):
            before, busy = time.perf_counter(), time.process_time()
            model(torch.ones(2 * ranks, 256)).square().mean().backward()
            taken.append((time.perf_counter() - before, time.process_time() - busy))
        return taken

    return run_threads(rank, ranks)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--rows", type=int, default=ROWS, help="sequences of a batch")
    parser.add_argument("--time", type=int, default=TIME, help="tokens of a sequence")
    parser.add_argument("--ranks", type=int, metavar="N", help="of threads in one process, instead")
    args = parser.parse_args()
    if args.ranks:
        torch.set_num_threads(1)
        print(f"{args.ranks} thread ranks: {', '.join(f'{s:.2f} s ({cpu:.2f} s of CPU)' for s, cpu in on_threads(args.ranks))} a step")
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=TP)
    mesh = init_device_mesh("cpu", (TP,))
    x = torch.randn(args.rows, args.time, WIDTH)
    # A fake group reduces nothing, so replicas cannot be compared; edges are looked at in the first step as always.
    arms = {"hand": stepper(Net(TP), x), "plan": stepper(parallelize(Net(), plan(), check=False), x)}
    arms["styles"] = stepper(by_styles(mesh), x)
    arms["dtensor"] = stepper(all_dtensor(mesh), distribute_tensor(x, mesh, [Replicate()]))
    for step in arms.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in arms}
    bare: list[float] = []
    turns = random.Random(0)
    for _ in range(args.rounds):
        for name in turns.sample(list(arms), len(arms)):
            times[name].append(arms[name]())
        halves = {}
        for installed in turns.sample([True, False], 2):
            (intercept.install if installed else intercept.uninstall)()
            halves[installed] = arms["hand"]()
        intercept.install()
        bare.append(halves[True] / halves[False])
    ratios = {
        f"{over} / {under}": [a / b for a, b in zip(times[over], times[under])]
        for over, under in (("plan", "hand"), ("styles", "plan"), ("dtensor", "plan"), ("dtensor", "hand"))
    } | {"kernels installed / not, nothing drawn": bare}
    for name, taken in times.items():
        print(f"| {name}, ms a step | {1e3 * min(taken):.3f} |")
    for name, values in ratios.items():
        print(f"| {name} | {quartiles(values)} |")
    found = {f"{name}, ms a step": 1e3 * min(taken) for name, taken in times.items()} | {name: statistics.median(values) for name, values in ratios.items()}
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1))
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
