"""Activation checkpointing on and off gives the same gradients.

A program that checkpoints is run without it; of one that does not, each block is checkpointed. Catches forwards with side effects: counters,
random numbers of numpy or Python, inputs that are changed in place, masks that are drawn anew in the recomputation. A program that does not checkpoint may compute from buffers that its
forward moves (the vectors of a spectral norm of its own): the second pass would move them once more. With them put back for it, nothing differs, and that is by design.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch
import torch.utils.checkpoint as library
from torch import nn

from proctor.oracle.selfcheck import ModelRelation, NotApplicable, Unknown, register
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.watching.gaps import gap
from proctor.oracle.selfcheck.watching.seen.recomputed import uncheckpointed
from proctor.oracle.selfcheck.watching.step import Call, Outputs, short

APART: Final = 1e-5  # relative error of a gradient


@register
class Checkpointing(ModelRelation):
    """Compares gradients with and without."""

    name, claim = "checkpointing", "activation checkpointing on and off gives the same gradients"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        with uncheckpointed() as used:
            _, plain = _derived(call)
        how = "without the program's checkpointing" if used else "with every block checkpointed"
        try:
            if used:
                _, other = _derived(call)
            else:
                with _checkpointed(call.module):
                    _, other = _derived(call)
        except NotApplicable:
            raise
        except Exception as e:  # noqa: BLE001 - the program's own code, or checkpointing that finds another recomputation
            if "different metadata" in str(e) or "different number of tensors" in str(e):
                return self._differs(call, "", 1.0, 0.0, how, f"the recomputation does something else than the first pass: {short(e)}")
            raise Unknown(f"{how} the step fails: {short(e)}") from None
        again = _derived(call)[1] if used else None
        worst = gap(plain, other)  # the same operations in the same order: no noise is allowed for
        if worst.error > APART and not used and (moved := _moved(call, plain)):
            module = moved.rpartition(".")[0]
            reason = f"the forward computes from {moved} and moves it, so that a second pass in the backward moves it once more; the program does not checkpoint, and with it put back gradients are the same"
            return Outcome(relation=self.name, verdict="by-design", reason=reason, error=worst.error, tolerance=worst.tolerance, culprit=call.place(module))
        if worst.error > APART and (again is None or gap(other, again).ratio <= 1.0):
            return self._differs(call, worst.name, worst.error, worst.tolerance, how, f"the gradient of {worst.name} is another {how}")
        return Outcome(relation=self.name, verdict="equivalent", error=worst.error, tolerance=worst.tolerance, reason=f"gradients of {len(plain)} parameters are the same {how}")

    def _differs(self, call: Call, name: str, error: float, tolerance: float, how: str, reason: str) -> Outcome:
        return Outcome(
            relation=self.name, verdict="different", reason=reason, expected="what is computed again is what was computed first", seen=f"a difference of {error:.2g} of the norm",
            culprit=_stateful(call) or call.place(name.rpartition(".")[0]), error=error, tolerance=tolerance,
            advice="look for counters, numpy's or Python's random numbers, in-place changes of inputs, and preserve_rng_state=False",
        )  # fmt: skip


def _blocks(module: nn.Module) -> list[nn.Module]:
    """Members of the outermost lists of modules, else the children."""
    for part in module.modules():
        if isinstance(part, nn.ModuleList | nn.Sequential) and len(part) and part is not module:
            return [m for m in _members(part) if next(m.parameters(), None) is not None]
    return [m for m in module.children() if next(m.parameters(), None) is not None]


def _members(part: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """Those of a list within a list, too: a list has no forward that is called."""
    for member in part:
        if isinstance(member, nn.ModuleList):
            yield from _members(member)
        else:
            yield member


def _derived(call: Call) -> tuple[Outputs, Outputs]:
    """Results and gradients; buffers that the forward moves are what they were behind it, so that the next one begins with the same."""
    kept = [(part, name, buffer, buffer.detach().clone()) for part in call.module.modules() for name, buffer in part._buffers.items() if buffer is not None]
    try:
        return call.derive()
    finally:
        with torch.no_grad():
            for part, name, buffer, value in kept:
                part._buffers[name] = buffer.copy_(value) if buffer.shape == value.shape else value


def _moved(call: Call, plain: Outputs) -> str:
    """The first buffer that a block moves in its forward, where gradients are the same with all of them put back for the second pass; else ""."""
    inside = {id(part) for block in _blocks(call.module) for part in block.modules()}
    held = {f"{name}.{n}".lstrip("."): b for name, part in call.module.named_modules() if id(part) in inside for n, b in part._buffers.items() if b is not None}
    before = {name: buffer.detach().clone() for name, buffer in held.items()}
    try:
        with _checkpointed(call.module, put_back=True):
            _, other = _derived(call)
    except Exception:  # noqa: BLE001 - the program's own code
        return ""
    if gap(plain, other).error > APART:
        return ""
    call.evaluate(training=True)
    return next((name for name, buffer in held.items() if not torch.equal(buffer, before[name])), "")


def _put(parts: list[nn.Module], buffers: list[dict[str, Any]]) -> None:
    for part, held in zip(parts, buffers, strict=True):
        part._buffers.update(held)


@contextlib.contextmanager
def _checkpointed(module: nn.Module, *, put_back: bool = False) -> Iterator[None]:
    """Each block checkpointed.

    Args:
        put_back: a second pass begins with the buffers that the first one began with, and leaves none of what it writes.
    """
    blocks = _blocks(module)
    if not blocks:
        raise NotApplicable("it has no blocks that could be checkpointed")

    def around(block: nn.Module, forward: Any) -> Any:
        def passed(*args: Any, **kwargs: Any) -> Any:
            first: list[dict[str, Any]] = []

            def run(*args: Any, **kwargs: Any) -> Any:
                parts = [part for part in block.modules() if part._buffers]
                now = [dict(part._buffers) for part in parts]
                if not first:
                    first.extend({n: None if b is None else b.detach().clone() for n, b in held.items()} for held in now)
                    return forward(*args, **kwargs)
                try:
                    _put(parts, first)
                    return forward(*args, **kwargs)
                finally:
                    _put(parts, now)

            return library.checkpoint(run if put_back else forward, *args, use_reentrant=False, **kwargs)

        return passed

    try:
        for block in blocks:
            block.forward = around(block, block.forward)
        yield
    finally:
        for block in blocks:
            vars(block).pop("forward", None)


def _stateful(call: Call) -> Any:
    """The first module with a plain number that its forward changes."""
    before = {n: _numbers(m) for n, m in call.module.named_modules()}
    with contextlib.suppress(Exception):
        call.evaluate(training=True)
    return next((call.place(n) for n, m in call.module.named_modules() if before[n] != _numbers(m)), None)


def _numbers(module: nn.Module) -> dict[str, Any]:
    return {k: v for k, v in vars(module).items() if isinstance(v, int | float) and k != "training"}
