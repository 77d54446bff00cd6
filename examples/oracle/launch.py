"""Start the ranks of a program: those of torchrun when it started us, else our own by spawn; one rank needs no process group.

`run_steps` is what they all do then.
"""
import json
import os
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _rank(rank, world, store, train, args):
    torch.set_num_threads(1)
    if store is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    train(rank, world, args)
    dist.barrier()
    dist.destroy_process_group()


def launch(train, args, world):
    """Call `train(rank, world, args)` on every rank; `train` must be importable (a function of the main module)."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        started = int(os.environ["WORLD_SIZE"])
        if started != world:
            raise SystemExit(f"the arguments ask for {world} ranks, the launcher started {started}")
        if world > 1:
            _rank(int(os.environ["RANK"]), world, None, train, args)
            return
    if world == 1:
        torch.set_num_threads(1)
        train(0, 1, args)
        return
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (world, os.path.join(folder, "rendezvous"), train, args), nprocs=world)


def run_steps(rank, step, batches, param_sum):
    """Do `step(batch)`, which gives a loss and a gradient norm, for every batch; rank 0 prints them and the RESULT.

    `param_sum()`, of absolute values over the whole model, is called on every rank after the last step.
    """
    losses, norms = [], []
    for number, batch in enumerate(batches):
        loss, norm = step(batch)
        losses.append(loss)
        norms.append(norm)
        if rank == 0:
            print(f"step {number} loss {loss:.6f} gradient norm {norm:.6f}", flush=True)
    total = param_sum()
    if rank == 0:
        print("RESULT " + json.dumps({"losses": losses, "grad_norms": norms, "param_sum": total}), flush=True)
