"""A job of torch.distributed that trains the GPT of the examples, or the zoo's Llama with ZeRO-3, around checkpoints.

    torchrun --nproc-per-node N parallel_checkpoint_job.py WHAT OUT KIND:MESH:FOLDER…

WHAT: "save" trains two steps and saves; "load" makes another model, loads and trains two steps more. KIND: gpt or llama.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2]))
from torch.nn.functional import cross_entropy

from helpers.oracle import parallel_zoo as zoo
from helpers.oracle.parallel_gpt import batches, make, plan
from proctor.oracle.parallel import parallelize
from proctor.oracle.parallel.checkpoint import load, save
from proctor.oracle.plans.mesh import Mesh


def made(kind, sizes, seed):
    torch.manual_seed(seed)
    model = make() if kind == "gpt" else zoo.MODELS["llama"](0.0)
    if seed:  # nothing of the constructor's values may be left where a checkpoint is loaded
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
    if sizes is not None:
        parallelize(model, plan("gpt.toml" if kind == "gpt" else "llama_4d.toml").on(Mesh(("dp", "tp"), tuple(sizes))), seed=0)
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return model, torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 2e-3}], lr=1e-3, eps=1e-3)  # so that a gradient of zero but for rounding is no update


def trained(kind, model, optimizer, steps):
    said = []
    for tokens in batches(4)[steps]:
        optimizer.zero_grad()
        if kind == "gpt":
            loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        else:
            loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        optimizer.step()
        said.append(loss.item())
    return said


def ran(what, kind, mesh, folder):
    model, optimizer = made(kind, [int(n) for n in mesh.split("x")], 0 if what == "save" else 5)
    if what == "save":
        said = trained(kind, model, optimizer, slice(0, 2))
        save(model, optimizer, folder)
    else:
        load(model, optimizer, folder)
        said = trained(kind, model, optimizer, slice(2, 4))
    return {"said": said, "lr": [group["lr"] for group in optimizer.param_groups]}


def main(what, out, *asked):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    found = {Path(one.split(":")[2]).name: ran(what, *one.split(":")) for one in asked}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
