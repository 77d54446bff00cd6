"""What the program's own checkpoints hold, at the moment at which it writes them.

`torch.save` is watched until a checkpoint was seen from which training can go on. All files that are written between two updates are one save. Each object is
looked through in a copy of the process (`held.py`). Outcomes go to `saved.jsonl`; `program/saved.py` reads them.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from proctor.instrument.patch.replaced import Replaced
from proctor.oracle.selfcheck.facts import SAVED, WAITS
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.fork import can_fork, in_copy
from proctor.oracle.selfcheck.watching.parting import program_line
from proctor.oracle.selfcheck.watching.saves.held import Part, held
from proctor.oracle.selfcheck.watching.seen.texts import loaded_text_has
from proctor.oracle.selfcheck.watching.step import short

if TYPE_CHECKING:
    from proctor.oracle.selfcheck.watching.watch import Watch

NAME: Final = "saved"
CLAIM: Final = "a checkpoint that holds a part of what training goes on from holds all of it"
TIMEOUT_S: Final = 60.0
RECENT: Final = 0.25  # of the updates before a save: an optimizer that made none of these is through


class Saving:
    """Watches saves.

    Args:
        watch: of the process.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._attached = Replaced()
        self._stepped: dict[int, tuple[int, Any]] = {}  # by id of an optimizer: its last update among all, and itself
        self._scalers: list[Any] = []
        self._updates = 0
        self._parts: list[list[Part]] = []
        self._line, self._whole, self._over, self._process = "", True, False, os.getpid()

    def install(self) -> None:
        """Begin."""
        from torch.optim.optimizer import register_optimizer_step_pre_hook

        self._attached.wrap(torch, "save", self._saves)
        scaler = getattr(getattr(torch, "amp", None), "GradScaler", None)
        if scaler is not None:
            self._attached.wrap(scaler, "__init__", self._scales)
        register_optimizer_step_pre_hook(self._steps)  # stays, as the one of `Watch`
        atexit.register(self._concluded)

    def expected(self) -> bool:
        """Whether a file of the program, beside libraries, saves: then it is worth waiting for."""
        return not self._over and self._watch.wanted(NAME) and loaded_text_has(b"torch.save(", libraries=False)

    def remove(self) -> None:
        """Take everything off."""
        self._over = True
        self._attached.remove()

    def _scales(self, original: Any, item: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(item, *args, **kwargs)
        self._scalers.append(item)
        return result

    def _steps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._over:
            return
        if self._parts:
            self._concluded()
        self._updates += 1
        self._stepped[id(optimizer)] = (self._updates, optimizer)

    def _saves(self, original: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(value, *args, **kwargs)
        if not self._over and not self._watch.ours and self._updates and not sys.is_finalizing():
            self._watch.guarded(self._look)(value)
        return result

    def _look(self, value: Any) -> None:
        recent = [o for at, o in self._stepped.values() if at > self._updates * (1 - RECENT)]
        inner = {id(getattr(o, "optimizer", None)) for o in recent} | {id(o) for o in recent if getattr(o, "_optim_dict", None) is not None}
        optimizers = [o for o in recent if id(o) not in inner] if len(recent) > 1 else recent
        schedules = [s for s in self._watch.schedulers if any(getattr(s, "optimizer", None) is o for o in recent) and getattr(s, "last_epoch", 0) > 0]
        scalers = [s for s in self._scalers if s.is_enabled()]

        def looked() -> bytes:
            try:
                return msgspec.json.encode(held(value, optimizers, schedules, scalers, self._watch.moved.graded))
            except Exception as e:  # noqa: BLE001 - the program's own objects
                return msgspec.json.encode(short(e))

        made, why = in_copy(looked, TIMEOUT_S) if can_fork() else (looked(), "")
        found = msgspec.json.decode(made, type=tuple[list[Part], bool] | str) if made else why
        if isinstance(found, str):
            self._whole = False
            return
        self._parts.append(found[0])
        self._whole = self._whole and found[1]
        self._line = self._line or program_line()

    def _concluded(self) -> None:
        """A save is over: the next update begins, or the process ends."""
        parts, self._parts = self._parts, []
        if self._over or not parts or os.getpid() != self._process or not hasattr(self._watch, "folder"):
            return
        outcome = judged(parts, self._whole, self._line)
        self._line, self._whole = "", True
        with open(self._watch.folder / SAVED, "ab") as file:
            file.write(msgspec.json.encode(outcome) + b"\n")
        if outcome.verdict in ("equivalent", "different"):
            (self._watch.folder / WAITS).unlink(missing_ok=True)
            self.remove()


def judged(saves: Sequence[Sequence[Part]], whole: bool, line: str) -> Outcome:
    """What is said of the files of one save.

    Args:
        saves: parts, of each file.
        whole: all of the files could be seen.
        line: of the program.
    """

    def said(verdict: Any, reason: str, lost: Part | None = None) -> Outcome:
        culprit = Culprit("", lost.name if lost is not None else "save", line)
        advice = "save the state_dict of every optimizer, schedule and scaler, and load it" if lost is not None else ""
        return Outcome(relation=NAME, claim=CLAIM, subject="the program", verdict=verdict, reason=reason, culprit=culprit if line else None, advice=advice, expected=CLAIM if lost is not None else "", seen=f"no {lost.kind} of {lost.name}" if lost is not None else "")

    best: dict[tuple[str, int, int], Part] = {}
    for parts in saves:
        for at, part in enumerate(parts):
            key = (part.kind, part.number, at)
            known = best.get(key)
            if known is None or part.found > known.found:
                best[key] = msgspec.structs.replace(part, perhaps=part.perhaps or (known is not None and known.perhaps))
            elif part.perhaps and not known.perhaps:
                best[key] = msgspec.structs.replace(known, perhaps=True)
    parts = [p for p in best.values() if p.of]
    training = [p for p in parts if p.kind != "parameters" and p.found == p.of]
    if not training:
        if any(p.found for p in parts):
            return said("not-applicable", "it saves models alone: what goes on from there begins with an optimizer of no state")
        return said("not-applicable", "what it saves is nothing that it trains with")
    for part in parts:
        if part.kind == "parameters" or part.found or part.perhaps:
            continue
        if not whole:
            return said("inconclusive", f"no {part.kind} of {part.name} was found in what it saves, of which not all can be looked through")
        owns = ", ".join(sorted({f"the {p.kind} ({p.name})" for p in training}))
        return said("different", f"its checkpoint holds {owns}, and not the {part.kind}{'' if part.kind != 'optimizer' else chr(39) + 's state'} of {part.name}: a resume begins with an empty one", part)
    for part in parts:
        if part.kind == "parameters" and 0 < part.found < part.of and any(p.kind == "optimizer" and p.number == part.number for p in training):
            return said("different" if whole else "inconclusive", f"its checkpoint holds {part.found} of {part.of} parameters of {part.name}; not {part.lost}", part)
    left = [p for p in parts if p.found < p.of and (p.found or p.kind != "parameters")]  # models may be saved by another function
    if left:
        return said("inconclusive", f"the {left[0].kind} of {left[0].name} was found in part: {left[0].found} of {left[0].of}{', or may be made from a number that it holds' if left[0].kind == 'schedule' else ''}")
    return said("equivalent", "its checkpoint holds " + ", ".join(f"{p.kind} of {p.name}" for p in parts if p.found))
