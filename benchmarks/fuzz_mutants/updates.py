"""Bugs planted into clipping, optimizers, recomputation and resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.fuzz_mutants import mutant

# clipping


@mutant("wrapper", "world", "clip", kind="clipped")
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


@mutant("clip", "clip_foreach", kind="clipped")
def clip_without_foreach_is_off() -> None:
    import torch

    plain = torch.nn.utils.clip_grad_norm_

    def clip(parameters: Any, max_norm: float, norm_type: float = 2.0, foreach: bool | None = None) -> Any:
        return plain(parameters, max_norm * (0.9 if foreach is False else 1.0), norm_type=norm_type, foreach=foreach)

    torch.nn.utils.clip_grad_norm_ = clip


@mutant("wrapper", "clip", kind="clipped")
def clip_value_of_shards_is_off() -> None:
    import torch
    from torch.distributed.tensor import DTensor

    plain = torch.nn.utils.clip_grad_value_

    def clip(parameters: Any, value: float, foreach: bool | None = None) -> None:
        given = list(parameters)
        plain(given, value * (0.8 if any(isinstance(p, DTensor) for p in given) else 1.0), foreach=foreach)

    torch.nn.utils.clip_grad_value_ = clip


# optimizers


def _stepped(name: str, change: Callable[[Any], None]) -> None:
    """Do something to each DTensor parameter after an optimizer's update."""
    import torch
    from torch.distributed.tensor import DTensor

    cls = getattr(torch.optim, name)
    plain = cls.step

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        done = plain(self, *args, **kwargs)
        for group in self.param_groups:
            for p in group["params"]:
                if isinstance(p, DTensor):
                    change(p.data.to_local())
        return done

    cls.step = step


@mutant("optimizer", "wrapper", "world", kind="parameter")
def adam_is_off_on_a_later_shard() -> None:
    import torch.distributed as dist

    _stepped("Adam", lambda local: local.mul_(1.001) if dist.get_rank() == 1 else None)


@mutant("optimizer", "wrapper", kind="parameter")
def adamw_is_off_on_shards() -> None:
    _stepped("AdamW", lambda local: local.mul_(1.001))


@mutant("optimizer", "wrapper", kind="parameter")
def adagrad_is_off_on_shards() -> None:
    _stepped("Adagrad", lambda local: local.mul_(1.001))


def _multi(module: str, name: str, option: str, more: float) -> None:
    import importlib

    found = importlib.import_module(f"torch.optim.{module}")
    plain = getattr(found, name)
    setattr(found, name, lambda *args, **kwargs: plain(*args, **{**kwargs, option: kwargs[option] + more}))


@mutant("optimizer", "implementation", kind="parameter")
def foreach_adam_is_another_adam() -> None:
    _multi("adam", "_multi_tensor_adam", "eps", 0.01)


@mutant("optimizer", "implementation", kind="parameter")
def foreach_rmsprop_is_another() -> None:
    _multi("rmsprop", "_multi_tensor_rmsprop", "eps", 0.01)


@mutant("implementation", kind="parameter")
def foreach_sgd_is_another() -> None:
    _multi("sgd", "_multi_tensor_sgd", "lr", 0.01)


# recomputation and resume


@mutant("recompute", kind="output")
def checkpoint_scales() -> None:
    import torch.utils.checkpoint as module

    plain = module.checkpoint
    module.checkpoint = lambda *args, **kwargs: plain(*args, **kwargs) * 1.001


@mutant("recompute", "wrapper", "world", kind="output")
def checkpoint_scales_on_one_rank() -> None:
    import torch.distributed as dist
    import torch.utils.checkpoint as module

    plain = module.checkpoint
    module.checkpoint = lambda *args, **kwargs: plain(*args, **kwargs) * (1.001 if dist.get_rank() == 1 else 1.0)


def _resumed(load: Callable[..., Any]) -> None:
    import torch.distributed.checkpoint.state_dict as module

    plain = module.set_state_dict
    module.set_state_dict = lambda model, opt, **kwargs: load(plain, model, opt, kwargs)


@mutant("optimizer", "resume", kind="state")
def resume_forgets_the_optimizer() -> None:
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    _resumed(lambda plain, model, _, kwargs: set_model_state_dict(model, kwargs["model_state_dict"], options=kwargs.get("options")))


@mutant("optimizer", "resume", kind="state")
def resume_forgets_the_count() -> None:
    def load(plain: Any, model: Any, opt: Any, kwargs: dict[str, Any]) -> None:
        plain(model, opt, **kwargs)
        for state in opt.state.values():
            if "step" in state:
                state["step"].zero_()

    _resumed(load)


@mutant("wrapper", "world", "resume", kind="evaluation")
def resume_is_off_on_one_rank() -> None:
    import torch.distributed as dist

    def load(plain: Any, model: Any, opt: Any, kwargs: dict[str, Any]) -> None:
        plain(model, opt, **kwargs)
        for p in model.parameters() if dist.get_rank() == 1 else ():
            (p.data.to_local() if hasattr(p, "to_local") else p.data).mul_(1.01)

    _resumed(load)
