"""Lightning and Fabric: `Trainer(callbacks=[ProctorCallback()])`, or nothing at all under `proctor record`.

The entry points `lightning.pytorch.callbacks_factory`, `lightning.fabric.callbacks_factory` and their twins of the
package `pytorch_lightning` name the factories below. They give no callback in a process that nobody asked to record.

Records the process when no `proctor record` does, from its own construction on, and tells the
Trainer's step, epoch, microbatch, accumulation and stage. Has no state of its own, so that checkpoints stay the same.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from proctor.instrument.callbacks.session import Session, activated

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

if TYPE_CHECKING:
    ProctorCallback: type[Any]  # made by `__getattr__`: Fabric users do not import the Trainer for it


class _Hooks:
    """The hooks of a Trainer's callback, for the `Callback` class of either package.

    Args:
        out: run directory; default: that of `proctor record`, `$PROCTOR_RUN`, or a new one in `proctor-runs/`.
    """

    def __init__(self, out: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._session = Session("lightning.Trainer", out)
        self._micro = 0
        self._updates = -1

    package = ""

    def __reduce__(self) -> tuple[Any, ...]:
        """For strategies that send the Trainer to other processes; those attach by themselves."""
        return _made, (self.package, self._session.out)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self._session.attach()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._session.run(self._begun, trainer)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._session.run(self._counted, trainer)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._session.run(self._batch, trainer)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._session.run(self._counted, trainer)

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        self._session.tell(stage="sanity_check")

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self._session.tell(stage=None)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._session.run(self._staged, trainer)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._session.run(self._validated, trainer)

    def on_test_start(self, trainer: Any, pl_module: Any) -> None:
        self._session.tell(stage="test")

    def on_predict_start(self, trainer: Any, pl_module: Any) -> None:
        self._session.tell(stage="predict")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._session.tell(stage=None, micro=None)

    def _begun(self, trainer: Any) -> None:
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self._session.adopt(list(trainer.optimizers), schedulers)
        self._session.tell(accumulation=int(trainer.accumulate_grad_batches), stage="train")
        self._counted(trainer)

    def _batch(self, trainer: Any) -> None:
        updates = int(trainer.global_step)
        self._micro = self._micro + 1 if updates == self._updates else 0
        self._updates = updates
        self._session.tell(micro=self._micro, stage="train")
        self._counted(trainer)

    def _counted(self, trainer: Any) -> None:
        self._session.tell(step=int(trainer.global_step), epoch=int(trainer.current_epoch))

    def _staged(self, trainer: Any) -> None:
        stage = "sanity_check" if trainer.sanity_checking else "validate"
        self._session.tell(stage=stage)

    def _validated(self, trainer: Any) -> None:
        if not trainer.sanity_checking:
            self._session.tell(stage="train" if trainer.state.fn == "fit" else None)


class FabricCallback:
    """The one hook that Fabric calls by itself: after each update.

    Args:
        out: run directory, as above.
    """

    def __init__(self, out: str | os.PathLike[str] | None = None) -> None:
        self._session = Session("lightning.Fabric", out)
        self._updates: dict[int, int] = {}

    def on_after_optimizer_step(self, strategy: Any, optimizer: Any) -> None:
        self._session.run(self._updated, optimizer)

    def _updated(self, optimizer: Any) -> None:
        key = id(optimizer)
        if key not in self._updates:
            self._session.adopt(optimizer)
        self._updates[key] = self._updates.get(key, 0) + 1
        self._session.tell(step=max(self._updates.values()))


def lightning_pytorch() -> list[Any]:
    """Entry point of the group `lightning.pytorch.callbacks_factory`."""
    return [_made("lightning.pytorch", None)] if activated() else []


def pytorch_lightning() -> list[Any]:
    """Entry point of the group `pytorch_lightning.callbacks_factory`."""
    return [_made("pytorch_lightning", None)] if activated() else []


def fabric() -> list[Any]:
    """Entry point of the groups `lightning.fabric.callbacks_factory` and `lightning_fabric.callbacks_factory`."""
    return [FabricCallback()] if activated() else []


def __getattr__(name: str) -> Any:
    if name == "ProctorCallback":
        return _callback_class(_package())
    raise AttributeError(name)


@functools.cache
def _callback_class(package: str) -> type[Any]:
    base = importlib.import_module(package).Callback
    return type("ProctorCallback", (_Hooks, base), {"__doc__": _Hooks.__doc__, "__module__": __name__, "package": package})


def _made(package: str, out: str | None) -> Any:
    return _callback_class(package)(out)


def _package() -> str:
    """The package that the program uses: the one it has imported, else the one that is installed.

    Raises:
        ImportError: neither is installed.
    """
    for package in _PACKAGES:
        if package in sys.modules:
            return package
    for package in _PACKAGES:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return package
    raise ImportError("ProctorCallback needs lightning or pytorch_lightning")
