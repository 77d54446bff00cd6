"""Who is told of an incident now: by tier and severity, unless it is muted, under maintenance or over the budget.

What is kept back is written down with the reason. A mute or maintenance only delays: an incident that is not over when
it ends is told then. What is over the budget goes into one digest a tier. The end of an incident always passes: it
closes what was told and wakes nobody.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from proctor.invariants.invariant import Tier
from proctor.verify.notice import Action, Notice
from proctor.verify.paging.config import PageConfig
from proctor.verify.paging.ledger import Ledger
from proctor.verify.paging.outbox import Outbox
from proctor.verify.sinks import Sink
from proctor.verify.wording import clean, count

DIGEST_CODE: Final = "PR290"
_LISTED: Final = 40  # incidents that a digest names


@dataclass
class _Members:
    """Incidents of a digest: how many, when the first began, and the loudest of them."""

    number: int
    began: float
    loudest: list[Notice]

    @classmethod
    def of(cls, notices: list[Notice], number: int) -> _Members:
        listed = sorted(notices, key=_loudness)[:_LISTED]
        return cls(number, min(n.began for n in notices), listed)

    def add(self, notice: Notice) -> None:
        self.number, self.began = self.number + 1, min(self.began, notice.began)
        bisect.insort(self.loudest, notice, key=_loudness)
        del self.loudest[_LISTED:]


def _loudness(notice: Notice) -> tuple[int, float]:
    return -notice.severity.level, notice.began


class Gate:
    """Decides for every notice and sink.

    Args:
        config: tiers, windows, budgets.
        sinks: by name.
        outbox: where what may go is queued.
        ledger: what is remembered.
        now: epoch seconds.
    """

    def __init__(
        self,
        config: PageConfig,
        sinks: Mapping[str, Sink],
        outbox: Outbox,
        ledger: Ledger,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config, self._sinks, self._outbox, self._ledger, self._now = config, sinks, outbox, ledger, now
        self._members: dict[Tier, _Members] = {}  # of digests, as they were last: one more of many costs no look at all of them

    def route(self, notice: Notice) -> None:
        """Queue, hold or drop a tidied notice for every sink."""
        if notice.action is Action.RESOLVE:
            self._ledger.drop_held(notice.key)
            for sink in self._sinks.values():
                self._outbox.put(sink, notice)
            emptied = self._ledger.drop_digested(notice.key)
            self._members.clear()
            if emptied is not None:
                self.route(self._digest(emptied, _Members.of([notice], 1), Action.RESOLVE))
            return
        asked = [
            sink
            for sink in self._sinks.values()
            if sink.settings.wants(notice.tier, notice.severity) or self._outbox.is_open(sink, notice.key)
        ]
        if not asked:
            self._ledger.suppress("-", notice, f"no sink takes tier {notice.tier}, severity {notice.severity}")
            return
        self._offer(asked, notice)

    def release(self) -> None:
        """Tell what was held back and may go now."""
        for name, notice in self._ledger.held():
            sink = self._sinks.get(name)
            if sink is None:
                self._ledger.drop_held(notice.key, name)
            elif not self._blocked(sink, notice):
                self._ledger.drop_held(notice.key, name)
                self._offer([sink], notice)

    def _offer(self, sinks: Iterable[Sink], notice: Notice) -> None:
        free = []
        for sink in sinks:
            reason = self._blocked(sink, notice)
            if not reason:
                self._ledger.drop_held(notice.key, sink.name)
                free.append(sink)
            else:
                self._ledger.hold(sink.name, notice, reason)
        if not free:
            return
        is_digest = notice.code == DIGEST_CODE
        if not is_digest and not self._outbox.knows(notice):
            over = self._ledger.digested(notice.key) or not self._ledger.within_budget(
                notice.tier, self._config.budget.of(notice.tier)
            )
            if over:
                self._into_digest(free, notice)
                return
        delay_s = self._config.budget.digest_s if is_digest else 0.0
        for sink in free:
            if self._outbox.put(sink, notice, delay_s=delay_s, repeat=is_digest) == "full":
                self._ledger.suppress(sink.name, notice, "too much waits for this sink")

    def _blocked(self, sink: Sink, notice: Notice) -> str:
        now = self._now()
        for mute in self._ledger.mutes():
            if mute.matches(sink.name, notice):
                return mute.say()
        return next((w.say() for w in self._config.maintenance if w.holds(sink.name, now)), "")

    def _into_digest(self, sinks: Iterable[Sink], notice: Notice) -> None:
        known = self._ledger.digested(notice.key)
        self._ledger.add_digested(notice)
        if known:
            return
        most = self._config.budget.of(notice.tier)
        for sink in sinks:
            self._ledger.suppress(sink.name, notice, f"over {most} {notice.tier}s an hour: told in the digest")
        there, known_members = self._ledger.members(notice.tier), self._members.get(notice.tier)
        if known_members is not None and known_members.number + 1 == there:
            known_members.add(notice)
        else:
            self._members[notice.tier] = _Members.of(self._ledger.digest(notice.tier) or [notice], max(1, there))
        self.route(self._digest(notice.tier, self._members[notice.tier], Action.TRIGGER))

    def _digest(self, tier: Tier, members: _Members, action: Action) -> Notice:
        listed, worst = members.loudest, members.loudest[0]
        more = members.number - len(listed)
        lines = [f"{n.severity}: {clean(n.title, 200)}" + (f" (step {n.step})" if n.step is not None else "") for n in listed]
        lines += [f"and {more:,} more"] if more > 0 else []
        noun = count(members.number, "more incident")
        return Notice(
            action=action,
            key=f"proctor:{worst.job or 'job'}:digest:{tier}",
            tier=tier,
            severity=worst.severity,
            title=f"{noun} beyond {self._config.budget.of(tier)} an hour: {clean(worst.title, 300)}",
            text="\n".join(lines),
            job=worst.job,
            source=worst.source,
            code=DIGEST_CODE,
            began=members.began,
            at=self._now(),
            links=worst.links,
        )
