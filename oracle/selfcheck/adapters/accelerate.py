"""accelerate: loaders with half the batch and twice `gradient_accumulation_steps` make the same update, in programs that use `accelerator.accumulate`."""

from __future__ import annotations

from typing import Any

from proctor.oracle.selfcheck.adapters import Adapter, offer, register


@register
class AccelerateAdapter(Adapter):
    """Works on the `Accelerator`'s accumulation and on the loaders that it prepares."""

    library = "accelerate.accelerator"

    def look(self) -> None:
        """As `Adapter.look`; a program that never calls `accumulate` updates after each batch, whatever is configured."""
        import wrapt

        prepared: list[int] = []

        def loader(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            prepared.append(getattr(args[0] if args else kwargs["data_loader"], "batch_size", None) or 0)
            return original(*args, **kwargs)

        def accumulate(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
            if prepared and all(size and size % 2 == 0 for size in prepared):
                parts = instance.gradient_accumulation_steps
                offer(self.library, "accumulation", f"Accelerator: batches of {prepared[0]} in {parts} parts against {prepared[0] // 2} in {2 * parts}")
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
            return original(_halved(first), *rest, **kwargs)

        wrapt.wrap_function_wrapper("accelerate.accelerator", "Accelerator.__init__", made)
        wrapt.wrap_function_wrapper("accelerate.accelerator", "Accelerator.prepare_data_loader", loader)


def _halved(loader: Any) -> Any:
    """The same samples in the same order, half as many at once."""
    from torch.utils.data import DataLoader

    size = getattr(loader, "batch_size", None)
    if not size or size % 2:
        return loader
    return DataLoader(
        loader.dataset, batch_size=size // 2, sampler=loader.sampler, num_workers=loader.num_workers, collate_fn=loader.collate_fn, pin_memory=loader.pin_memory,
        drop_last=loader.drop_last, worker_init_fn=loader.worker_init_fn, generator=loader.generator,
    )  # fmt: skip
