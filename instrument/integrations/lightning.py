"""Lightning: the Trainer, the module's training API, and Fabric."""

from __future__ import annotations

LIBRARY = "lightning"
TRIED = ("2.4.0", "2.6.6")
POINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "lightning.pytorch.trainer.trainer": {"Trainer": ("fit", "validate", "test", "save_checkpoint")},
    "lightning.pytorch.core.module": {
        "LightningModule": ("manual_backward", "backward", "optimizer_step", "optimizer_zero_grad", "clip_gradients",
                            "lr_scheduler_step", "toggle_optimizer", "untoggle_optimizer"),
    },
    "lightning.fabric.fabric": {
        "Fabric": ("setup", "setup_module", "setup_optimizers", "setup_dataloaders", "backward", "clip_gradients",
                   "all_reduce", "all_gather", "no_backward_sync", "save", "load", "seed_everything"),
    },
}
