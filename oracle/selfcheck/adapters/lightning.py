"""lightning: loaders with half the batch and twice `accumulate_grad_batches` make the same update.

Ranks are not varied: on several the `Trainer` draws an order of its own, also of loaders that draw none (`use_distributed_sampler`), so the first batches are others.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar

from proctor.oracle.selfcheck.adapters import (
    Adapter,
    divisible,
    halved,
    offer,
    register,
)


@register
class LightningAdapter(Adapter):
    """Works on the `Trainer`'s accumulation and on the training loader that it is given, or that the model or the data module makes."""

    library = "lightning.pytorch.trainer.trainer"
    package: ClassVar[str] = "lightning.pytorch"

    def look(self) -> None:
        """As `Adapter.look`; a model that steps its optimizers by itself takes no accumulation."""

        def fit(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            model = args[0] if args else kwargs.get("model")
            if getattr(model, "automatic_optimization", False):
                _with_loaders(args, kwargs, lambda loader: self._seen(instance, loader))
            return original(*args, **kwargs)

        self._wrap("fit", fit)

    def change(self, axis: str) -> None:
        """As `Adapter.change`."""

        def made(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            done = original(*args, **kwargs)
            instance.accumulate_grad_batches *= 2
            return done

        def fit(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            args, kwargs = _with_loaders(args, kwargs, halved)
            return original(*args, **kwargs)

        self._wrap("__init__", made)
        self._wrap("fit", fit)

    def _wrap(self, method: str, wrapper: Any) -> None:
        import wrapt

        wrapt.wrap_function_wrapper(self.library, f"Trainer.{method}", wrapper)

    def _seen(self, trainer: Any, loader: Any) -> Any:
        if divisible(loader) and isinstance(trainer.accumulate_grad_batches, int):
            size, parts = loader.batch_size, trainer.accumulate_grad_batches
            offer(self.library, "accumulation", f"{self.package}.Trainer: batches of {size} in {parts} parts against {size // 2} in {2 * parts}")
        return loader


@register
class OldNameAdapter(LightningAdapter):
    """The same library by its old name."""

    library = "pytorch_lightning.trainer.trainer"
    package: ClassVar[str] = "pytorch_lightning"


def _with_loaders(args: Any, kwargs: Any, change: Any) -> tuple[Any, Any]:
    """Arguments of `fit` with the training loader changed, wherever it comes from."""
    given = dict(zip(("model", "train_dataloaders", "val_dataloaders", "datamodule"), args, strict=False)) | kwargs
    source = given.get("train_dataloaders")
    if source is None:
        source = given.get("datamodule") or given.get("model")
    method = getattr(source, "train_dataloader", None)
    if method is None:
        given["train_dataloaders"] = change(source)
        return (), given
    source.train_dataloader = functools.partial(lambda made: change(made()), method)
    return args, kwargs
