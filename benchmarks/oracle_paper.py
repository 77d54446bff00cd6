"""The silent bugs of TTrace's Table 1, injected into the small Megatron of the published bugs: is each found, and where?

    python benchmarks/oracle_paper.py FOLDER [BUG…] [--out DIR]

FOLDER holds `_minimegatron`. Each bug is one function that replaces a piece of the library, written from the paper's
description and not from a published script. The same run without the mistake must be equivalent. Bug 6 and 10 and 1
are among the published scripts (`oracle_exam.py`).
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUGS = {  # number in Table 1 → configuration, steps after which it shows
    "2": ("tp=2 recompute=uniform", 1),
    "3": ("cp=2", 1),
    "4": ("dp=2 per_token_loss=1", 1),
    "5": ("pp=2 dp=2 distributed_optimizer=1", 1),
    "7": ("tp=2 fp8=1", 2),
    "8": ("dp=2 fp8=1 recompute=block", 1),
    "9": ("dp=2 distributed_optimizer=1 overlap_param_gather=1", 1),
    "11": ("tp=2 sequence_parallel=1 tp_comm_overlap=1", 1),
    "12": ("tp=2 sequence_parallel=1", 1),
    "13": ("cp=2", 1),
    "14": ("tp=2 cp=2 fp8=1", 1),
}
PARALLEL = {"tp", "cp", "pp", "sequence_parallel", "distributed_optimizer", "overlap_param_gather", "tp_comm_overlap", "recompute"}
ITERATIONS = 3


def main() -> None:
    """Record, compare and print a line a run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("bugs", nargs="*", metavar="BUG", help=", ".join(BUGS))
    parser.add_argument("--out", type=Path, help="keep recordings here")
    args = parser.parse_args()
    if not (args.folder / "_minimegatron").is_dir():
        sys.exit(f"{args.folder}: holds no _minimegatron")
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or Path(scratch)
        for bug in args.bugs or BUGS:
            judge(bug, args.folder.resolve(), out)


def judge(bug: str, folder: Path, out: Path) -> None:
    """Compare the clean and the wrong run of one configuration with its reference."""
    from proctor.oracle.judging.check import Comparison
    from proctor.oracle.recording.record import Recorder
    from proctor.oracle.store import Recording

    options, steps = BUGS[bug]
    alike = " ".join(o for o in options.split() if o.partition("=")[0] not in PARALLEL)
    reference = out / f"reference-{steps}-{alike.replace(' ', '-').replace('=', '') or 'plain'}"

    def record(where: Path, role: str, samples: int) -> None:
        command = [sys.executable, __file__, "--worker", role, str(folder), *options.split()]
        Recorder(where, command, samples=samples, steps=steps, overwrite=True).record()

    if not (reference / "oracle.json").is_file():
        record(reference, "reference", 4)
    for role in ("clean", bug):
        where = out / f"bug-{bug}-{role}"
        record(where, role, 0)
        verdict = Comparison(Recording(reference), Recording(where)).run()
        first = verdict.first
        place = f"{first.kind} {first.name}, {first.ratio:.3g} × its tolerance; {first.note}" if first is not None else verdict.reason
        print(f"bug {bug:>2} {'clean' if role == 'clean' else 'wrong':<6} {verdict.verdict:<12} {place}", flush=True)


def worker() -> None:
    """One run of the library: `--worker ROLE FOLDER key=value…`; ranks that it spawns come here again."""
    role, folder, *options = os.environ.get("ORACLE_PAPER", "\n".join(sys.argv[2:])).split("\n")
    os.environ["ORACLE_PAPER"] = "\n".join((role, folder, *options))
    sys.path.insert(0, str(Path(folder) / "_minimegatron"))
    from minimegatron.config import ModelConfig

    given: dict[str, Any] = {}
    for option in options:
        key, _, text = option.partition("=")
        kind = type(getattr(ModelConfig, key))
        given[key] = text == "1" if kind is bool else kind(text)
    config, args = ModelConfig(**given), argparse.Namespace(iters=ITERATIONS, seed=0, save="")
    if role == "reference":
        from minimegatron.reference import train_reference

        train_reference(config, args)
        return
    if role in MISTAKES:
        MISTAKES[role]()
    if __name__ == "__main__":
        from minimegatron.training import launch, train

        launch(train, config, args)


def _replace(module: Any, name: str, old: str, new: str) -> None:
    """Define a function or class of a module anew with one piece of its source replaced."""
    source = inspect.getsource(getattr(module, name))
    if old not in source:
        sys.exit(f"{module.__name__}.{name} has changed: {old!r} is not in it")
    exec(source.replace(old, new), module.__dict__)


def _recompute_of(keep: Callable[[Any, Any], Any]) -> type:
    """A checkpoint that computes again from what `keep(x, first)` gives."""
    import torch

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, run: Any, x: Any, first: Any) -> Any:
            ctx.run = run
            ctx.save_for_backward(keep(x, first))
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            x = ctx.saved_tensors[0].detach().requires_grad_(True)
            with torch.enable_grad():
                y = ctx.run(x)
            torch.autograd.backward(y, grad)
            return None, x.grad, None

    return Again


def stale_input() -> None:
    """2: recomputation starts from an earlier chunk's input."""
    from minimegatron import recompute

    again = _recompute_of(lambda x, first: first)

    def uniform_forward(layers: Any, x: Any, cfg: Any) -> Any:
        first = x.detach()
        for i in range(0, len(layers), cfg.recompute_num_layers):
            x = again.apply(recompute._run_layers(layers, i, min(i + cfg.recompute_num_layers, len(layers))), x, first)
        return x

    recompute.uniform_forward = uniform_forward


def context_parallel_scale() -> None:
    """3: the loss is not multiplied by the number of context parallel ranks."""
    from minimegatron import loss, schedule

    _replace(loss, "loss_func", "loss * cfg.cp /", "loss /")
    schedule.loss_func = loss.loss_func


def token_count() -> None:
    """4: the number of tokens is not summed over data parallel ranks."""
    from minimegatron import finalize, training

    _replace(finalize, "finalize_model_grads", 'if ps.size("dp") > 1:', "if False:")
    training.finalize_model_grads = finalize.finalize_model_grads


def untied() -> None:
    """5: the two copies of the tied embedding do not exchange gradients."""
    from minimegatron import finalize

    finalize._allreduce_word_embedding = lambda model, cfg: None


def amax_group() -> None:
    """7: the largest magnitude is taken over the wrong group."""
    from minimegatron import fp8
    from minimegatron import parallel_state as ps

    fp8.get_amax_reduction_group = lambda: ps.group("dp")


def cast_input() -> None:
    """8: what recomputation keeps is the input after its cast to 8 bits."""
    import torch
    from minimegatron import fp8, recompute

    recompute._Fp8Checkpoint = _recompute_of(lambda x, _: fp8.cast(x, torch.tensor(56.0)))


def not_gathered() -> None:
    """9: parameters that were gathered are not copied back."""
    from minimegatron import distopt, training

    _replace(distopt, "DistributedOptimizer", "            flat.copy_(torch.cat(parts))\n", "")
    training.DistributedOptimizer = distopt.DistributedOptimizer


def workspace() -> None:
    """11: the workspace is written again before it was used."""
    from minimegatron import overlap

    text = inspect.getsource(overlap._LinearWithOverlap)
    moved = text.replace("        ws.copy_(dgrad)\n", "").replace("        wgrad = torch", "        ws.copy_(dgrad)\n        wgrad = torch")
    exec(moved, overlap.__dict__)


def norm_mark() -> None:
    """12: the final norm is not marked as in the sequence parallel region."""
    from minimegatron import norm

    original = norm.LayerNorm.__init__

    def init(self: Any, *args: Any) -> None:
        original(self, *args)
        self.weight.sequence_parallel = self.bias.sequence_parallel = False

    norm.WrappedTorchNorm.__init__ = init


def not_contiguous() -> None:
    """13: the attention's backward kernel reads a gradient that is not contiguous as if it were."""
    from minimegatron import attention

    _replace(attention, "CPAttention", "dout = dout.contiguous()", "pass")


def summed_norms() -> None:
    """14: norm gradients are summed over tensor parallel ranks instead of averaged, with 8-bit casts and context parallelism."""
    from minimegatron import finalize

    _replace(finalize, "_sync_fp8_norms", "p.grad /= cfg.tp", "pass")


MISTAKES = {
    "2": stale_input,
    "3": context_parallel_scale,
    "4": token_count,
    "5": untied,
    "7": amax_group,
    "8": cast_input,
    "9": not_gathered,
    "11": workspace,
    "12": norm_mark,
    "13": not_contiguous,
    "14": summed_norms,
}

if "ORACLE_PAPER" in os.environ or "--worker" in sys.argv[1:2]:
    worker()
elif __name__ == "__main__":
    main()
