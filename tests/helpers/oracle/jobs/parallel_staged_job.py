"""A job of torch.distributed that trains GPT-2, whose head is its embedding, in stages x tp; every rank writes what it saw to a JSON file.

    torchrun --nproc-per-node 4 parallel_staged_job.py FOLDER
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[3]))
from helpers.oracle import parallel_zoo as zoo
from helpers.oracle.parallel_gpt import plan
from proctor.oracle.parallel import parallelize
from proctor.oracle.plans.mesh import Mesh

TWO = (r"transformer\.(wte|wpe|drop|h\.0)", r"transformer\.(h\.1|ln_f)|lm_head")
EACH = (r"transformer\.(wte|wpe|drop)", r"transformer\.h\.0", r"transformer\.h\.1", r"transformer\.ln_f|lm_head")
CASES = {"gpipe": (TWO, 4, "gpipe"), "1f1b": (TWO, 4, "1f1b"), "two stages a rank": (EACH, 2, "gpipe"), "two stages a rank, 1f1b": (EACH, 2, "1f1b")}


def trained(case, sizes):
    stages, microbatches, schedule = CASES[case]
    torch.manual_seed(0)
    model = zoo.MODELS["gpt2"](0.2).train()
    rules = plan("gpt2.toml").on(Mesh(("pp", "dp", "tp"), sizes)).pipeline(*stages, axis="pp", microbatches=microbatches, schedule=schedule)
    parallelize(model, rules, seed=0)
    held = sum(p.numel() for p in model.parameters())
    said = zoo.train(model, "gpt2", 3)
    return {"said": said, "held": held, "sums": {name: float(value.double().square().sum()) for name, value in model.state_dict().items()}}


def main(folder):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {case: trained(case, (2, 1, 2)) for case in CASES}
    (Path(folder) / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
