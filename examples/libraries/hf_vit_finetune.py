"""Fine-tune a tiny ViT of transformers on coloured stripes in a plain loop, with its embeddings frozen.

The patch and position embeddings keep `requires_grad=False` and stay out of the optimizer; the rest has layer-wise
learning rates. SGD with momentum, cosine annealing, evaluation under `no_grad` twice in a run.

Class: vision
"""
import argparse
import json
import math
import os
import sys
from dataclasses import dataclass

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F

try:
    from transformers import ViTConfig, ViTForImageClassification
except ImportError as missing:
    print(f"hf_vit_finetune needs transformers: {missing}", file=sys.stderr)
    sys.exit(77)


@dataclass
class Config:
    iters: int = 30
    seed: int = 0
    width: int = 32
    batch_size: int = 24
    lr: float = 0.1
    classes: int = 4
    size: int = 16

    @classmethod
    def from_command_line(cls):
        parser = argparse.ArgumentParser(description=__doc__)
        parser.add_argument("--iters", type=int, default=cls.iters)
        parser.add_argument("--seed", type=int, default=cls.seed)
        parser.add_argument("--width", type=int, default=cls.width, help="hidden size, a multiple of 4")
        parser.add_argument("--batch-size", type=int, default=cls.batch_size)
        parser.add_argument("--lr", type=float, default=cls.lr)
        return cls(**vars(parser.parse_args()))


def stripes(count, config, seed):
    """Colour images whose class is the direction of their stripes."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(config.size), torch.arange(config.size), indexing="ij")
    labels = torch.randint(0, config.classes, (count,), generator=g)
    angle = labels * math.pi / config.classes
    phase = torch.rand(count, generator=g) * 6.28
    wave = torch.sin(x * angle.cos()[:, None, None] + y * angle.sin()[:, None, None] + phase[:, None, None])
    colour = torch.rand(count, 3, 1, 1, generator=g) * 0.5 + 0.5
    return wave[:, None] * colour + 0.2 * torch.randn(count, 3, config.size, config.size, generator=g), labels


def layerwise_groups(model, lr, decay=0.8):
    """Deeper layers learn faster; the head at full speed."""
    blocks = [m for m in model.vit.modules() if type(m).__name__ == "ViTLayer"]
    groups, seen = [], set()
    for depth, block in enumerate(blocks):
        groups.append({"params": list(block.parameters()), "lr": lr * decay ** (len(blocks) - depth)})
        seen.update(map(id, block.parameters()))
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in seen]
    return [*groups, {"params": rest, "lr": lr}]


@torch.no_grad()
def accuracy(model, images, labels):
    model.eval()
    right = (model(pixel_values=images).logits.argmax(-1) == labels).float().mean().item()
    model.train()
    return right


def main():
    config = Config.from_command_line()
    torch.set_num_threads(1)
    torch.manual_seed(config.seed)
    images, labels = stripes(480, config, config.seed)
    test_images, test_labels = stripes(96, config, config.seed + 1)
    model = ViTForImageClassification(ViTConfig(
        hidden_size=config.width, num_hidden_layers=2, num_attention_heads=4, intermediate_size=2 * config.width,
        image_size=config.size, patch_size=4, num_labels=config.classes, initializer_range=0.1,
    ))
    model.vit.embeddings.requires_grad_(False)
    optimizer = torch.optim.SGD(layerwise_groups(model, config.lr), momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, config.iters)

    losses, scores = [], []
    model.train()
    for it in range(1, config.iters + 1):
        rows = torch.randint(0, len(images), (config.batch_size,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(pixel_values=images[rows]).logits, labels[rows])
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
        if it % max(1, config.iters // 2) == 0:
            scores.append(accuracy(model, test_images, test_labels))
            print(f"iter {it} loss {losses[-1]:.4f} test accuracy {scores[-1]:.3f}", flush=True)

    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "accuracy": scores}), flush=True)


if __name__ == "__main__":
    main()
