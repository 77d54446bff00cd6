"""Models of other people's repositories, run by a plan that nobody wrote: as it is, and with a rule changed.

    python benchmarks/parallel_abroad.py CHECKOUTS [--only NAME …] [--processes] [--json FILE]

CHECKOUTS: a folder with a checkout `owner+name` of each repository. A plan is derived from one forward (`oracle plan --from model`) for tp 2, dp 2 and
dp 2 x tp 2. Each trains three steps of SGD on thread ranks, with dropout, beside one rank of the same plan: `equal` where losses agree to 1e-4. Then
every rule of the last plan is left out or changed, one at a time. What comes of it:
  refused   `parallelize`, or the first step, says so in one line
  told      the step of a rehearsal differs (`oracle plan --batch`)
  broken    the model itself stops (shapes that do not fit)
  stuck     ranks wait for each other
  harmless  it trains as before
  missed    it trains something else and nobody says so
With --processes ranks are processes on gloo instead of threads.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from proctor.errors import OracleError
from proctor.oracle import Plan
from proctor.oracle.parallel import parallelize, run_threads
from proctor.oracle.parallel.deriving import derive, rehearsed
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.rules import Rule

_GENERATOR = torch.Generator().manual_seed(1)
_SAME = 1e-4
Made = tuple[torch.nn.Module, tuple[Any, ...]]


def _tokens(*shape: int) -> torch.Tensor:
    return torch.randint(3, 64, shape, generator=_GENERATOR)


def _llama2c() -> Made:
    model = importlib.import_module("model")
    args = model.ModelArgs(dim=32, n_layers=2, n_heads=4, n_kv_heads=4, vocab_size=64, hidden_dim=64, max_seq_len=16, dropout=0.1)
    return model.Transformer(args), (_tokens(4, 12), _tokens(4, 12))


def _tuned() -> Made:
    model = importlib.import_module("mingpt.model")
    return model.GPT(model.GPTConfig(64, 12, n_layer=2, n_head=4, n_embd=32)), (_tokens(4, 12), _tokens(4, 12))


def _annotated() -> Made:
    model = importlib.import_module("transformer.Models")
    made = model.Transformer(64, 64, 0, 0, d_word_vec=32, d_model=32, d_inner=64, n_layers=2, n_head=4, d_k=8, d_v=8, n_position=20)
    return made, (_tokens(4, 10), _tokens(4, 9))


def _scratch() -> Made:
    for name in ("tiktoken", "matplotlib", "matplotlib.pyplot"):  # for reading text and drawing, which is not done here
        sys.modules.setdefault(name, SimpleNamespace())  # type: ignore[arg-type]
    model = importlib.import_module("gpt")
    config = {"vocab_size": 64, "context_length": 16, "emb_dim": 32, "n_heads": 4, "n_layers": 2, "drop_rate": 0.1, "qkv_bias": False}
    return model.GPTModel(config), (_tokens(4, 12),)


def _palm() -> Made:
    model = importlib.import_module("palm_pytorch")
    return model.PaLM(num_tokens=64, dim=32, depth=2, heads=4, dim_head=8), (_tokens(4, 12),)


def _mixer() -> Made:
    model = importlib.import_module("mlp_mixer_pytorch")
    made = model.MLPMixer(image_size=16, channels=3, patch_size=4, dim=32, depth=2, num_classes=8, dropout=0.1)
    return made, (torch.randn(4, 3, 16, 16, generator=_GENERATOR),)


def _series() -> SimpleNamespace:
    return SimpleNamespace(
        seq_len=16, pred_len=8, output_attention=False, use_norm=False, d_model=32, embed="fixed", freq="h", dropout=0.1, class_strategy="projection", factor=1, n_heads=4,
        d_ff=64, activation="gelu", e_layers=2, enc_in=5, fc_dropout=0.1, head_dropout=0.1, individual=0, patch_len=4, stride=2, padding_patch="end", revin=0, affine=0,
        subtract_last=0, decomposition=0, kernel_size=3,
    )  # fmt: skip


def _itransformer() -> Made:
    sys.modules.setdefault("reformer_pytorch", SimpleNamespace(LSHSelfAttention=None))  # type: ignore[arg-type]  # of another model
    model = importlib.import_module("model.iTransformer")
    return model.Model(_series()), (torch.randn(4, 16, 5, generator=_GENERATOR), torch.randn(4, 16, 4, generator=_GENERATOR), torch.zeros(4, 8, 5), torch.zeros(4, 8, 4))


def _patchtst() -> Made:
    model = importlib.import_module("models.PatchTST")
    return model.Model(_series(), norm="LayerNorm"), (torch.randn(4, 16, 5, generator=_GENERATOR),)


def _bert() -> Made:
    model = importlib.import_module("bert_pytorch.model")
    made = model.BERTLM(model.BERT(64, hidden=32, n_layers=2, attn_heads=4), 64)
    return made, (_tokens(4, 12), torch.randint(0, 3, (4, 12), generator=_GENERATOR))


def _hyunwoong() -> Made:
    model = importlib.import_module("models.model.transformer")
    made = model.Transformer(1, 1, 2, 64, 64, d_model=32, n_head=4, max_len=16, ffn_hidden=64, n_layers=2, drop_prob=0.1, device="cpu")
    return made, (_tokens(4, 12), _tokens(4, 12))


def _lynn() -> Made:
    model = importlib.import_module("Models")
    made = model.Transformer(64, 64, 32, 2, 4, 0.1)
    return made, (_tokens(4, 10), _tokens(4, 9), torch.ones(4, 1, 10, dtype=torch.bool), torch.ones(9, 9).tril().bool().expand(4, 9, 9))


def _graykode() -> Made:
    model, config = importlib.import_module("GPT2.model"), importlib.import_module("GPT2.config")
    return model.GPT2LMHeadModel(config.GPT2Config(64, n_positions=16, n_ctx=16, n_embd=32, n_layer=2, n_head=4)), (_tokens(4, 12),)


def _former() -> Made:
    model = importlib.import_module("former.transformers")
    made = model.CTransformer(32, 4, 2, 12, 64, 8, max_pool=False, dropout=0.1)
    return made, (_tokens(4, 12),)


def _vit() -> Made:
    sys.modules.setdefault("torchvision", SimpleNamespace(transforms=None))  # type: ignore[arg-type]  # of another model
    model = importlib.import_module("vit_pytorch.vit")
    made = model.ViT(image_size=16, patch_size=4, num_classes=8, dim=32, depth=2, heads=4, mlp_dim=64, dim_head=8, dropout=0.1, emb_dropout=0.1)
    return made, (torch.randn(4, 3, 16, 16, generator=_GENERATOR),)


def _sparse() -> Made:
    model = importlib.import_module("moe")
    made = model.MoE(32, 32, 4, 64, noisy_gating=True, k=2)
    torch.nn.init.normal_(made.w_gate), torch.nn.init.normal_(made.w_noise)
    return made, (torch.randn(8, 32, generator=_GENERATOR),)


PROGRAMS: dict[str, tuple[str, Callable[[], Made]]] = {
    "karpathy+llama2.c": ("", _llama2c),
    "BlinkDL+minGPT-tuned": ("", _tuned),
    "jadore801120+attention-is-all-you-need-pytorch": ("", _annotated),
    "rasbt+LLMs-from-scratch": ("ch04/01_main-chapter-code", _scratch),
    "lucidrains+PaLM-pytorch": ("", _palm),
    "lucidrains+mlp-mixer-pytorch": ("", _mixer),
    "thuml+iTransformer": ("", _itransformer),
    "yuqinie98+PatchTST": ("PatchTST_supervised", _patchtst),
    "codertimo+BERT-pytorch": ("", _bert),
    "hyunwoongko+transformer": ("", _hyunwoong),
    "SamLynnEvans+Transformer": ("", _lynn),
    "graykode+gpt-2-Pytorch": ("", _graykode),
    "pbloem+former": ("", _former),
    "lucidrains+vit-pytorch": ("", _vit),
    "davidmrau+mixture-of-experts": ("", _sparse),
}


def _loss(output: Any) -> torch.Tensor:
    """The model's own where it gives one, else of its first tensor."""
    found = [output] if isinstance(output, torch.Tensor) else [t for t in output if isinstance(t, torch.Tensor) and t.is_floating_point()]
    own = [t for t in found if t.dim() == 0]
    return own[0] if own else found[0].float().square().mean()


def trained(model: torch.nn.Module, args: tuple[Any, ...], plan: Plan) -> list[float]:
    """Losses of three steps."""
    one = copy.deepcopy(model).train()
    parallelize(one, plan, seed=0)
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    said = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = _loss(one(*args))
        loss.backward()
        optimizer.step()
        said.append(float(loss.detach()))
    return said


Said = list[float] | tuple[str, str]
Ranks = Callable[[Callable[[int], list[float]], int], list[list[float]]]


def run_processes(function: Callable[[int], list[float]], ranks: int) -> list[list[float]]:
    """What a function gives on so many processes of a gloo job, forks of this one.

    Raises:
        OracleError: a rank raised one.
        RuntimeError: a rank raised something else.
        TimeoutError: ranks are not done after a minute.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        said: Any = context.SimpleQueue()
        started = [context.Process(target=_process, args=(function, rank, ranks, folder, said)) for rank in range(ranks)]
        for process in started:
            process.start()
        end = time.monotonic() + 60
        while time.monotonic() < end and any(process.is_alive() for process in started) and not any(process.exitcode for process in started):
            time.sleep(0.02)
        waiting = [process for process in started if process.is_alive()]
        for process in waiting:
            process.kill()
        for process in started:
            process.join()
        found: dict[int, Said] = {}
        while not said.empty():
            rank, one = said.get()
            found[rank] = one
    failed = [one for one in found.values() if isinstance(one, tuple)]
    if failed:
        kind, line = min(failed, key=lambda one: one[0] != "OracleError")
        raise OracleError(line) if kind == "OracleError" else RuntimeError(line)
    if len(found) < ranks:
        raise TimeoutError("ranks wait for each other")
    return [one for _, one in sorted(found.items()) if isinstance(one, list)]


def _process(function: Callable[[int], list[float]], rank: int, ranks: int, folder: str, said: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    try:
        said.put((rank, function(rank)))
    except Exception as error:  # noqa: BLE001  # a changed plan may break the model anywhere
        said.put((rank, (type(error).__name__, error.message if isinstance(error, OracleError) else str(error)[:200])))
        os._exit(1)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    os._exit(0)  # nothing of the parent's is to be done at this exit


def apart(model: torch.nn.Module, args: tuple[Any, ...], plan: Plan, ranks: Ranks) -> float:
    """The largest difference of a loss of any rank to one rank's, of its size.

    Raises:
        OracleError: the plan is refused.
    """
    wanted = trained(model, args, plan.on(Mesh(plan.mesh.axes, (1,) * len(plan.mesh.axes))))
    every = ranks(lambda rank: trained(model, args, plan), plan.mesh.world)
    return max(abs(a - b) / max(abs(b), 1e-3) for said in every for a, b in zip(said, wanted))


def changed_plans(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The plan with one rule left out, or changed."""
    for kind in ("params", "edges", "pendings", "draws", "sizes"):
        for at, rule in enumerate(getattr(plan, kind)):
            other = plan.on(plan.mesh)
            del getattr(other, kind)[at]
            yield f"without {kind} {at} ({getattr(rule, 'module', None) or getattr(rule, 'path', '')})", other
            new: Any = None
            if kind == "pendings":
                new = msgspec.structs.replace(rule, reduce="avg" if rule.reduce == "sum" else "sum")
            elif kind == "draws" and rule.rule.cuts:
                new = msgspec.structs.replace(rule, rule=Rule())
            if new is not None:
                other = plan.on(plan.mesh)
                getattr(other, kind)[at] = new
                yield f"changed {kind} {at}", other


def judged(model: torch.nn.Module, args: tuple[Any, ...], plan: Plan, ranks: Ranks) -> str:
    """What becomes of a changed plan."""
    try:
        differs = apart(model, args, plan, ranks) > _SAME
    except OracleError:
        return "refused"
    except TimeoutError:
        return "stuck"
    except Exception:  # noqa: BLE001  # the model, with tensors that do not fit
        return "broken"
    told = rehearsed(model, args, plan)
    return "told" if told else "missed" if differs else "harmless"


def looked(folder: Path, name: str, ranks: Ranks) -> dict[str, Any]:
    """One row."""
    under, make = PROGRAMS[name]
    before, modules = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(folder / name / under))
    try:
        torch.manual_seed(0)
        model, args = make()
        row: dict[str, Any] = {"name": name, "plans": {}, "changed": {}, "missed": []}
        plan = None
        for mesh in ("tp=2", "dp=2", "dp=2,tp=2"):
            try:
                found = derive(model, args, mesh)
                plan = found.plan
                differs = "differs, and says so" if found.apart else "equal" if apart(model, args, plan, ranks) <= _SAME else "differs"
                row["plans"][mesh] = {"outcome": differs, "said": [*found.apart[:2], *found.notes[:2]]}
            except OracleError as error:
                row["plans"][mesh] = {"outcome": "refused", "said": [error.message]}
        layouts = {p: plan.param_layout(n) for n, p in model.named_parameters()} if plan is not None else {}
        row["cut"] = sum(p.numel() for p, at in layouts.items() if at is not None and at.cuts) / max(sum(p.numel() for p in layouts), 1)
        if plan is not None and row["plans"]["dp=2,tp=2"]["outcome"] == "equal":
            outcomes = {what: judged(model, args, other, ranks) for what, other in changed_plans(plan)}
            row["changed"] = dict(Counter(outcomes.values()))
            row["missed"] = [what for what, outcome in outcomes.items() if outcome == "missed"]
        return row
    finally:
        sys.path[:] = before
        for own in set(sys.modules) - modules:
            if str(folder) in str(getattr(sys.modules[own], "__file__", "") or ""):
                del sys.modules[own]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="CHECKOUTS")
    parser.add_argument("--only", nargs="*", default=list(PROGRAMS), metavar="NAME")
    parser.add_argument("--processes", action="store_true", help="ranks are processes on gloo")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = []
    for name in args.only:
        start = time.process_time()
        row = looked(args.folder, name, run_processes if args.processes else run_threads)
        rows.append(row)
        plans = ", ".join(f"{mesh}: {one['outcome']}" for mesh, one in row["plans"].items())
        changed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(row["changed"].items()))
        said = "; ".join(dict.fromkeys(line for one in row["plans"].values() for line in one["said"]))[:200]
        print(f"| {name} | {row['cut']:.2f} | {plans} | {changed} | {said} {row['missed'] or ''} | {time.process_time() - start:.0f} s", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
