"""What all callbacks share: attaching this process once, and the trainer's own facts as context of the records.

Facts, as keys of `proctor.meta`; a key appears when the library tells it:

    trainer                who drives the loop: transformers.Trainer, lightning.Trainer, …
    trainer.step           updates that the trainer has counted; goes on after a resume, where Proctor's steps begin at 0
    trainer.epoch          epochs that the trainer has begun before this one
    trainer.micro          forward and backward passes of this update before this one
    trainer.accumulation   passes that make an update
    trainer.stage          train, validate, sanity_check, test, predict, eval, checkpoint_save, checkpoint_load
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from typing import Any

from proctor.instrument.guard import Guard

Fact = str | int | float | bool | None
_MAX_WRAPPERS = 8  # optimizers around optimizers


class Session:
    """One callback's way into this process. No method raises: an error of ours turns the session's probe off.

    A callback attaches when it is made, the earliest moment that it has: a library that keeps a bound method of its own
    (the Trainer keeps `gather_for_metrics`) calls past the tap that comes later. Until the process trains, attaching
    writes nothing and a fork undoes nothing. Callbacks attach again where training is set up, for ranks started meanwhile.

    Args:
        trainer: who drives the loop.
        out: run directory for a process that nothing records yet; see `attach.attach`.
    """

    def __init__(self, trainer: str, out: str | os.PathLike[str] | None = None) -> None:
        self.trainer = trainer
        self.out = None if out is None else os.fspath(out)
        self._guard = Guard()
        self._told: dict[str, Fact] = {}
        self.attach()

    def __reduce__(self) -> tuple[Any, ...]:
        """A trainer may be copied, or pickled for the ranks that it starts: those attach themselves."""
        return Session, (self.trainer, self.out)

    def attach(self) -> None:
        """Observe this process from here on, unless it is observed already; nothing is written before it trains."""
        self._guard.run("attach", self._attach)

    def adopt(self, *objects: Any) -> None:
        """Observe optimizers and schedulers that were made before we attached, and begin to record.

        Args:
            objects: what the library hands out: theirs, wrapped ones, sequences of them, None.
        """
        self._guard.run("adopt", self._adopt, objects)

    def tell(self, **facts: Fact) -> None:
        """Set facts of the trainer on later records; `None` takes one back. Cheap when nothing changed.

        Args:
            facts: by their names without `trainer.`, see the top of this file.
        """
        self._guard.run("tell", self._tell, facts)

    def run(self, hook: Callable[..., None], *args: Any) -> None:
        """Call a hook that reads a library's objects, which may not be as we know them."""
        self._guard.run(hook.__name__, hook, *args)

    def _attach(self) -> None:
        from proctor.instrument import attach  # late: a process that nobody watches pays for none of it

        attach.attach(self.out)

    def _adopt(self, objects: tuple[Any, ...]) -> None:
        from proctor.instrument import attach

        attach.watch(*(_innermost(thing) for thing in _flat(objects)), out=self.out)

    def _tell(self, facts: dict[str, Fact]) -> None:
        changed = {f"trainer.{k}": v for k, v in facts.items() if self._told.get(k) != v}
        self._told.update(facts)
        if changed:
            from proctor.instrument import attach

            attach.meta({"trainer": self.trainer, **changed})


def activated() -> bool:
    """Whether somebody asked for Proctor in this process: `proctor record`, `proctor watch` or `$PROCTOR_RUN`."""
    if os.environ.get("PROCTOR_DISABLE") == "1":
        return False
    attach = sys.modules.get("proctor.instrument.attach")
    return bool(os.environ.get("PROCTOR_RUN")) or (attach is not None and bool(attach.recording()))


def _flat(things: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for thing in things:
        flat.extend(_flat(thing) if isinstance(thing, list | tuple) else [thing])
    return flat


def _innermost(thing: Any) -> Any:
    """The torch object in accelerate's, Fabric's and others' wrappers, which are optimizers and schedulers too."""
    for _ in range(_MAX_WRAPPERS):
        held = vars(thing) if hasattr(thing, "__dict__") else {}
        inner = held.get("optimizer") if hasattr(thing, "param_groups") else held.get("scheduler")
        if inner is None:
            return thing
        thing = inner
    return thing
