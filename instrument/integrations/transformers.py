"""Hugging Face transformers: the Trainer's loop, schedulers, checkpoints, processors' calls."""

from __future__ import annotations

LIBRARY = "transformers"
TRIED = ("4.57.1", "5.24.0")
POINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "transformers.trainer": {
        "Trainer": (
            "train", "training_step", "compute_loss", "evaluate", "prediction_step", "create_optimizer",
            "create_scheduler", "save_model", "get_train_dataloader", "get_batch_samples", "_wrap_model",
            "_save_checkpoint", "_load_from_checkpoint", "set_initial_training_values",
        ),
    },
    "transformers.modeling_utils": {
        "PreTrainedModel": (
            "save_pretrained", "resize_token_embeddings", "tie_weights", "init_weights", "gradient_checkpointing_enable",
        ),
    },
    "transformers.optimization": {"get_scheduler": (), "get_linear_schedule_with_warmup": ()},
    "transformers.processing_utils": {"ProcessorMixin": ("__call__",)},
    "transformers.tokenization_utils_base": {"PreTrainedTokenizerBase": ("__call__", "pad")},
    "transformers.data.data_collator": {
        "DataCollatorForLanguageModeling": ("__call__", "torch_call"),
        "DataCollatorWithPadding": ("__call__",),
        "default_data_collator": (),
    },
}
