"""Hugging Face diffusers: what training programs ask of noise schedulers, averages of weights and autoencoders."""

from __future__ import annotations

LIBRARY = "diffusers"
TRIED = ("0.42.1", "0.42.1")
# Noise schedulers, by module: those that have a velocity, and those that have none.
_WITH_VELOCITY = {
    "ddpm": "DDPMScheduler", "ddim": "DDIMScheduler", "ddpm_parallel": "DDPMParallelScheduler", "ddim_parallel": "DDIMParallelScheduler",
    "euler_discrete": "EulerDiscreteScheduler", "lcm": "LCMScheduler",
}  # fmt: skip
_PLAIN = {
    "pndm": "PNDMScheduler", "euler_ancestral_discrete": "EulerAncestralDiscreteScheduler", "lms_discrete": "LMSDiscreteScheduler",
    "heun_discrete": "HeunDiscreteScheduler", "dpmsolver_multistep": "DPMSolverMultistepScheduler", "deis_multistep": "DEISMultistepScheduler",
    "unipc_multistep": "UniPCMultistepScheduler", "edm_euler": "EDMEulerScheduler",
}  # fmt: skip
POINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "diffusers.training_utils": {"EMAModel": ("__init__", "step", "copy_to", "store", "restore", "save_pretrained")},
    "diffusers.models.autoencoders.autoencoder_kl": {"AutoencoderKL": ("encode", "decode")},
    "diffusers.models.autoencoders.vae": {"DiagonalGaussianDistribution": ("sample", "mode")},
    "diffusers.schedulers.scheduling_flow_match_euler_discrete": {"FlowMatchEulerDiscreteScheduler": ("scale_noise",)},
    **{f"diffusers.schedulers.scheduling_{module}": {name: ("add_noise", "get_velocity")} for module, name in _WITH_VELOCITY.items()},
    **{f"diffusers.schedulers.scheduling_{module}": {name: ("add_noise",)} for module, name in _PLAIN.items()},
}
