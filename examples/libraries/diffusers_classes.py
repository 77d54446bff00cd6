"""Class-conditional diffusion in a frozen autoencoder's latents with diffusers: a UNet2DModel learns the sample itself, over microbatches, and its average is saved.

Class: generative
"""
import argparse
import json
import os
import sys
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    from diffusers import AutoencoderKL, DDIMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel
except ImportError as missing:
    print(f"diffusers_classes needs diffusers: {missing}", file=sys.stderr)
    sys.exit(77)


def corners(count, seed):
    """A bright square of 8 x 8 pixels in one of four corners of 16 x 16."""
    g = torch.Generator().manual_seed(seed)
    pictures, where = -torch.ones(count, 1, 16, 16), torch.randint(4, (count,), generator=g)
    for picture, place in zip(pictures, where.tolist()):
        picture[0, 8 * (place // 2) : 8 * (place // 2) + 8, 8 * (place % 2) : 8 * (place % 2) + 8] = 1
    return TensorDataset(pictures + 0.05 * torch.randn(pictures.shape, generator=g), where)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=8, help="of the first block, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    with tempfile.TemporaryDirectory() as folder:  # as one that was trained elsewhere
        AutoencoderKL(
            in_channels=1, out_channels=1, latent_channels=2, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, sample_size=16,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, scaling_factor=0.7,
        ).save_pretrained(folder)
        vae = AutoencoderKL.from_pretrained(folder)
    vae.requires_grad_(False)
    model = UNet2DModel(
        sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(args.channels, 2 * args.channels), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"), num_class_embeds=4,
    )
    noise_scheduler = DDIMScheduler(num_train_timesteps=50, prediction_type="sample")
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, 1.0, 5)
    ema = EMAModel(model.parameters(), decay=0.9, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config)
    losses, micro = [], []
    model.train()
    while len(losses) < args.iters:
        for pictures, classes in DataLoader(corners(256, args.seed), args.batch_size, shuffle=True, drop_last=True):
            with torch.no_grad():
                latents = vae.encode(pictures).latent_dist.mode() * vae.config.scaling_factor
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, 50, (len(latents),))
            found = model(noise_scheduler.add_noise(latents, noise, timesteps), timesteps, class_labels=classes).sample
            loss = F.mse_loss(found, latents)
            (loss / 2).backward()
            micro.append(loss.item())
            if len(micro) < 2:
                continue
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.step(model.parameters())
            losses.append(sum(micro) / 2)
            micro = []
            if len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
            if len(losses) == args.iters:
                break
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        ema.save_pretrained(folder)
        average = UNet2DModel.from_pretrained(folder)
    distance = sum((a - p).detach().double().abs().sum().item() for a, p in zip(average.parameters(), model.parameters()))
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "distance": distance}), flush=True)


if __name__ == "__main__":
    main()
