"""Does a campaign find bugs that are planted into the library, and does it name the right trigger set?

    python benchmarks/fuzz_selftest.py [--rows 32] [--only NAMES]

A mutant patches torch in the rank, before its first task. Every mutant meets the same rows, drawn by the campaign's cover for two models; rows that fail without
a mutant are left out and counted. Found: a row fails. Attributed: the axes of the first failure's minimal set are the mutant's.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

MUTANTS: dict[str, tuple[Callable[[], None], set[str]]] = {}
ONLY: dict[str, tuple[str, ...]] = {
    "optimizer": ("Adam", "AdamW", "RMSprop", "Adagrad"),
    "implementation": ("foreach=True",),
    "option": ("weight_decay=0.1", "momentum=0.1", "amsgrad=True"),
    "groups": ("two",),
    "precision": (),
    "ddp_hook": ("ALLREDUCE",),
    "resume": ("full", "sharded"),
    "recompute": ("non-reentrant",),
    "fsdp_policy": (),
}
MODELS = (("chain", {"layers": ["mlp", "layernorm", "linear"], "frozen": "first"}), ("transformer", {}))


def mutant(*axes: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Register a mutant with the axes of its trigger set."""

    def add(function: Callable[[], None]) -> Callable[[], None]:
        MUTANTS[function.__name__] = function, set(axes)
        return function

    return add


def _after_ddp(change: Callable[[Any, dict[str, Any]], None]) -> None:
    from torch.nn.parallel import DistributedDataParallel as DDP

    plain = DDP.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        change(self, kwargs)

    DDP.__init__ = init


def _hooks(net: Any, factor: float) -> None:
    for p in net.parameters():
        if p.requires_grad:
            p.register_hook(lambda g: g * factor)


@mutant("world", "wrapper")
def ddp_sums_for_mean() -> None:
    _after_ddp(lambda self, _: _hooks(self, self.process_group.size()))


@mutant("world", "wrapper")
def ddp_drops_one_rank() -> None:
    _after_ddp(lambda self, _: _hooks(self, 0.0 if self.process_group.rank() == 1 else 1.0))


@mutant("wrapper", "ddp")
def ddp_bucket_view_scales() -> None:
    _after_ddp(lambda self, kwargs: _hooks(self, 1.01) if kwargs.get("gradient_as_bucket_view") else None)


@mutant("wrapper", "ddp")
def ddp_static_graph_scales() -> None:
    _after_ddp(lambda self, kwargs: _hooks(self, 1.01) if kwargs.get("static_graph") else None)


@mutant("wrapper")
def ddp_trains_what_is_frozen() -> None:
    from torch.nn.parallel import DistributedDataParallel as DDP

    plain = DDP.__init__

    def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        module.requires_grad_(True)
        plain(self, module, *args, **kwargs)

    DDP.__init__ = init


@mutant("wrapper", "world", "accumulate", "sync")
def ddp_no_sync_forgets_to_sync() -> None:
    from contextlib import contextmanager

    from torch.nn.parallel import DistributedDataParallel as DDP

    @contextmanager
    def no_sync(self: Any) -> Any:
        self.require_backward_grad_sync = False
        yield  # and never again

    DDP.no_sync = no_sync


@mutant("wrapper", "world")
def zero_does_not_broadcast() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Zero

    Zero._sync_params = lambda self: None


@mutant("wrapper", "scheduler")
def zero_ignores_the_schedule() -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer as Zero

    Zero._sync_param_groups = staticmethod(lambda source, target: None)


@mutant("wrapper")
def fsdp_halves_gradients() -> None:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    reduce = group.foreach_reduce

    def halved(params: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        return reduce(params, [g * 0.5 for g in grads], *args, **kwargs)

    group.foreach_reduce = halved


@mutant("wrapper", "world")
def hsdp_replicas_do_not_reduce() -> None:
    from torch.distributed.fsdp import FSDPModule

    plain = FSDPModule.set_requires_all_reduce
    import torch.distributed.fsdp as fsdp

    shard = fsdp.fully_shard

    def without(module: Any, *args: Any, **kwargs: Any) -> Any:
        made = shard(module, *args, **kwargs)
        plain(made, False)
        return made

    fsdp.fully_shard = without


@mutant("wrapper", "world", "clip")
def clip_norm_of_the_shard_alone() -> None:
    import torch
    from torch.distributed.tensor import DTensor

    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0, *_: Any, **__: Any) -> Any:
        grads = [p.grad for p in parameters if p.grad is not None]
        local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
        total = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, norm_type) for g in local]), norm_type)
        for g in local:
            g.mul_((max_norm / (total + 1e-6)).clamp(max=1.0))
        return total

    torch.nn.utils.clip_grad_norm_ = clip


@mutant("optimizer", "wrapper", "world")
def adam_is_off_on_a_later_shard() -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    plain = torch.optim.Adam.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = plain(self, *args, **kwargs)
        if dist.get_rank() == 1:
            for group in self.param_groups:
                for p in group["params"]:
                    if isinstance(p, DTensor):
                        p.data.to_local().mul_(1.001)
        return done

    torch.optim.Adam.step = step


@mutant("optimizer", "implementation")
def foreach_adam_is_another_adam() -> None:
    import torch.optim.adam as adam

    plain = adam._multi_tensor_adam

    def other(*args: Any, eps: float, **kwargs: Any) -> None:
        plain(*args, eps=eps + 0.01, **kwargs)

    adam._multi_tensor_adam = other


@mutant("recompute")
def checkpoint_scales() -> None:
    import torch.utils.checkpoint as module

    plain = module.checkpoint
    module.checkpoint = lambda *args, **kwargs: plain(*args, **kwargs) * 1.001


@mutant("wrapper", "tp_style", "world")
def rowwise_does_not_reduce() -> None:
    from torch.distributed.tensor.parallel import RowwiseParallel

    RowwiseParallel._prepare_output_fn = staticmethod(lambda layouts, local, module, outputs, mesh: outputs.to_local())


@mutant("optimizer", "resume")
def resume_forgets_the_optimizer() -> None:
    import torch.distributed.checkpoint.state_dict as module

    def load(model: Any, optimizers: Any, *, model_state_dict: Any, optim_state_dict: Any, options: Any = None) -> Any:
        return module.set_model_state_dict(model, model_state_dict, options=options)

    module.set_state_dict = load


def rows(number: int) -> list[Any]:
    """The same scenarios for every mutant."""
    from proctor.oracle.fuzz.cover import Cover
    from proctor.oracle.fuzz.program import model_code
    from proctor.oracle.fuzz.spec import Scenario

    cover, rng, found = Cover(only=ONLY), random.Random(0), {}
    for template, model in MODELS:
        base = Scenario(template, dict(model), {"batch": 8})
        for _ in range(number):
            scenario = base.with_setting(cover.row(rng, model_code(base).traits))
            found[scenario.key()] = scenario
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--only", help="names with commas")
    args = parser.parse_args()
    from proctor.oracle.fuzz.warm import warm_up

    warm_up()
    scenarios = rows(args.rows)
    healthy, failing = clean(scenarios)
    print(f"{len(scenarios)} rows; without a mutant {len(healthy)} agree, {len(failing)} fail: {failing}", flush=True)
    found = attributed = 0
    chosen = {n: m for n, m in MUTANTS.items() if args.only is None or n in args.only.split(",")}
    for name, (prepare, axes) in chosen.items():
        said, triggers, seconds = judged(prepare, healthy)
        found += said > 0
        right = triggers is not None and set(triggers) == axes
        attributed += right
        print(f"{name:32} {said:3} rows fail  {'right' if right else 'wrong' if said else 'MISSED':6}  {triggers}  (expected {sorted(axes)}; {seconds:.0f} s)", flush=True)
    print(f"found {found} of {len(chosen)}, attributed {attributed} of {len(chosen)}")


def clean(scenarios: list[Any]) -> tuple[list[Any], list[str]]:
    """Scenarios that agree without a mutant, and what the others say."""
    from proctor.oracle.fuzz.evaluate import Runner
    from proctor.oracle.fuzz.worlds import Worlds

    with Worlds(timeout_s=120) as worlds:
        outcomes = Runner(worlds).run_all(scenarios)
    pairs = list(zip(scenarios, outcomes, strict=True))
    return [s for s, o in pairs if o.verdict == "ok"], [f"{o.verdict} {o.why[:90]} {s.setting}" for s, o in pairs if o.failed]


def judged(prepare: Callable[[], None], scenarios: list[Any]) -> tuple[int, Any, float]:
    """How many rows fail, and the trigger set of the first that does."""
    from proctor.oracle.fuzz.campaign import Campaign
    from proctor.oracle.fuzz.evaluate import Runner
    from proctor.oracle.fuzz.findings import Finding
    from proctor.oracle.fuzz.worlds import Worlds

    begun = time.monotonic()
    with Worlds(timeout_s=120, prepare=prepare) as worlds:
        campaign = Campaign(Runner(worlds), 0, [])
        failed = [(s, o) for s, o in zip(scenarios, campaign.runner.run_all(scenarios), strict=True) if o.failed]
        triggers = None
        for scenario, outcome in failed[:1]:
            for one in campaign.explain(scenario, outcome):
                if isinstance(one, Finding):
                    triggers = one.triggers
    return len(failed), triggers, time.monotonic() - begun


if __name__ == "__main__":
    main()
