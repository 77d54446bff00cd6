"""Every optimizer of `torch.optim`, and what each of their arguments changes.

`optimizer` and `option` belong to the program. `implementation` says how the same update is computed (foreach, fused, capturable, a learning
rate that is a tensor): the reference has the plain loop.
"""

from __future__ import annotations

import inspect
from functools import cache

import torch

from proctor.oracle.fuzz.axes import Axis, Rule, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

# How an update is computed, not which.
IMPLEMENTATIONS = ("foreach", "fused", "capturable")
# `differentiable` is for updates within an outer graph: no training loop has it. `params` and `lr` are set by us.
_LEFT_OUT = (*IMPLEMENTATIONS, "differentiable", "self", "params", "lr")
_TUPLES = {
    "betas": "(0.8, 0.9)",
    "etas": "(0.7, 1.3)",
    "step_sizes": "(1e-3, 0.5)",
    "eps": "(1e-3, 1e-2)",
    "ns_coefficients": "(3.0, -4.0, 2.0)",
}
_NONES = {"line_search_fn": "'strong_wolfe'", "adjust_lr_fn": "'match_rms_adamw'"}
_RATES = {"Adafactor": "0.3", "LBFGS": "0.3", "Adadelta": "1.0"}


@cache
def arguments() -> dict[str, dict[str, object]]:
    """Optimizers of the library → their arguments → defaults."""
    found = {}
    for name in dir(torch.optim):
        cls = getattr(torch.optim, name)
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
            parameters = inspect.signature(cls).parameters.values()
            found[name] = {p.name: p.default for p in parameters}
    return found


def changed(name: str, default: object) -> str | None:
    """Another value of an argument, as text; None if we know of none."""
    if isinstance(default, bool):
        return repr(not default)
    if isinstance(default, int | float):
        return _number(name, default)
    return _TUPLES.get(name) if isinstance(default, tuple) else _NONES.get(name)


def _number(name: str, default: float) -> str:
    if name in ("history_size", "max_iter", "ns_steps"):
        return "3"
    return "0.1" if not default else repr(default / 2)


@cache
def options() -> tuple[str, ...]:
    """`name=value` of every argument of every optimizer that can be changed."""
    found: dict[str, None] = {}
    for given in arguments().values():
        for name, default in given.items():
            value = changed(name, default) if name not in _LEFT_OUT else None
            if value is not None:
                found[f"{name}={value}"] = None
    return tuple(sorted(found))


@register
class Optimizer(Axis):
    """The optimizer's class."""

    program = True
    order = 20

    def __init__(self) -> None:
        self.choice = Choice("optimizer", ("SGD", "Adam", *sorted(set(arguments()) - {"SGD", "Adam"})))
        self.rules = (
            Rule("invalid", "torch has no sparse form of the update", unless={"optimizer": ("SGD", "SparseAdam", "Adagrad")}, traits=frozenset({"sparse"})),
            Rule("invalid", "LBFGS has one group of parameters", when={"optimizer": ("LBFGS",)}, unless={"groups": ("one",)}),
            Rule("invalid", "SparseAdam takes sparse gradients alone", when={"optimizer": ("SparseAdam",)}, unless={"groups": ("bags",)}),
            Rule("invalid", "Muon takes matrices alone", when={"optimizer": ("Muon",)}, unless={"groups": ("matrices",)}),
            Rule("approximate", "Muon orthogonalises in bfloat16", when={"optimizer": ("Muon",)}, tolerance=0.05),
        )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.optimizer = f"torch.optim.{value}"
        draft.options["lr"] = _RATES.get(str(value), "0.1")
        draft.closure = value == "LBFGS"
        if draft.closure:
            draft.options["max_iter"] = "2"


@register
class Option(Axis):
    """One argument of the optimizer that is not its default."""

    program = True
    order = 21

    def __init__(self) -> None:
        self.choice = Choice("option", ("", *options()))

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        name, _, new = str(value).partition("=")
        given = arguments()[str(setting["optimizer"])]
        if name and (name not in given or changed(name, given[name]) != new):
            return f"{setting['optimizer']} has no {value}"
        return ""

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`; nesterov needs a momentum."""
        name, _, new = str(value).partition("=")
        draft.options[name] = new
        if name in ("nesterov", "dampening") and setting["optimizer"] == "SGD":
            draft.options["momentum"] = "0.9"
        if name == "adjust_lr_fn":
            draft.options["lr"] = "0.05"


@register
class Implementation(Axis):
    """How the update is computed."""

    order = 22
    # Capturable updates are for accelerators: on a CPU every optimizer refuses them.
    choice = Choice("implementation", ("", "foreach=True", "fused=True", *(["capturable=True"] if torch.accelerator.is_available() else []), "lr=tensor"))
    rules = (
        Rule("invalid", "DTensor has no sharding strategy for the fused update", when={"implementation": ("fused=True",), "optimizer": ("SGD", "Adagrad")},
             unless={"wrapper": ("none", "ddp", "zero")}),
        Rule("invalid", "torch has no sparse form of the update in one call", when={"implementation": ("fused=True", "foreach=True")}, traits=frozenset({"sparse"})),
    )

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        name = str(value).partition("=")[0]
        if name not in arguments()[str(setting["optimizer"])]:
            return f"{setting['optimizer']} has no {name}"
        return ""

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        name, _, new = str(value).partition("=")
        draft.options[name] = f"torch.tensor({draft.options['lr']}, dtype=torch.float64)" if new == "tensor" else new


@register
class Groups(Axis):
    """How parameters are given: all together, by rate, only matrices, with their names, or only embedding bags with sparse gradients."""

    program = True
    order = 23
    choice = Choice("groups", ("one", "two", "matrices", "named", "bags"))
    rules = (Rule("invalid", "the model has no matrices", when={"groups": ("matrices",)}, lacks=frozenset({"matrix"})),)

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return "the model has no sparse gradients" if value == "bags" and "sparse" not in traits else ""

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        rate = draft.options["lr"]
        draft.net_args = {
            "two": f"[{{'params': [p for p in net.parameters() if p.ndim > 1]}}, "
            f"{{'params': [p for p in net.parameters() if p.ndim < 2], 'lr': {rate} / 2, 'weight_decay': 0.0}}]",
            "matrices": "[p for p in net.parameters() if p.ndim == 2]",
            "bags": "[p for name, p in net.named_parameters() if 'bags' in name or 'weighted' in name]",
            "named": "net.named_parameters()",
        }[str(value)]
