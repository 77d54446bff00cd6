"""Pages wait for a trusted run, and only as long as was said."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from proctor.invariants.invariant import Severity, Tier
from proctor.verify.lifecycle.policy import Policy
from proctor.verify.notice import Action, Notice
from proctor.verify.service.confirm import HELD, Answer, Confirming, Reference


class Receiver:
    """A pager that remembers."""

    def __init__(self) -> None:
        self.got: list[Notice] = []
        self.closed = False

    def notify(self, notice: Notice) -> None:
        self.got.append(notice)

    def alive(self, text: str = "") -> None:
        pass

    def close(self, timeout_s: float = 10.0, *, finished: bool = True) -> bool:
        self.closed = True
        return True


def notice(key: str = "k", action: Action = Action.TRIGGER, code: str = "PR101", step: int | None = 7, tier: Tier = Tier.PAGE, severity: Severity = Severity.ERROR) -> Notice:
    return Notice(action=action, key=key, tier=tier, severity=severity, title="t", text="seen", code=code, step=step, began=1.0, at=2.0)


def answering(answer: Answer, gate: threading.Event | None = None) -> Callable[[str, float], Answer]:
    def ask(key: str, within_s: float) -> Answer:
        if gate is not None:
            gate.wait(10.0)
        return answer

    return ask


def settle(confirming: Confirming, receiver: Receiver, count: int) -> None:
    for thread in threading.enumerate():
        if thread.name == "proctor-confirm":
            thread.join(5.0)
    confirming.alive()
    assert len(receiver.got) == count


def test_what_is_confirmed_pages_with_the_evidence(tmp_path: Path) -> None:
    receiver, gate, notes = Receiver(), threading.Event(), []
    ask = answering(Answer("confirmed", "the gradient of w is twice the reference's"), gate)
    confirming = Confirming(receiver, tmp_path, ask, 60.0, note=lambda key, text: notes.append((key, text)))
    confirming.notify(notice())
    confirming.alive()
    assert not receiver.got and (tmp_path / HELD).is_file()
    gate.set()
    settle(confirming, receiver, 1)
    assert receiver.got[0].tier is Tier.PAGE and "twice the reference's" in receiver.got[0].text
    assert receiver.got[0].details["reference"] == notes[0][1] == "confirmed: the gradient of w is twice the reference's"
    assert not (tmp_path / HELD).exists()


def test_what_is_cleared_is_a_ticket_until_it_gets_worse_or_comes_back(tmp_path: Path) -> None:
    receiver = Receiver()
    confirming = Confirming(receiver, tmp_path, answering(Answer("cleared", "it is the same")), 60.0)
    confirming.notify(notice())
    settle(confirming, receiver, 1)
    confirming.notify(notice())
    assert [n.tier for n in receiver.got] == [Tier.TICKET, Tier.TICKET]
    confirming.notify(notice(severity=Severity.CRITICAL))
    settle(confirming, receiver, 3)  # asked again
    confirming.notify(notice(action=Action.RESOLVE))
    confirming.notify(notice())
    assert len(receiver.got) == 4
    settle(confirming, receiver, 5)


def test_other_notices_do_not_wait(tmp_path: Path) -> None:
    receiver = Receiver()
    confirming = Confirming(receiver, tmp_path, answering(Answer("cleared", "")), 60.0)
    passing = [notice(tier=Tier.TICKET), notice(code="PR201"), notice(step=None), notice("other", Action.RESOLVE)]
    for one in passing:
        confirming.notify(one)
    assert receiver.got == passing


@pytest.mark.parametrize("end", ["time", "job", "killed", "failed"])
def test_without_an_answer_it_pages_as_before(tmp_path: Path, end: str) -> None:
    receiver, gate, now = Receiver(), threading.Event(), [0.0]

    def ask(key: str, within_s: float) -> Answer:
        if end == "failed":
            raise OSError("no such command")
        gate.wait(10.0)
        return Answer("cleared", "too late")

    confirming = Confirming(receiver, tmp_path, ask, 120.0, clock=lambda: now[0])
    confirming.notify(notice())
    confirming.notify(notice(action=Action.RESOLVE))
    if end == "time":
        now[0] = 200.0
        confirming.alive()
    elif end == "job":
        assert confirming.close() and receiver.closed
    elif end == "killed":
        Confirming(receiver, tmp_path, ask, 120.0)
    else:
        settle(confirming, receiver, 2)
    assert [(n.action, n.tier) for n in receiver.got] == [(Action.TRIGGER, Tier.PAGE), (Action.RESOLVE, Tier.PAGE)]
    assert not (tmp_path / HELD).exists() or end == "job"
    gate.set()


def test_a_page_that_cannot_be_kept_does_not_wait(tmp_path: Path) -> None:
    receiver = Receiver()
    (tmp_path / "file").write_text("")
    confirming = Confirming(receiver, tmp_path / "folder", answering(Answer("cleared", "")), 60.0)
    (tmp_path / "folder").symlink_to(tmp_path / "file")
    confirming.notify(notice())
    assert [n.tier for n in receiver.got] == [Tier.PAGE]


def test_a_step_that_nobody_kept_is_inconclusive(tmp_path: Path) -> None:
    answer = Reference(tmp_path, "true")("key", 0.2)
    assert (answer.verdict, answer.reason) == ("inconclusive", "no capsule of the step was written in time")


def test_the_command_is_checked_when_the_policy_is_read() -> None:
    assert Policy(confirm_with="python 'my ref.py'").confirm_within_s == 120.0
    with pytest.raises(ValueError, match="confirm_with"):
        Policy(confirm_with="python 'ref.py")
