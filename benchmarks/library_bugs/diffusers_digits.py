"""Seven-segment digits by diffusion of pixels: a UNet2DModel learns the noise in microbatches, an average is evaluated and saved. `--bug` plants a mistake that users of diffusers make.

Bugs: uniform_noise, other_timesteps, timesteps_drawn_once, one_timestep, against_the_sample, configured_for_velocity, average_not_stepped, average_stays, average_each_microbatch, noise_left_out
"""
import argparse
import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iters", type=int, default=18)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--bug", default="")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
SEGMENTS = (slice(1, 2), slice(1, 7)), (slice(1, 4), slice(6, 7)), (slice(4, 7), slice(6, 7)), (slice(6, 7), slice(1, 7)), (slice(4, 7), slice(1, 2)), (slice(1, 4), slice(1, 2)), (slice(3, 5), slice(1, 7))
LIT = (0b0111111, 0b0000110, 0b1011011, 0b1001111, 0b1100110)
digits = -torch.ones(200, 1, 8, 8)
for i, which in enumerate(torch.randint(5, (200,)).tolist()):
    for bit, (rows, columns) in enumerate(SEGMENTS):
        if LIT[which] >> bit & 1:
            digits[i, 0, rows, columns] = 1
model = UNet2DModel(
    sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
    down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
)
scheduler = DDPMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2", prediction_type="v_prediction" if args.bug == "configured_for_velocity" else "epsilon")
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
rate = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.iters)
average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
test = digits[:8]
once = torch.randint(0, 100, (args.batch_size,))


def lost(clean):
    noise = torch.rand_like(clean) if args.bug == "uniform_noise" else torch.randn_like(clean)
    steps = once if args.bug == "timesteps_drawn_once" and model.training else torch.randint(0, 100, (len(clean),))
    noisy = clean if args.bug == "noise_left_out" else scheduler.add_noise(clean, noise, steps)
    told = {"other_timesteps": torch.randint(0, 100, (len(clean),)), "one_timestep": steps[:1]}.get(args.bug, steps)
    return F.mse_loss(model(noisy, told).sample, clean if args.bug == "against_the_sample" else noise)


def evaluate():
    average.store(model.parameters())
    average.copy_to(model.parameters())
    model.eval()
    with torch.no_grad():
        found = lost(test).item()
    model.train()
    if args.bug != "average_stays":
        average.restore(model.parameters())
    return found


model.train()
done = micro = 0
while done < args.iters:
    for clean in DataLoader(digits[8:], args.batch_size, shuffle=True, drop_last=True):
        loss = lost(clean)
        (loss / 2).backward()
        micro += 1
        if args.bug == "average_each_microbatch":
            average.step(model.parameters())
        if micro % 2:
            continue
        optimizer.step()
        rate.step()
        optimizer.zero_grad()
        if args.bug not in ("average_each_microbatch", "average_not_stepped"):
            average.step(model.parameters())
        done += 1
        if done % 6 == 0:
            print(done, loss.item(), evaluate(), flush=True)
        if done == args.iters:
            break
with tempfile.TemporaryDirectory() as folder:
    average.save_pretrained(folder)
print("end", sum(p.abs().sum().item() for p in model.parameters()))
