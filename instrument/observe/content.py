"""A tensor's memory: whether its content may be read, in which format, and where it lies in the whole of which it is a part.

`fingerprint` (on the host) and `on_device` read what this says may be read. No tensor is touched, and no mode, hook or graph of
the user's sees an operation of ours (`unseen`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from proctor.native import Tensors
from proctor.native.twins import fingerprint as keys

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor, dtype

ZERO: Final = keys.ZERO
NONFINITE: Final = keys.NONFINITE
CONSTANT: Final = keys.CONSTANT
UNHASHED: Final = 16
_DEVICES: Final = ("cuda", "xpu")  # have int64 and float64 arithmetic


class Summary(NamedTuple):
    """What is kept of a tensor's content."""

    fp: int  # 64 bits; 0 when UNHASHED or empty
    norm: float  # Euclidean; NaN where not computed (float8, UNHASHED)
    flags: int  # `invariants.schema.StateFlag`


def no_torch_function() -> Any:
    """What a `with` statement takes so that no `__torch_function__` of the program's runs within it."""
    return torch_function_off()()


@functools.cache
def torch_function_off() -> type[Any]:
    """The class of what `no_torch_function` gives, for those who ask many times a step."""
    import torch

    found: type[Any] = torch._C.DisableTorchFunction
    return found


@contextmanager
def unseen() -> Iterator[None]:
    """Torch ops that no mode, hook or graph of the user's sees."""
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), torch.no_grad(), _disable_current_modes():
        yield


@functools.cache
def formats() -> dict[dtype, tuple[int, int]]:
    """Bytes of an element and its kind, for each dtype that has whole bytes."""
    import torch

    known = {
        keys.FLOAT: {"float16": 2, "float32": 4, "float64": 8},
        keys.BFLOAT16: {"bfloat16": 2},
        keys.INT: {"int8": 1, "int16": 2, "int32": 4, "int64": 8},
        keys.UNSIGNED: {"bool": 1, "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8},
        keys.COMPLEX: {"complex64": 8, "complex128": 16},
        keys.RAW: {
            "complex32": 4,
            "float8_e4m3fn": 1,
            "float8_e4m3fnuz": 1,
            "float8_e5m2": 1,
            "float8_e5m2fnuz": 1,
            "float8_e8m0fnu": 1,
            "float4_e2m1fn_x2": 1,
        },
    }
    return {
        getattr(torch, name): (width, kind)
        for kind, names in known.items()
        for name, width in names.items()
        if hasattr(torch, name)
    }


@functools.cache
def reader() -> Tensors:
    """What reads plain tensors natively; where the extension is not in use it reads none, and Python does."""
    import torch

    return Tensors(torch.Tensor, torch.nn.Parameter, torch.strided, formats(), Summary)


def readable(tensor: Tensor) -> Tensor | None:
    """The tensor whose memory holds the content; None where there is none to read."""
    import torch

    if type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        local = getattr(tensor, "_local_tensor", None)  # DTensor
        return readable(local) if isinstance(local, torch.Tensor) else None
    if tensor.layout is not torch.strided or tensor.dtype not in formats() or tensor.is_meta or tensor.is_nested:
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return None
    if not tensor.is_cpu and (tensor.device.type not in _DEVICES or _capturing(tensor)):
        return None
    if tensor.numel() == 0:
        return None if isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin) else tensor
    # FSDP frees storage under living views; their data_ptr is then 0 + offset, and reading it a segmentation fault.
    if tensor.is_contiguous():
        extent = tensor.numel()
    else:
        extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))
    needed = (tensor.storage_offset() + extent) * tensor.itemsize
    return tensor if needed <= tensor.untyped_storage().nbytes() and tensor.data_ptr() else None


def plain(value: Any, largest: int) -> bool:
    """Whether a value is a dense tensor on the CPU, of no subclass but parameters and of 1 to `largest` elements, that is there to be read."""
    import torch

    return (
        type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu" and value.layout is torch.strided
        and 0 < value.numel() <= largest and not value.is_quantized and readable(value) is not None
    )  # fmt: skip


def _capturing(tensor: Tensor) -> bool:
    import torch

    return bool(tensor.device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def is_dense(tensor: Tensor) -> bool:
    """Memory holds the content's bits in logical order."""
    return bool(tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg())


def dense(tensor: Tensor) -> Tensor:
    if is_dense(tensor):
        return tensor
    with unseen():
        return tensor.detach().resolve_conj().resolve_neg().contiguous()


Runs = list[tuple[int, int]]  # (size, stride in the whole) from the outermost dimension to the innermost


def collapse(shape: Sequence[int], strides: Sequence[int]) -> Runs:
    """Fuse the dimensions that lie in the whole as one; the innermost has stride 1 (of size 1 if need be)."""
    runs: Runs = []
    for size, stride in zip(shape, strides):
        if size == 1:
            continue
        if runs and runs[-1][1] == size * stride:
            runs[-1] = (runs[-1][0] * size, stride)
        else:
            runs.append((size, stride))
    return runs if runs and runs[-1][1] == 1 else [*runs, (1, 1)]


def rows_of(runs: Runs, start: int) -> Iterator[tuple[int, int, int]]:
    """(start, rows, row stride) in elements: the two innermost runs, once for each index of the others."""
    rows, row_stride = runs[-2] if len(runs) > 1 else (1, 0)
    for index in itertools.product(*(range(size) for size, _ in runs[:-2])):
        yield start + sum(i * s for i, (_, s) in zip(index, runs[:-2])), rows, row_stride


def array_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The elements of a plain tensor on the CPU, copied.

    An array that shares a tensor's memory fixes its size for good: `resize_` of the program raises from then on, however briefly the array was there.
    """
    array: np.ndarray[Any, Any] = tensor.detach().clone().numpy()
    return array
