"""Training libraries: their public API is recorded when they are imported, and the result stays the same."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.warm import python

pytest.importorskip("torch")
import proctor

TRAINER = """
    import torch
    from torch.utils.data import Dataset
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, default_data_collator
    class Numbers(Dataset):
        def __init__(self):
            self.x = (torch.randint(0, 64, (64, 1), generator=torch.Generator().manual_seed(0)) + torch.arange(16)) % 64
        def __len__(self): return len(self.x)
        def __getitem__(self, i): return {"input_ids": self.x[i], "labels": self.x[i]}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=16, n_layer=1, n_head=2))
    arguments = TrainingArguments(output_dir=OUT, max_steps=4, per_device_train_batch_size=4, save_strategy="no",
                                  report_to=[], use_cpu=True, seed=0, gradient_accumulation_steps=2, disable_tqdm=True)
    Trainer(model=model, args=arguments, train_dataset=Numbers(), data_collator=default_data_collator).train()
"""

LIGHTNING = """
    import torch, lightning as L
    from torch.utils.data import DataLoader, TensorDataset
    class Regressor(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
        def training_step(self, batch, index):
            return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)
    L.seed_everything(0)
    x = torch.randn(64, 8)
    trainer = L.Trainer(max_steps=4, accelerator="cpu", logger=False, enable_checkpointing=False,
                        enable_progress_bar=False, gradient_clip_val=1.0, default_root_dir=OUT)
    model = Regressor()
    trainer.fit(model, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16, shuffle=True))
"""

ACCELERATE = """
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), 16))
    for inputs, target in loader:
        optimizer.zero_grad()
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), target))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
"""

PEFT = """
    import torch
    from peft import LoraConfig, get_peft_model
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    model = get_peft_model(net, LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    x = torch.randn(64, 8)
    for batch in x.split(16):
        torch.nn.functional.mse_loss(model(batch), batch.sum(1, keepdim=True)).backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(OUT)
"""

DIFFUSERS = """
    import torch
    from diffusers import DDPMScheduler, UNet2DModel
    from diffusers.training_utils import EMAModel
    torch.manual_seed(0)
    model = UNet2DModel(sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(4, 4), norm_num_groups=2,
                        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2)
    scheduler, average = DDPMScheduler(100), EMAModel(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(4):
        clean, noise, steps = torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8), torch.randint(0, 100, (4,))
        torch.nn.functional.mse_loss(model(scheduler.add_noise(clean, noise, steps), steps).sample, noise).backward()
        optimizer.step()
        optimizer.zero_grad()
        average.step(model.parameters())
    average.copy_to(model.parameters())
"""

DEEPSPEED = """
    import os, torch
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    import deepspeed
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config={
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}})
    for batch in torch.randn(64, 8).split(8):
        engine.backward(torch.nn.functional.mse_loss(engine(batch), batch.sum(1, keepdim=True)))
        engine.step()
"""


@pytest.mark.parametrize(
    ("library", "program", "functions"),
    [
        ("transformers", TRAINER, {"transformers.Trainer.training_step", "accelerate.Accelerator.backward"}),
        ("lightning", LIGHTNING, {"lightning.Trainer.fit", "lightning.LightningModule.optimizer_step"}),
        ("accelerate", ACCELERATE, {"accelerate.Accelerator.prepare", "accelerate.Accelerator.clip_grad_norm_"}),
        ("peft", PEFT, {"peft.get_peft_model", "peft.PeftModel.save_pretrained", "peft.get_peft_model_state_dict"}),
        ("diffusers", DIFFUSERS, {"diffusers.DDPMScheduler.add_noise", "diffusers.EMAModel.step", "diffusers.EMAModel.copy_to"}),
        ("deepspeed", DEEPSPEED, {"deepspeed.initialize", "deepspeed.DeepSpeedEngine.backward", "deepspeed.DeepSpeedEngine.step"}),
    ],
)
def test_library_is_recorded_and_its_result_unchanged(library: str, program: str, functions: set[str], tmp_path: Path) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    path = tmp_path / "train.py"
    tail = "print('SUM', sum(p.double().abs().sum().item() for p in model.parameters()))"
    path.write_text(f"OUT = {str(tmp_path / 'out')!r}\n{textwrap.dedent(program)}\n{tail}\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

    def result(command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()[-1]

    bare = result([python(), str(path)])
    run = tmp_path / "run"
    assert result([sys.executable, "-m", "proctor.cli", "record", "-o", str(run), "--", python(), str(path)]) == bare
    opened = proctor.open_run(str(run))
    assert functions <= set(opened.calls["fn"])
    assert opened.trace.steps >= 4
    assert not opened.processes[0].notes
