"""A campaign of several workers: who looks into a failure, what is carried between machines, what a worker that is lost costs. No ranks, no cluster."""

from __future__ import annotations

import errno
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from proctor.errors import OracleError
from proctor.oracle.fuzz.running.evaluate import Runner
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.board import LAPSED_S, Board, key_of
from proctor.oracle.fuzz.search.campaign import Campaign, Pair, Row
from proctor.oracle.fuzz.search.findings import Finding
from proctor.oracle.fuzz.sessions import cluster
from proctor.oracle.fuzz.sessions.cluster import Cluster, Numbers
from proctor.oracle.fuzz.sessions.journal import Asked, Journal
from proctor.oracle.fuzz.sessions.piece import Carried, Piece, Told
from proctor.oracle.fuzz.sessions.relay import Mail, Relay, checked
from proctor.oracle.fuzz.sessions.session import Limits
from proctor.oracle.fuzz.spec import Scenario

CRASH = Symptom("crash", "RuntimeError", "cannot", "torch/x.py:f")
ASKED = Asked(3, ("torch",), 4, 1, {"torch": "2.13.0"})


class Fake:
    """Settings with a value fail; counts what it runs."""

    most = 150

    def __init__(self) -> None:
        self.runs = 0

    def run(self, scenario: Scenario) -> Outcome:
        self.runs += 1
        return Outcome("crash", CRASH, "it fails") if scenario.setting.get("clip") == "inf" else Outcome("ok")

    def run_all(self, scenarios: Sequence[Scenario]) -> list[Outcome]:
        return [self.run(s) for s in scenarios]


def a_campaign(folder: Path, name: str) -> tuple[Campaign, Fake]:
    fake = Fake()
    return Campaign(cast("Runner", fake), 0, [], board=Board(folder, name)), fake


def a_finding(id_: str = "0123abcd", confirmed: str = "yes") -> Finding:
    scenario = Scenario("chain", {"layers": ["mlp"]}, {}, {"clip": "inf"})
    return Finding(id_, scenario, Outcome("crash", CRASH, "it fails"), {"clip": "inf"}, (), scenario, confirmed=confirmed)


def test_one_worker_makes_a_failure_small_and_the_others_wait_for_it(tmp_path: Path) -> None:
    scenario = Scenario("chain", {"layers": ["mlp"]}, {"batch": 8}, {"world": 2, "wrapper": "ddp", "clip": "inf"})
    outcome = Outcome("crash", CRASH, "it fails")
    (first, _), (second, idle) = a_campaign(tmp_path, "0"), a_campaign(tmp_path, "1")
    looking = first.explain(scenario, outcome)
    finding = next(looking)
    assert isinstance(finding, Finding) and finding.triggers == {"clip": "inf"}
    assert list(second.explain(scenario, outcome)) == [] and idle.runs == 0  # the first one has it in hand
    Journal(tmp_path).put(finding, "print()", "")
    assert list(looking) == [] and list(second.ended(time.monotonic() + 20)) == []
    assert idle.runs == 0 and list(second.findings) == [finding.id]
    assert list(second.explain(scenario, outcome)) == [finding.id]


def test_a_failure_that_the_other_worker_did_not_see_again_is_looked_into_after_all(tmp_path: Path) -> None:
    scenario = Scenario("chain", {"layers": ["mlp"]}, {}, {"clip": "inf"})
    second, runner = a_campaign(tmp_path, "1")
    other = Board(tmp_path, "0")
    assert other.claim(CRASH) and other.claim(CRASH)
    assert list(second.explain(scenario, Outcome("crash", CRASH, "it fails"))) == [] and list(second.settled()) == []
    assert runner.runs == 0
    other.release(CRASH)
    (found,) = second.ended(time.monotonic() + 20)
    assert found.triggers == {"clip": "inf"} and runner.runs and not list((tmp_path / "claims").iterdir())


def test_a_claim_of_a_worker_that_is_gone_lapses(tmp_path: Path) -> None:
    import os

    assert Board(tmp_path, "0").claim(CRASH)
    assert not Board(tmp_path, "1").claim(CRASH)
    old = time.time() - LAPSED_S - 1
    os.utime(tmp_path / "claims" / key_of(CRASH), (old, old))
    assert Board(tmp_path, "1").claim(CRASH) and not Board(tmp_path, "0").claim(CRASH)


@pytest.fixture
def five(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model has five pairs."""
    monkeypatch.setattr(cluster, "INPUTS", 5)


@pytest.mark.usefixtures("five")
def test_pairs_of_a_lost_worker_are_dealt_once_more_and_then_left_out() -> None:
    numbers = Numbers({0, 1, 6}, 15)
    assert numbers.take(2) == (2, 3, 4, 5, 7, 8, 9)
    assert numbers.ran(2) and not numbers.ran(2)
    assert numbers.back((2, 3, 4), lost=True) == [] and numbers.back((5, 7)) == []
    assert numbers.take(1) == (3, 4, 5, 7)
    assert numbers.back((3, 4), lost=True) == [3, 4]
    assert numbers.take(4) == (10, 11, 12, 13, 14) and not numbers.more and numbers.take(1) == ()
    endless = Numbers((), None)
    assert endless.take(1) == (0, 1, 2, 3, 4) and endless.more


FAKE_PIECE = """
import json, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
piece = json.loads((folder / "piece.json").read_text())
(folder / "claims" / "feed").write_text("here")
with (folder / "journal-0.jsonl").open("w") as file:
    for number in piece["numbers"]:
        file.write(json.dumps({"number": number, "scenario": {"template": "chain"}, "rows": [], "passed": 0, "seconds": 0.0}) + chr(10))
while not (folder / "findings" / "0123abcd" / "scenario.json").exists() or not (folder / "claims" / "beef").exists(): time.sleep(0.05)
%s
"""


def relayed(tmp_path: Path, then: str, said: Callable[[str], Any]) -> Told:
    script = tmp_path / "fake.py"
    script.write_text(FAKE_PIECE % then)
    folder = tmp_path / "folder"
    folder.mkdir()
    mail = Mail({"beef": 9, "feed": 4}, {"0123abcd": a_finding()})
    relay = Relay(folder, 4, mail, said, (sys.executable, str(script)))
    return msgspec.json.decode(relay.run(Piece(ASKED, (7, 8), 30.0, 5.0)), type=Told)


def test_a_relay_brings_findings_of_others_and_takes_pairs_and_claims_with_it(tmp_path: Path) -> None:
    heard: list[Told] = []
    told = relayed(tmp_path, "", lambda text: heard.append(msgspec.json.decode(text, type=Told)))
    assert told.ended == "" and [p.number for p in told.pairs] == [7, 8] and told.findings == ()  # what it was given is not its own
    assert [p.number for one in heard for p in one.pairs] in ([], [7, 8])  # while it ran, each once
    assert all(one.claims in ((), ("feed",)) and one.ended is None for one in heard)


def test_a_piece_that_fails_says_why_in_a_line(tmp_path: Path) -> None:
    assert relayed(tmp_path, "sys.exit('no room')", lambda _: None).ended == "no room"


def test_a_piece_that_ends_on_a_full_disk_says_so_where_its_own_words_found_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", _no_room)
    assert relayed(tmp_path, "sys.exit(1)", lambda _: None).ended == f"the disk is full: {tmp_path}"


def _no_room(**_: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("finding", [a_finding("../../etc"), msgspec.structs.replace(a_finding(), found=Scenario("chain", {}, {}, {"clip": "x'); import os"}))])
def test_what_comes_over_the_wire_is_a_point_of_our_own_spaces(finding: Finding) -> None:
    with pytest.raises(OracleError):
        checked(finding)
    assert checked(a_finding())


class Future:
    def __init__(self, result: str) -> None:
        self._result = result

    def done(self) -> bool:
        return bool(self._result)

    def cancel(self) -> None:
        self._result = "cancelled"

    def result(self) -> str:
        if self._result == "cancelled":
            raise RuntimeError("cancelled")
        return self._result


class FakeClient:
    """A cluster of two workers, of which the second one is lost as soon as it has a piece."""

    status = "running"

    def __init__(self) -> None:
        self.workers = {"a": None, "b": None}
        self.news: list[str] = []

    def nthreads(self) -> dict[str, Any]:
        return dict(self.workers)

    def submit(self, fn: object, name: str, number: int, text: str, *, workers: list[str], **_: object) -> Future:
        piece = msgspec.json.decode(text, type=Piece)
        if workers == ["b"]:
            del self.workers["b"]
            return Future("")
        pairs = tuple(Pair(n, Scenario("chain"), (Row({"clip": "inf"}, "crash", "it fails", "0123abcd"),), 0, 0.1) for n in piece.numbers)
        told = Told(number, pairs, (Carried(a_finding(), "off by 1"),), (), "")
        return Future(msgspec.json.encode(told).decode())

    def run(self, fn: object, name: str, text: str, **_: object) -> None:
        self.news.append(text)

    def subscribe_topic(self, topic: str, handler: object) -> None: ...

    def cancel(self, futures: list[Future]) -> None: ...


@pytest.mark.usefixtures("five")
def test_a_lost_worker_costs_a_line_and_its_pairs_are_run_by_another(tmp_path: Path) -> None:
    journal, said, client = Journal(tmp_path), [], FakeClient()
    journal.begin(ASKED)
    assert not Cluster(client, journal, ASKED, Limits(60.0, 10), [], said.append).run(time.monotonic() + 60)
    assert sorted(p.number for _, p in journal.pairs()) == list(range(10))
    assert [line for line in said if "lost" in line] == ["piece 1: its worker b was lost"]
    assert [line for line in said if line.startswith("new ")] == ["new 0123abcd: clip=inf: it fails"]
    text = (tmp_path / "findings" / "0123abcd" / "script.py").read_text()
    assert "torch 2.13.0" in text and (tmp_path / "findings" / "0123abcd" / "output.txt").read_text() == "off by 1"
    assert any("0123abcd" in text for text in client.news)
