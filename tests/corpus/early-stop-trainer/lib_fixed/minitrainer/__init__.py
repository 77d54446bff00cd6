"""A small trainer: epochs, gradient accumulation, warmup, logging."""
from dataclasses import dataclass, field

from .trainer import Trainer


@dataclass
class TrainingArguments:
    num_train_epochs: float = 1.0
    max_steps: int = -1
    batch_size: int = 8
    gradient_accumulation_steps: int = 1
    learning_rate: float = 1e-3
    warmup_ratio: float = 0.1
    seed: int = 0
    history: list = field(default_factory=list)


__all__ = ["Trainer", "TrainingArguments"]
