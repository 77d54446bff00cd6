"""Every input matters: with other values of it, some result is another one.

Catches an input that is overwritten, forgotten, or detached from the results. An input of one value only cannot be exchanged and is listed. A whole batch in one mapping is given to models
that ask for a part of it: an entry that the forward never asks for is no input of the model.
"""

from __future__ import annotations

import dis
import inspect
from typing import Any

import torch

from proctor.oracle.selfcheck import ModelRelation, NotApplicable, Unknown, register
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.step import Call, Outputs, written_at
from proctor.oracle.selfcheck.watching.values import exchanged, same_bits


@register
class Inputs(ModelRelation):
    """The values of one input at a time change places."""

    name, claim = "inputs", "every input of the model has a part in its results"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        results = call.baseline
        idle: list[str] = []
        moved: list[str] = []
        unable: list[str] = []
        for path, (name, tensor) in call.named_inputs.items():
            other = _other(tensor)
            if other is None:
                unable.append(name)
                continue
            try:
                matters = _matters(call, path, other, results)
            except Exception:  # noqa: BLE001 - the program's own code
                unable.append(name)
                continue
            (moved if matters else idle).append(name)
        if idle and any(t.requires_grad for _, t in call.named_inputs.values()):
            raise NotApplicable(f"{', '.join(idle)} has no part in a result, but activations come in beside it: the module is a later part of a model, which may leave it to the first one")
        numbers = {n for n, t in call.named_inputs.values() if _numbers(t) and not _read(call, n)}
        if idle and numbers.issuperset(idle):
            return Outcome(relation=self.name, verdict="by-design", reason=f"{', '.join(idle)} numbers the samples (as many different whole numbers as there are samples), and the forward never reads it", culprit=call.place())
        unasked = _unasked(call) if idle else set()
        if idle and all(n in numbers or ("." in n and n.rpartition(".")[2] in unasked) for n in idle):
            return Outcome(relation=self.name, verdict="by-design", reason=f"{', '.join(idle)} {'is' if len(idle) == 1 else 'are'} in the batch that the model is given, and the forward never asks for {'it' if len(idle) == 1 else 'them'}", culprit=call.place())
        if idle:
            where = written_at(call.module)
            return Outcome(
                relation=self.name, verdict="different", reason=f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no part in any result",
                expected="other values give other results", seen="the same bits, in training and in evaluation",
                culprit=Culprit(call.name, type(call.module).__name__, where, ""), advice=f"look where forward uses {idle[0]}",
            )  # fmt: skip
        said = f"; not exchanged, since of one value only or refused: {', '.join(unable)}" if unable else ""
        if not moved:
            raise (Unknown if unable else NotApplicable)(f"no input could be exchanged{said}" if unable else "it takes no tensors")
        return Outcome(relation=self.name, verdict="equivalent", reason=f"{', '.join(moved[:6])} {'matters' if len(moved) == 1 else 'matter'}{said}")


def _numbers(tensor: torch.Tensor) -> bool:
    """Whether it tells samples apart and nothing else: identifiers come in beside features and are often left alone."""
    whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    return whole and tensor.ndim == 1 and tensor.numel() > 1 and int(tensor.unique().numel()) == tensor.numel()


def _read(call: Call, name: str) -> bool:
    """Whether the forward does anything with an argument; true where its code is not there to look at."""
    code = getattr(inspect.unwrap(type(call.module).forward), "__code__", None)
    if code is None or name not in code.co_varnames or name in code.co_cellvars:
        return True
    return any(name == i.argval or (isinstance(i.argval, tuple) and name in i.argval) for i in dis.get_instructions(code) if i.opname.startswith("LOAD_FAST"))


class _Noting(dict[Any, Any]):
    """A mapping that notes what is asked of it."""

    def __init__(self, given: dict[Any, Any], asked: set[Any]) -> None:
        super().__init__(given)
        self._asked = asked

    def __getitem__(self, key: Any) -> Any:
        self._asked.add(key)
        return super().__getitem__(key)

    def __iter__(self) -> Any:  # as `**batch` does, too, which asks for each
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        self._asked.add(key)
        return super().get(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        self._asked.add(key)
        return super().pop(key, *default)

    def items(self) -> Any:
        self._asked.update(self.keys())
        return super().items()

    def values(self) -> Any:
        self._asked.update(self.keys())
        return super().values()

    def copy(self) -> Any:
        return _Noting(self, self._asked)


def _unasked(call: Call) -> set[str]:
    """Keys of mappings among the arguments that the forward asks for neither in training nor in evaluation."""
    asked: set[Any] = set()
    keys: set[Any] = set()

    def noting(value: Any) -> Any:
        if type(value) is not dict:
            return value
        keys.update(value)
        return _Noting({key: noting(item) for key, item in value.items()}, asked)

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        return tuple(noting(a) for a in args), {name: noting(value) for name, value in kwargs.items()}

    handle = call.module.register_forward_pre_hook(before, with_kwargs=True)
    try:
        for training in (False, True):
            call.evaluate(training=training)
    except Exception:  # noqa: BLE001 - the program's own code, which may want a plain mapping
        return set()
    finally:
        handle.remove()
    return {str(key) for key in keys - asked}


def _matters(call: Call, path: str, other: torch.Tensor, results: Outputs) -> bool:
    changed = exchanged(call.inputs, lambda p, t: other if p == path else t)
    for training in (False, True):
        before = results if not training else call.evaluate(training=True)
        seen = call.evaluate(changed, training=training)
        if seen.keys() != before.keys() or any(not same_bits(before[p], seen[p]) for p in before):
            return True
    return False


def _other(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same values in other places; `None` where that changes nothing."""
    if isinstance(tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.numel() < 2:
        return None
    flat = tensor.detach().reshape(-1)
    kinds = flat.unique()
    if kinds.numel() < 2:
        binary = tensor.dtype == torch.bool or (tensor.ndim == 2 and float(kinds[0]) == 1.0)
        if not binary or tensor.numel() < 4:
            return None
        made = tensor.detach().clone()  # a mask that shows everything: hide the last of the first sample
        made[0, -1:] = 0
        return made
    made = torch.roll(flat, 1).reshape(tensor.shape)
    return None if same_bits(made, tensor) else made
