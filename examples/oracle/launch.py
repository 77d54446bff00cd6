"""Start the ranks of a program: those of torchrun when it started us, else our own by spawn; one rank needs no process group."""
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
