"""TorchRec's recommendation model: an `EmbeddingBagCollection`, weighted or not, a dense layer, and a layer over both (D3 §III-D, figure 3).

Tables are small, bags may be empty, the output is not squashed. Tables update themselves in the backward pass, as sharded ones do, with an optimizer that leaves
rows as they are which no bag holds (Adam does not: the kernels' one updates the rows that are there alone, torch's all).
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.models import ModelCode, Template, _parts, register
from proctor.oracle.fuzz.models.dlrm import BAG
from proctor.oracle.fuzz.space import Choice, Point

# Optimizer of the tables → where it is, and its options: those of the kernels.
TABLE_OPTIMIZERS: Final = {
    "SGD": ("torch.optim.SGD", "{'lr': 0.1}"),
    "Adagrad": ("torch.optim.Adagrad", "{'lr': 0.1, 'eps': 1e-8}"),
    "RowWiseAdagrad": ("RowWiseAdagrad", "{'lr': 0.1, 'eps': 1e-8}"),
}


@register
class Recommendation(Template):
    """Tables of one collection; features may share a table."""

    name: ClassVar[str] = "torchrec"
    library: ClassVar[str] = "torchrec"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("tables", (1, 2, 3)),
        Choice("rows", (6, 5, 9, 2)),
        Choice("width", (4, 8, 16)),  # a table of 4 or 12 columns is not cut in two: parts have 4 columns or a multiple
        Choice("pooling", ("SUM", "MEAN", "both")),
        Choice("weighted", (False, True), rare=0.4),
        Choice("shared", (False, True), rare=0.3),
        Choice("frozen", _parts.CHOICES[0].values[:1]),
        Choice("table_optimizer", tuple(TABLE_OPTIMIZERS), rare=0.5),
        Choice("vector", (False, True), rare=0.2),
        Choice("unused", (False,)),
        Choice("scalar", (False,)),
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        tables, rows, width = (int(str(point[k])) for k in ("tables", "rows", "width"))
        features = [[f"f{i}"] for i in range(tables)]
        if point["shared"]:
            features[0].append(f"f{tables}")
        number = tables + bool(point["shared"])
        asked = "SUM" if point["weighted"] else str(point["pooling"])  # the kernel has no weighted mean
        pooling = [("SUM", "MEAN")[i % 2] if asked == "both" else asked for i in range(tables)]
        configs = ", ".join(
            f"EmbeddingBagConfig(name='t{i}', embedding_dim={width}, num_embeddings={rows}, feature_names={names}, pooling=PoolingType.{pooling[i]})"
            for i, names in enumerate(features)
        )
        weights = f"torch.cat([weight[there]] * {number})" if point["weighted"] else "None"
        optimizer, options = TABLE_OPTIMIZERS[str(point["table_optimizer"])]
        adagrad = ("from torchrec.optim import RowWiseAdagrad",) if optimizer == "RowWiseAdagrad" else ()
        net = (
            "from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, KeyedTensor, PoolingType",
            "from torch.distributed.optim import _apply_optimizer_in_backward",
            *adagrad,
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.bags = EmbeddingBagCollection(tables=[{configs}], is_weighted={point['weighted']})",
            f"        self.dense, self.over = nn.Linear(5, {width}), nn.Linear({width * (number + 1)}, 3)",
            *_parts.init_lines(point, width),
            # A plan gives the keys in an order of its own, and says which one.
            "        self.read = lambda bags: bags.values() if bags.keys() == sorted(bags.keys()) else torch.cat([bags[key] for key in sorted(bags.keys())], 1)",
            "    def forward(self, dense, index, weight, over=True):",
            "        there, x = index >= 0, self.dense(dense)",
            *_parts.forward_lines(point),
            f"        bags = KeyedJaggedTensor({[f'f{i}' for i in range(number)]}, torch.cat([index[there]] * {number}), {weights}, "
            f"lengths=torch.cat([there.sum(1)] * {number}))",
            "        bags = self.read(self.bags(bags))",
            "        return self.over(torch.cat([x, bags], 1)) if over else bags",
        )
        return ModelCode(
            net=net,
            x=f"(torch.randn(n, 5, generator=g), torch.randint(-1, {rows}, (n, {BAG}), generator=g), torch.rand(n, {BAG}, generator=g))",
            y=(3,),
            after=(f"_apply_optimizer_in_backward({optimizer}, net.bags.parameters(), {options})",),
            traits=_parts.traits(point) | {"embedding bag", "torchrec"} | ({"mean bags"} if "MEAN" in pooling else set()) | ({"state of rows"} if adagrad else set()),
        )
