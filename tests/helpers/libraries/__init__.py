"""Small stand-ins of libraries that are not installed where the tests run: as many public names of each as its probe looks at."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Final

PEFT: Final = {
    "peft/__init__.py": "",
    "peft/tuners/__init__.py": "",
    "peft/tuners/tuners_utils.py": """
        from torch import nn
        class BaseTunerLayer:
            adapter_layer_names = ("lora_A", "lora_B")
            merged, disable_adapters = False, False
            def get_base_layer(self):
                return self.base_layer
        class Linear(nn.Module, BaseTunerLayer):
            def __init__(self, base):
                super().__init__()
                self.base_layer, self.lora_A, self.lora_B, self.active_adapters = base, nn.ModuleDict(), nn.ModuleDict(), []
            def update(self, name):
                self.lora_A[name] = nn.Linear(self.base_layer.in_features, 2, bias=False)
                self.lora_B[name] = nn.Linear(2, self.base_layer.out_features, bias=False)
            def set_adapter(self, name):
                self.active_adapters = [name]
                for table in (self.lora_A, self.lora_B):
                    for key, layer in table.items():
                        layer.requires_grad_(key == name)
            def forward(self, x):
                out = self.base_layer(x)
                for name in () if self.merged or self.disable_adapters else self.active_adapters:
                    out = out + self.lora_B[name](self.lora_A[name](x))
                return out
        class BaseTuner(nn.Module):
            def merge_adapter(self): ...
            def unmerge_adapter(self): ...
            def merge_and_unload(self): ...
            def unload(self): ...
    """,
    "peft/utils/__init__.py": "",
    "peft/utils/other.py": """
        from torch import nn
        class AuxiliaryTrainingWrapper(nn.Module): ...
    """,
    "peft/utils/save_and_load.py": """
        def get_peft_model_state_dict(model, state_dict=None, adapter_name="default"):
            return {k.replace(f".{adapter_name}", ""): v for k, v in model.state_dict().items() if f".{adapter_name}." in k}
        def set_peft_model_state_dict(model, state, adapter_name="default"):
            named = {k.replace(".weight", f".{adapter_name}.weight"): v for k, v in state.items()}
            return model.load_state_dict(named, strict=False)
    """,
    "peft/peft_model.py": """
        import types
        import torch
        from torch import nn
        from .tuners.tuners_utils import Linear
        from .utils import save_and_load
        class PeftModel(nn.Module):
            def __init__(self, model):
                super().__init__()
                self.base_model, self.peft_config = model, {}
                model.requires_grad_(False)
                for name, layer in list(model.named_children()):
                    if isinstance(layer, nn.Linear):
                        setattr(model, name, Linear(layer))
                self.add_adapter("default")
                self.set_adapter("default")
            def layers(self):
                return [m for m in self.modules() if isinstance(m, Linear)]
            def add_adapter(self, name):
                self.peft_config[name] = types.SimpleNamespace(is_prompt_learning=False)
                for layer in self.layers():
                    layer.update(name)
            def set_adapter(self, name):
                for layer in self.layers():
                    layer.set_adapter(name)
            def delete_adapter(self, name): ...
            def load_adapter(self, path): ...
            def save_pretrained(self, folder, selected_adapters=None, state_dict=None):
                for name in selected_adapters or self.peft_config:
                    torch.save(save_and_load.get_peft_model_state_dict(self, adapter_name=name), f"{folder}/{name}.pt")
            def forward(self, x):
                return self.base_model(x)
    """,
    "peft/mapping_func.py": """
        from .peft_model import PeftModel
        def get_peft_model(model):
            return PeftModel(model)
    """,
}
DIFFUSERS: Final = {
    "diffusers/__init__.py": "",
    "diffusers/schedulers/__init__.py": "",
    "diffusers/schedulers/scheduling_ddpm.py": """
        import types
        class DDPMScheduler:
            def __init__(self, prediction_type="epsilon"):
                self.config = types.SimpleNamespace(prediction_type=prediction_type)
            def share(self, timesteps):
                return (timesteps / 100)[:, None]
            def add_noise(self, original_samples, noise, timesteps):
                return original_samples * (1 - self.share(timesteps)) + noise * self.share(timesteps)
            def get_velocity(self, sample, noise, timesteps):
                return noise * (1 - self.share(timesteps)) - sample * self.share(timesteps)
    """,
    "diffusers/models/__init__.py": "",
    "diffusers/models/autoencoders/__init__.py": "",
    "diffusers/models/autoencoders/vae.py": """
        class DiagonalGaussianDistribution:
            def __init__(self, mean):
                self.mean = mean
            def sample(self):
                return self.mean + 0.0
            def mode(self):
                return self.mean + 0.0
    """,
    "diffusers/models/autoencoders/autoencoder_kl.py": """
        import types
        from torch import nn
        from .vae import DiagonalGaussianDistribution
        class AutoencoderKL(nn.Module):
            def __init__(self, width):
                super().__init__()
                self.config, self.inner = types.SimpleNamespace(scaling_factor=0.5), nn.Linear(width, width)
            def encode(self, x):
                return DiagonalGaussianDistribution(self.inner(x))
            def decode(self, x):
                return x
    """,
    "diffusers/training_utils.py": """
        class EMAModel:
            def __init__(self, parameters):
                self.shadow_params, self.optimization_step, self.kept = [p.clone().detach() for p in parameters], 0, None
            def step(self, parameters):
                self.optimization_step += 1
                for s, p in zip(self.shadow_params, parameters):
                    s.lerp_(p.detach(), 0.2)
            def put(self, parameters, values):
                for p, v in zip(parameters, values):
                    p.data.copy_(v)
            def copy_to(self, parameters):
                self.put(parameters, self.shadow_params)
            def store(self, parameters):
                self.kept = [p.detach().clone() for p in parameters]
            def restore(self, parameters):
                self.put(parameters, self.kept)
            def save_pretrained(self, path): ...
    """,
}
DEEPSPEED: Final = {
    "deepspeed/__init__.py": """
        from .runtime.engine import DeepSpeedEngine
        def initialize(**options):
            return DeepSpeedEngine(**options)
    """,
    "deepspeed/runtime/__init__.py": "",
    "deepspeed/runtime/lr_schedules.py": """
        class WarmupLR:
            def __init__(self, optimizer):
                self.optimizer, self.done = optimizer, 0
            def step(self):
                self.done += 1
                for group in self.optimizer.param_groups:
                    group["lr"] = 0.05 * min(1.0, self.done / 4)
    """,
    "deepspeed/runtime/engine.py": """
        from torch import nn
        class DeepSpeedEngine(nn.Module):
            def __init__(self, module, optimizer, lr_scheduler, batches, takes=False):
                super().__init__()
                self.module, self.optimizer, self.lr_scheduler, self.batches, self.takes = module, optimizer, lr_scheduler, batches, takes
                self.micro, self.applied, self.kept = 0, False, {}
            def gradient_accumulation_steps(self):
                return self.batches
            def was_step_applied(self):
                return self.applied
            def forward(self, *args):
                return self.module(*args)
            def backward(self, loss):
                (loss / self.batches).backward()
                for p in self.module.parameters() if self.takes else ():
                    self.kept[p], p.grad = self.kept.get(p, 0) + p.grad, None
            def zero_grad(self):
                for p in self.module.parameters():
                    p.grad = None
            def step(self):
                self.micro += 1
                self.applied = self.micro % self.batches == 0
                if self.applied:
                    for p, grad in self.kept.items():
                        p.grad = grad
                    self.kept = {}
                    self.optimizer.step()
                    self.zero_grad()
                    self.lr_scheduler.step()
            def save_checkpoint(self): ...
            def load_checkpoint(self): ...
            def allreduce_gradients(self): ...
            def clip_fp32_gradients(self): ...
            def is_gradient_accumulation_boundary(self): ...
    """,
}


def write(folder: Path, *libraries: dict[str, str]) -> None:
    """Put packages into a folder that is to be on the path."""
    for library in libraries:
        for name, text in library.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
