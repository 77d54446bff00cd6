"""Which operators of ordinary models have no meaning in `oracle/prove/meanings`? One training step of each, tiny, on one device.

    python benchmarks/prove_opaque.py [--only NAME …]

Models of transformers and diffusers from their configurations (nothing is downloaded), and networks of torch's own layers. A line: model, how many operations
its step has, and the operators without a meaning; then how far doubles are from torch's own numbers, over the largest gradient.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from proctor.errors import OracleError
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.machine import Machine
from proctor.oracle.prove.recording.world import tape_of

TOKENS = 4


def language(kind: str, **sizes: Any) -> Callable[[], Any]:
    """A language model of transformers, and its loss."""

    def loss() -> Any:
        import transformers

        common = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8, "attn_implementation": "eager"}
        config = getattr(transformers, f"{kind}Config")(**{**common, **sizes})
        model = getattr(transformers, f"{kind}ForCausalLM" if hasattr(transformers, f"{kind}ForCausalLM") else f"{kind}LMHeadModel" if hasattr(transformers, f"{kind}LMHeadModel") else f"{kind}ForMaskedLM")(config).train()
        tokens = torch.randint(0, 8, (2, TOKENS), generator=torch.Generator().manual_seed(1))
        return model, lambda: F.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1), tokens.flatten())

    return loss


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=12, num_layers=1, num_decoder_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0)).train()
    tokens = torch.randint(0, 8, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    return model, lambda: F.cross_entropy(model(input_ids=tokens, labels=tokens).logits.flatten(0, 1), tokens.flatten())


def vit() -> Any:
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=8, patch_size=4, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)).train()
    image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return model, lambda: F.cross_entropy(model(pixel_values=image).logits, torch.tensor([0, 2]))


def dit() -> Any:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=2, num_layers=1, sample_size=4, patch_size=2, num_embeds_ada_norm=4, norm_num_groups=2).train()
    image = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(image, timestep=torch.tensor([1, 3]), class_labels=torch.tensor([0, 2])).sample.square().mean()


def unet() -> Any:
    from diffusers import UNet2DModel

    model = UNet2DModel(sample_size=4, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(4, 8), down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), norm_num_groups=2, attention_head_dim=4).train()
    image = torch.randn(1, 2, 4, 4, generator=torch.Generator().manual_seed(1))
    return model, lambda: model(image, torch.tensor([3])).sample.square().mean()


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(width, out, 3, stride, 1, bias=False), nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(out), nn.BatchNorm2d(out), nn.BatchNorm2d(out)])
        self.side = nn.Conv2d(width, out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norms[1](self.second(F.relu(self.norms[0](self.first(x)), inplace=True)))
        return F.relu(h + self.norms[2](self.side(x)))


def resnet() -> Any:
    model = nn.Sequential(nn.Conv2d(3, 4, 7, 2, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), Residual(4, 4, 1), Residual(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    image = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    return model, lambda: F.cross_entropy(model(image), torch.tensor([0, 2]), label_smoothing=0.1)


def layers() -> Any:
    parts = nn.ModuleDict({
        "conv1": nn.Conv1d(2, 4, 3, padding=1, groups=2), "conv3": nn.Conv3d(1, 2, 2), "up": nn.ConvTranspose2d(2, 2, 2, 2), "group": nn.GroupNorm(2, 4), "instance": nn.InstanceNorm1d(4, affine=True),
        "lstm": nn.LSTM(4, 3, batch_first=True), "gru": nn.GRU(3, 3, batch_first=True), "prelu": nn.PReLU(), "encoder": nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True), "bilinear": nn.Bilinear(3, 3, 2),
    })
    g = torch.Generator().manual_seed(1)
    x, image, cube = torch.randn(2, 2, 5, generator=g), torch.randn(2, 2, 3, 3, generator=g), torch.randn(1, 1, 3, 3, 3, generator=g)

    def loss() -> torch.Tensor:
        h = parts["instance"](parts["group"](parts["conv1"](x)))
        seq = parts["gru"](parts["lstm"](parts["encoder"](h.transpose(1, 2)))[0])[0]
        up = F.interpolate(F.avg_pool2d(parts["up"](image), 2, 1), scale_factor=2, mode="bilinear") + F.interpolate(F.max_pool2d(parts["up"](image), 2, 1), scale_factor=2)
        smooth = F.huber_loss(seq, torch.zeros_like(seq)) + F.smooth_l1_loss(seq, torch.ones_like(seq)) + F.binary_cross_entropy_with_logits(seq, torch.full_like(seq, 0.3)) + F.kl_div(seq.log_softmax(-1), torch.full_like(seq, 1 / 3))
        other = F.elu(seq).sum() + F.leaky_relu(seq).sum() + F.hardswish(seq).sum() + F.mish(seq).sum() + F.celu(seq).sum() + F.selu(seq).sum() + F.logsigmoid(seq).sum() + F.glu(h, 1).sum() + F.hardtanh(seq).sum() + F.relu6(seq).sum() + F.hardsigmoid(seq).sum() + F.softsign(seq).sum()
        return smooth + other + up.square().mean() + parts["conv3"](cube).square().mean() + parts["prelu"](seq).mean() + parts["bilinear"](seq, seq).mean() + F.cosine_similarity(seq, seq.flip(1), -1).mean() + torch.cdist(seq, seq.flip(1) + 1).mean()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parts

        def forward(self) -> torch.Tensor:
            return loss()

    model = Model()
    return model, model


MODELS: dict[str, Callable[[], Any]] = {
    "Llama": language("Llama"), "Mixtral": language("Mixtral", num_local_experts=4, num_experts_per_tok=2, pad_token_id=None), "GPT2": language("GPT2", n_embd=8, n_layer=1, n_head=2, n_positions=8),
    "Bert": language("Bert", hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1), "Qwen2Moe": language("Qwen2Moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, shared_expert_intermediate_size=8, decoder_sparse_step=1),
    "Qwen3": language("Qwen3", head_dim=4), "Gemma2": language("Gemma2", head_dim=4, pad_token_id=0), "Phi3": language("Phi3", pad_token_id=0), "GPTNeoX": language("GPTNeoX"), "Opt": language("OPT", ffn_dim=12, word_embed_proj_dim=8, pad_token_id=1),
    "Mamba": language("Mamba", state_size=2), "Bloom": language("Bloom", n_layer=1, n_head=2), "DeepseekV3": language("DeepseekV3", n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=8, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=2, qk_nope_head_dim=2, v_head_dim=4, first_k_dense_replace=0, num_key_value_heads=2),
    "T5": t5, "ViT": vit, "DiT": dit, "UNet": unet, "ResNet": resnet, "layers": layers,
}


def judged(name: str) -> dict[str, Any]:
    """A row."""
    torch.manual_seed(0)
    model, loss = MODELS[name]()

    def step() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loss().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    tape = tape_of(step)
    machine = Machine([tape], F64(), {})
    machine.run()
    own = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    far, most = 0.0, max(float(grad.abs().max()) for grad in own.values())
    for name_, grad in own.items():
        mark = machine.marks[0].get(f"grad {name_}")
        if mark is not None:
            far = max(far, float(np.nan_to_num(np.abs(mark - grad.double().numpy()), nan=np.inf).max() / most))
    return {"model": name, "operations": len(tape.nodes), "opaque": dict(Counter(op for op in machine.opaque)), "far": float(f"{far:.1g}")}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    total: Counter[str] = Counter()
    for name in MODELS:
        if args.only and name not in args.only:
            continue
        try:
            row = judged(name)
            total.update(row["opaque"])
        except (OracleError, TypeError, ValueError, RuntimeError, AttributeError, ImportError) as error:  # a library's model that does not start with these sizes
            row = {"model": name, "cannot be run": f"{type(error).__name__}: {str(error)[:200]}"}
        print(json.dumps(row), flush=True)
    print(json.dumps(dict(total.most_common())))


if __name__ == "__main__":
    main()
