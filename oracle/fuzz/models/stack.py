"""A stack of layers with nothing beside it: each can be a stage of a pipeline."""

from __future__ import annotations

from typing import ClassVar

from proctor.oracle.fuzz.models import ModelCode, Template, _layers, _parts, register
from proctor.oracle.fuzz.models.chain import Chain
from proctor.oracle.fuzz.space import Choice, Point, full


@register
class Stack(Template):
    """A chain that is longer, without skip connections, parameters outside its layers, or layers that run twice."""

    name: ClassVar[str] = "stack"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("layers", tuple(layer for layer in _layers.LAYERS if not _layers.LAYERS[layer][1] & {"local statistics", "powers"}), most=9),
        Choice("width", (4, 8, 5, 6, 3)),
        *(c for c in _parts.CHOICES if c.name == "frozen"),
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        return Chain().write(full(Chain.choices, point))
