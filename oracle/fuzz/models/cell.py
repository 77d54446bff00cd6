"""Cells: a graph of layers with one input and one output (D3 §III-D, after Muffin).

Each vertex reads the sum of one or two earlier vertices; what nothing reads is summed into the output.
"""

from __future__ import annotations

import random
from typing import ClassVar

from proctor.oracle.fuzz.models import ModelCode, Template, _layers, _parts, register
from proctor.oracle.fuzz.space import Choice, Point


@register
class Cell(Template):
    """A directed graph without cycles, drawn from `wiring`."""

    name: ClassVar[str] = "cell"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("layers", tuple(_layers.LAYERS), most=5),
        Choice("width", (4, 8, 5, 6, 3)),
        Choice("wiring", tuple(range(16))),
        *_parts.CHOICES,
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        layers, width = list(point["layers"]), int(str(point["width"]))  # type: ignore[arg-type]
        steps, result = _graph(len(layers), int(str(point["wiring"])))
        made = ", ".join(_layers.constructor(layer, width) for layer in layers)
        net = [
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.cell = nn.ModuleList([{made}])",
            *_parts.init_lines(point, width),
            "    def forward(self, x):",
            *_parts.forward_lines(point),
            *(f"        {line}" for line in steps),
            f"        return {result}",
        ]
        return ModelCode(
            net=tuple(net),
            x=f"(torch.randn(n, {width}, generator=g),)",
            y=(width,),
            after=_parts.after_lines(point),
            units=tuple(f"net.cell[{i}]" for i in range(len(layers))),
            tensor_parallel=_layers.parallel(layers, "cell"),
            pairs=_layers.pairs(layers, "cell"),
            traits=_layers.traits(layers) | _parts.traits(point),
        )


def _graph(vertices: int, wiring: int) -> tuple[list[str], str]:
    """The statements of each vertex, and the expression of the output."""
    rng = random.Random(wiring)
    names, read, lines = ["x"], set(), []
    for i in range(vertices):
        sources = sorted(set(rng.choices(names, k=2 if wiring else 1))) if wiring else [names[-1]]
        read.update(sources)
        lines.append(f"h{i} = self.cell[{i}]({' + '.join(sources)})")
        names.append(f"h{i}")
    return lines, " + ".join(n for n in names[1:] if n not in read)
