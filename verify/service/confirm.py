"""A trusted run does a step again before people are woken: `proctor oracle replay`, between the incidents and the pager.

A notice that would page, of an incident at a step, is held until its capsule was written and the reference has answered:

* confirmed: it pages, with the evidence;
* cleared: it is a ticket, with the evidence;
* inconclusive, too late, failed, the verifier was started again or the job ended: it pages, as without a reference.

All of it happens in the verifier's thread but for waiting, which each answer has a thread for: judging never waits. What
is held is on disk, so that a verifier that is killed loses no page. Other notices pass at once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from proctor.errors import ProctorError
from proctor.invariants.capsule import Capsule, capsules_of, read_capsule, siblings
from proctor.invariants.files import UNREADABLE, read_file, replace_file
from proctor.invariants.invariant import Severity, Tier
from proctor.verify.notice import Action, Notice
from proctor.verify.service.teller import Tells
from proctor.verify.wording import clean

HELD: Final = "held.json"
AT_ONCE: Final = 2  # answers waited for at a time; what comes on top pages at once
REMEMBERED: Final = 1000  # incidents of which the answer is known
GRACE_S: Final = 15.0  # after which a reference that does not end by itself is ended
_POLL_S: Final = 0.5
_MAX_BYTES: Final = 64 << 20
_MOST_ANSWER: Final = 16 << 20
_OF_A_JOB: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PROCTOR_RUN")


class Answer(msgspec.Struct, frozen=True):
    """What the reference says of a step.

    Args:
        verdict: of `proctor oracle replay`.
        reason: one sentence.
    """

    verdict: Literal["confirmed", "cleared", "inconclusive"]
    reason: str


Ask = Callable[[str, float], Answer]  # key of an incident, seconds; waits


class _Held:
    """Notices of one incident that wait, and the answer for which they do."""

    def __init__(self, notice: Notice) -> None:
        self.notices = [notice]
        self.answer: Answer | None = None


class Confirming:
    """Holds pages until a reference has confirmed or cleared them; else as the pager behind it.

    Args:
        pager: where notices go.
        folder: of the verifier's files.
        ask: has the reference do the step of an incident.
        within_s: that a page waits.
        note: gets key and evidence of each answer, for the report.
        clock: seconds that never jump.
    """

    def __init__(
        self,
        pager: Tells,
        folder: Path,
        ask: Ask,
        within_s: float,
        note: Callable[[str, str], object] = lambda key, text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pager, self._ask, self._within, self._note, self._clock = pager, ask, within_s, note, clock
        self._path = folder / HELD
        self._held: dict[str, _Held] = {}
        self._until: dict[str, float] = {}
        self._known: dict[str, tuple[Answer, Severity]] = {}
        for notice in self._left():
            self._pager.notify(notice)
        self._path.unlink(missing_ok=True)

    def notify(self, notice: Notice) -> None:
        """Take a notice; it is durable when this returns."""
        key = notice.key
        if key in self._held:  # in order: its end must not overtake it
            self._held[key].notices = [*self._held[key].notices[-8:], notice]
            self._save()
            return
        if notice.action is Action.RESOLVE:
            self._known.pop(key, None)
        known = self._known.get(key)
        if known is not None and notice.severity.level <= known[1].level:
            self._pager.notify(_with(notice, known[0]))
            return
        fits = notice.action is Action.TRIGGER and notice.tier is Tier.PAGE and notice.step is not None
        if not fits or notice.code.startswith("PR2") or notice.test or len(self._held) >= AT_ONCE:
            self._pager.notify(notice)
            return
        held = self._held[key] = _Held(notice)
        self._until[key] = self._clock() + self._within + GRACE_S
        if not self._save():
            self._release(key, None)
            return
        threading.Thread(target=self._wait, args=(key, held), name="proctor-confirm", daemon=True).start()

    def alive(self, text: str = "") -> None:
        """The verifier judges; what was answered since goes out."""
        for key, held in list(self._held.items()):
            if held.answer is not None:
                self._release(key, held.answer)
            elif self._clock() > self._until[key]:
                self._release(key, Answer("inconclusive", "the reference has not answered in time"))
        self._pager.alive(text)

    def close(self, timeout_s: float = 10.0, *, finished: bool = True) -> bool:
        """The job is over: what is held goes out."""
        for key, held in list(self._held.items()):
            self._release(key, held.answer or Answer("inconclusive", "the job ended before the reference had answered"))
        return self._pager.close(timeout_s, finished=finished)

    def _wait(self, key: str, held: _Held) -> None:
        try:
            held.answer = self._ask(key, self._within)
        except Exception as e:  # noqa: BLE001 - it pages then
            held.answer = Answer("inconclusive", f"the reference could not be asked: {type(e).__name__}: {e}")

    def _release(self, key: str, answer: Answer | None) -> None:
        held = self._held.pop(key)
        self._until.pop(key, None)
        for notice in held.notices:
            self._pager.notify(_with(notice, answer) if answer is not None else notice)
        self._save()
        if answer is None:
            return
        if held.notices[-1].action is not Action.RESOLVE:
            self._known[key] = answer, held.notices[0].severity
            while len(self._known) > REMEMBERED:
                self._known.pop(next(iter(self._known)))
        self._note(key, _said(answer))

    def _save(self) -> bool:
        """Write what is held; a page that cannot be kept must not wait."""
        waiting = [n for held in self._held.values() for n in held.notices]
        try:
            if not waiting:
                self._path.unlink(missing_ok=True)
                return True
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, msgspec.json.encode(waiting))
        except OSError:
            return False
        return True

    def _left(self) -> list[Notice]:
        """What a verifier that was killed held."""
        try:
            return msgspec.json.decode(read_file(self._path, _MAX_BYTES), type=list[Notice])
        except (OSError, *UNREADABLE):
            return []


def _with(notice: Notice, answer: Answer) -> Notice:
    """A notice with what the reference said."""
    if notice.action is not Action.TRIGGER:
        return notice
    text = _said(answer)
    tier = Tier.TICKET if answer.verdict == "cleared" and notice.tier is Tier.PAGE else notice.tier
    return msgspec.structs.replace(notice, tier=tier, text=f"{notice.text}\nReference: {text}", details={**notice.details, "reference": text})


def _said(answer: Answer) -> str:
    return clean(f"{answer.verdict}: {answer.reason}", 1000)


class Reference:
    """Asks `proctor oracle replay`.

    Args:
        run: whose capsules are looked at.
        command: of the reference.
        plan: file that says how the job is cut; "" without one.
    """

    def __init__(self, run: Path, command: str, plan: str = "") -> None:
        self._run, self._command, self._plan = run, command, plan

    def __call__(self, key: str, within_s: float) -> Answer:
        """Wait for the incident's capsule and for what the reference says of it."""
        end = time.monotonic() + within_s
        capsule = self._capsule(key, end - within_s / 2)
        if capsule is None:
            return Answer("inconclusive", "no capsule of the step was written in time")
        words = [sys.executable, "-P", "-m", "proctor.cli", "oracle", "replay", str(capsule), "--reference", self._command, "--format", "json"]
        words += ["--within", f"{max(1.0, end - time.monotonic()):.1f}", *(["--plan", self._plan] if self._plan else [])]
        return _run(words, max(1.0, end - time.monotonic()) + GRACE_S)

    def _capsule(self, key: str, until: float) -> Path | None:
        """The step of an incident in all ranks, by value where it comes in time."""
        found: Path | None = None
        while time.monotonic() < until:
            for path in capsules_of(self._run):
                with contextlib.suppress(ProctorError):
                    capsule = read_capsule(path)
                    if capsule.key != key[:256] or capsule.control is not None:
                        continue
                    found = found or path
                    if len(siblings(path, capsule)) == capsule.world and self._held(path, capsule):
                        return path
            time.sleep(_POLL_S)
        return found


    @staticmethod
    def _held(path: Path, capsule: Capsule) -> bool:
        """Whether a rank holds the step by value; ranks that do not may be replicas of it."""
        return any(read_capsule(folder).by_value for folder in siblings(path, capsule).values())


def _run(words: Sequence[str], limit_s: float) -> Answer:
    environment = {k: v for k, v in os.environ.items() if k not in _OF_A_JOB}
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as complained:
        process = subprocess.Popen(
            list(words), stdin=subprocess.DEVNULL, stdout=said, stderr=complained, env=environment, start_new_session=True
        )
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return Answer("inconclusive", "the reference has not answered in time")
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        said.seek(0)
        try:
            return msgspec.json.decode(said.read(_MOST_ANSWER), type=Answer)
        except msgspec.MsgspecError:
            complained.seek(0)
            lines = complained.read(_MOST_ANSWER).decode(errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
            return Answer("inconclusive", f"the reference failed: {last.removeprefix('proctor: ')}")

