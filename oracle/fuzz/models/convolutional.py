"""A small convolutional network: convolutions, a norm, a pooling, a head."""

from __future__ import annotations

from typing import ClassVar

from proctor.oracle.fuzz.models import ModelCode, Template, _parts, register
from proctor.oracle.fuzz.space import Choice, Point

SIDE = 4  # pixels

_NORMS = {
    "none": "nn.Identity()",
    "group": "nn.GroupNorm(1, {c})",
    "layer": "nn.LayerNorm([{c}, 4, 4])",
    "instance": "nn.InstanceNorm2d({c}, affine=True)",
    "batch": "nn.BatchNorm2d({c})",
}


@register
class Convolutional(Template):
    """Channels last or first, grouped or not, transposed or not."""

    name: ClassVar[str] = "convolutional"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("channels", (4, 3, 6)),
        Choice("kernel", (1, 3)),
        Choice("groups", (False, True)),
        Choice("transposed", (False, True)),
        Choice("norm", tuple(_NORMS)),
        Choice("last", (False, True), rare=0.3),
        *_parts.CHOICES,
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        channels, kernel = int(str(point["channels"])), int(str(point["kernel"]))
        groups = f", groups={channels}" if point["groups"] else ""
        second = "nn.ConvTranspose2d" if point["transposed"] else "nn.Conv2d"
        norm = _NORMS[str(point["norm"])].format(c=channels)
        net = [
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.first = nn.Conv2d(2, {channels}, {kernel}, padding={kernel // 2})",
            f"        self.norm = {norm}",
            f"        self.second = {second}({channels}, {channels}, {kernel}, padding={kernel // 2}{groups})",
            f"        self.head = nn.Linear({channels}, 3)",
            *_parts.init_lines(point, channels),
            "    def forward(self, x):",
            f"        x = self.first(x{'.contiguous(memory_format=torch.channels_last)' if point['last'] else ''})",
            "        x = self.second(F.gelu(self.norm(x))).mean((2, 3))",
            *_parts.forward_lines(point),
            "        return self.head(x)",
        ]
        traits = _parts.traits(point) | {"convolution"} | ({"local statistics"} if point["norm"] == "batch" else {"needs rows"} if point["norm"] == "instance" else set())
        return ModelCode(
            net=tuple(net),
            x=f"(torch.randn(n, 2, {SIDE}, {SIDE}, generator=g),)",
            y=(3,),
            after=_parts.after_lines(point),
            units=("net.first", "net.second"),
            tensor_parallel={"head": "linear"},
            traits=traits,
        )
