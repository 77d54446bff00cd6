"""A chain of layers with skip connections (D3 §III-D, after Muffin)."""

from __future__ import annotations

from typing import ClassVar

from proctor.oracle.fuzz.models import ModelCode, Template, _layers, _parts, register
from proctor.oracle.fuzz.space import Choice, Point


@register
class Chain(Template):
    """Layers one after the other; some add what they were given to what they make, some run twice."""

    name: ClassVar[str] = "chain"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("layers", tuple(_layers.LAYERS), most=5),
        Choice("width", (4, 8, 5, 6, 3)),
        Choice("skip", ("no", "all", "second")),
        Choice("twice", (False, True), rare=0.15),
        *_parts.CHOICES,
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        layers, width = list(point["layers"]), int(str(point["width"]))  # type: ignore[arg-type]
        made = ", ".join(_layers.constructor(layer, width) for layer in layers)
        skip = {"no": "layer(x)", "all": "x + layer(x)", "second": "x + layer(x) if i % 2 else layer(x)"}[str(point["skip"])]
        rounds = " * 2" if point["twice"] else ""
        net = [
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.layers = nn.ModuleList([{made}])",
            *_parts.init_lines(point, width),
            "    def forward(self, x):",
            *_parts.forward_lines(point),
            f"        for i, layer in enumerate([*self.layers]{rounds}):" if "if" in skip else f"        for layer in [*self.layers]{rounds}:",
            f"            x = {skip}",
            "        return x",
        ]
        bare = _parts.bare(point)
        plain = bare and not point["twice"] and point["skip"] == "no"
        return ModelCode(
            net=tuple(net),
            x=f"(torch.randn(n, {width}, generator=g),)",
            y=(width,),
            after=_parts.after_lines(point),
            units=tuple(f"net.layers[{i}]" for i in range(len(layers))),
            tensor_parallel=_layers.parallel(layers, "layers"),
            pairs=_layers.pairs(layers, "layers"),
            sequence=_layers.sequence(layers, "layers") if bare else {},
            stages=_stages(layers) if plain else (),
            traits=_layers.traits(layers) | _parts.traits(point) | ({"twice"} if point["twice"] else frozenset()),
        )


def _stages(layers: list[str]) -> tuple[tuple[str, ...], ...]:
    """Layers in parts: a function goes with the layer before it, or with the first one."""
    parts: list[list[str]] = []
    for i, layer in enumerate(layers):
        if not parts or (layer not in _layers.FUNCTIONS and not {layers[j] for j in range(i)} <= _layers.FUNCTIONS):
            parts.append([])
        parts[-1].append(f"net.layers[{i}]")
    return tuple(map(tuple, parts))
