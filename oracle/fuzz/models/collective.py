"""Twelve rows of numbers that lie with the ranks, and one reduction over them: what collectives must give in every type, shape and memory layout.

In one process the reduction is a plain operator. The numbers are small and whole, so that every type holds the result exactly.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.models import ModelCode, Template, register
from proctor.oracle.fuzz.space import Choice, Point

ROWS: Final = 12
TYPES: Final = ("float64", "float32", "bfloat16", "float16", "complex128", "complex64", "int64", "int32", "int16", "int8", "uint8", "bool")
REDUCTIONS: Final = {
    "SUM": "t.sum(0, dtype=t.dtype)",
    "PRODUCT": "t.prod(0, dtype=t.dtype)",
    "MAX": "t.amax(0)",
    "MIN": "t.amin(0)",
    "BAND": "functools.reduce(torch.bitwise_and, t)",
    "BOR": "functools.reduce(torch.bitwise_or, t)",
    "BXOR": "functools.reduce(torch.bitwise_xor, t)",
}


@register
class Collective(Template):
    """A reduction."""

    name: ClassVar[str] = "collective"
    apart: ClassVar[bool] = True
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("dtype", TYPES),
        Choice("shape", ("3", "2, 3", "", "0", "2, 0", "2, 2, 3, 2")),
        Choice("reduction", tuple(REDUCTIONS)),
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        dtype, reduction = str(point["dtype"]), str(point["reduction"])
        shape = f"{ROWS}, {point['shape']}".rstrip(", ")
        kind = "bool" if dtype == "bool" else "complex" if "complex" in dtype else "float" if "float" in dtype else "int"
        value = {"bool": "t > 1", "complex": "torch.complex(t.double(), t.flip(0).double() - 1)"}.get(kind, "t")
        special = {f"{kind} values", f"of {dtype}", f"by {reduction}", f"shape {point['shape']}"} - {"float values", "of float64", "by SUM", "shape 3"}
        net = (
            "import functools",
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.bias, self.collect, self.op = nn.Parameter(torch.empty(1)), None, {reduction!r}",
            "    def forward(self, x):",
            f"        t = (torch.randint(0, 9, ({shape},), generator=torch.Generator().manual_seed(3)) == 0) + 1",
            f"        t, reduced = ({value}).to(torch.{dtype}), lambda t: {REDUCTIONS[reduction]}",
            "        got = self.collect(t, reduced) if self.collect else reduced(t)",
            f"        got = {'torch.view_as_real(got.resolve_conj())' if kind == 'complex' else 'got'}.flatten().to(x.dtype)",
            "        return x * torch.cat([got, self.bias])",
        )
        return ModelCode(net=net, x="(torch.randn(n, 1, generator=g),)", y=(1,), traits=frozenset({"collective", *special}))
