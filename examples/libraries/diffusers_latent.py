"""Flow matching in a latent space with diffusers: an AutoencoderKL is trained first, frozen, and a UNet2DModel then learns in its latents.

Two trainings in one process, the first model a teacher of the second; FlowMatchEulerDiscreteScheduler, Adam with gradient accumulation.

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
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, UNet2DModel
except ImportError as missing:
    print(f"diffusers_latent needs diffusers: {missing}", file=sys.stderr)
    sys.exit(77)


def waves(count, seed):
    """Plane waves of 16 x 16 pixels."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.linspace(0, 1, 16), torch.linspace(0, 1, 16), indexing="ij")
    angle, phase = (6.2832 * torch.rand(count, 1, 1, generator=g) for _ in range(2))
    return torch.sin(9 * (angle.cos() * x + angle.sin() * y) + phase)[:, None]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=8, help="of the first block, a multiple of 4")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    channels = (args.channels, 2 * args.channels)
    coder = AutoencoderKL(
        in_channels=1, out_channels=1, latent_channels=2, block_out_channels=channels, layers_per_block=1, norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )
    data, losses = TensorDataset(waves(256, args.seed)), []

    def batches(updates):
        done = 0
        while done < updates:
            for batch, in DataLoader(data, args.batch_size, shuffle=True, drop_last=True):
                yield batch
                done += 1
                if done == updates:
                    return

    def note(loss):
        losses.append(loss)
        if len(losses) % 10 == 0:
            print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)

    half = max(1, args.iters // 2)
    optimizer = torch.optim.Adam(coder.parameters(), lr=args.lr)
    coder.train()
    for batch in batches(half):
        optimizer.zero_grad()
        posterior = coder.encode(batch).latent_dist
        loss = F.mse_loss(coder.decode(posterior.sample()).sample, batch) + 1e-4 * posterior.kl().mean()
        loss.backward()
        optimizer.step()
        note(loss.item())

    coder.requires_grad_(False)
    coder.eval()
    model = UNet2DModel(
        sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=channels, norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )
    flow = FlowMatchEulerDiscreteScheduler()
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    model.train()
    running = []
    for batch in batches(2 * (args.iters - half)):
        with torch.no_grad():
            latents = coder.encode(batch).latent_dist.sample()
        noise = torch.randn_like(latents)
        chosen = torch.randint(0, flow.config.num_train_timesteps, (len(latents),))
        sigmas = flow.sigmas[chosen].view(-1, 1, 1, 1)
        found = model((1 - sigmas) * latents + sigmas * noise, flow.timesteps[chosen]).sample
        loss = F.mse_loss(found, noise - latents)
        (loss / 2).backward()
        running.append(loss.item())
        if len(running) == 2:
            optimizer.step()
            optimizer.zero_grad()
            note(sum(running) / 2)
            running = []
    param_sum = sum(p.detach().double().abs().sum().item() for m in (coder, model) for p in m.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
