"""Which axis of a batch holds samples, and which the positions of a sequence: found out by trying, else told by convention.

An axis is *certain* where the model's results are permuted when the batch is permuted along it. Where no axis is certain, the
first one is taken if the model's own layers (convolutions, batch norms, recurrent layers, attention) or the program's loader say that it holds
samples. Nodes of a graph and results that relate samples to each other are no samples.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from proctor.oracle.selfcheck import NotApplicable, Unknown
from proctor.oracle.selfcheck.watching.gaps import gap
from proctor.oracle.selfcheck.watching.step import Call, Outputs, short
from proctor.oracle.selfcheck.watching.values import exchanged, same_bits

AXES: Final = (0, 1)
LIKE: Final = 1e-4  # relative error below which a permuted result is that of the permuted batch, where an axis is sought


def tried(call: Call, args: Any, what: str, run: Callable[..., Outputs] | None = None) -> Outputs:
    """Results on another batch than the program's.

    Args:
        call: of the model.
        args: `(args, kwargs)`.
        what: the batch has.
        run: evaluates; the results of the model without.

    Raises:
        Unknown: the model fails.
    """
    try:
        return (run or call.evaluate)(args)
    except Exception as e:  # noqa: BLE001 - the program's own code
        raise Unknown(f"with {what} the model fails: {short(e)}") from None


def other_tokens(some: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Others than some of a batch's tokens, of the same vocabulary: those of the batch, one further.

    Raises:
        Unknown: the batch is one token again and again.
    """
    known = tokens.unique()
    if known.numel() < 2:
        raise Unknown("the batch is one token again and again")
    return known[(torch.searchsorted(known, some.contiguous()) + 1) % known.numel()]


@dataclass(frozen=True)
class Batch:
    """Where samples lie.

    Attributes:
        size: B.
        inputs: axis of each input that has samples, by path.
        outputs: of each result that has.
        certain: results were seen to be permuted with the batch.
        why: who says so.
    """

    size: int
    inputs: dict[str, int]
    outputs: dict[str, int]
    certain: bool
    why: str


def batch_of(call: Call) -> Batch:
    """The axis of samples, looked for once a call.

    Raises:
        NotApplicable: there is none, or nobody can tell.
        Unknown: the model cannot be evaluated.
    """
    if call.batch is None:
        try:
            call.batch = _batch_of(call)
        except NotApplicable as why:
            call.batch = why
    if isinstance(call.batch, NotApplicable):
        raise NotApplicable(*call.batch.args)
    found: Batch = call.batch
    return found


def _batch_of(call: Call) -> Batch:
    results = call.baseline
    found = [b for axis in AXES if (b := _assumed(call, results, axis)) is not None]
    if not found:
        raise NotApplicable("its inputs and results have no axis in common that could hold samples")
    for batch in found:
        outputs = _permutes(call, batch, results)
        if outputs is not None:
            return Batch(batch.size, batch.inputs, outputs, True, "its results are permuted as the batch is")
    quiet = _without_noise(call, found, results)
    if quiet is not None:
        return quiet
    said = _conventions(call)
    batch = found[0]
    if any(list(t.shape).count(batch.size) > 1 for t in (*(t for _, t in call.named_inputs.values()), *results.values())):
        raise NotApplicable(f"which axis holds samples cannot be told: several are {batch.size} long")
    agreed = bool(said) and said[0] == batch.size == call.loader_batch  # a layer further in may run over another axis, by design or by mistake
    if (any(size != batch.size for size in said) and not agreed) or next(iter(batch.inputs.values())) != 0:
        raise NotApplicable("which axis holds samples cannot be told: its layers do not say that the first one does")
    if not said and batch.size not in (call.loader_batch, *(len(t) for t in call.targets if t.ndim)):
        raise NotApplicable("which axis holds samples cannot be told: neither its layers nor a loader say so")
    return Batch(batch.size, batch.inputs, batch.outputs, False, "its layers or its loader say that the first axis holds samples")


def _without_noise(call: Call, found: list[Batch], results: Outputs) -> Batch | None:
    """The batch of a model that draws a sample's noise by its place: looked for with one number a draw, which stays so for this call."""
    other = tried(call, call.inputs, "other random numbers", functools.partial(call.evaluate, seed=1))
    if all(same_bits(t, other[p]) for p, t in results.items() if p in other):
        return None
    call.without_noise(True)
    try:
        results = call.baseline
        for batch in found:
            outputs = _permutes(call, batch, results)
            if outputs is not None:
                return Batch(batch.size, batch.inputs, outputs, True, "its results are permuted as the batch is, where noise is the same for all samples")
    except Unknown:
        pass
    call.without_noise(False)
    return None


def permuted(call: Call, batch: Batch, order: torch.Tensor) -> tuple[object, ...]:
    """The arguments with samples in another order."""
    made = exchanged(call.inputs, lambda p, t: t.index_select(batch.inputs[p], order) if p in batch.inputs else t)
    return tuple(made)


def rotation(size: int) -> torch.Tensor:
    """An order without a sample in its place: B-1, 0, 1, …"""
    return torch.roll(torch.arange(size), 1)


def _assumed(call: Call, results: Outputs, axis: int) -> Batch | None:
    """The batch if samples lay along this axis of the first input; other tensors may have them along another."""
    inputs = {p: t for p, (_, t) in call.named_inputs.items() if t.ndim > 0 and not isinstance(t, nn.Parameter)}
    if any(t.is_sparse or t.layout != torch.strided for t in inputs.values()):
        raise NotApplicable("an input is sparse: its rows may be nodes of one graph")
    first = next((t for t in inputs.values() if t.ndim > axis), None)
    if first is None or first.size(axis) < 2:
        return None
    size = first.size(axis)
    _no_graph(inputs, size)
    where = {p: a for p, t in inputs.items() if (a := _axis(t, size, axis)) is not None}
    there = {p: a for p, t in results.items() if (a := _axis(t, size, axis)) is not None}
    if any(t.ndim >= 2 and list(t.shape[:2]) == [size, size] and axis == 0 and t.ndim == 2 for t in results.values()):
        raise NotApplicable("a result relates samples to each other: it has as many columns as there are samples")
    return Batch(size, where, there, False, "") if there else None


def _axis(tensor: torch.Tensor, size: int, axis: int) -> int | None:
    """Where a tensor has as many entries as there are samples: at the same axis, else at one of the first two."""
    return next((a for a in (axis, *AXES) if a < tensor.ndim and tensor.size(a) == size), None)


def _no_graph(inputs: dict[str, torch.Tensor], size: int) -> None:
    for tensor in inputs.values():
        square = tensor.ndim == 2 and tensor.shape == (size, size)
        edges = tensor.ndim == 2 and tensor.size(0) == 2 != size and not tensor.is_floating_point() and tensor.numel() and int(tensor.max()) < size
        if (square and len(inputs) > 1) or edges:
            raise NotApplicable("an input relates rows to each other: they are nodes of one graph, or a mask of one sequence")


def _permutes(call: Call, batch: Batch, results: Outputs) -> dict[str, int] | None:
    """Axes of the results along which they are permuted as the batch is; `None` where one of them is not, or nothing was shown."""
    order = rotation(batch.size)
    try:
        other = call.evaluate(permuted(call, batch, order))
    except Exception:  # noqa: BLE001 - the program's own code, with a batch that it did not expect
        return None
    axes: dict[str, int] = {}
    moved = False
    for path, preferred in batch.outputs.items():
        result = results[path]
        if path not in other or other[path].shape != result.shape:
            return None
        for axis in (preferred, *(a for a in range(result.ndim) if a != preferred)):
            if result.size(axis) == batch.size and _alike(wanted := result.index_select(axis, order), other[path]):
                axes[path], moved = axis, moved or not same_bits(wanted, result)
                break
        else:
            return None
    return axes if moved else None


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    worst = gap({"": one}, {"": other})
    return worst.ratio <= 1.0 or worst.error <= LIKE


def _conventions(call: Call) -> list[int]:
    """Sizes of the axis that the model's own layers take for samples."""
    said: list[int] = []
    hooks = []

    def look(of: Callable[[torch.Tensor, nn.Module], int]) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
            value = args[0] if args else next(iter(kwargs.values()), None)
            if isinstance(value, torch.Tensor):
                said.append(of(value, module))

        return hook

    for module in call.module.modules():
        rule = _RULES.get(next((k for k in _RULES if isinstance(module, k)), nn.Identity))
        if rule is not None:
            hooks.append(module.register_forward_pre_hook(look(rule), with_kwargs=True))
    try:
        call.evaluate()
    except Exception as e:  # noqa: BLE001 - the program's own code
        raise Unknown(short(e)) from None
    finally:
        for hook in hooks:
            hook.remove()
    return [s for s in said if s > 0]


def _sequence(value: torch.Tensor, module: nn.Module) -> int:
    if value.ndim < 3:
        return 1  # unbatched
    return int(value.size(0 if getattr(module, "batch_first", False) else 1))


_RULES: Final = {
    nn.Conv1d: lambda v, _: v.size(0) if v.ndim == 3 else 1,
    nn.Conv2d: lambda v, _: v.size(0) if v.ndim == 4 else 1,
    nn.Conv3d: lambda v, _: v.size(0) if v.ndim == 5 else 1,
    nn.modules.batchnorm._BatchNorm: lambda v, _: v.size(0),
    nn.RNNBase: _sequence,
    nn.MultiheadAttention: _sequence,
    nn.TransformerEncoderLayer: lambda v, m: _sequence(v, m.self_attn),
    nn.TransformerDecoderLayer: lambda v, m: _sequence(v, m.self_attn),
}

