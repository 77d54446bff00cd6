"""A job of torch.distributed that trains models of the zoo by plans with fully_shard; rank 0 writes what it saw to a JSON file.

    torchrun --nproc-per-node 4 parallel_zero_job.py OUT MODEL…
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))
from helpers.oracle import parallel_zoo as zoo
from helpers.oracle.parallel_gpt import plan
from proctor.oracle.parallel import deferred, parallelize


def trained(of, defer):
    torch.manual_seed(0)
    model = deferred(zoo.MODELS[of], 0.2) if defer else zoo.MODELS[of](0.2)
    parallelize(model.train(), plan(f"{of}_4d.toml"), seed=0)
    held = sum(p.to_local().numel() for p in model.parameters())
    said = zoo.train(model, of, 3)
    state = model.state_dict()
    sums = {name: float(value.double().square().sum()) for name, value in state.items()}
    model.load_state_dict({name: torch.full_like(value, 0.5) for name, value in state.items()})
    loaded = all(bool((value == 0.5).all()) for value in model.state_dict().values())
    return {"said": said, "held": held, "sums": sums, "loaded": loaded}


def main(out, *models):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {f"{of} {defer}": trained(of, defer) for of in models for defer in (False, True)}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
