"""What `torch.compile` wraps, seen from outside: a compiled region is compared at its edges.

A region is a module whose call is compiled (`torch.compile(module)`, `module.compile()`) or whose forward is. Nothing of
ours stands inside it: its modules get no hooks, and what dynamo traces of our patches is the call that they stand for.
The values at a region's edge are taken around its call, where they are the values of an eager program. A module of a
region that is called outside of it is seen as any other.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import wrapt
from torch import nn

from proctor.oracle.collect.finding.roots import Meta

DISABLED = "TORCHDYNAMO_DISABLE"


class Edge(NamedTuple):
    """A module that is seen where it is called, and not by hooks.

    Args:
        meta: its name, class and `file:line`.
        key: under which its calls are counted.
        left_out: sides that the model as a whole does not have there.
        compiled: its call is a compiled region; otherwise it is inside one.
    """

    meta: Meta
    key: str
    left_out: frozenset[str]
    compiled: bool


class Regions:
    """The compiled regions of a process.

    Args:
        on: compiled regions run as such; otherwise there are none.
    """

    def __init__(self, on: bool) -> None:
        self.on = on and os.environ.get(DISABLED) != "1"
        self.edges: dict[int, Edge] = {}  # by id of the module
        self.names: set[str] = set()
        self.running = False

    def calls(self, root: nn.Module) -> list[nn.Module]:
        """The modules below a root, itself among them, whose call is compiled."""
        return [m for m in root.modules() if _call_is_compiled(m)] if self.on else []

    def inside(self, root: nn.Module) -> set[int]:
        """Ids of the modules that a compiled region calls."""
        if not self.on:
            return set()
        found = [m for m in root.modules() if _call_is_compiled(m) or _forward_is_compiled(m)]
        return {id(child) for m in found for child in m.modules() if child is not m}

    def with_forward(self, root: nn.Module) -> list[nn.Module]:
        """The modules whose forward is compiled, but not their call: their hooks are outside."""
        return [m for m in root.modules() if _forward_is_compiled(m) and not _call_is_compiled(m)] if self.on else []


def _call_is_compiled(module: nn.Module) -> bool:
    if type(module).__name__ == "OptimizedModule":
        return type(vars(module).get("dynamo_ctx")).__name__ != "DisableContext"  # torch.compiler.disable wraps likewise
    return getattr(module, "_compiled_call_impl", None) is not None


def _forward_is_compiled(module: nn.Module) -> bool:
    forward = vars(module).get("forward", getattr(type(module), "forward", None))
    return type(module).__name__ != "OptimizedModule" and hasattr(forward, "_torchdynamo_orig_callable")


def unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ours that dynamo leaves out, and leaves alone between the pieces of a region that breaks."""
    disabled: list[Callable[..., Any]] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        if not disabled:
            if not hasattr(sys.modules.get("torch._dynamo"), "disable"):
                return function(*args, **kwargs)
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return run


def anything_compiled() -> bool:
    """Whether dynamo traced anything in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return bool(counters.get("stats", {}).get("unique_graphs", 0))


def skip_frames(*owners: type) -> None:
    """Have dynamo not begin to trace at a function of these classes; what they call it sees as ever."""
    codes = [code for owner in owners for f in vars(owner).values() if isinstance(f, FunctionType) for code in _codes(f.__code__)]
    codes += _codes(unseen.__code__)

    def tell(module: Any) -> None:
        for code in codes:
            module.skip_code(code)

    wrapt.register_post_import_hook(tell, "torch._dynamo.eval_frame")


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)
