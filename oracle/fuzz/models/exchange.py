"""Twelve rows of a parameter that lie with the ranks, and one reduction over them: what the backward pass of a collective must give.

In one process the reduction is a plain operator. On ranks each has three, four, six or twelve of the rows, and the loss of its own rows of the batch, so that the gradient of a row is a sum
of what all ranks make of it. What is done with the result says in which layout its gradient comes back.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.models import ModelCode, Template, register
from proctor.oracle.fuzz.space import Choice, Point

ROWS: Final = 12
# Of equal parts of rows, what is reduced of the parts is what is reduced of all; no two elements are equal, so that the largest is one.
REDUCTIONS: Final = {"SUM": "t.sum(0)", "AVG": "t.mean(0)", "MAX": "t.amax(0)", "MIN": "t.amin(0)", "PRODUCT": "t.prod(0)"}
USES: Final = {
    "as it is": "",
    "expanded": "got.sum() * torch.arange(1, got.numel() + 1).to(x.dtype)",
    "transposed": "got.mT.contiguous()",
    "strided": "torch.stack([got, got], -1)[..., 0] * 2",
    "negative": "torch.complex(got, -got).conj().imag",
}


@register
class Exchange(Template):
    """A reduction of a parameter."""

    name: ClassVar[str] = "exchange"
    apart: ClassVar[bool] = True
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("reduction", tuple(REDUCTIONS)),
        Choice("shape", ("2, 3", "1, 1", "3, 2", "0, 2")),
        Choice("use", tuple(USES)),
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        reduction, use = str(point["reduction"]), USES[str(point["use"])]
        net = (
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.rows, self.bias, self.collect, self.op = nn.Parameter(torch.empty({ROWS}, {point['shape']})), nn.Parameter(torch.empty(1)), None, {reduction!r}",
            "    def forward(self, x):",
            f"        t, reduced = self.rows * 2, lambda t: {REDUCTIONS[reduction]}",
            "        got = self.collect(t, reduced) if self.collect else reduced(t)",
            *([f"        got = {use}"] if use else []),
            "        return x * torch.cat([got.flatten(), self.bias])",
        )
        special = {f"by {reduction}", f"used {point['use']}"} - {"by SUM", "used as it is"}
        return ModelCode(net=net, x="(torch.randn(n, 1, generator=g),)", y=(1,), traits=frozenset({"exchange", *special}))
