"""transformers: causal language models of many families, each made tiny through `AutoConfig`, with every dropout at zero.

The families differ in what distributed wrappers meet: tied heads, learned, rotary and linear positions, layers in parallel, grouped heads, routed experts, buffers.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.models import ModelCode, Template, _parts, register
from proctor.oracle.fuzz.space import Choice, Point

LENGTH: Final = 4  # tokens of a sequence
_FAMILIES: Final = ("llama", "gpt2", "gpt_neox", "opt", "qwen2", "mistral", "phi", "bloom", "gemma", "mixtral", "bert")
_SIZES: Final = (
    "hidden_size=8, num_attention_heads=2, num_key_value_heads=2, head_dim=4, intermediate_size=16, vocab_size=11, max_position_embeddings=16, "
    "word_embed_proj_dim=8, ffn_dim=16, num_local_experts=2, pad_token_id=0, bos_token_id=1, eos_token_id=2, is_decoder=True"
)


@register
class Causal(Template):
    """A causal language model, and its logits."""

    name: ClassVar[str] = "causal"
    library: ClassVar[str] = "transformers"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("family", _FAMILIES),
        Choice("blocks", (1, 2)),
        Choice("tied", (False, True), rare=0.4),
        Choice("frozen", _parts.CHOICES[0].values, rare=0.2),
        Choice("unused", (False,)),
        Choice("scalar", (False,)),
        Choice("vector", (False,)),
    )

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        family = str(point["family"])
        own = {"unused"} if family == "bert" and not point["tied"] else set()  # a bias that only ties make another's
        own.add(f"family {family}")
        own |= {"grouped experts"} if family == "mixtral" else set()
        net = (
            "from transformers import AutoConfig, AutoModelForCausalLM",
            "class Net(nn.Module):",
            "    def __init__(self):",
            "        super().__init__()",
            f"        config = AutoConfig.for_model('{family}', num_hidden_layers={point['blocks']}, tie_word_embeddings={point['tied']}, {_SIZES})",
            "        for name, value in vars(config).items():",
            "            if 'drop' in name and isinstance(value, float):",
            "                setattr(config, name, 0.0)",
            "        self.lm = AutoModelForCausalLM.from_config(config)",
            "    def forward(self, ids):",
            "        return self.lm(input_ids=ids, use_cache=False).logits",
        )
        return ModelCode(
            net=net,
            x=f"(torch.randint(3, 11, (n, {LENGTH}), generator=g),)",
            y=(LENGTH, 11),
            after=_parts.after_lines(point),
            units=("*next(m for m in net.modules() if isinstance(m, nn.ModuleList))",),
            traits=_parts.traits(point) | {"tokens", "norm", "attention", "keywords", "transformers", "needs rows"} | ({"tied"} if point["tied"] else set()) | own,
        )
