"""What a recorder asks of an operator, a tensor or a call: which results are written where, of what kind, by which group; and whose line it is."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any, Final, NamedTuple

import torch

from proctor.oracle.prove.tape import Array, Window

SILENT: Final = ("profiler.", "aten._assert", "aten.sym_", "prim.device", "aten.is_same_size", "aten.record_stream", "c10d.monitored_barrier", "_c10d_functional._wrap_tensor", "_c10d_functional.wait_tensor")
FRESH: Final = frozenset({"empty", "empty_strided", "new_empty", "new_empty_strided", "empty_like", "empty_permuted"})
RANDOM: Final = frozenset({
    "bernoulli", "bernoulli_", "rand", "randn", "rand_like", "randn_like", "randint", "randperm", "normal", "normal_",
    "uniform_", "native_dropout", "multinomial", "exponential_", "random_",
})
TURNED: Final = ("aten.transpose_.", "aten.t_.", "aten.squeeze_.", "aten.unsqueeze_.", "aten.as_strided_.", "aten.detach_.")  # in place, of how a tensor is looked at
FAKE: Final = "FakeTensor"
PLAIN: Final = frozenset({torch.Tensor, torch.nn.Parameter})
COMPLEX_KINDS: Final = frozenset({torch.complex32, torch.complex64, torch.complex128})
_OWN: Final = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)
_NUMPY: Final = torch._C.TensorBase.numpy  # what a program reads by is followed, and this is not the program
_LIBRARY: Final = ("site-packages", "dist-packages", "/lib/python", "<frozen", "<string>", "<__array")


class Operator(NamedTuple):
    """What is known of an operator before it is called.

    Attributes:
        base: its name without namespace and overload.
        silent: not recorded.
        writes: into what it is given, or may, as collectives do.
        talks: with other ranks.
        known: has a meaning.
        view: gives a view of its first argument, which is its only tensor, where that can be.
        made_of: torch's decomposition, where there is no meaning for the whole.
        inner: a library's own operator, of which the operations inside are recorded.
        takes: what is in the tensors that it is given, and not their shapes alone.
        plain: draws no random numbers, and gives no memory that nothing was written to.
    """

    name: str
    base: str
    silent: bool
    writes: bool
    talks: bool
    known: bool
    view: bool
    made_of: Callable[..., Any] | None
    inner: bool
    takes: bool
    plain: bool


_OPERATORS: Final[dict[int, tuple[Operator, Any]]] = {}


def operator(func: Any) -> Operator:
    """What is known of it, found by its address: its own hash is a function of Python. It is held, so that its address is not given away again."""
    found = _OPERATORS.get(id(func))
    if found is None:
        found = _OPERATORS[id(func)] = _operator(func), func
    return found[0]


def _operator(func: Any) -> Operator:
    from proctor.oracle.prove.meanings import known

    name, schema = f"{func}", func._schema
    view = len(schema.returns) == 1 and schema.returns[0].alias_info is not None and not func._schema.is_mutable and [k for k, a in enumerate(schema.arguments) if "Tensor" in str(a.type)] == [0]
    talks = name.startswith(("c10d.", "_c10d_functional"))
    base = name.split(".")[1] if "." in name else name
    takes = not base.startswith("new_") and (base in RANDOM or not base.endswith("_like"))
    return Operator(name, base, name.startswith((*SILENT, *TURNED)), _writes(func), talks, known(name), view, _decompositions().get(func), name.startswith("fsdp."), takes, base not in RANDOM and base not in FRESH)


def user_frame() -> str:
    """ "file:line function" of the innermost frame that is neither ours nor a library's; "" when there is none."""
    frame: Any = sys._getframe(1)
    fallback = ""
    while frame is not None:
        code = frame.f_code
        whose = _whose(code.co_filename)
        if whose and not (fallback and whose == "a library's"):
            said = _said(code, frame.f_lasti)
            if whose == "the user's":
                return said
            fallback = said
        frame = frame.f_back
    return fallback


_LINES: Final[dict[tuple[int, int], tuple[str, CodeType]]] = {}


def _said(code: CodeType, at: int) -> str:
    """A line of code, by the instruction that runs; code is held, as in `operator`: that of two copies of a file is equal."""
    found = _LINES.get((id(code), at))
    if found is None:
        line = next((line for first, last, line in code.co_lines() if first <= at < last and line is not None), code.co_firstlineno)
        found = _LINES[id(code), at] = f"{code.co_filename}:{line} {code.co_name}", code
    return found[0]


@functools.cache
def _whose(path: str) -> str:
    """Of a file: ours or torch's "", a library's, or the user's."""
    if path.startswith(_OWN):
        return ""
    return "a library's" if any(library in path for library in _LIBRARY) else "the user's"


def imagined(t: torch.Tensor) -> bool:
    return t.is_meta or type(t).__name__ == FAKE


def unreal(types: Any, kwargs: Any) -> bool:
    return any(t.__name__ == FAKE for t in types) or ("device" in kwargs and str(kwargs["device"]).startswith("meta"))


def tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for v in value for t in tensors(v)]
    if isinstance(value, dict):
        return [t for v in value.values() for t in tensors(v)]
    return []


def counts(args: Any, kwargs: Any) -> bool:
    """Whether an operation takes integers and truth values alone: what it gives is taken as recorded, and needs no meaning."""
    given = tensors([args, kwargs])
    return bool(given) and not any(t.is_floating_point() or t.is_complex() for t in given)


def results(result: Any) -> list[torch.Tensor | None]:
    """Results by position: a gradient that nobody wants is None, and keeps its place."""
    if isinstance(result, torch.Tensor):
        return [result]
    if not isinstance(result, list | tuple):
        return []
    return [found for value in result for found in ([None] if value is None else results(value))]


def _writes(func: Any) -> bool:
    return bool(func._schema.is_mutable) or func.namespace == "c10d"


def written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [t for position, name in _written(func) for t in tensors(args[position] if position < len(args) else kwargs.get(name))]


@functools.cache
def _written(func: Any) -> list[tuple[int, str]]:
    """Number and name of the arguments that an operator writes to."""
    found = []
    for position, argument in enumerate(func._schema.arguments):
        written = argument.alias_info is not None and argument.alias_info.is_write
        if not written and func.namespace == "c10d" and "send" not in str(func):
            written = argument.name in ("tensors", "output_tensors", "output_tensor", "output", "tensor", "output_buffer")
        if written:
            found.append((position, argument.name))
    return found


def others(func: Any, result: Any) -> list[torch.Tensor]:
    """Results of a writing operation that are not what it writes to."""
    values = result if isinstance(result, list | tuple) else [result]
    fresh = _fresh(func)
    if func.namespace == "c10d" or len(fresh) != len(values) or True not in fresh:
        return []
    return [t for new, v in zip(fresh, values) if new for t in tensors(v)]


@functools.cache
def _fresh(func: Any) -> list[bool]:
    """Of each result, whether it is none of the arguments."""
    return [r.alias_info is None for r in func._schema.returns]


def hidden(base: str, args: Any) -> list[torch.Tensor]:
    """What an operator writes to without saying so: running averages of a batch's norm in training."""
    if base != "native_batch_norm" or len(args) < 6 or not args[5]:
        return []
    return [t for t in args[3:5] if isinstance(t, torch.Tensor)]


_KINDS: Final[dict[torch.dtype, str]] = {}


def window_of(storage: int, t: torch.Tensor) -> Window:
    """How a tensor looks at its storage. A complex one is an array of pairs of reals, as `view_as_real` shows it."""
    kind = _KINDS.get(t.dtype)
    if kind is None:
        if t.dtype in COMPLEX_KINDS:
            return Window(storage, 2 * t.storage_offset(), (*t.shape, 2), (*(2 * s for s in t.stride()), 1), "f")
        kind = _KINDS[t.dtype] = _kind(t.dtype)
    return Window(storage, t.storage_offset(), tuple(t.shape), t.stride(), kind)


def kind_of(t: torch.Tensor) -> str:
    return _kind(t.dtype)


@functools.cache
def _kind(dtype: torch.dtype) -> str:
    if dtype == torch.bool:
        return "b"
    return "f" if dtype.is_floating_point or dtype.is_complex else "i"


def array_of(t: torch.Tensor) -> Array:
    """A copy of a tensor's numbers, in order; pairs of a complex one."""
    if t.dtype in (torch.bfloat16, torch.float16) or (t.dtype.is_floating_point and t.element_size() < 4):
        t = t.to(torch.float32)
    if t.is_complex():
        t = torch.view_as_real(t.resolve_conj())
    array: Array = _NUMPY(t.resolve_neg().contiguous().cpu()).reshape(-1).copy()
    return array


def whole(t: torch.Tensor) -> Array:
    """A copy of all that a tensor's storage holds."""
    storage, dtype = t.untyped_storage(), t.dtype.to_real() if t.is_complex() else t.dtype
    count = storage.nbytes() // dtype.itemsize
    return array_of(torch.empty(0, dtype=dtype, device=t.device).set_(storage, 0, (count,), (1,)))


def kernel(func: Any) -> Any:
    """The implementation of a library's own operator, whose inner operations are then seen."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)

    return call


def group_of(args: Any, kwargs: Any) -> tuple[int, ...]:
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _resolve_process_group

    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(value)))
    names = [v for v in (*args, *kwargs.values()) if isinstance(v, str)]
    return tuple(dist.get_process_group_ranks(_resolve_process_group(names[-1]))) if names else ()


@functools.cache
def _decompositions() -> dict[Any, Any]:
    """Operators that are recorded as what torch says they are made of, since we have no meaning for the whole."""
    from torch._decomp import core_aten_decompositions, decomposition_table

    from proctor.oracle.prove.meanings import known

    others = {op: how for op, how in decomposition_table.items() if hasattr(op, "_schema") and any("Tensor" in str(a.type) for a in op._schema.arguments)}
    table = {**others, **core_aten_decompositions()}
    return {op: how for op, how in table.items() if hasattr(op, "_schema") and not known(str(op)) and str(op).split(".")[1] not in RANDOM}
