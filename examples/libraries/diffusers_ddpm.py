"""Diffusion of small glyphs with diffusers: a UNet2DModel learns the noise that a DDPMScheduler adds; an EMAModel samples in the end.

Cosine schedule with warmup per update, clipping, AdamW.

Class: generative
"""
import argparse
import json
import os
import sys

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_cosine_schedule_with_warmup
    from diffusers.training_utils import EMAModel
except ImportError as missing:
    print(f"diffusers_ddpm needs diffusers: {missing}", file=sys.stderr)
    sys.exit(77)


def glyphs(count, seed):
    """Bars of 8 x 8 pixels, upright or lying, between -1 and 1."""
    g = torch.Generator().manual_seed(seed)
    pictures = -torch.ones(count, 1, 8, 8)
    for picture, place, lies in zip(pictures, torch.randint(7, (count,), generator=g), torch.rand(count, generator=g) < 0.5):
        (picture[0] if lies else picture[0].T)[place : place + 2] = 1
    return pictures + 0.05 * torch.randn(pictures.shape, generator=g)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=8, help="of the first block, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    model = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(args.channels, 2 * args.channels), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
    )
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=4, num_training_steps=args.iters + 1)
    ema = EMAModel(model.parameters(), decay=0.99)
    losses = []
    model.train()
    while len(losses) < args.iters:
        for clean, in DataLoader(TensorDataset(glyphs(256, args.seed)), args.batch_size, shuffle=True, drop_last=True):
            noise = torch.randn_like(clean)
            steps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(clean),))
            loss = F.mse_loss(model(noise_scheduler.add_noise(clean, noise, steps), steps).sample, noise)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.step(model.parameters())
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) == args.iters:
                break
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    ema.store(model.parameters())
    ema.copy_to(model.parameters())
    model.eval()
    pipeline = DDPMPipeline(unet=model, scheduler=noise_scheduler)
    pipeline.set_progress_bar_config(disable=True)
    pictures = pipeline(batch_size=2, num_inference_steps=5, output_type="np").images
    ema.restore(model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "brightness": float(pictures.mean())}), flush=True)


if __name__ == "__main__":
    main()
