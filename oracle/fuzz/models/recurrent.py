"""A recurrent network over short sequences, and a head."""

from __future__ import annotations

from typing import ClassVar

from proctor.oracle.fuzz.models import ModelCode, Template, _parts, register
from proctor.oracle.fuzz.space import Choice, Point

LENGTH = 3


@register
class Recurrent(Template):
    """RNN, GRU or LSTM; one way or both; with a projection where the cell has one."""

    name: ClassVar[str] = "recurrent"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("cell", ("RNN", "GRU", "LSTM")),
        Choice("width", (4, 5, 3)),
        Choice("depth", (1, 2)),
        Choice("both_ways", (False, True)),
        Choice("projected", (False, True), rare=0.3),
        *_parts.CHOICES,
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        width, depth = int(str(point["width"])), int(str(point["depth"]))
        projected = bool(point["projected"]) and point["cell"] == "LSTM"
        more = f", num_layers={depth}, bidirectional={bool(point['both_ways'])}" + (", proj_size=2" if projected else "")
        out = (2 if projected else width) * (2 if point["both_ways"] else 1)
        net = [
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.cell = nn.{point['cell']}({width}, {width}, batch_first=True{more})",
            f"        self.head = nn.Linear({out}, 3)",
            *_parts.init_lines(point, width),
            "    def forward(self, x):",
            *_parts.forward_lines(point),
            "        return self.head(self.cell(x)[0])",
        ]
        return ModelCode(
            net=tuple(net),
            x=f"(torch.randn(n, {LENGTH}, {width}, generator=g),)",
            y=(LENGTH, 3),
            after=_parts.after_lines(point),
            units=("net.cell",),
            tensor_parallel={"head": "linear"},
            traits=_parts.traits(point) | {"recurrent"},
        )
