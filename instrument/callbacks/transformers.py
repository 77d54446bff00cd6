"""Hugging Face Trainer: `Trainer(..., callbacks=[ProctorCallback()])`.

Records the process when no `proctor record` does, from its own construction on, and tells the Trainer's step,
epoch, microbatch and accumulation. Reads `args`, `state` and the optimizer, changes nothing, returns no control.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from proctor.instrument.callbacks.session import Session

if TYPE_CHECKING:  # the library need not be there where types are checked
    TrainerCallback = object
else:
    from transformers import TrainerCallback


class ProctorCallback(TrainerCallback):
    """Record a Trainer's run.

    Args:
        out: run directory; default: that of `proctor record`, `$PROCTOR_RUN`, or a new one in `proctor-runs/`.
    """

    def __init__(self, out: str | os.PathLike[str] | None = None) -> None:
        self._session = Session("transformers.Trainer", out)
        self._micro = 0

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.attach()

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, lr_scheduler: Any = None, **kwargs: Any
    ) -> None:
        self._session.adopt(optimizer, lr_scheduler)
        self._session.run(self._begun, args, state)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.run(self._epoch_begun, state)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.run(self._counted, state)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._micro += 1
        self._session.tell(micro=self._micro)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.run(self._counted, state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._session.tell(micro=None, stage=None)

    def _begun(self, args: Any, state: Any) -> None:
        self._session.tell(accumulation=int(args.gradient_accumulation_steps), stage="train")
        self._epoch_begun(state)
        self._counted(state)

    def _epoch_begun(self, state: Any) -> None:
        self._session.tell(epoch=int(state.epoch or 0))

    def _counted(self, state: Any) -> None:
        self._micro = 0
        self._session.tell(step=int(state.global_step), micro=0)
