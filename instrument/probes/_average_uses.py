"""How a program uses diffusers' averages of weights (`EMAModel`): part of `denoising.py`."""

from __future__ import annotations

import weakref
from typing import Any, Final

from proctor.instrument.probes import NO_HOOKS, Hooks
from proctor.instrument.probes._usage import Usage

_UPDATES: Final = 2  # in which one that is used should have been stepped
_AGAIN: Final = 3  # updates in a row with several steps
_MOST: Final = 8


class _Average:
    """One average: updates and steps since it was made."""

    def __init__(self, average: Any) -> None:
        self.ref = weakref.ref(average)
        self.updates = 0  # of any optimizer
        self.steps = 0  # since the last update
        self.several = 0  # updates in a row behind which it stepped several times
        self.copied: set[int] = set()  # parameters that hold it, in the place of what was stored


class Averages:
    """The averages of one process.

    Args:
        usage: says what was seen.
    """

    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self._known: list[_Average] = []

    def hooks(self, method: str) -> Hooks:
        return {
            "__init__": (None, self._made), "step": (None, self._stepped), "copy_to": (self._used, self._copied), "save_pretrained": (self._used, None),
            "restore": (None, self._restored),
        }.get(method, NO_HOOKS)  # fmt: skip

    def updates(self, optimizer: Any) -> None:
        """An optimizer is about to update."""
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]} if any(known.copied for known in self._known) else set()
        for known in self._known:
            if mine & known.copied:
                self._usage.say("restored", "EMAModel", "an update trains weights that an EMAModel was copied into, and that nothing has restored")
                known.copied = set()
            known.updates += 1
            known.several = known.several + 1 if known.steps > 1 else 0
            if known.steps and not self._usage.over:
                self._usage.say("once", "EMAModel", f"an EMAModel steps several times for each of {_AGAIN} updates in a row" if known.several == _AGAIN else "")
            known.steps = 0

    def _find(self, average: Any) -> _Average | None:
        return next((known for known in self._known if known.ref() is average), None)

    def _made(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        self._known = [known for known in self._known if known.ref() is not None]
        if not raised and len(self._known) < _MOST:
            self._known.append(_Average(args[0]))

    def _stepped(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        known = self._find(args[0])
        if known is not None and not raised:
            known.steps += 1

    def _used(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        known, steps = self._find(args[0]), getattr(args[0], "optimization_step", None)
        if known is not None and steps is not None and known.updates >= _UPDATES:
            self._usage.say("averaged", "EMAModel", "an EMAModel is used that was never stepped while the model trained" if steps == 0 else "")

    def _copied(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        # Who hands a generator has it consumed: what the optimizers hold, and has the average's values, is what was copied into.
        known = self._find(args[0])
        if known is None or raised:
            return
        given = args[1] if len(args) > 1 else (kwargs or {}).get("parameters")
        into = list(given) if isinstance(given, list | tuple) else [p for p in self._usage.held() if any(p.shape == s.shape and _equal(p, s) for s in args[0].shadow_params)]
        known.copied = {id(p) for p in into}

    def _restored(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        known = self._find(args[0])
        if known is not None and not raised:
            if known.copied:
                self._usage.say("restored", "EMAModel")
            known.copied = set()


def _equal(left: Any, right: Any) -> bool:
    from proctor.instrument.observe import content

    if left.numel() < 2 or left.device != right.device:
        return False
    with content.unseen():
        return bool((left.detach() == right.to(left.dtype)).all())
