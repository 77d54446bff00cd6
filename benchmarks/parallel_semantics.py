"""Is training by a plan training on one device? Largest loss difference over 200 steps (veScale, figure 9 and table 3).

    python benchmarks/parallel_semantics.py [--model gpt|mixtral] [--steps 200] [--case CASE] [--how MESH] [--json FILE]

A small GPT (examples/oracle/gpt.py) and transformers' Mixtral, on one device by plain torch, and on TP 2, 4 and 8, dp2 x tp2 and
dp2 x tp2 with sequence parallelism by `proctor.parallelize`. Twice: all randomness in the initialisation, and all in dropout
(of Mixtral in its attention's dropout and its router's noise; the same initial values everywhere). Beside it, in the same run:
DTensor's `parallelize_module` on gloo processes, initialised as DTensors (torch has no style for Mixtral's experts: they are whole
there); and seeds as Megatron-LM sets them (one for what is cut over tp, another for the rest), carried out on the same plan
by a stream of its own. The paper's bound is 6e-5.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "examples" / "oracle")]

import gpt  # noqa: E402
import torch  # noqa: E402

from proctor.oracle.parallel import deferred, parallelize, run_threads  # noqa: E402
from proctor.oracle.parallel import run as runs  # noqa: E402
from proctor.oracle.plans.mesh import Mesh  # noqa: E402
from proctor.oracle.plans.plan_toml import read_plan  # noqa: E402

SEED = 0
VOCAB, WIDTH, HEADS, LAYERS, CONTEXT, ROWS = 64, 32, 8, 2, 16, 8
CASES = {"init only": 0.0, "dropout only": 0.1}
MESHES = {"TP 2": (1, 2, ""), "TP 4": (1, 4, ""), "TP 8": (1, 8, ""), "dp2 x tp2": (2, 2, ""), "dp2 x tp2 + sp": (2, 2, "sp")}
PLANS = {"gpt": {"": "gpt.toml", "sp": "gpt_sp.toml"}, "mixtral": {"": "mixtral.toml", "sp": "mixtral_4d.toml"}}
MODEL = "gpt"


def bare(dropout: float) -> torch.nn.Module:
    """The model as its constructor leaves it."""
    if MODEL == "gpt":
        return gpt.GPT(VOCAB, WIDTH, HEADS, LAYERS, CONTEXT, dropout=dropout)
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, intermediate_size=2 * WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=HEADS,
        num_local_experts=4, attention_dropout=dropout, router_jitter_noise=dropout / 10, use_cache=False, sliding_window=None,
        initializer_range=1 / math.sqrt(WIDTH),
    )
    return MixtralForCausalLM(config)


def initialise(model: torch.nn.Module) -> None:
    """Random values of the seed; of Mixtral its own initialisation, once more."""
    if MODEL == "gpt":
        gpt.initialise(model, LAYERS)
        return
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 1 / math.sqrt(WIDTH))


def make(dropout: float) -> torch.nn.Module:
    model = bare(dropout)
    initialise(model)
    return model


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    if MODEL == "gpt":
        return gpt.next_token_loss(model(batch[:, :-1]), batch[:, 1:])
    return model(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss


def plan_on(how: str, dp: int, tp: int):
    plan = read_plan(ROOT / "examples" / "parallel" / PLANS[MODEL][how]).on(Mesh(("dp", "tp"), (dp, tp)))
    plan.shards.clear()  # ranks are threads here
    return plan


def fixed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Values that do not come from a seed: those of the case in which dropout alone is random."""
    state = {}
    for at, (name, value) in enumerate(model.state_dict().items()):
        generator = torch.Generator().manual_seed(1000 + at)
        near = 1.0 if "norm" in name and name.endswith("weight") else 0.0
        state[name] = near + 0.1 * torch.randn(value.shape, generator=generator)
    return state


def batches(steps: int):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        start = torch.randint(0, VOCAB, (ROWS, 1), generator=generator)
        stride = torch.randint(1, 5, (ROWS, 1), generator=generator)
        yield (start + stride * torch.arange(CONTEXT + 1)) % VOCAB


def train(model: torch.nn.Module, steps: int) -> list[float]:
    # SGD: Adam divides a gradient of 1e-9 by itself, so rounding alone would part the runs.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def one_device(case: str, steps: int) -> list[float]:
    torch.manual_seed(SEED)
    model = make(CASES[case])
    if case == "dropout only":
        model.load_state_dict(fixed(model))
        torch.manual_seed(SEED)
    return train(model, steps)


def by_plan(case: str, mesh: tuple[int, int, str], steps: int, rng: str) -> list[float]:
    """The losses of rank 0; "keyed" on a mesh of one rank is the keyed stream's own single device."""
    dp, tp, name = mesh
    plan = plan_on(name, dp, tp)

    def rank(_: int) -> list[float]:
        if case == "init only":
            return train(parallelize(deferred(make, 0.0), plan, rng=rng, seed=SEED), steps)
        model = deferred(make, CASES[case])
        parallelize(model, plan, rng="keyed", seed=SEED)
        model.load_state_dict(fixed(model))
        model._proctor_parallel.placing.stream = runs._stream(rng, SEED, model._proctor_parallel.comm)  # from the seed on, as on one device
        return train(model, steps)

    return run_threads(rank, dp * tp)[0]


class MegatronSeeds:
    """What a rank draws where each tp rank has a seed of its own for what is cut, and all the same one for the rest."""

    kind = "megatron"

    def __init__(self, tp_rank: int) -> None:
        self.cut, self.rest = torch.Generator().manual_seed(SEED + 2718 + tp_rank), torch.Generator().manual_seed(SEED)

    def fill(self, draw, out, box, args, ident) -> None:
        draw.kernel(out, *args, generator=self.rest if box.is_whole() else self.cut)

    def whole(self, draw, shape, dtype, args, ident):
        out = torch.empty(shape, dtype=dtype)
        draw.kernel(out, *args, generator=self.rest)
        return out


def by_megatron_seeds(case: str, tp: int, steps: int) -> list[float]:
    plan = plan_on("", 1, tp)

    def rank(number: int) -> list[float]:
        model = deferred(make, CASES[case])
        verified = runs.comm_of(plan.mesh)
        runs.Parallel(model, plan, verified, MegatronSeeds(number), check=False)
        if case == "dropout only":
            model.load_state_dict(fixed(model))
        return train(model, steps)

    return run_threads(rank, tp)[0]


def dtensor_rank(case: str, steps: int, out: str) -> None:
    """One process of a job: the same model by torch's own tensor parallelism."""
    import torch.distributed as dist
    from parallel_gpt import tensor_parallel_plan
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.parallel import parallelize_module

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = parallelize_module(bare(CASES[case]), mesh, tensor_parallel_plan(False) if MODEL == "gpt" else _styles_of_mixtral())
    torch.manual_seed(SEED)
    initialise(model)
    if case == "dropout only":
        with torch.no_grad():
            for name, value in fixed(model).items():
                parameter = model.get_parameter(name)
                parameter.copy_(distribute_tensor(value, mesh, parameter.placements) if isinstance(parameter, DTensor) else value)
        torch.manual_seed(SEED)
    losses = train(model, steps)
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def _styles_of_mixtral():
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    attention = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {"model.layers.*.self_attn.o_proj": RowwiseParallel()}
    return attention | {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }


def by_dtensor(case: str, tp: int, steps: int) -> list[float]:
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        out = f"{folder}/losses.json"
        own = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(tp), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--model", MODEL, "--steps", str(steps), "--dtensor", case, out]
        ranks = [subprocess.Popen(command, env={**os.environ, **own, "RANK": str(r)}) for r in range(tp)]
        if any([rank.wait() for rank in ranks]):
            raise SystemExit("a DTensor rank failed")
        return json.loads(Path(out).read_text())


def apart(found: list[float], wanted: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(found, wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--case", choices=CASES, action="append", help="one of the cases; both without it")
    parser.add_argument("--dtensor", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--how", choices=MESHES, action="append", help="one of the meshes; all without it")
    parser.add_argument("--model", choices=PLANS, default="gpt")
    args = parser.parse_args()
    torch.set_num_threads(1)
    global MODEL
    MODEL = args.model
    if args.dtensor:
        dtensor_rank(args.dtensor[0], args.steps, args.dtensor[1])
        return
    table: dict[str, dict[str, float]] = {}
    print(f"largest loss difference to one device over {args.steps} steps\n| case | how | stock | keyed | parallelize_module | Megatron's seeds |\n|---|---|---|---|---|---|", flush=True)
    for case in args.case or CASES:
        wanted = one_device(case, args.steps)
        keyed = by_plan(case, (1, 1, ""), args.steps, "keyed")
        for how in args.how or MESHES:
            mesh = MESHES[how]
            row = {"stock": apart(by_plan(case, mesh, args.steps, "stock"), wanted), "keyed": apart(by_plan(case, mesh, args.steps, "keyed"), keyed)}
            if how.startswith("TP"):
                row["parallelize_module"] = apart(by_dtensor(case, mesh[1], args.steps), wanted)
                row["Megatron's seeds"] = apart(by_megatron_seeds(case, mesh[1], args.steps), wanted)
            table[f"{case}, {how}"] = row
            cells = [f"{row[k]:.1e}" if k in row else "" for k in ("stock", "keyed", "parallelize_module", "Megatron's seeds")]
            print(f"| {case} | {how} | {' | '.join(cells)} |", flush=True)
        print(f"  losses of one device: {wanted[0]:.4f} … {wanted[-1]:.4f}", flush=True)
    if args.json:
        Path(args.json).write_text(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
