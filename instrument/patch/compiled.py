"""What `torch.compile` asks of functions that it follows into, and whether a program uses it.

Dynamo finds a method in its class (`type(self).__dict__["pick"]`) and guards what it has beside its code: default arguments, and variables of the function around it, as
`super()` has one. These guards take nothing but a function of Python, and a tap is none: the program would end with "Guard failed". So such methods stand without a tap in a process that compiles
(`usercode.py`). Module-level functions are found by another name, and keep theirs.
"""

from __future__ import annotations

import sys
import types


def guarded(function: types.FunctionType) -> bool:
    """Whether Dynamo guards more of a method than its code."""
    return bool(function.__defaults__ or function.__kwdefaults__ or function.__closure__)


def anything_compiled() -> bool:
    """Whether anything in this process was given to `torch.compile`; also where torch does not tell."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is None:
        return False
    backends = getattr(dynamo, "cached_backends", None)
    return not isinstance(backends, dict) or any(backend is not None for backend in backends.values())
