"""DeepSpeed: the engine's public methods, and its own schedulers'."""

from __future__ import annotations

LIBRARY = "deepspeed"
TRIED = ("0.19.8", "0.19.8")
POINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "deepspeed": {"initialize": ()},
    "deepspeed.runtime.engine": {
        "DeepSpeedEngine": ("forward", "backward", "step", "zero_grad", "save_checkpoint", "load_checkpoint",
                            "allreduce_gradients", "clip_fp32_gradients", "is_gradient_accumulation_boundary"),
    },
    "deepspeed.runtime.pipe.engine": {"PipelineEngine": ("train_batch", "eval_batch")},
    "deepspeed.runtime.lr_schedules": {name: ("step",) for name in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupCosineLR")},
}
