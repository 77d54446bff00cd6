"""TorchRec's `EmbeddingCollection`: embeddings of sequences, which are not pooled; a layer over what each row makes of its own words.

Every word's embedding goes through a function that is not linear before it is added up, so that a word that went to another row, or to another table, shows. Tables update themselves in
the backward pass, as in `torchrec`.
"""

from __future__ import annotations

from typing import ClassVar

from proctor.oracle.fuzz.models import ModelCode, Template, register
from proctor.oracle.fuzz.models.dlrm import BAG
from proctor.oracle.fuzz.models.torchrec import TABLE_OPTIMIZERS
from proctor.oracle.fuzz.space import Choice, Point


@register
class Sequences(Template):
    """Tables of one collection; features may share a table."""

    name: ClassVar[str] = "sequences"
    library: ClassVar[str] = "torchrec"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("tables", (1, 2, 3)),
        Choice("rows", (6, 5, 9, 2)),
        Choice("width", (4, 8, 16)),
        Choice("shared", (False, True), rare=0.3),
        Choice("table_optimizer", tuple(TABLE_OPTIMIZERS), rare=0.5),
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        tables, rows, width = (int(str(point[k])) for k in ("tables", "rows", "width"))
        features = [[f"f{i}"] for i in range(tables)]
        if point["shared"]:
            features[0].append(f"f{tables}")
        number = tables + bool(point["shared"])
        configs = ", ".join(f"EmbeddingConfig(name='t{i}', embedding_dim={width}, num_embeddings={rows}, feature_names={names})" for i, names in enumerate(features))
        optimizer, options = TABLE_OPTIMIZERS[str(point["table_optimizer"])]
        adagrad = ("from torchrec.optim import RowWiseAdagrad",) if optimizer == "RowWiseAdagrad" else ()
        net = (
            "from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor",
            "from torch.distributed.optim import _apply_optimizer_in_backward",
            *adagrad,
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.bags, self.over = EmbeddingCollection(tables=[{configs}]), nn.Linear({width * number}, 3)",
            "    def forward(self, index):",
            "        there = index >= 0",
            f"        found = self.bags(KeyedJaggedTensor({[f'f{i}' for i in range(number)]}, torch.cat([index[there]] * {number}), lengths=torch.cat([there.sum(1)] * {number})))",
            "        rows = torch.arange(len(index)).repeat_interleave(there.sum(1))",
            f"        sums = [torch.zeros(len(index), {width}).index_add(0, rows, found[key].values().sin()) for key in sorted(found.keys())]",
            "        return self.over(torch.cat(sums, 1))",
        )
        return ModelCode(
            net=net,
            x=f"(torch.randint(-1, {rows}, (n, {BAG}), generator=g),)",
            y=(3,),
            after=(f"_apply_optimizer_in_backward({optimizer}, net.bags.parameters(), {options})",),
            traits=frozenset({"torchrec", "sequences"} | ({"state of rows"} if adagrad else set())),
        )
