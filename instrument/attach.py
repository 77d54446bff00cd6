"""Attaching to a process: what the injected `sitecustomize`, `proctor.watch`, `proctor.meta` and the callbacks call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from proctor.instrument.config import RecordConfig, read_config
from proctor.instrument.guard import say
from proctor.instrument.observer import Observer

_observer: Observer | None = None


def install_from(activation: str) -> None:
    """Install with the configuration in this file; called from `sitecustomize`."""
    install(read_config(Path(activation)))


def install(config: RecordConfig) -> Observer:
    """Install once a process; later calls return the observer that is there."""
    global _observer
    if _observer is None or _observer.finished:
        observer = Observer(config)
        observer.install()
        _observer = observer
    return _observer


def watch(*objects: Any, out: str | None = None) -> None:
    """See `proctor.watch`. Never raises: a program must not die of being watched."""
    try:
        _watch(objects, out)
    except Exception as e:  # noqa: BLE001 - the front door of the library inside the user's program
        say(f"not recording: {type(e).__name__}: {e}")


def attach(out: str | None = None) -> Observer | None:
    """Install in this process unless something records it already; dormant until the process trains.

    The run directory is made when the process arms, so that one that never trains leaves nothing behind.

    Args:
        out: run directory; without it `$PROCTOR_RUN`, with the settings that `proctor record` left there, or the name
            that `rundir.default_run` gives this job.

    Returns:
        the observer, `None` where recording is switched off.
    """
    if _observer is not None and not _observer.finished:
        return _observer
    if os.environ.get("PROCTOR_DISABLE") == "1":
        return None
    from proctor.instrument.record.rundir import default_run

    asked = os.environ.get("PROCTOR_RUN")
    left = Path(asked) / "boot" / "activation.json" if asked and out is None else None
    if left is not None and left.is_file():
        config = read_config(left)
    else:
        config = RecordConfig(run=str(Path(out or asked or default_run(os.environ)).resolve()))
    observer = install(config)
    observer.makes_run = True
    observer.guard.run("early names", observer.reach_early)
    return observer


def recording() -> bool:
    """Whether this process has an observer that may yet record."""
    return _observer is not None and not _observer.inert and not _observer.finished


def _watch(objects: tuple[Any, ...], out: str | None) -> None:
    import torch

    observer = attach(out)
    if observer is None:
        return
    observer.arm("proctor.watch")
    for thing in objects:
        if isinstance(thing, torch.nn.Module):
            observer.guard.run("state", observer.tracker.add_model, thing)
        elif isinstance(thing, torch.optim.Optimizer):
            if not observer.tracker.holds(thing):
                observer.guard.run("watch", observer.steps.updates.optimizer_created, (thing,), None, None, False)
        elif isinstance(thing, torch.optim.lr_scheduler.LRScheduler):
            observer.guard.run("watch", observer.steps.updates.scheduler_created, (thing,), None)


def meta(values: dict[str, Any]) -> None:
    """See `proctor.meta`."""
    if _observer is None or _observer.inert or _observer.finished:
        return
    for key, value in values.items():
        if value is None:
            _observer.contexts.meta.pop(str(key), None)
        else:
            _observer.contexts.meta[str(key)] = value if isinstance(value, bool | int | float) else str(value)[:200]
    _observer.clock_moved()


def detach() -> None:
    """Stop recording and restore every patched function; for tests and notebooks."""
    global _observer
    if _observer is not None:
        _observer.close()
        _observer = None
