"""The GPT of the examples, trained on one device or by a plan: as threads, or as a job of torch.distributed."""

import importlib
import sys
import threading
from pathlib import Path

import torch

from proctor.oracle import Plan
from proctor.oracle.parallel import deferred, parallelize, run_threads
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan_toml import read_plan

EXAMPLES = Path(__file__).parents[3] / "examples"
_seeding = threading.Lock()  # torch's default generator is one for all threads


def gpt():
    folder = str(EXAMPLES / "oracle")
    if folder not in sys.path:
        sys.path.append(folder)
    return importlib.import_module("gpt")


def plan(name="gpt.toml") -> Plan:
    return read_plan(EXAMPLES / "parallel" / name)


def make(dropout=0.0, **more):
    module = gpt()
    model = module.GPT(64, 32, 4, 2, 16, dropout=dropout, **more)
    module.initialise(model, 2)
    return model


def batches(steps, rows=8):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 64, (rows, 17), generator=generator) for _ in range(steps)]


def train(mesh, steps=3, name="gpt.toml", rng="keyed", dropout=0.0, defer=False, seed=0, microbatches=1, **more):
    """Losses and gradient norms of each step, and the model. mesh: None for torch alone."""
    if defer:
        model = deferred(make, dropout, **more)
    else:
        with _seeding:
            torch.manual_seed(seed)
            model = make(dropout, **more)
    if mesh is not None:
        parallelize(model, plan(name).on(mesh), rng=rng, seed=seed)
    elif not defer:
        torch.manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    said = []
    for batch in batches(steps):
        optimizer.zero_grad()
        total = 0.0
        for rows in batch.chunk(microbatches):
            loss = gpt().next_token_loss(model(rows[:, :-1]), rows[:, 1:]) / microbatches
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        said.append((total, norm.item()))
    return said, model


def on_threads(mesh, **options):
    return run_threads(lambda rank: train(mesh, **options), mesh.world)


def one(**options):
    """One device, by a plan on a mesh of one rank: what the keyed stream's single device is."""
    axes = plan(options.get("name", "gpt.toml")).mesh.axes
    return train(Mesh(axes, (1,) * len(axes)), **options)
