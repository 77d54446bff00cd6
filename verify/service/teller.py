"""Tells what the verifier has found: to the pager, the live view, experiment trackers, capsules and the terminal.

A notice is told once, in the order in which they come. One that the pager does not take is offered again; whatever one of
those who listen does, the others hear it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

from proctor.invariants.invariant import Tier
from proctor.verify.lifecycle import IncidentBook
from proctor.verify.lifecycle.record import State
from proctor.verify.metrics import Metrics
from proctor.verify.notice import Action, Notice
from proctor.verify.view.convert import incident_event
from proctor.verify.view.events import EventLog, NoticeEvent
from proctor.verify.writers import Writer

_MOST_UNTOLD: Final = 1000


class Tells(Protocol):
    """Where notices go: `paging.Pager`."""

    def notify(self, notice: Notice) -> None: ...
    def alive(self, text: str = "") -> None: ...
    def close(self, timeout_s: float = 10.0, *, finished: bool = True) -> bool: ...


class Attempts(Protocol):
    """Does something, and whatever fails in it stays there."""

    def __call__(self, what: str, work: Callable[[], object], *, lost: bool = True) -> object: ...


@dataclass
class Teller:
    """Told of notices by the verifier; arguments as those of `Verifier`.

    Args:
        attempt: does what may fail.
    """

    book: IncidentBook
    log: EventLog
    pager: Tells | None
    metrics: Metrics
    writers: Sequence[Writer]
    freeze: Callable[[str, int], None]
    say: Callable[[str], None]
    attempt: Attempts
    undelivered: bool = False
    """After the end: whether notices wait in the outbox."""
    _untold: list[Notice] = field(default_factory=list)  # that the pager did not take yet
    _shown: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def tell(self, notices: Iterable[Notice]) -> None:
        """Tell everybody; with a book that is kept on disk, also what it knows to be untold."""
        given = self.book.unsent if self.book.state_path is not None else list(notices)
        fresh = [notice for notice in given if notice not in self._untold]
        self._untold = [*self._untold, *fresh][-_MOST_UNTOLD:]
        for notice in fresh:
            if notice.action is Action.TRIGGER and notice.step is not None and not notice.code.startswith("PR2"):
                self.attempt("capsules", partial(self.freeze, notice.key, notice.step), lost=False)
            self.log.append(NoticeEvent(action=notice.action.value, key=notice.key, title=notice.title))
            if notice.action is Action.TRIGGER:
                for writer in self.writers:
                    said = partial(writer.incident, notice.step, notice.title, notice.text, notice.severity)
                    self.attempt("a writer", said, lost=False)
            word = "over" if notice.action is Action.RESOLVE else notice.tier.value
            self.say(f"[{word}] {notice.code} {notice.title}")
        if fresh:
            self.attempt("paging", self.page, lost=False)

    def page(self) -> None:
        """Hand notices to the pager; one that it does not take is offered again."""
        if not self._untold:
            return
        while self._untold:
            if self.pager is not None:
                self.pager.notify(self._untold[0])
            self._untold.pop(0)
        self.book.taken()

    def show(self) -> None:
        """Incidents as they are now, for the live view: those that changed."""
        for one in self.book.incidents:
            look = (one.state, one.title, one.severity, one.flaps, len(one.rules) + one.beside, one.ranks, one.capsule, len(one.facts))
            if self._shown.get(one.key) != look:
                self._shown[one.key] = look
                self.log.append(incident_event(one))
        firing = [one.tier for one in self.book.incidents if one.state is State.FIRING]
        self.metrics.active({tier: firing.count(tier) for tier in Tier})

    def close(self, *, finished: bool) -> None:
        """The pager delivers what it can."""
        self.undelivered = self.pager is not None and not self.pager.close(finished=finished)
