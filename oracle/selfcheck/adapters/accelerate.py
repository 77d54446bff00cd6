"""accelerate: loaders with half the batch and twice `gradient_accumulation_steps` make the same update, in programs that use `accelerator.accumulate`."""

from __future__ import annotations

from typing import Any

from proctor.oracle.selfcheck.adapters import (
    Adapter,
    divisible,
    halved,
    offer,
    register,
)


@register
class AccelerateAdapter(Adapter):
    """Works on the `Accelerator`'s accumulation and on the loaders that it prepares."""

    library = "accelerate.accelerator"

    def look(self) -> None:
        """As `Adapter.look`; a program that never calls `accumulate` updates after each batch, whatever is configured."""
        import wrapt

        prepared: list[Any] = []

        def loader(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            prepared.append(args[0] if args else kwargs["data_loader"])
            return original(*args, **kwargs)

        def accumulate(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if prepared and all(map(divisible, prepared)):
                size, parts = prepared[0].batch_size, instance.gradient_accumulation_steps
                offer(self.library, "accumulation", f"Accelerator: batches of {size} in {parts} parts against {size // 2} in {2 * parts}")
            return original(*args, **kwargs)

        wrapt.wrap_function_wrapper("accelerate.accelerator", "Accelerator.prepare_data_loader", loader)
        wrapt.wrap_function_wrapper("accelerate.accelerator", "Accelerator.accumulate", accumulate)

    def change(self, axis: str) -> None:
        """As `Adapter.change`."""
        import wrapt

        def made(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            done = original(*args, **kwargs)
            instance.gradient_accumulation_steps *= 2
            return done

        def loader(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            first, *rest = args or (kwargs.pop("data_loader"),)
            return original(halved(first), *rest, **kwargs)

        wrapt.wrap_function_wrapper("accelerate.accelerator", "Accelerator.__init__", made)
        wrapt.wrap_function_wrapper("accelerate.accelerator", "Accelerator.prepare_data_loader", loader)
