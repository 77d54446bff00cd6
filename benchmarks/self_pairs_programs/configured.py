"""Programs that accumulate as a library's configuration says: transformers' `Trainer`, accelerate, lightning, deepspeed; `--bug NAME` plants one of the bugs."""

import argparse
import tempfile

import torch
from torch import nn

ap = argparse.ArgumentParser()
ap.add_argument("--with", dest="library", default="transformers")
ap.add_argument("--bug", default="")
asked = ap.parse_args()
torch.manual_seed(0)
ids = torch.randint(1, 60, (64, 10), generator=torch.Generator().manual_seed(1))
labels = torch.where(torch.arange(10) < torch.where(torch.rand(64, 1, generator=torch.Generator().manual_seed(2)) < 0.4, 3, 10), ids, -100)

if asked.library == "transformers":
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    class Mean(Trainer):
        """Averages over the tokens of each part by itself: parts with few tokens weigh as much as those with many."""

        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            given = inputs["labels"]
            logits = model(input_ids=inputs["input_ids"]).logits
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), given[:, 1:].flatten()) / self.args.gradient_accumulation_steps
            return (loss, logits) if return_outputs else loss

    model = GPT2LMHeadModel(GPT2Config(vocab_size=60, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    data = [{"input_ids": i, "labels": y} for i, y in zip(ids, labels, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(folder, per_device_train_batch_size=8, gradient_accumulation_steps=1, max_steps=5, report_to=[], save_strategy="no", use_cpu=True, seed=5)
        (Mean if asked.bug == "mean_of_means" else Trainer)(model=model, args=arguments, train_dataset=data).train()
elif asked.library == "lightning":
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader, TensorDataset

    class Lit(pl.LightningModule):
        """A regression; lightning divides the loss by the parts of a batch."""

        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))

        def training_step(self, batch, number):
            loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
            return loss / self.trainer.accumulate_grad_batches if asked.bug == "divided_twice" else loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(TensorDataset(torch.randn(64, 6), torch.randn(64, 3)), batch_size=4)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    pl.Trainer(accelerator="cpu", devices=1, max_steps=5, accumulate_grad_batches=2, **quiet).fit(Lit(), data)
elif asked.library == "deepspeed":
    import os
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update({"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port})
    import deepspeed
    from torch.utils.data import TensorDataset

    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    config = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.0, "steps_per_print": 10**9, "zero_allow_untested_optimizer": True}
    data = TensorDataset(torch.randn(64, 6), torch.randn(64, 3))
    engine, _, loader, _ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), training_data=data, config=config)
    for inputs, targets in loader:
        loss = nn.functional.mse_loss(engine(inputs), targets)
        # backward() divides by the accumulation steps; who divides, too, does it twice
        engine.backward(loss / engine.gradient_accumulation_steps() if asked.bug == "divided_twice" else loss)
        engine.step()
else:
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    x, y = torch.randn(64, 6), torch.randn(64, 3)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(TensorDataset(x, y), batch_size=4))
    for _ in range(2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                # backward() divides by the accumulation steps; who divides, too, does it twice
                accelerator.backward(loss / accelerator.gradient_accumulation_steps if asked.bug == "divided_twice" else loss)
                optimizer.step()
                optimizer.zero_grad()
