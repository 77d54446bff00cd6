"""Ordinary trainings with diffusers, one a kind, all of them right.

Kinds: minimal_snr, velocity, sample, flow, flow_scaled, offset_noise, perturbed_input, prior, inpainting, adapters, inversion, control, distilled, accelerated, one_timestep, own_autoencoder, average_late, average_starts_again, sampled_between, time_embedded
"""
import argparse
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DDPMPipeline,
    DDPMScheduler,
    FlowMatchEulerDiscreteScheduler,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.training_utils import EMAModel, compute_snr
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--iters", type=int, default=9)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--kind", default="velocity")
args = parser.parse_args()
torch.set_num_threads(1)
torch.manual_seed(args.seed)
kind = args.kind
clean = torch.sin(torch.linspace(0, 6, 8)[None, :, None] * (1 + torch.rand(96, 1, 1)) + 6 * torch.rand(96, 1, 8).cumsum(2) / 8)[:, None]
SIZES = {"sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 8), "norm_num_groups": 4}


def unet(channels=1, out=1):
    return UNet2DModel(in_channels=channels, out_channels=out, down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2, **SIZES)


def conditional():
    return UNet2DConditionModel(in_channels=1, out_channels=1, down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"), cross_attention_dim=8, attention_head_dim=4, **SIZES)


def fit(model, loss_of, parameters=None, average=None, each=None, optimizer=None):
    optimizer = optimizer or torch.optim.AdamW(parameters or [p for p in model.parameters() if p.requires_grad], 2e-3)
    model.train()
    done = 0
    while done < args.iters:
        for batch in DataLoader(clean, 8, shuffle=True, drop_last=True):
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            done += 1
            if average is not None:
                average(done)
            if each is not None:
                each(done)
            if done == args.iters:
                break
    print(kind, loss.item())


def drawn(batch, scheduler):
    noise, steps = torch.randn_like(batch), torch.randint(0, scheduler.config.num_train_timesteps, (len(batch),))
    return noise, steps, scheduler.add_noise(batch, noise, steps)


def plain(model, scheduler):
    def loss_of(batch):
        noise, steps, noisy = drawn(batch, scheduler)
        return F.mse_loss(model(noisy, steps).sample, noise)

    return loss_of


scheduler = DDPMScheduler(num_train_timesteps=60, prediction_type={"velocity": "v_prediction", "sample": "sample"}.get(kind, "epsilon"))
if kind in ("velocity", "sample", "minimal_snr", "offset_noise", "perturbed_input", "prior", "one_timestep"):
    model = unet()

    def loss_of(batch):
        noise, steps, noisy = drawn(batch, scheduler)
        target = {"velocity": scheduler.get_velocity(batch, noise, steps), "sample": batch}.get(kind, noise)
        if kind == "offset_noise":
            target = noise = noise + 0.1 * torch.randn(len(batch), 1, 1, 1)
            noisy = scheduler.add_noise(batch, noise, steps)
        if kind == "perturbed_input":
            noisy = scheduler.add_noise(batch, noise + 0.1 * torch.randn_like(noise), steps)
        if kind == "one_timestep":
            steps = torch.randint(0, 60, (1,)).expand(len(batch))
            noisy = scheduler.add_noise(batch, noise, steps)
            return F.mse_loss(model(noisy, steps[0]).sample, target)
        found = model(noisy, steps).sample
        if kind == "minimal_snr":
            snr = compute_snr(scheduler, steps)
            return (F.mse_loss(found, target, reduction="none").mean((1, 2, 3)) * snr.clamp(max=5) / snr).mean()
        if kind == "prior":
            (found, others), (target, theirs) = found.chunk(2), target.chunk(2)
            return F.mse_loss(found, target) + F.mse_loss(others, theirs)
        return F.mse_loss(found, target)

    fit(model, loss_of)
elif kind in ("flow", "flow_scaled"):
    model, flow = unet(), FlowMatchEulerDiscreteScheduler()

    def loss_of(batch):
        noise, chosen = torch.randn_like(batch), torch.randint(0, 1000, (len(batch),))
        sigmas, steps = flow.sigmas[chosen].view(-1, 1, 1, 1), flow.timesteps[chosen]
        noisy = flow.scale_noise(batch, steps, noise) if kind == "flow_scaled" else (1 - sigmas) * batch + sigmas * noise
        return F.mse_loss(model(noisy, steps / 1000).sample, noise - batch)

    fit(model, loss_of)
elif kind == "inpainting":
    model = unet(3)

    def loss_of(batch):
        noise, steps, noisy = drawn(batch, scheduler)
        mask = (torch.rand(len(batch), 1, 8, 1) < 0.5).float().expand_as(batch)
        return F.mse_loss(model(torch.cat([noisy, mask, batch * (1 - mask)], 1), steps).sample, noise)

    fit(model, loss_of)
elif kind in ("adapters", "inversion"):
    model, words = conditional(), torch.nn.Embedding(4, 8)
    model.requires_grad_(False)
    if kind == "adapters":
        from peft import LoraConfig

        model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"]))
        words.requires_grad_(False)
    texts = torch.nn.Sequential(words, torch.nn.Linear(8, 8).requires_grad_(False))

    def loss_of(batch):
        noise, steps, noisy = drawn(batch, scheduler)
        return F.mse_loss(model(noisy, steps, texts(torch.randint(4, (len(batch), 3)))).sample, noise)

    fit(model, loss_of, [p for p in (*model.parameters(), *texts.parameters()) if p.requires_grad])
elif kind == "control":
    from diffusers import ControlNetModel

    model = conditional().requires_grad_(False)
    control = ControlNetModel.from_unet(model, conditioning_channels=1).requires_grad_(True)
    states = torch.randn(1, 3, 8)

    def loss_of(batch):
        noise, steps, noisy = drawn(batch, scheduler)
        given = states.expand(len(batch), -1, -1)
        hint = F.interpolate(batch, scale_factor=8)
        down, middle = control(noisy, steps, given, controlnet_cond=hint, return_dict=False)
        return F.mse_loss(model(noisy, steps, given, down_block_additional_residuals=down, mid_block_additional_residual=middle).sample, noise)

    fit(control, loss_of)
elif kind == "distilled":
    teacher, model, ddim = unet().requires_grad_(False).eval(), unet(), DDIMScheduler(num_train_timesteps=60)

    def loss_of(batch):
        _, steps, noisy = drawn(batch, ddim)
        with torch.no_grad():
            target = teacher(noisy, steps).sample
        return F.mse_loss(model(noisy, steps).sample, target)

    fit(model, loss_of)
elif kind == "accelerated":
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = unet()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    average = EMAModel(model.parameters(), decay=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(clean, 8, shuffle=True, drop_last=True))
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(plain(model, scheduler)(batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                average.step(model.parameters())
    average.copy_to(model.parameters())
elif kind == "own_autoencoder":
    coder = AutoencoderKL(in_channels=1, out_channels=1, latent_channels=1, block_out_channels=(8,), layers_per_block=1, norm_num_groups=4, down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",))

    def rebuilt(batch):
        posterior = coder.encode(batch).latent_dist
        return F.mse_loss(coder.decode(posterior.sample()).sample, batch) + 1e-3 * posterior.kl().mean()

    fit(coder, rebuilt)
    coder.requires_grad_(False).eval()
    model = unet()

    def loss_of(batch):
        with torch.no_grad():
            latents = coder.encode(batch).latent_dist.sample()
        return plain(model, scheduler)(latents)

    fit(model, loss_of)
elif kind in ("average_late", "average_starts_again", "sampled_between", "time_embedded"):
    model = unet()
    average = EMAModel(model.parameters(), decay=0.9)

    def late(done):
        if kind != "average_late" or done > args.iters // 2:
            average.step(model.parameters())

    def each(done):
        if done % 3:
            return
        if kind == "average_starts_again":
            average.store(list(model.parameters()))
            average.copy_to(list(model.parameters()))
        model.eval()
        pipeline = DDPMPipeline(unet=model, scheduler=DDPMScheduler.from_config(scheduler.config) if kind == "sampled_between" else scheduler)
        pipeline.set_progress_bar_config(disable=True)
        pipeline(batch_size=2, num_inference_steps=3, output_type="np")
        model.train()
        if kind == "average_starts_again":
            average.restore(list(model.parameters()))

    if kind == "time_embedded":
        fit(model, lambda batch: (lambda noise, steps: F.huber_loss(model(scheduler.add_noise(batch, noise, steps), timestep=steps.float() * 2 + 1).sample, noise))(torch.randn_like(batch), torch.randint(0, 60, (len(batch),))), average=late)
    else:
        fit(model, plain(model, scheduler), average=late, each=each)
    average.copy_to(model.parameters())
