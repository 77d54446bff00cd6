"""How far judging is, for those who look: steps of the live view, and points of curves in experiment trackers.

`verifier` calls it after each round, under its own guard. Nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from proctor.verify.live.groups import Round
from proctor.verify.live.online import OnlineChecker
from proctor.verify.series import curves
from proctor.verify.service.overhead import Overhead
from proctor.verify.view.events import EventLog, StepEvent
from proctor.verify.writers import Writer


class Progress:
    """Of one job.

    Args:
        log: of the live view.
        writers: of experiment trackers.
        clock: seconds that never jump.
    """

    def __init__(self, log: EventLog, writers: Sequence[Writer], clock: Callable[[], float]) -> None:
        self._log, self._writers, self._clock = log, writers, clock
        self._stepped = (clock(), -1)
        self._rate = 0.0
        self._drawn = -1

    def draw(self, rounds: Sequence[Round]) -> None:
        """Points of the judged steps, for those who draw curves elsewhere."""
        if not self._writers:
            return
        trace = rounds[-1].trace
        first, end = max(0, min(r.first for r in rounds)), max(r.end for r in rounds)
        points: dict[int, dict[str, float]] = {}
        for name, (steps, values) in curves(trace).items():
            for step, value in zip(steps, values, strict=True):
                if first <= step < end and step > self._drawn:
                    points.setdefault(step, {})[name] = value
        for step in sorted(points):
            self._drawn = step
            for writer in self._writers:
                writer.series(step, points[step])

    def show(
        self, checker: OnlineChecker, violated: int, worst: Overhead, *, latency: Callable[[], float] | None = None, checked: int | None = None
    ) -> None:
        """Tell the live view which steps are judged, at most once a second, or at every eighth; at the end of the job how many rules were checked, too."""
        members = [m for m in checker.live.members.values() if m.trains]
        ahead = max((m.reached for m in members), default=-1)
        behind = min(members, key=lambda m: m.reached, default=None)
        at, step = self._stepped
        if self._clock() - at >= 1.0:
            self._rate = (checker.judged - step) / (self._clock() - at)
            self._stepped = self._clock(), checker.judged
        elif checked is None and checker.judged % 8:
            return  # often enough
        lags = behind is not None and behind.reached < ahead - 1
        self._log.append(
            StepEvent(
                step=int(checker.judged),
                ahead=int(ahead),
                ranks=len(members),
                behind=_rank(behind.info) if behind is not None and lags else None,
                behind_step=int(behind.reached) if behind is not None and lags else None,
                checked=checked or 0,
                violated=violated,
                rate=max(0.0, self._rate),
                latency_ms=1e3 * latency() if latency is not None else 0.0,
                overhead=worst.share if worst.budget else 0.0,
                delay=worst.delay,
                finished=checked is not None,
            )
        )


def _rank(info: Mapping[str, Any]) -> int | None:
    rank = info.get("rank")
    return rank if isinstance(rank, int) else None
