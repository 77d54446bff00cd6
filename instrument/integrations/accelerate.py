"""Hugging Face accelerate: what Accelerator does around a user's loop."""

from __future__ import annotations

LIBRARY = "accelerate"
TRIED = ("1.11.0", "1.15.0")
POINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "accelerate.accelerator": {
        "Accelerator": (
            "prepare", "prepare_model", "prepare_optimizer", "prepare_data_loader", "prepare_scheduler", "backward",
            "clip_grad_norm_", "clip_grad_value_", "gather", "gather_for_metrics", "reduce", "save_state", "load_state",
            "unwrap_model", "wait_for_everyone", "unscale_gradients", "no_sync",
        ),
    },
    "accelerate.optimizer": {"AcceleratedOptimizer": ("step", "zero_grad")},
    "accelerate.scheduler": {"AcceleratedScheduler": ("step",)},
}
