"""Latent diffusion from captions with diffusers: a frozen autoencoder and a frozen text encoder beside a UNet2DConditionModel that learns the velocity.

Captions are dropped now and then for guidance; an EMAModel is evaluated in the model's place and taken out again.

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
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from diffusers.training_utils import EMAModel
    from transformers import CLIPTextConfig, CLIPTextModel
except ImportError as missing:
    print(f"diffusers_text needs diffusers and transformers: {missing}", file=sys.stderr)
    sys.exit(77)


def stripes(count, seed):
    """Stripes of 16 x 16 pixels and captions of 6 tokens: beginning, direction, width, end and two of padding."""
    g = torch.Generator().manual_seed(seed)
    lies, width = torch.randint(2, (count,), generator=g), torch.randint(1, 4, (count,), generator=g)
    line = torch.arange(16)
    rows = torch.where((line // width[:, None]) % 2 == 0, 1.0, -1.0)
    pictures = torch.where(lies[:, None, None] == 1, rows[:, :, None].expand(-1, 16, 16), rows[:, None, :].expand(-1, 16, 16))
    ends = torch.full((count,), 9)
    captions = torch.stack([torch.full((count,), 8), lies, 3 + width, ends, ends, ends], 1)
    return TensorDataset(pictures[:, None] + 0.05 * torch.randn(count, 1, 16, 16, generator=g), captions)


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
    vae = AutoencoderKL(
        in_channels=1, out_channels=1, latent_channels=2, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, scaling_factor=0.5,
    )
    text = CLIPTextModel(CLIPTextConfig(vocab_size=10, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=6, bos_token_id=8, eos_token_id=9, pad_token_id=9))
    unet = UNet2DConditionModel(
        sample_size=8, in_channels=2, out_channels=2, layers_per_block=1, block_out_channels=(args.channels, 2 * args.channels), norm_num_groups=4,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16, attention_head_dim=4,
    )
    for frozen in (vae, text):
        frozen.requires_grad_(False)
        frozen.eval()
    noise_scheduler = DDPMScheduler(num_train_timesteps=200, prediction_type="v_prediction")
    ema = EMAModel(unet.parameters(), decay=0.95, model_cls=UNet2DConditionModel, model_config=unet.config)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr, weight_decay=1e-2)
    test_pictures, test_captions = stripes(16, args.seed + 50).tensors
    losses = []

    def loss_of(pictures, captions, generator=None):
        with torch.no_grad():
            latents = vae.encode(pictures).latent_dist.sample(generator) * vae.config.scaling_factor
            states = text(captions).last_hidden_state
        noise = torch.randn(latents.shape, generator=generator)
        timesteps = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),), generator=generator)
        noisy = noise_scheduler.add_noise(latents, noise, timesteps)
        return F.mse_loss(unet(noisy, timesteps, encoder_hidden_states=states).sample, noise_scheduler.get_velocity(latents, noise, timesteps))

    def evaluate():
        ema.store(unet.parameters())
        ema.copy_to(unet.parameters())
        unet.eval()
        with torch.no_grad():
            found = loss_of(test_pictures, test_captions, torch.Generator().manual_seed(1)).item()
        unet.train()
        ema.restore(unet.parameters())
        return found

    unet.train()
    last = 0.0
    while len(losses) < args.iters:
        for pictures, captions in DataLoader(stripes(128, args.seed), args.batch_size, shuffle=True, drop_last=True):
            dropped = torch.rand(len(captions)) < 0.1
            captions = torch.where(dropped[:, None], torch.tensor([8, 9, 9, 9, 9, 9]), captions)
            loss = loss_of(pictures, captions)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ema.step(unet.parameters())
            losses.append(loss.item())
            if len(losses) % 10 == 0:
                print(f"iter {len(losses)} loss {losses[-1]:.4f}", flush=True)
                last = evaluate()
            if len(losses) == args.iters:
                break
    param_sum = sum(p.detach().double().abs().sum().item() for p in unet.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "average": last}), flush=True)


if __name__ == "__main__":
    main()
