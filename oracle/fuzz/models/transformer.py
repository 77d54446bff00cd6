"""A small transformer: token and position embeddings, blocks of attention and MLP, a head that may be tied."""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.models import ModelCode, Template, _parts, register
from proctor.oracle.fuzz.space import Choice, Point

# Styles by which what lies between layers stays cut along its tokens (Korthikanti et al. 2022, §4.2); attention is given all of them.
_ENDS: Final = {
    "tokens": "RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))",
    "places": "RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))",
    "norm": "SequenceParallel(use_local_output=True)",
    "head": "ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())",
}
_BLOCK: Final = {
    "norm1": "SequenceParallel(use_local_output=True)",
    "qkv": "ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())",
    "out": "RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))",
    "norm2": "SequenceParallel(use_local_output=True)",
    "up": "ColwiseParallel(input_layouts=Shard(1))",
    "down": "RowwiseParallel(output_layouts=Shard(1))",
}


@register
class Transformer(Template):
    """Pre-norm blocks over tokens."""

    name: ClassVar[str] = "transformer"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("blocks", (1, 2)),
        Choice("heads", (2, 4, 1, 3)),
        Choice("vocabulary", (8, 7, 3)),
        Choice("length", (3, 4)),
        Choice("norm", ("layernorm", "rmsnorm")),
        Choice("tied", (False, True), rare=0.3),
        Choice("bias", (True, False)),
        Choice("padding", (False, True), rare=0.2),
        *_parts.CHOICES,
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        heads, vocabulary, blocks = (int(str(point[k])) for k in ("heads", "vocabulary", "blocks"))
        length = int(str(point["length"]))
        width, bias = 2 * heads if heads > 2 else 4 * heads, "" if point["bias"] else ", bias=False"
        norm = f"nn.{'LayerNorm' if point['norm'] == 'layernorm' else 'RMSNorm'}({width})"
        padding = ", padding_idx=0" if point["padding"] else ""
        net = [
            *_block(width, heads, norm, bias),
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        self.tokens = nn.Embedding({vocabulary}, {width}{padding})",
            f"        self.places = nn.Embedding({length}, {width})",
            f"        self.blocks = nn.ModuleList([Block() for _ in range({blocks})])",
            f"        self.norm, self.head = {norm}, nn.Linear({width}, {vocabulary}, bias=False)",
            *(["        self.head.weight = self.tokens.weight"] if point["tied"] else []),
            *_parts.init_lines(point, width),
            "    def forward(self, x):",
            f"        x = self.tokens(x) + self.places(torch.arange({length}))",
            *_parts.forward_lines(point),
            "        for block in self.blocks:",
            "            x = block(x)",
            "        return self.head(self.norm(x))",
        ]
        parallel: dict[str, str] = {} if point["tied"] else {"tokens": "embedding", "head": "linear"}
        for i in range(blocks):
            parallel |= {f"blocks.{i}.{name}": "linear" for name in ("up", "down")}
        return ModelCode(
            net=tuple(net),
            x=f"(torch.randint({vocabulary}, (n, {length}), generator=g),)",
            y=(length, vocabulary),
            after=_parts.after_lines(point),
            units=tuple(f"net.blocks[{i}]" for i in range(blocks)),
            tensor_parallel=parallel,
            pairs=tuple((f"blocks.{i}.up", f"blocks.{i}.down") for i in range(blocks)),
            sequence=_ENDS | {f"blocks.{i}.{name}": style for i in range(blocks) for name, style in _BLOCK.items()} if _parts.bare(point) and not point["tied"] else {},
            traits=_parts.traits(point) | {"tokens", "norm", "attention"} | ({"tied"} if point["tied"] else set()),
        )


def _block(width: int, heads: int, norm: str, bias: str) -> list[str]:
    return [
        "class Block(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        f"        self.norm1, self.norm2 = {norm}, {norm}",
        f"        self.qkv, self.out = nn.Linear({width}, {3 * width}{bias}), nn.Linear({width}, {width}{bias})",
        f"        self.up, self.down = nn.Linear({width}, {2 * width}{bias}), nn.Linear({2 * width}, {width}{bias})",
        "    def forward(self, x):",
        f"        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, {heads}, {width // heads})).permute(2, 0, 3, 1, 4)",
        "        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)",
        "        x = x + self.out(a.transpose(1, 2).flatten(2))",
        "        return x + self.down(F.gelu(self.up(self.norm2(x))))",
    ]
