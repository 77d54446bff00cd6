"""Transitions around the forward of modules: all that a run adds to a model beside the hooks of draws.

What enters or leaves a module is handed on as the program passes it, with tensors in their new layout.
In the first forward it also compares what a rule says a tensor comes as with what the edge before left it as, and data that ranks are to
cut with each other: each is to be given all of it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.comm import Comm
from proctor.oracle.parallel.crossing.transitions import Move
from proctor.oracle.plans.mesh import Layout
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.rules import EdgeRule

Change = Callable[[str, torch.Tensor], torch.Tensor]
_LEFT: Final = "_proctor_left"  # on a tensor: the edge that left it as it lies


class Edge:
    """A rule on one module.

    Args:
        rule: of the plan.
        path: of the module.
        comm: ranks.
    """

    def __init__(self, rule: EdgeRule, path: str, comm: Comm) -> None:
        source, target, back, home = rule.layouts(comm.mesh)
        self.rule, self.name = rule, f"{rule.at} of {path or 'the model'}"
        self.move = Move((source, target), (back, home), comm)
        self.idle = self.move.idle
        self.slot = compiled(rule.slot)
        self.everywhere = rule.slot == ".*"
        # What the rule speaks of: of other axes it neither knows nor changes how the tensor lies.
        self.axes = {cut.axis for layout in (source, target, back, home) for cut in layout.cuts if comm.mesh.size(cut.axis) > 1}

    @property
    def plain(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """`carry` when nothing is checked."""
        return self.move if self.move.one_sum else functools.partial(self.carry, checking=False)

    def carry(self, tensor: torch.Tensor, checking: bool) -> torch.Tensor:
        """The tensor in its new layout.

        Raises:
            OracleError: it does not come as the rule says; only while checking.
            MappingError: a dimension is not divisible.
        """
        if checking:
            self._compare(tensor)
        if self.idle:
            return tensor
        try:
            moved = self.move(tensor)
        except OracleError as error:
            raise OracleError(f"{self.name}: {error.message}", hint=error.hint) from None
        if checking and moved is not tensor:
            setattr(moved, _LEFT, self)
        return moved

    def _compare(self, tensor: torch.Tensor) -> None:
        left: Edge | None = getattr(tensor, _LEFT, None)
        if left is None:
            self._all_given_the_same(tensor)
            return
        there, here = (_cuts(layout, tensor.dim(), self.axes & left.axes) for layout in (left.move.target, self.move.source))
        if there != here:
            raise OracleError(
                f"{self.name} comes as ({self.move.source}), says the plan, and {left.name} leaves it as ({left.move.target})",
                hint="make `from` of the one the `to` of the other",
            )

    def _all_given_the_same(self, tensor: torch.Tensor) -> None:
        """Data that comes whole and is cut here is the same on all ranks that cut it; each asks the others, so that all refuse."""
        axes = [step.target.axis for step in self.move.there if step.source is None and step.target is not None and not step.target.reduction]
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.device.type != "meta"
        if not axes or self.rule.at != "input" or tensor.requires_grad or not plain or not self.move.comm.arrives:
            return
        digest = hashlib.blake2b(repr((tuple(tensor.shape), tensor.dtype)).encode(), digest_size=4)
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        mine = int.from_bytes(digest.digest(), "big")
        most = self.move.comm.all_reduce(torch.tensor([mine, -mine], device=tensor.device), axes, "max")
        if int(most[0]) != -int(most[1]):
            raise OracleError(
                f"{self.name} comes whole, says the plan, and each rank takes its part of it along {', '.join(axes)}; ranks were given different data",
                hint="give all ranks the whole batch; or, where each reads its own part, say in the plan that it comes cut: `from` like `to`",
            )


def _cuts(layout: Layout, ndim: int, axes: set[str]) -> set[tuple[object, ...]]:
    return {
        (c.axis, c.strategy, 0 if c.reduction else c.dim % ndim if -ndim <= c.dim < ndim else c.dim, c.options)
        for c in layout.cuts
        if c.axis in axes
    }


class Crossing:
    """Stands in the place of a module's `forward`: transitions of what enters, the module's own forward, transitions of what leaves.

    Not hooks: torch's path through hooks costs more than the transition of a small tensor.

    Args:
        forward: the module's own.
        state: has `checking`.
        inputs, outputs: rules on the module; the first that is about a tensor counts.
        lookup: of an embedding whose rows are cut.
        afters: parameters that are added last.
    """

    def __init__(
        self, forward: Callable[..., Any], state: Any, inputs: Sequence[Edge], outputs: Sequence[Edge], lookup: Lookup | None, afters: Sequence[After]
    ) -> None:
        self.forward, self.state = forward, state
        self._inputs = inputs if any(not edge.idle for edge in inputs) else ()
        self._outputs = outputs if any(not edge.idle for edge in outputs) else ()
        self._lookup, self._afters = lookup, afters

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._inputs or self._outputs or self._lookup or self._afters)

    def short(self) -> Callable[..., Any]:
        """This, or where all there is is one tensor that enters or leaves, a function that costs little more than the transition."""
        edges = (*self._inputs[:1], *self._outputs[:1])
        if self._lookup is not None or self._afters or len(edges) != 1 or not edges[0].everywhere:
            return self
        state, forward, carry, tensor, entering = self.state, self.forward, edges[0].plain, torch.Tensor, bool(self._inputs)
        if not entering and edges[0].move.one_sum and getattr(forward, "__func__", None) is torch.nn.Linear.forward:
            carry = edges[0].move.fresh  # what torch's own linear layer gives is new, and its backward does not look at it

        def enter(*args: Any, **kwargs: Any) -> Any:
            if state.checking or kwargs or len(args) != 1 or not isinstance(args[0], tensor):
                return self(*args, **kwargs)
            return forward(carry(args[0]))

        def leave(*args: Any, **kwargs: Any) -> Any:
            if state.checking:
                return self(*args, **kwargs)
            output = forward(*args, **kwargs)
            return carry(output) if isinstance(output, tensor) else changed(output, self._leaves)

        return enter if entering else leave

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, between its transitions."""
        if self._lookup is not None:
            args = self._lookup.before(args)
        if self._inputs:
            if len(args) == 1 and not kwargs and self._inputs[0].everywhere and isinstance(args[0], torch.Tensor):
                args = (self._inputs[0].carry(args[0], self.state.checking),)
            else:
                args, kwargs = changed(args, self._enters), changed(kwargs, self._enters)
        if self._afters:
            with contextlib.ExitStack() as withheld:
                for after in self._afters:
                    withheld.enter_context(after.withheld())
                output = self.forward(*args, **kwargs)
        else:
            output = self.forward(*args, **kwargs)
        if self._lookup is not None:
            output = self._lookup.after(output)
        if self._outputs:
            if self._outputs[0].everywhere and isinstance(output, torch.Tensor):
                output = self._outputs[0].carry(output, self.state.checking)
            else:
                output = changed(output, self._leaves)
        for after in self._afters:
            output = after.added(output)
        return output

    def _enters(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._through(self._inputs, path, tensor)

    def _leaves(self, path: str, tensor: torch.Tensor) -> torch.Tensor:
        return self._through(self._outputs, path, tensor)

    def _through(self, edges: Sequence[Edge], path: str, tensor: torch.Tensor) -> torch.Tensor:
        for edge in edges:
            if edge.slot.fullmatch(path):
                return edge.carry(tensor, self.state.checking)
        return tensor


class Lookup:
    """An embedding of which this rank holds some rows: tokens of other rows give zeros.

    Args:
        start: first row.
        count: rows.
    """

    def __init__(self, start: int, count: int) -> None:
        self.start, self.count = start, count
        self._others: list[torch.Tensor] = []

    def keep_padding(self, module: torch.nn.Module) -> None:
        """The row that gets no gradient (`padding_idx`) is one of this rank's rows, or none of them."""
        padding = getattr(module, "padding_idx", None)
        if isinstance(padding, int):
            module.padding_idx = padding - self.start if 0 <= padding - self.start < self.count else None

    def before(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Tokens as rows of this rank."""
        tokens = args[0] - self.start
        self._others.append((tokens < 0) | (tokens >= self.count))
        return (tokens.clamp(0, self.count - 1), *args[1:])

    def after(self, output: torch.Tensor) -> torch.Tensor:
        """Zeros for the others' tokens."""
        return output.masked_fill(self._others.pop().unsqueeze(-1), 0.0)


class After:
    """A parameter that is added once, when the addends have been summed: the bias of a row-parallel layer.

    Args:
        name: of the parameter.
        module: that has it.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        self.name, self.module = name, module
        self._zeros: torch.nn.Parameter | None = None

    @contextlib.contextmanager
    def withheld(self) -> Iterator[None]:
        """While the module computes, a tensor of zeros stands in its place."""
        own = self.module._parameters[self.name]
        assert own is not None
        if self._zeros is None or self._zeros.dtype != own.dtype:
            self._zeros = torch.nn.Parameter(torch.zeros_like(own), requires_grad=False)
        self.module._parameters[self.name] = self._zeros
        try:
            yield
        finally:
            self.module._parameters[self.name] = own

    def added(self, output: Any) -> Any:
        """The output with it."""
        return output + self.module._parameters[self.name] if isinstance(output, torch.Tensor) else output


def changed(value: Any, change: Change, path: str = "") -> Any:  # Any: whatever a module takes or gives
    """The same value with its tensors replaced; the very same object where none is.

    Args:
        value: tensors in tuples, lists, dicts and transformers' outputs, one within another.
        change: gives the other tensor, by place: a path of indices and keys as "0", "hidden_states", "1.key"; "" is the value itself.
        path: of `value`.
    """
    if isinstance(value, torch.Tensor):
        return change(path, value)
    if isinstance(value, tuple | list):
        new = [changed(one, change, _under(path, str(i))) for i, one in enumerate(value)]
        if all(a is b for a, b in zip(new, value)):
            return value
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if isinstance(value, Mapping):
        pairs = {key: changed(one, change, _under(path, str(key))) for key, one in value.items()}
        if all(pairs[key] is value[key] for key in pairs):
            return value
        if type(value) is dict:
            return pairs
        found = copy.copy(value)  # an output of transformers: keys that are attributes, too
        for key, one in pairs.items():
            found[key] = one  # type: ignore[index]
        return found
    return value


def _under(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
