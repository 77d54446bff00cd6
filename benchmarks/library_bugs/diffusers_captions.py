"""Latents of an autoencoder from captions: a UNet2DConditionModel learns noise beside a frozen autoencoder and a frozen T5 encoder. `--bug` plants a mistake that users of diffusers make.

Bugs: autoencoder_not_frozen, without_scaling_factor, text_encoder_drops_out, against_the_latents, velocity_against_noise, other_timesteps, uniform_noise, average_not_stepped, autoencoder_in_optimizer, noise_drawn_once, velocity_swapped
"""
import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, TensorDataset
from transformers import T5Config, T5EncoderModel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iters", type=int, default=16)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--bug", default="")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
words = torch.randint(2, 6, (96, 4))
pictures = (words.float().mean(1)[:, None, None, None] - 3.5) * torch.ones(1, 3, 16, 16) / 2 + 0.1 * torch.randn(96, 3, 16, 16)
vae = AutoencoderKL(
    in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8, 8), layers_per_block=1, norm_num_groups=4, sample_size=16,
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, scaling_factor=0.6,
)
text = T5EncoderModel(T5Config(vocab_size=8, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.1))
unet = UNet2DConditionModel(
    sample_size=8, in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=16, attention_head_dim=4,
)
leaks = args.bug in ("autoencoder_not_frozen", "autoencoder_in_optimizer")
vae.requires_grad_(leaks).eval()
text.requires_grad_(False)
text.train(args.bug == "text_encoder_drops_out")
velocity = args.bug in ("velocity_against_noise", "velocity_swapped")
scheduler = EulerDiscreteScheduler(num_train_timesteps=100, prediction_type="v_prediction" if velocity else "epsilon")
trained = [*unet.parameters(), *(vae.parameters() if args.bug == "autoencoder_in_optimizer" else ())]
optimizer = torch.optim.AdamW(trained, 2e-3)
rate = get_scheduler("constant_with_warmup", optimizer, num_warmup_steps=3)
average = EMAModel(unet.parameters(), decay=0.95)
fixed = torch.randn(args.batch_size, 4, 8, 8)


def latents_of(batch):
    with torch.set_grad_enabled(leaks and unet.training):
        found = vae.encode(batch).latent_dist.sample()
    return found if args.bug == "without_scaling_factor" else found * vae.config.scaling_factor


unet.train()
done = 0
while done < args.iters:
    for batch, caption in DataLoader(TensorDataset(pictures, words), args.batch_size, shuffle=True, drop_last=True):
        latents = latents_of(batch)
        noise = fixed if args.bug == "noise_drawn_once" else torch.rand_like(latents) if args.bug == "uniform_noise" else torch.randn_like(latents)
        timesteps = torch.randint(0, 100, (len(latents),))
        noisy = scheduler.add_noise(latents, noise, timesteps)
        with torch.no_grad():
            states = text(input_ids=caption).last_hidden_state
        told = torch.randint(0, 100, (len(latents),)) if args.bug == "other_timesteps" else timesteps
        found = unet(noisy, told, states).sample
        target = noise
        if args.bug == "against_the_latents":
            target = latents.detach()
        if args.bug == "velocity_swapped":
            target = scheduler.get_velocity(noise, latents, timesteps)
        loss = F.mse_loss(found.float(), target.float(), reduction="mean")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        rate.step()
        if args.bug != "average_not_stepped":
            average.step(unet.parameters())
        done += 1
        if done % 4 == 0:
            print(done, loss.item(), flush=True)
        if done == args.iters:
            break
average.copy_to(unet.parameters())
print("end", sum(p.abs().sum().item() for p in unet.parameters()))
