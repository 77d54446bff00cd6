"""transformers: `TrainingArguments` with half the batch and twice the accumulation make the same update."""

from __future__ import annotations

from typing import Any

from proctor.oracle.selfcheck.adapters import Adapter, offer, register


@register
class TransformersAdapter(Adapter):
    """Works on the arguments before they check themselves."""

    library = "transformers.training_args"

    def look(self) -> None:
        """As `Adapter.look`."""
        _wrap(lambda arguments: offer(self.library, "accumulation", _said(arguments)) if _divisible(arguments) else None)

    def change(self, axis: str) -> None:
        """As `Adapter.change`."""
        _wrap(_halve)


def _wrap(act: Any) -> None:
    import wrapt

    def checked(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        act(instance)
        return original(*args, **kwargs)

    wrapt.wrap_function_wrapper("transformers.training_args", "TrainingArguments.__post_init__", checked)


def _divisible(arguments: Any) -> bool:
    # With fewer rows in the last batch halves are no halves; a batch that is found by trying is no configuration.
    return arguments.per_device_train_batch_size % 2 == 0 and not getattr(arguments, "auto_find_batch_size", False)


def _said(arguments: Any) -> str:
    batch, parts = arguments.per_device_train_batch_size, arguments.gradient_accumulation_steps
    return f"TrainingArguments: batches of {batch} in {parts} parts against {batch // 2} in {2 * parts}"


def _halve(arguments: Any) -> None:
    if _divisible(arguments):
        arguments.per_device_train_batch_size //= 2
        arguments.gradient_accumulation_steps *= 2
