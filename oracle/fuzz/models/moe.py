"""A mixture of experts: the router's choice decides which experts a rank's rows reach, so ranks use different parameters."""

from __future__ import annotations

from typing import ClassVar

from proctor.oracle.fuzz.models import ModelCode, Template, _parts, register
from proctor.oracle.fuzz.space import Choice, Point


@register
class Mixture(Template):
    """Each row goes to its best expert, weighted by the router; experts without rows are not called."""

    name: ClassVar[str] = "moe"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("experts", (2, 3, 5)),
        Choice("width", (4, 6, 5)),
        Choice("call", ("all", "used")),
        *_parts.CHOICES,
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        experts, width = int(str(point["experts"])), int(str(point["width"]))
        expert = f"nn.Sequential(nn.Linear({width}, {width + 2}), nn.SiLU(), nn.Linear({width + 2}, {width}))"
        skip = ["            if not mine.any(): continue"] if point["call"] == "used" else []
        net = [
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.router = nn.Linear({width}, {experts})",
            f"        self.experts = nn.ModuleList([{expert} for _ in range({experts})])",
            *_parts.init_lines(point, width),
            "    def forward(self, x):",
            *_parts.forward_lines(point),
            "        weight, best = self.router(x).softmax(-1).max(-1)",
            "        out = x + weight[:, None]  # so that the router is used where a rank has no rows",
            "        for i, expert in enumerate(self.experts):",
            "            mine = best == i",
            *skip,
            "            out = out.index_add(0, mine.nonzero()[:, 0], expert(x[mine]) * weight[mine, None])",
            "        return out",
        ]
        return ModelCode(
            net=tuple(net),
            x=f"(torch.randn(n, {width}, generator=g),)",
            y=(width,),
            after=_parts.after_lines(point),
            units=tuple(f"net.experts[{i}]" for i in range(experts)),
            tensor_parallel={f"experts.{i}.{j}": "linear" for i in range(experts) for j in (0, 2)},
            pairs=tuple((f"experts.{i}.0", f"experts.{i}.2") for i in range(experts)),
            traits=_parts.traits(point) | {"routed"} | ({"sometimes unused"} if point["call"] == "used" else set()),
        )
