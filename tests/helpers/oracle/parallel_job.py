"""A job of torch.distributed that trains the examples' GPT by a plan; rank 0 writes what it saw to a JSON file.

    torchrun --nproc-per-node 4 parallel_job.py OUT RNG NAME
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from helpers.oracle.parallel_gpt import plan, train


def main(out, rng, name):
    dist.init_process_group("gloo")
    torch.manual_seed(0)  # of the stock stream, which continues the process's own generator
    said, model = train(plan(name).mesh, rng=rng, name=name, dropout=0.2, defer=True)
    state = model.state_dict()
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps({"said": said, "shapes": {k: list(v.shape) for k, v in state.items()}, "sum": float(sum(v.double().abs().sum() for v in state.values()))}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
