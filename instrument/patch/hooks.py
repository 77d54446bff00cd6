"""How a tap calls hooks of ours: as one, unseen by the program's modes, not compiled, and timed where there is a budget.

Probes and `steps/` give functions; `patches` gives taps what comes out of here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from proctor.native import Chain

Hook = Callable[..., None]
Labelled = tuple[str, bool, Hook]  # as `native/calls/chain.h` says


class Timed(Protocol):
    """What times hooks (`budget.Meter`)."""

    idle: bool

    def around(self, hook: Hook) -> Hook: ...


def as_one(
    hooks: Iterable[Labelled], wants: Callable[[], bool], off: set[str], over: set[str], takes: Callable[[str, Exception], bool], *, dispatched: bool = False
) -> Chain:
    """Hooks as one, of which a call takes as little as it can: a model may be called thousands of times a step.

    Args:
        hooks: label, whether it runs in any case, and function; without a label it guards itself and runs in any case.
        wants: whether those with a label are to run; asked behind the hooks before them, which may begin a step.
        off: labels of those that run no more, since one raised.
        over: labels of those that run no more, since they have nothing left to do.
        takes: says whether an error of a hook with a label ends here.
        dispatched: whether they belong to a function that torch hands to the `__torch_function__` of what it is given. Where that is no tensor,
            hooks with a label do not run: what it is only code of the program's could tell.
    """
    import torch

    modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
    return Chain(tuple((label, always, _left_by_compilers(hook)) for label, always, hook in hooks), wants, off, over, takes, modes, _aside, torch.Tensor, torch.nn.Parameter, dispatched)


def unseen(hook: Hook) -> Chain:
    """The hook, where what it reads of tensors reaches no TorchFunctionMode and no TorchDispatchMode of the program's."""
    return hook if isinstance(hook, Chain) else as_one([("", True, hook)], bool, set(), set(), lambda label, error: False)


def measured(hook: Chain, meter: Timed) -> Hook:
    """The hook, timed where the meter is not idle."""
    timed = meter.around(hook)

    def call(*args: Any) -> None:
        if meter.idle:
            hook(*args)
        else:
            timed(*args)

    return _left_by_compilers(call)


def _left_by_compilers(hook: Hook) -> Hook:
    """Keep Dynamo from compiling this and all that it calls: behind a graph break it compiles whatever runs."""
    from torch._C._dynamo import eval_frame

    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    if code is None:
        return _left_by_compilers(lambda *args: hook(*args))
    strategy, action = getattr(eval_frame, "_FrameExecStrategy", None), getattr(eval_frame, "_FrameAction", None)
    if strategy is not None and action is not None:
        eval_frame.set_code_exec_strategy(code, strategy(action.SKIP, action.SKIP))
    return hook


def _aside(run: Hook, args: tuple[Any, ...]) -> None:
    """`run(*args)` while no mode of the program's is on."""
    import torch
    from torch.utils import _python_dispatch

    with torch._C.DisableTorchFunction(), _python_dispatch._disable_current_modes():
        run(*args)
