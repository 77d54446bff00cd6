"""A recommendation model: embedding bags, plain and weighted, a dense layer, and a layer over both (D3 §III-D, figure 3).

Differs from the paper: tables are small, bags may be empty, the output is not squashed.
"""

from __future__ import annotations

from typing import ClassVar

from proctor.oracle.fuzz.models import ModelCode, Template, _parts, register
from proctor.oracle.fuzz.space import Choice, Point

BAG = 3  # entries of a bag at most; those below zero are not there


@register
class Recommender(Template):
    """torch's own `EmbeddingBag`s."""

    name: ClassVar[str] = "dlrm"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("tables", (1, 2, 3)),
        Choice("weighted", (0, 1, 2)),
        Choice("rows", (6, 5, 9, 2)),
        Choice("width", (4, 8, 3)),
        Choice("mode", ("sum", "mean", "max")),
        Choice("sparse", (False, True), rare=0.35),
        Choice("shared", (False, True), rare=0.2),
        *_parts.CHOICES,
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        tables, weighted, rows, width = (int(str(point[k])) for k in ("tables", "weighted", "rows", "width"))
        sparse = f", sparse={bool(point['sparse'])}"
        mode = str(point["mode"])
        if mode == "max" and point["sparse"]:
            mode = "mean"  # torch has no sparse gradients for it
        bags = ", ".join([f"nn.EmbeddingBag({rows}, {width}, mode='{mode}'{sparse})"] * tables)
        plus = ", ".join([f"nn.EmbeddingBag({rows}, {width}, mode='sum'{sparse})"] * weighted)
        net = [
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.bags, self.weighted = nn.ModuleList([{bags}]), nn.ModuleList([{plus}])",
            *(["        for bag in [*self.bags, *self.weighted]: bag.weight = self.bags[0].weight"] if point["shared"] else []),
            f"        self.dense, self.over = nn.Linear(5, {width}), nn.Linear({width * (tables + weighted + 1)}, 3)",
            *_parts.init_lines(point, width),
            "    def forward(self, dense, index, weight):",
            "        there, x = index >= 0, self.dense(dense)",
            *_parts.forward_lines(point),
            "        start = there.sum(1).cumsum(0) - there.sum(1)",
            "        parts = [x] + [bag(index[there], start) for bag in self.bags]",
            "        parts += [bag(index[there], start, per_sample_weights=weight[there]) for bag in self.weighted]",
            "        return self.over(torch.cat(parts, 1))",
        ]
        shared = bool(point["shared"]) and tables + weighted > 1
        units = () if shared else tuple(f"net.bags[{i}]" for i in range(tables))
        return ModelCode(
            net=tuple(net),
            x=f"(torch.randn(n, 5, generator=g), torch.randint(-1, {rows}, (n, {BAG}), generator=g), torch.rand(n, {BAG}, generator=g))",
            y=(3,),
            after=_parts.after_lines(point),
            units=units,
            tensor_parallel={"dense": "linear", "over": "linear"},
            traits=_parts.traits(point) | {"embedding bag"} | ({"sparse"} if point["sparse"] else set()) | ({"tied"} if shared else set()),
        )
