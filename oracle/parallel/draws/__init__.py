"""What is drawn: one random operation = one file, which registers itself.

An operation here is a kernel of torch for the CPU, under which all others end: `torch.rand`, `rand_like` and
`nn.init.kaiming_uniform_` end in `uniform_`; `F.dropout`, an attention's dropout and an LSTM's in `bernoulli_`. A rule says
how an element follows from random words (`keyed`) and which kernel of torch draws it (`kernel`). To add one:

    @register("mine_")                                     # overloads of aten, as torch.library writes them
    class Mine(Elementwise):
        def keyed(self, bits, dtype, low): return bits.unit() + low
        def kernel(self, out, low, *, generator): out.mine_(low, generator=generator)

`FIXED` lists operations that torch tags as random and that draw nothing on a CPU. What has no rule stops where it is
called in a parallel model, with its name and the user's line (`intercept`).
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections.abc import Callable
from typing import Any, ClassVar, Final, Protocol

import torch

from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.streams import Ident, Stream
from proctor.oracle.parallel.streams.keyed import Bits

FIXED: Final = {
    "_fused_sdp_choice": "chooses a kernel by shapes and types",
    "_scaled_dot_product_flash_attention_for_cpu": "is chosen without dropout only",
}


class Place(Protocol):
    """Where a draw lies: asked once for each draw, with the tensor that is drawn.

    One with a method `applies` is asked first, with the operation's arguments, whether what is drawn now is its concern; else torch draws.
    """

    def __call__(self, tensor: torch.Tensor) -> tuple[Stream, Box, Ident]:
        """The stream, the tensor's part of the whole, and the name of this draw."""
        ...


class Draw:
    """One random operation. A rule is called with the arguments of the operation, and with where its result lies.

    Args of the class:
        name: the first of its overloads.
        overloads: of aten.
    """

    name: ClassVar[str] = ""
    overloads: ClassVar[tuple[str, ...]] = ()

    def __call__(self, place: Place, *args: Any, **kwargs: Any) -> Any:
        """Carry out the operation for this rank's part; returns what the operation returns."""
        raise NotImplementedError


class Elementwise(Draw):
    """An operation that overwrites a tensor, each element by itself.

    Args of the class:
        blocks: whether torch's kernel draws in blocks of 16 as `normal_` does.
        curand: of the stock stream on a GPU: curand's distribution, and C++ for an element: of x, which is its number times b plus a (of "uniform": times b − a),
            in the tensor's dtype. Empty: no rule there.
    """

    blocks: ClassVar[bool] = False
    curand: ClassVar[tuple[str, str]] = ("", "")

    def keyed(self, bits: Bits, dtype: torch.dtype, *args: Any) -> torch.Tensor:
        """[N] elements from random words; in a dtype that is rounded once to `dtype`."""
        raise NotImplementedError

    def kernel(self, out: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Draw with torch's own kernel from `generator`."""
        raise NotImplementedError

    def variety(self, *args: Any) -> str:
        """What else than the dtype decides how many numbers the kernel draws an element."""
        return ""

    def arguments(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The operation's arguments after the tensor, in order and complete."""
        return args

    def __call__(self, place: Place, out: torch.Tensor, *args: Any, generator: Any = None, **kwargs: Any) -> torch.Tensor:
        """See `Draw`."""
        stream, box, ident = place(out)
        stream.fill(self, out, box, self.arguments(*args, **kwargs), ident)
        return out


_REGISTRY: dict[str, Draw] = {}


def register(*overloads: str) -> Callable[[type[Draw]], type[Draw]]:
    """Decorator: makes a rule known for overloads of aten."""

    def add(kind: type[Draw]) -> type[Draw]:
        kind.name, kind.overloads = overloads[0], overloads
        made = kind()
        for overload in overloads:
            _REGISTRY[overload] = made
        return kind

    return add


@functools.cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


def registry() -> dict[str, Draw]:
    """Rules by overload."""
    _load()
    return dict(sorted(_REGISTRY.items()))


def rule(name: str) -> Draw:
    """The rule of an overload."""
    _load()
    return _REGISTRY[name]
