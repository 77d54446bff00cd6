"""What torch computes over all parameters at once, made right for parameters of which a rank holds a part.

`clip_grad_norm_` and `get_total_norm` add up the parts of all ranks; optimizers that look at a whole matrix (Adafactor, Muon,
LBFGS) are refused, since a part is not what they mean. Both look at a mark that `run` puts on parameters;
tensors without one are torch's own business.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Final

import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.comm import Comm
from proctor.oracle.parallel.threads import Thread, current
from proctor.oracle.parallel.zero import local

_MARK: Final = "_proctor_cut"
_WHOLE: Final = ("Adafactor", "LBFGS", "Muon", "SparseAdam", "Shampoo", "SOAP", "LAMB", "Lars", "GaLore")
Mark = tuple[Comm, tuple[str, ...], str, bool]
_lock = threading.RLock()
_marked: weakref.WeakValueDictionary[int, torch.nn.Parameter] = weakref.WeakValueDictionary()
_installed: list[Any] = []


def mark(parameter: torch.nn.Parameter, comm: Comm, axes: tuple[str, ...], stages: str = "", counted: bool = True) -> None:
    """Say along which axes a parameter is cut, along which one ranks hold other parameters, and whether this rank counts it."""
    _install()
    setattr(parameter, _MARK, (comm, axes, stages, counted))
    with _lock:
        _marked[id(parameter)] = parameter


def _marks() -> dict[int, Mark]:
    """Marks by the identity of gradients: looked up when a norm is asked for, so that a backward pays nothing.

    Only of this rank: on threads, another one's backward may be replacing its gradients now, and to read them then ends the process.
    """
    with _lock:
        marks = [(p, getattr(p, _MARK)) for p in _marked.values()]
    return {id(p.grad): mark for p, mark in marks if _here(mark[0]) and p.grad is not None}


def _here(comm: Comm) -> bool:
    rank = current()
    if rank is None or not isinstance(comm, Thread):
        return rank is None and not isinstance(comm, Thread)
    return comm.world is rank.world and comm.rank == rank.rank


def _install() -> None:
    with _lock:
        if _installed:
            return
        from torch.nn.utils import clip_grad
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        torchs = clip_grad._get_total_norm

        def total_norm(tensors: Any, norm_type: float = 2.0, *args: Any, **kwargs: Any) -> torch.Tensor:
            held = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            marks = _marks()
            if not any(id(t) in marks for t in held):
                return torchs(held, norm_type, *args, **kwargs)
            return _over_ranks(held, marks, float(norm_type), *args, torchs=torchs, **kwargs)

        clip_grad._get_total_norm = total_norm
        if hasattr(torch.nn.utils, "get_total_norm"):
            torch.nn.utils.get_total_norm = total_norm
        _installed.append(register_optimizer_step_pre_hook(_refuse))


def _over_ranks(
    tensors: list[torch.Tensor], marks: dict[int, Mark], order: float, error_if_nonfinite: bool = False, foreach: bool | None = None, *, torchs: Any
) -> torch.Tensor:
    by_axes: dict[tuple[str, ...], list[torch.Tensor]] = {}
    comm: Comm | None = None
    stages = ""
    for tensor in tensors:
        comm, axes, stages, counted = marks.get(id(tensor), (comm, (), stages, True))
        if counted:
            by_axes.setdefault(axes, []).append(tensor)
    endless = order == float("inf")
    norms = []
    # All ranks hold the same parameters in the same order, so they come by here in the same order, too.
    for axes, group in by_axes.items():
        norm = torchs([local(tensor) for tensor in group], order, False, foreach)
        if axes and comm is not None:
            norm = comm.all_reduce(norm, axes, "max") if endless else comm.all_reduce(norm**order, axes) ** (1 / order)
        norms.append(norm)
    total = torch.linalg.vector_norm(torch.stack(norms), order) if norms else torch.zeros(())
    if stages and comm is not None:
        total = comm.all_reduce(total, (stages,), "max") if endless else comm.all_reduce(total**order, (stages,)) ** (1 / order)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(f"The total norm of order {order} for gradients is non-finite")
    return total


def _refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    kind = type(optimizer).__name__
    if not any(kind.lower().startswith(name.lower()) for name in _WHOLE):
        return
    if any(hasattr(p, _MARK) for p in _parameters(optimizer)):
        raise OracleError(f"{kind} looks at whole parameters, and a rank of this model holds parts", hint="use an elementwise optimizer such as AdamW")


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Any]:
    return (p for group in optimizer.param_groups for p in group["params"])
