"""A model that ends in a cross entropy over its vocabulary, as Megatron cuts it: tokens, pairs of layers, a head, and a loss for each token, which is the output.

The loss without Megatron is written out as its own comment has it: with smoothing (`a`) each wrong entry of K has a (K - 1)th of it.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.models import ModelCode, Template, _parts, register
from proctor.oracle.fuzz.space import Choice, Point

LENGTH: Final = 3  # tokens of a sequence


@register
class Vocabulary(Template):
    """Embeddings, blocks of two layers, a head, and the loss of each token."""

    name: ClassVar[str] = "vocabulary"
    library: ClassVar[str] = "megatron"
    besides: ClassVar[bool] = True
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("blocks", (1, 2)),
        Choice("width", (4, 6, 8)),
        Choice("words", (12, 24)),
        Choice("smoothing", (0.0, 0.1), rare=0.3),
        Choice("logits", (False, True), rare=0.3),
        Choice("frozen", _parts.CHOICES[0].values, rare=0.2),
        Choice("unused", (False,)),
        Choice("scalar", (False,)),
        Choice("vector", (False, True), rare=0.2),
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        blocks, width, words, smoothing = (int(str(point["blocks"])), int(str(point["width"])), int(str(point["words"])), float(str(point["smoothing"])))
        more = f", {smoothing}" if smoothing else ""
        net = (
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.tokens, self.head = nn.Embedding({words}, {width}), nn.Linear({width}, {words}, bias=False)",
            f"        self.layers = nn.ModuleList([nn.Sequential(nn.Linear({width}, {2 * width}), nn.GELU(), nn.Linear({2 * width}, {width})) for _ in range({blocks})])",
            *(["        self.total = lambda part: part"] if point["logits"] else []),
            *_parts.init_lines(point, width),
            "    def loss(self, logits, target, a=0.0):",
            "        t = F.log_softmax(logits, -1)",
            "        hit = t.gather(-1, target[..., None])[..., 0]",
            "        return -(1 - a) * hit - a / (t.shape[-1] - 1) * (t.sum(-1) - hit)",
            "    def forward(self, ids, target):",
            "        x = self.tokens(ids)",
            *_parts.forward_lines(point),
            *(f"        x = x + self.layers[{i}](x)" for i in range(blocks)),
            "        logits = self.head(F.layer_norm(x, x.shape[-1:]))",  # bounded: the library's loss is in single precision
            f"        loss = self.loss(logits, target{more})",
            f"        return {'torch.cat([loss, self.total(logits.tanh().sum(-1))], -1) / 4' if point['logits'] else 'loss / 4'}",
        )
        names = [(f"layers.{i}.0", f"layers.{i}.2") for i in range(blocks)]
        return ModelCode(
            net=net,
            x=f"(torch.randint(0, {words}, (n, {LENGTH}), generator=g), torch.randint(0, {words}, (n, {LENGTH}), generator=g))",
            y=(LENGTH * (2 if point["logits"] else 1),),
            after=_parts.after_lines(point),
            units=tuple(f"net.layers[{i}]" for i in range(blocks)),
            tensor_parallel={"tokens": "embedding", "head": "linear", **{name: "linear" for pair in names for name in pair}},
            pairs=tuple(names),
            cut_outputs=("head",),
            traits=_parts.traits(point) | {"tokens", "vocabulary"} | ({"smoothed"} if smoothing else set()) | ({"logits"} if point["logits"] else set()),
        )
