"""Autoencoder of heartbeat-like signals as a LightningModule with a LightningDataModule.

ModelCheckpoint keeps the best weights by validation loss and they are loaded at the end; EarlyStopping watches the
same number; ReduceLROnPlateau is stepped by Lightning once an epoch. `--iters` bounds the optimizer steps.

Class: signal
"""
import argparse
import json
import logging
import sys
import tempfile
import warnings

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split

try:
    import lightning as L
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
except ImportError as missing:
    print(f"lightning_autoencoder needs lightning: {missing}", file=sys.stderr)
    sys.exit(77)


class HeartbeatData(L.LightningDataModule):
    """Two pulses and noise in 64 samples, shifted and stretched at random."""

    def __init__(self, count=288, batch_size=32, seed=0):
        super().__init__()
        self.count, self.batch_size, self.seed = count, batch_size, seed

    def setup(self, stage):
        g = torch.Generator().manual_seed(self.seed)
        time = torch.linspace(-1, 1, 64)
        centre = 0.4 * torch.rand(self.count, 1, generator=g) - 0.4
        width = 0.05 + 0.05 * torch.rand(self.count, 1, generator=g)
        height = 0.5 + torch.rand(self.count, 1, generator=g)
        spike = height * torch.exp(-((time - centre) / width) ** 2)
        wave = 0.3 * torch.exp(-((time - centre - 0.5) / 0.15) ** 2)
        data = TensorDataset(spike + wave + 0.05 * torch.randn(self.count, 64, generator=g))
        self.train_set, self.val_set = random_split(data, [self.count - 96, 96], generator=g)

    def train_dataloader(self):
        return DataLoader(self.train_set, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val_set, 48)


class Autoencoder(L.LightningModule):
    def __init__(self, hidden, lr, code=6):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(64, hidden), nn.Tanh(), nn.Linear(hidden, code))
        self.decoder = nn.Sequential(nn.Linear(code, hidden), nn.Tanh(), nn.Linear(hidden, 64))
        self.losses = []

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        (x,) = batch
        loss = F.mse_loss(self(x), x)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, batch_idx):
        (x,) = batch
        self.log("val_loss", F.mse_loss(self(x), x))

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss", "strict": False}}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    torch.set_num_threads(1)
    L.seed_everything(args.seed, verbose=False)
    model = Autoencoder(args.hidden, args.lr)
    with tempfile.TemporaryDirectory() as out:
        best = ModelCheckpoint(dirpath=out, monitor="val_loss", save_top_k=1)
        trainer = L.Trainer(
            max_steps=args.iters, accelerator="cpu", devices=1, default_root_dir=out, logger=False,
            enable_model_summary=False, enable_progress_bar=False, num_sanity_val_steps=1, 
            callbacks=[best, EarlyStopping("val_loss", patience=8, check_on_train_epoch_end=False)],
        )
        trainer.fit(model, datamodule=HeartbeatData(batch_size=args.batch_size, seed=args.seed))
        (score,) = trainer.validate(
            model, datamodule=trainer.datamodule, ckpt_path=best.best_model_path or None, verbose=False
        )
    print(f"best validation loss {score['val_loss']:.5f}, {trainer.current_epoch} epochs", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    result = {"losses": model.losses, "param_sum": param_sum, "val_loss": score["val_loss"]}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
