"""A real step of a program, as relations see it: calls of models with their batches, and the update that follows.

B samples, T positions of a sequence.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from proctor.oracle.collect.edges.taps import noisy
from proctor.oracle.selfcheck import NotApplicable, Unknown
from proctor.oracle.selfcheck.outcomes import Culprit
from proctor.oracle.selfcheck.watching.fork import set_random_states
from proctor.oracle.selfcheck.watching.undrawn import Undrawn
from proctor.oracle.selfcheck.watching.values import UNIT, copied, difference, exchanged, tensors

SAMPLES: Final = 4  # one noise sample can be 2× too low, four ≤ 1.25× (docs/evaluation.md)

if TYPE_CHECKING:
    from proctor.oracle.selfcheck.watching.seen.pairs import Crossed

Outputs = dict[str, torch.Tensor]


@dataclass
class Criterion:
    """A call of one of torch's loss functions.

    Attributes:
        function: its name.
        reduction: `mean`, `sum` or `none`.
        items: what it averages over: targets that are not ignored.
        ignored: targets that are.
        line: `file:line` of the program.
        weight: gradient of what was differentiated with respect to its result; `None` if it was not differentiated.
        backward: number of the backward pass of the update in which that happened.
        targets: integer targets, for relations that look at them.
    """

    function: str
    reduction: str
    items: int
    ignored: int
    line: str
    weight: float | None = None
    backward: int = -1
    targets: torch.Tensor | None = None


@dataclass
class Backward:
    """A backward pass of an update: the program's stack, innermost line first."""

    stack: tuple[str, ...]


@dataclass(eq=False)
class Call:
    """A call of a root module in a training step.

    Attributes:
        module: that was called.
        name: how reports call it.
        args, kwargs: copies of what it got.
        random: states of the generators when it was called.
        training: its mode.
        autocast: type of autocast on its device, `None` where that was off.
        results: what it returned: shapes and types by path.
        gradients: what came back to its results, by path.
        step: update, counted from 0.
        targets: of losses that were computed after it.
        loader_batch: size of the batches of the program's loader, 0 where it is not known.
        batch: what `axes.batch_of` found.
        undrawn: each draw of random numbers gives the same one for all samples (`undrawn`).
    """

    module: nn.Module
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: list[Any]
    training: bool
    autocast: torch.dtype | None = None
    results: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    gradients: Outputs = field(default_factory=dict)
    step: int = 0
    targets: list[torch.Tensor] = field(default_factory=list)
    loader_batch: int = 0
    batch: Any = None
    undrawn: bool = False

    # -- running it ---------------------------------------------------------------------------------------------

    def evaluate(self, args: Any = None, *, seed: int = 0, training: bool = False) -> Outputs:
        """Results on a batch, without gradients.

        Args:
            args: `(args, kwargs)`; those of the real step without.
            seed: of the generators.
            training: in training mode.
        """
        given = self.inputs if args is None else args
        before = self.modes()
        try:
            self.module.train(training)
            with torch.no_grad(), self.casting(), self.drawing():
                seeded(seed)
                found = self.module(*_fresh(given[0]), **_fresh(given[1]))
                return {path: t.detach() for path, t in tensors(found)}
        finally:
            for module, mode in before:
                module.training = mode

    def derive(
        self, args: Any = None, *, call: Callable[..., Any] | None = None, gradients: Outputs | None = None, dtype: torch.dtype | None = None
    ) -> tuple[Outputs, Outputs]:
        """Results and gradients of parameters, in the mode and with the random numbers of the step.

        Args:
            args: `(args, kwargs)`; those of the step without.
            call: in place of the module.
            gradients: of the results; those of the step without.
            dtype: of inputs and gradients; their own without.

        Returns:
            results by path, gradients by the parameters' names.
        """
        given = self.inputs if args is None else args
        for parameter in self.module.parameters():
            parameter.grad = None

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

        set_random_states(self.random)
        with torch.enable_grad(), self.casting(), self.drawing():
            made = exchanged(given, lambda _, t: cast(copied(t)))
            found = dict(tensors((self.module if call is None else call)(*made[0], **made[1])))
        slopes = self.gradients if gradients is None else gradients
        pairs = [(found[p], cast(g).reshape(found[p].shape)) for p, g in slopes.items() if p in found and found[p].requires_grad and found[p].numel() == g.numel()]
        if not pairs:
            raise NotApplicable("no gradient came back to its results in this step")
        torch.autograd.backward([t for t, _ in pairs], [g.to(t.dtype) for t, g in pairs])
        return {p: t.detach() for p, t in found.items()}, {
            name: p.grad.detach().clone() for name, p in self.module.named_parameters() if p.grad is not None
        }

    @property
    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What it got."""
        return self.args, self.kwargs

    def modes(self) -> list[tuple[nn.Module, bool]]:
        """Training or evaluation, of each module."""
        return [(m, m.training) for m in self.module.modules()]

    def casting(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast as it was in the step."""
        if self.autocast is None:
            return contextlib.nullcontext()
        mode: contextlib.AbstractContextManager[Any] = torch.autocast(self.device, dtype=self.autocast)
        return mode

    def drawing(self) -> contextlib.AbstractContextManager[Any]:
        """Random numbers as the program draws them, or the same for all samples."""
        return Undrawn() if self.undrawn else contextlib.nullcontext()

    def without_noise(self, undrawn: bool) -> None:
        """From here on, draws give the same number for all samples, or not."""
        if self.undrawn != undrawn:
            self.undrawn = undrawn
            self.__dict__.pop("baseline", None)

    @property
    def device(self) -> str:
        """Of its parameters, `cpu` or `cuda`."""
        return next((p.device.type for p in self.module.parameters()), "cpu")

    # -- what is known of it ------------------------------------------------------------------------------------

    @cached_property
    def baseline(self) -> Outputs:
        """Results in evaluation on the real batch.

        Raises:
            Unknown: it cannot be evaluated, or is not repeatable, so that nothing can be held against it.
        """
        try:
            one, other = self.evaluate(), self.evaluate()
        except Unknown:
            raise
        except Exception as e:  # noqa: BLE001 - a program's own code
            raise Unknown(f"the model cannot be evaluated on the step's batch: {short(e)}") from None
        if any(difference(one[p], other[p])[0] for p in one if p in other) or one.keys() != other.keys():
            raise Unknown("evaluated twice with the same random numbers it gives two results (relation repeatable)")
        return one

    @cached_property
    def named_inputs(self) -> dict[str, tuple[str, torch.Tensor]]:
        """Input tensors by path in `(args, kwargs)`: what the forward calls them, and the values."""
        paths = dict(tensors(self.inputs))
        try:
            names = list(inspect.signature(type(self.module).forward).parameters)[1:]
        except (TypeError, ValueError):
            names = []
        out = {}
        for path, tensor in paths.items():
            side, _, rest = path.partition(".")
            first, _, more = rest.partition(".")
            if side == "0" and first.isdigit() and int(first) < len(names):
                rest = names[int(first)] + (f".{more}" if more else "")
            out[path] = (rest, tensor)
        return out

    def place(self, module: str = "", op: str = "", source: str = "") -> Culprit:
        """A culprit: a module by its path, with the line where its forward is written unless a better one is known."""
        found = dict(self.module.named_modules()).get(module, self.module)
        return Culprit(module or self.name, type(found).__name__, source or written_at(found) or written_at(self.module), op)

    def noise(self, run: Callable[[], Mapping[str, torch.Tensor]]) -> list[Mapping[str, torch.Tensor]]:
        """Runs with an error of one rounding at the edge of every module.

        Args:
            run: results by name.
        """
        return [self.shaken(run, sample) for sample in range(SAMPLES)]

    def shaken(self, run: Callable[[], Mapping[str, torch.Tensor]], sample: int, loud: float = 1.0, *, leaves: bool = False, unit: float | None = None) -> Mapping[str, torch.Tensor]:
        """One run with noise of so many roundings.

        Args:
            run: results by name.
            sample: number of the noise.
            loud: roundings.
            unit: one of them; that of a tensor's own type without.
            leaves: also of parameters and of what the module got. A rounded sum of products is the exact one of factors that are a little off
                (backward error); noise of a result that cancels leaves its sign alone.
        """

        def moved(path: str, tensor: torch.Tensor, name: str, count: int) -> torch.Tensor:
            if tensor.dtype not in UNIT or not tensor.numel():
                return tensor
            with torch.no_grad(), _disable_current_modes():  # its random numbers are not the program's
                factor = noisy(torch.ones_like(tensor, dtype=torch.float64), loud * (UNIT[tensor.dtype] if unit is None else unit), sample, name, path, count)
            return (tensor * factor.to(torch.float64)).to(tensor.dtype)

        hooks = []
        for name, module in self.module.named_modules():
            counted = [0]

            def shake(_: Any, __: Any, result: Any, name: str = name, counted: list[int] = counted) -> Any:
                counted[0] += 1
                return exchanged(result, lambda path, tensor: moved(path, tensor, name, counted[0]))

            hooks.append(module.register_forward_hook(shake))
        given, kept = self.inputs, [(p, p.data) for p in self.module.parameters()] if leaves else []
        try:
            if leaves:
                for number, (parameter, data) in enumerate(kept):
                    parameter.data = moved(str(number), data, "parameter", 0)
                self.args, self.kwargs = exchanged(given, lambda path, t: t if isinstance(t, nn.Parameter) else moved(path, t.detach(), "input", 0).requires_grad_(t.requires_grad))
            return run()
        finally:
            self.args, self.kwargs = given
            for parameter, data in kept:
                parameter.data = data
            for hook in hooks:
                hook.remove()


@dataclass
class Update:
    """An update of an optimizer that is about to happen.

    Attributes:
        optimizer: with the real gradients in its parameters.
        name: its class.
        step: counted from 0.
        calls: of root modules since the update before.
        criteria: of torch's losses since then.
        backwards: passes since then.
        moved: by id of a parameter, whether any update so far had a gradient for it that is not zero.
        called: ids of the modules that ran since the program began.
        models: roots with the optimizer's parameters.
        owners: by id of a parameter: root, name, and the module that holds it.
        optimizers, schedulers: all of the program.
        loaders: of data, the one that was read last at the end.
        checkpointed: the program computes something again in its backward passes.
        world: ranks.
        crossed: results and targets that were broadcast to all pairs.
        met: how often results met other tensors.
        by_hand: by id of a parameter without a gradient, whether the program moved it.
        taken: by id of a parameter without a gradient, whether the backward had given it one, and the program took it away.
    """

    optimizer: Any
    name: str
    step: int
    calls: Sequence[Call]
    criteria: Sequence[Criterion]
    backwards: Sequence[Backward]
    moved: Mapping[int, bool]
    called: frozenset[int]
    models: Sequence[nn.Module]
    optimizers: Sequence[Any] = ()
    schedulers: Sequence[Any] = ()
    loaders: Sequence[Any] = ()
    checkpointed: bool = False
    world: int = 1
    crossed: Sequence[Crossed] = ()
    met: int = 0
    by_hand: Mapping[int, bool] = field(default_factory=dict)
    taken: Mapping[int, bool] = field(default_factory=dict)

    @cached_property
    def owners(self) -> dict[int, tuple[nn.Module, str, nn.Module]]:
        """By id of a parameter: root, name in it, and the module that holds it."""
        found: dict[int, tuple[nn.Module, str, nn.Module]] = {}
        for root in self.models:
            for path, module in root.named_modules():
                for name, parameter in module.named_parameters(recurse=False):
                    found.setdefault(id(parameter), (root, f"{path}.{name}" if path else name, module))
        return found

    def parameters(self) -> Iterator[torch.Tensor]:
        """Of the optimizer."""
        for group in self.optimizer.param_groups:
            yield from group["params"]


def seeded(seed: int) -> None:
    """The same random numbers from here on."""
    import random

    torch.manual_seed(seed)
    random.seed(seed)
    import sys

    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed)


def short(error: BaseException) -> str:
    """An exception in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:160]}"


def written_at(module: Any) -> str:
    """`file:line` of the class of a module; "" where it is torch's own or has no source."""
    forward = getattr(type(module), "forward", None)
    code = getattr(inspect.unwrap(forward), "__code__", None) if forward is not None else None
    if code is None or "/torch/nn/" in code.co_filename:
        return ""
    return f"{code.co_filename}:{code.co_firstlineno}"


def _fresh(value: Any) -> Any:
    return exchanged(value, lambda _, t: t.detach().clone())
