"""Image classifier as a LightningModule: gradient clipping, two accumulated batches, validation, per-step schedule.

`forward` is also used outside of the Trainer; metrics are kept by hand and logged with `log_dict`; a callback
prints progress. The last accumulated group of an epoch may be smaller: Lightning steps at the epoch's end.
`--iters` counts updates.

Class: vision
"""
import argparse
import json
import logging
import sys
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning as L
except ImportError as missing:
    print(f"lightning_classifier needs lightning: {missing}", file=sys.stderr)
    sys.exit(77)


def blobs(count, seed):
    """12x12 images of one to three bright spots; the class is their number."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=g)
    grid = torch.arange(12.0)
    centres = torch.rand(count, 3, 2, generator=g) * 9 + 1.5
    dy = (grid[None, None, :, None] - centres[..., 0, None, None]) ** 2
    dx = (grid[None, None, None, :] - centres[..., 1, None, None]) ** 2
    spots = torch.exp(-(dy + dx) / 1.5) * (torch.arange(3)[None, :] <= labels[:, None])[..., None, None]
    return TensorDataset((spots.sum(1) + 0.1 * torch.randn(count, 12, 12, generator=g))[:, None], labels)


class Progress(L.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step and trainer.global_step % 10 == 0 and (batch_idx + 1) % 2 == 0:
            print(f"step {trainer.global_step} loss {outputs['loss'].item():.4f}", flush=True)


class SpotCounter(L.LightningModule):
    def __init__(self, channels, lr, total_steps):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(channels, 2 * channels, 3, padding=1), nn.GroupNorm(2, 2 * channels), nn.ReLU(),
        )
        self.head = nn.Linear(2 * channels, 3)
        self.step_losses = {}

    def forward(self, images):
        return self.head(self.features(images).sum((2, 3)) / 10)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        loss = F.cross_entropy(logits, labels)
        self.log_dict({"loss": loss, "accuracy": (logits.argmax(-1) == labels).float().mean()}, on_step=True)
        self.step_losses.setdefault(self.global_step, []).append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        logits = self(images)
        self.log("val_accuracy", (logits.argmax(-1) == labels).float().mean(), on_epoch=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, weight_decay=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: max(0.05, 1 - s / self.hparams.total_steps))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-2)
    args = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    L.seed_everything(args.seed, verbose=False)
    model = SpotCounter(args.channels, args.lr, args.iters)
    trainer = L.Trainer(
        max_steps=args.iters, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        callbacks=[Progress()], enable_progress_bar=False, enable_model_summary=False, gradient_clip_val=1.0, accumulate_grad_batches=2,
        check_val_every_n_epoch=1,
    )
    trainer.fit(
        model, DataLoader(blobs(480, args.seed), args.batch_size, shuffle=True),
        DataLoader(blobs(96, args.seed + 1), 48),
    )
    accuracy = float(trainer.callback_metrics.get("val_accuracy", float("nan")))
    model.eval()
    with torch.inference_mode():
        spots = model(torch.zeros(1, 1, 12, 12)).argmax().item() + 1
    print(f"validation accuracy {accuracy:.3f}; an empty image has {spots} spots", flush=True)
    losses = [sum(values) / len(values) for values in model.step_losses.values()]
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum}), flush=True)


if __name__ == "__main__":
    main()
