"""What came of a scenario: a verdict of a class, and a symptom by which findings are told apart."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import resources
from typing import Any, Final, Literal

import msgspec

from proctor.oracle.fuzz.axes import Rule
from proctor.oracle.fuzz.running.judge import MISSING, Difference
from proctor.oracle.fuzz.running.rank import plain_message, within_library
from proctor.oracle.fuzz.running.worlds import GONE, Answer

Verdict = Literal["ok", "inconsistent", "replicas", "crash", "hang", "refused", "different", "rounding", "no program"]
FAILURES: Final = ("inconsistent", "replicas", "crash", "hang")
ENDED: Final = "ended"  # of a rank of a hang that had done its part
VERDICTS: Final = ("ok", *FAILURES, "refused", "different", "rounding", "no program")


class Symptom(msgspec.Struct, frozen=True):
    """How a failure looks, without what differs from run to run.

    Attributes:
        verdict: of `FAILURES`.
        what: kind of the first tensor that differs, or type of the exception.
        way: how it is wrong, or the exception's message without numbers.
        where: class of the module that owns the tensor, or the innermost frame in a library.
    """

    verdict: str
    what: str
    way: str = ""
    where: str = ""

    def alike(self, other: Symptom) -> bool:
        """Whether both may be of one cause: the same exception at the same place; of tensors, the same kind of failure."""
        if self.verdict in ("crash", "hang") or other.verdict in ("crash", "hang"):
            return self == other
        return True


class Outcome(msgspec.Struct, frozen=True):
    """A scenario's verdict.

    Attributes:
        verdict: of `VERDICTS`.
        symptom: of a failure.
        why: one sentence: of a failure what is seen, else the reason.
        first: the first tensor that differs.
        others: further tensors that differ.
        trace: the end of the traceback, or the stacks of a hang.
        seconds: that the candidate took.
    """

    verdict: Verdict
    symptom: Symptom | None = None
    why: str = ""
    first: Difference | None = None
    others: tuple[str, ...] = ()
    trace: str = ""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        """Whether it is a finding."""
        return self.symptom is not None


def outcome_of(answer: Answer, declared: Sequence[Rule]) -> Outcome:
    """Read what the ranks of a candidate answered.

    Args:
        answer: of the world.
        declared: what is known of the setting.
    """
    raised = answer.raised()
    died = answer.ended.startswith("rank ")
    if raised and not (died and all(GONE.search(r["message"]) for r in raised)):  # those that are left only tell that one is gone
        return _raised(raised[0], answer.seconds)
    if answer.ended == "timeout":
        return _hang(answer)
    if answer.ended:
        symptom = Symptom("crash", "death", plain_message(re.sub(r"^rank \d+ ", "", answer.ended)))
        return Outcome("crash", symptom, answer.ended, seconds=answer.seconds)
    return _compared(answer, declared)


def _raised(error: dict[str, Any], seconds: float) -> Outcome:
    said = f"{error['type']}: {error['message']}"
    for pattern, why in refusals():
        if pattern.search(said):
            return Outcome("refused", why=why, trace=error["traceback"], seconds=seconds)
    symptom = Symptom("crash", error["type"], plain_message(error["message"]), error["where"])
    line = said.strip().splitlines()[0]
    return Outcome("crash", symptom, f"{line[:300]} ({error['where']})", trace=error["traceback"], seconds=seconds)


def _hang(answer: Answer) -> Outcome:
    places = sorted({_waits(stack) for stack in answer.stacks if stack.strip()})
    inner = [place for place in places if place != ENDED]
    said = f"the ranks wait in {', '.join(inner) or 'native code'}{', and others have ended' if inner and ENDED in places else ''}"
    why = f"no answer within {answer.seconds:.0f} s; {'all ranks have ended' if places == [ENDED] else said}"
    return Outcome("hang", Symptom("hang", "timeout", "", ", ".join(places)), why, trace="\n".join(answer.stacks), seconds=answer.seconds)


def _waits(stack: str) -> str:
    """What a rank waits in: the innermost frame of a library, as of an exception; `ENDED` of one that waits for its next task. No path of the interpreter, whose files lie elsewhere on each machine."""
    frames = re.findall(r'File "([^"]+)", line \d+ in (\S+)', stack)
    for file, name in frames:
        if inner := within_library(file):
            return f"{inner}:{name}"
    mine = next((number for number, (file, _) in enumerate(frames) if file == "<scenario>"), -1)
    return ENDED if mine < 0 else ":".join((frames[0][0].rpartition("/")[2], frames[0][1]))


def _compared(answer: Answer, declared: Sequence[Rule]) -> Outcome:
    found = [difference_of(d) for r in answer.ranks if r is not None for d in r["differences"]]
    found.sort(key=lambda d: d.order)
    apart = replicas_apart(answer)
    if not found and not apart:
        return Outcome("ok", seconds=answer.seconds)
    different = next((r for r in declared if r.effect == "different"), None)
    if different is not None:
        return Outcome("different", why=different.why, seconds=answer.seconds)
    beyond = [d for d in found if not d.rounding]
    if not beyond and not apart:
        first = _first(found)
        return Outcome("rounding", why=f"within the program's own noise: {sentence(first)}", first=first, seconds=answer.seconds)
    if not beyond:
        return Outcome("replicas", Symptom("replicas", "parameter"), f"replicas of {apart} differ in their bits", seconds=answer.seconds)
    first = _first(beyond)
    symptom = Symptom("inconsistent", first.kind, way_class(first.way), first.module)
    others = tuple(dict.fromkeys(f"{d.kind} {d.name} of step {d.step}" for d in found))[1:13]
    return Outcome("inconsistent", symptom, sentence(first), first, others, seconds=answer.seconds)


def _first(found: Sequence[Difference]) -> Difference:
    """The tensor that differs first in the run; of those the one that is furthest off for its size."""
    order = found[0].order
    alike = [d for d in found if d.order == order]
    return max(alike, key=lambda d: d.error / (d.largest or 1.0))


def difference_of(plain: dict[str, Any]) -> Difference:
    """A difference out of a rank's JSON."""
    return msgspec.convert(plain, Difference)


def sentence(d: Difference) -> str:
    """A difference in words."""
    name = f" {d.name}" if d.name else ""
    if d.error >= MISSING and not d.candidate:
        return f"{d.kind}{name} of step {d.step} on rank {d.rank}: {d.way}"
    way = f" ({d.way})" if d.way else ""
    own = "" if d.noise < 0 else f"; one process moves it by {d.noise:.2g} when each operation is rounded otherwise"
    return f"{d.kind}{name} of step {d.step} on rank {d.rank}: {d.candidate} for {d.reference}, off by {d.error:.3g}, allowed {d.allowed:.2g}{way}{own}"


def way_class(way: str) -> str:
    """The kind of a way of being wrong."""
    for word in ("scale", "zero", "stale", "partial", "another order", "only in", "has none", "no gradient", "shape", "NaN"):
        if word in way:
            return word
    return ""


def replicas_apart(answer: Answer) -> str:
    """The first tensor whose replicas differ, as "kind/name"; "" if all agree."""
    seen: dict[str, int] = {}
    for rank in answer.ranks:
        for key, sum_ in (rank or {}).get("digests", {}).items():
            if seen.setdefault(key, sum_) != sum_:
                step, _, rest = key.partition("/")
                return f"{rest.partition('|')[0]} after step {step}"
    return ""


@cache
def refusals() -> tuple[tuple[re.Pattern[str], str], ...]:
    """Messages by which libraries say clearly that they do not do something, and what they say."""
    text = resources.files("proctor.oracle.fuzz").joinpath("refusals.toml").read_text()
    return tuple((re.compile(r["pattern"]), r["why"]) for r in tomllib.loads(text)["refusal"])
