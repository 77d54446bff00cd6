"""What the monitor says of itself and of processes: records that were lost, ranks that went silent or were killed, a verifier that was away.

Silence counts only while somebody listens: a verifier that was stopped, or whose clock jumped, has heard nobody because
of itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from proctor.invariants.invariant import Severity
from proctor.verify.lifecycle.cases import Cases
from proctor.verify.wording import clean, count, ranges

LOST_COVERAGE: Final = "PR201"
SILENT_RANK: Final = "PR202"
VERIFIER_AWAY: Final = "PR203"
KILLED_RANK: Final = "PR204"
_SHOWN: Final = 8  # ranks, one sentence each
_MAX_GAP_S: Final = 5.0  # between two looks; of a longer one no more counts as listening
_MAX_REASONS: Final = 64


class Monitor:
    """Raises and clears the incidents about monitoring.

    Args:
        cases: where they are kept.
    """

    def __init__(self, cases: Cases) -> None:
        self._cases = cases
        self.lost: dict[str, int] = {}
        self.counters: dict[str, int] = {}
        self.lost_at = 0.0
        self._listened = 0.0  # seconds
        self._looked: float | None = None
        self._heard: dict[int, tuple[float, float]] = {}  # rank: said to be heard at, listened until then
        self._missing: dict[int, float] = {}  # rank: listened when it was first missed
        self._silent: dict[int, float] = {}
        self._killed: list[str] = []

    def coverage(self, lost: Mapping[str, int], missing: Collection[int], time: float) -> None:
        """Counters of lost records by reason, at most 64, and ranks that were never heard."""
        more = 0
        for reason, n in sorted(lost.items()):
            if reason not in self.counters and len(self.counters) >= _MAX_REASONS:
                continue
            name, before = clean(reason, 80), self.counters.get(reason, 0)
            new = n - before if n >= before else n
            self.counters[reason] = n
            self.lost[name] = self.lost.get(name, 0) + new
            more += new
        self._missing = {rank: self._missing.get(rank, self._listened) for rank in missing}
        if more:
            self.lost_at = time
            self._cases.doubt()
            total = sum(self.lost.values())
            self._cases.raise_own(
                LOST_COVERAGE,
                f"monitor lost coverage: {count(total, 'record')} missing",
                Severity.WARNING,
                self._cases.policy.coverage_tier,
                {
                    "lost": "; ".join(f"{reason}: {n:,}" for reason, n in sorted(self.lost.items()) if n),
                    "what it means": "rules that would need these records are unknown, not violated",
                },
            )

    def away(self, why: str, time: float) -> None:
        """The verifier was not there for a while."""
        self.lost_at = time
        self._cases.raise_own(
            VERIFIER_AWAY,
            "verifier was restarted",
            Severity.WARNING,
            self._cases.policy.coverage_tier,
            {"gap": clean(why, 300), "what it means": "steps in between may not have been judged"},
        )

    def killed(self, rank: int, signal: str, means: str, step: int) -> None:
        """A signal ended a rank; the first one of a life of the job is what people are told of, since a launcher ends the others."""
        self._killed.append(f"rank {rank} by {signal} ({means}){f' in step {step}' if step >= 0 else ''}")
        shown = self._killed[:_SHOWN] + ([f"{len(self._killed) - _SHOWN} more"] if len(self._killed) > _SHOWN else [])
        first, *others = shown
        more = f", then {count(len(self._killed) - 1, 'more rank')}" if others else ""
        self._cases.raise_own(
            KILLED_RANK,
            f"{first.replace(' by ', ' was ended by ', 1)}{more}",
            Severity.ERROR,
            self._cases.policy.silent_tier,
            {"ended": "; ".join(shown), "what it means": "the process wrote no traceback; its last steps may not have been judged"},
        )

    def begin_life(self) -> None:
        """The job was started again."""
        self._killed = []
        self._cases.clear_own(KILLED_RANK, "the job was started again")

    def look(self, last_heard: Mapping[int, float], clock: float, time: float) -> None:
        """Once a second or so: who is silent, what is well again.

        Args:
            last_heard: when each rank was heard last, on the clock of `clock`; without those that said goodbye.
            clock: now.
            time: now, on the book's time line.
        """
        policy = self._cases.policy
        gap = 0.0 if self._looked is None else max(0.0, clock - self._looked)
        self._looked = clock
        self._listened += min(gap, _MAX_GAP_S)
        self._silent = {}
        for rank, at in last_heard.items():
            if self._heard.get(rank, (None,))[0] != at:
                self._heard[rank] = (at, self._listened)
            quiet = min(clock - at, self._listened - self._heard[rank][1])
            if quiet >= policy.silent_after_s:
                self._silent[rank] = quiet
        for rank, since in self._missing.items():
            if rank not in last_heard and self._listened - since >= policy.silent_after_s:
                self._silent[rank] = self._listened - since
        self._heard = {rank: self._heard[rank] for rank in last_heard}
        self._say_silent(len(last_heard.keys() | self._missing.keys()))
        if time - self.lost_at >= policy.coverage_clear_s:
            self._cases.clear_own(LOST_COVERAGE, f"no record was lost for {policy.coverage_clear_s:.0f} s")
            self._cases.clear_own(VERIFIER_AWAY, f"it has been there for {policy.coverage_clear_s:.0f} s")

    def _say_silent(self, known: int) -> None:
        if not self._silent:
            self._cases.clear_own(SILENT_RANK, "every rank that is expected is heard again")
            return
        silent = sorted(self._silent)
        named = f"{'rank' if len(silent) == 1 else 'ranks'} {ranges(silent)}"
        who = "no rank is heard any more" if len(silent) == known > 1 else f"{named} of {known} {'is' if len(silent) == 1 else 'are'} silent"
        self._cases.raise_own(
            SILENT_RANK,
            who,
            Severity.ERROR,
            self._cases.policy.silent_tier,
            {
                "silent": f"{named}, for {max(self._silent.values()):.0f} s",
                "what it may mean": "the process ended or hangs, its host or the network is gone; nothing is checked there",
            },
        )

    def close(self, *, finished: bool) -> None:
        """The job ended: there is nothing to listen to any more. Ranks that were silent before a crash stay so."""
        why = "the job ended"
        self._cases.clear_own(LOST_COVERAGE, why)
        self._cases.clear_own(VERIFIER_AWAY, why)
        if finished:
            self._cases.clear_own(SILENT_RANK, why)
