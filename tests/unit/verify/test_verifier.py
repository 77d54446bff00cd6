"""The verifier's core, fed by hand: what a job may do to it, and what may break around it."""

# More than 400 lines: all of these feed one verifier by hand.
from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.live.flushes import flushes
from helpers.loops import loop
from helpers.runs import write_run

from proctor.infer.engine import infer
from proctor.invariants.invariant import Severity, Tier
from proctor.invariants.pack import Pack
from proctor.invariants.relations import registry
from proctor.invariants.suppression import Suppression
from proctor.invariants.trace import Trace
from proctor.verify.lifecycle import IncidentBook
from proctor.verify.live.online import OnlineChecker
from proctor.verify.live.pace import Pace
from proctor.verify.metrics import NoMetrics
from proctor.verify.notice import Action, Notice
from proctor.verify.service.verifier import LINGER_S, Verifier
from proctor.verify.service.whole import Summary
from proctor.verify.transport.inbox import Event, Gap, Inbox, Joined, Left, Rows, Told
from proctor.verify.view.events import EventLog

KNOWN = {name: registry()[name] for name in ("contain", "sequence")}
FAULT = {8: ["backward"]}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("healthy")
    paths = [write_run(folder / f"run{i}", [loop(steps=12)]) for i in range(2)]
    return Pack(infer(Trace.load(paths), list(KNOWN.values()), strict=True)[0])


@dataclass
class Clock:
    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds


@dataclass
class Phone:
    """A pager that remembers."""

    told: list[Notice] = field(default_factory=list)
    broken: int = 0  # calls that still fail
    closed: bool | None = None

    def notify(self, notice: Notice) -> None:
        if self.broken:
            self.broken -= 1
            raise RuntimeError("no line")
        self.told.append(notice)

    def alive(self, text: str = "") -> None:
        pass

    def close(self, timeout_s: float = 10.0, *, finished: bool = True) -> bool:
        self.closed = finished
        return True

    def begun(self, code: str = "PR1") -> list[Notice]:
        return [n for n in self.told if n.action is Action.TRIGGER and n.code.startswith(code)]


class Bench:
    """A verifier whose inbox, clock, pager and disk are in the test's hand."""

    def __init__(self, run: Path, packs: Iterable[Pack], **options: Any) -> None:
        self.run, self.clock, self.phone = run, Clock(), Phone()
        self.said: list[str] = []
        self.inbox = Inbox()
        self.refused: dict[str, int] = {}
        (run / "verify").mkdir(parents=True, exist_ok=True)
        book = IncidentBook("job", "here", now=self.clock, clock=self.clock, state_path=run / "verify" / "incidents.json")
        self.verifier = Verifier(
            **{
                "run": run,
                "packs": list(packs),
                "inbox": self.inbox,
                "book": book,
                "log": EventLog(run),
                "refused": lambda: self.refused,
                "pager": self.phone,
                "say": self.said.append,
                "now": self.clock,
                "clock": self.clock,
                "pace": lambda: Pace(most_s=0.0),
                **options,
            }
        )

    def feed(self, *events: Event, after_s: float = 0.0) -> None:
        for event in events:
            self.inbox.put(event)
        self.clock.seconds += after_s
        self.verifier.turn(0.0)
        for _ in range(20):  # what is not urgent is judged bit by bit
            if not self.verifier._checker.pending:
                break
            self.verifier.turn(0.0)

    def play(self, run: Path, *, life: str = "", until: int = 1 << 30, bye: str = "bye", **info: Any) -> None:
        """What the processes of a recorded run send, up to a step; then they leave."""
        for name in play(run, self.feed, life=life, until=until, **info):
            self.feed(Left(name, bye))

    def spoke(self, text: str) -> int:
        return sum(text in line for line in self.said)


def play(run: Path, feed: Callable[..., None], *, life: str = "", until: int = 1 << 30, **more: Any) -> list[str]:
    seen: list[str] = []
    for process, part, info, reached in flushes(run):
        name = process + life
        if reached > until:
            continue
        told = {**info, **more}
        if name not in seen:
            seen.append(name)
            feed(Joined(name, process, "elsewhere", told, resumed=False))
        feed(Rows(name, part, reached))
    return seen


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    return write_run(tmp_path / "faulty", [loop(steps=16, skip=FAULT)])


def bench(tmp_path: Path, pack: Pack, **options: Any) -> Bench:
    return Bench(tmp_path / "watched", [pack], **options)


def test_a_fault_is_told_while_the_job_goes_on_and_once(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    it = bench(tmp_path, pack)
    play(faulty, it.feed, until=12)
    assert [n.step for n in it.phone.begun()] == [8]
    play(faulty, it.feed)
    summary = it.verifier.close()
    assert len(it.phone.begun()) == 1 and summary.worst() is not None
    assert summary.judged == 16  # the one that the program is in


def test_of_which_incidents_no_step_was_kept_is_said_at_the_end(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    it = bench(tmp_path, pack)
    asked: dict[str, int] = {}
    it.verifier.freeze = asked.__setitem__
    it.play(faulty)
    it.verifier.close()
    [key] = asked
    it.verifier.miss_capsules(asked)
    [said] = json.loads((it.run / "verify" / "incidents.json").read_bytes())["incidents"]
    assert said["not_kept"].startswith("No step was kept")
    it.verifier.book.attach_capsule(key, "capsules/x")
    it.verifier.book.incidents[0].not_kept = ""
    it.verifier.miss_capsules(asked)
    assert it.verifier.book.incidents[0].not_kept == ""


def test_a_healthy_job_is_quiet(tmp_path: Path, pack: Pack) -> None:
    it = bench(tmp_path, pack)
    it.play(write_run(tmp_path / "fine", [loop(steps=16), loop(steps=16)]))
    summary = it.verifier.close()
    assert it.phone.told == [] and summary.violations == [] and summary.judged == 16
    assert it.verifier.finished and it.phone.closed is True


def test_a_job_that_was_killed_is_not_finished(tmp_path: Path, pack: Pack) -> None:
    it = bench(tmp_path, pack)
    it.play(write_run(tmp_path / "fine", [loop(steps=10)]), bye="eof")
    it.verifier.close()
    assert it.verifier.finished is False and it.phone.closed is False


@pytest.mark.parametrize("late", [False, True], ids=["after all left", "before all left"])
def test_a_job_that_starts_again_is_judged_from_step_0(tmp_path: Path, pack: Pack, late: bool) -> None:
    fine = write_run(tmp_path / "fine", [loop(steps=14), loop(steps=14)])
    broken = write_run(tmp_path / "broken", [loop(steps=12, skip={5: ["backward"]}), loop(steps=12)])
    it = bench(tmp_path, pack)
    names = play(fine, it.feed)
    leaving = [Left(name, "eof") for name in names]
    if not late:
        it.feed(*leaving)
    again = play(broken, it.feed, life="~2", until=9)
    assert [n.step for n in it.phone.begun()] == [5]
    if late:
        it.feed(Rows(names[0], {}, 14), *leaving)  # the old ones are given up some seconds later
    assert it.verifier.processes == again
    assert {m.folder for m in it.verifier._checker.live.members.values()} == set(again)
    it.feed(*(Left(name, "bye") for name in again))
    summary = it.verifier.close()
    assert it.verifier.finished and summary.judged + 1 == 15 + 10
    assert all(n.step in (None, 5) for n in it.phone.begun())


def test_a_verifier_that_is_started_again_does_not_say_over_of_what_goes_on(tmp_path: Path, pack: Pack) -> None:
    lasting = write_run(tmp_path / "lasting", [loop(steps=40, skip={step: ["backward"] for step in range(25, 40)})])
    first = bench(tmp_path, pack)
    play(lasting, first.feed, until=30)
    [notice] = first.phone.begun()
    second = bench(tmp_path, pack)  # the first is killed; the whole job is sent once more
    second.clock.seconds = first.clock.seconds + 60
    for process, part, info, reached in flushes(lasting):
        if reached < 2:
            second.feed(Joined(process, process, "elsewhere", info, resumed=False))
        second.feed(Rows(process, part, reached), after_s=1.0)
    told = [n for n in second.phone.told if not n.code.startswith("PR2")]
    assert told == [] and notice.key in {one.key for one in second.verifier.book.incidents if one.open}


def test_two_programs_side_by_side_are_no_restart(tmp_path: Path, pack: Pack) -> None:
    it = bench(tmp_path, pack)
    one = write_run(tmp_path / "one", [loop(steps=6, pid=os.getpid(), world=1)])
    play(one, it.feed)
    play(one, it.feed, life="-other")
    assert len(it.verifier.processes) == 2


def test_one_program_after_another_is_a_restart_though_the_first_died_unheard(tmp_path: Path, pack: Pack) -> None:
    it = bench(tmp_path, pack)
    here = os.uname().nodename
    it.feed(Joined("0-1", "0-1", here, {"rank": 0, "world": 1, "pid": 1 << 30}, resumed=False))
    it.feed(Joined("0-2", "0-2", here, {"rank": 0, "world": 1, "pid": os.getpid()}, resumed=False))
    assert it.verifier.processes == ["0-2"]


def gap(name: str, run: Path, folder: str) -> Gap:
    """Nothing of a process arrived: all rows of its files are missing."""
    from proctor.invariants.schema import TABLES
    from proctor.invariants.trace.tables import read_stream

    rows = {table: read_stream(run / "procs" / folder / f"{table}.arrow", table)[0].num_rows for table in TABLES}
    return Gap(name, folder, 0, 5, {table: (0, n) for table, n in rows.items()})


def test_records_that_did_not_arrive_are_read_from_the_files(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    it = Bench(faulty, [pack])
    folder = next((faulty / "procs").iterdir()).name
    it.feed(Joined(folder, folder, "here", {"rank": 0, "world": 1}, resumed=False))
    it.feed(gap(folder, faulty, folder), Rows(folder, {}, 16))
    assert [n.step for n in it.phone.begun()] == [8]
    assert it.verifier.close().lost == {}


def test_records_that_are_lost_are_unknown_and_told(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    it = bench(tmp_path, pack)
    folder = next((faulty / "procs").iterdir()).name
    missing = gap(folder, faulty, folder)
    it.feed(Joined(folder, folder, "here", {"rank": 0, "world": 1}, resumed=False))
    it.feed(missing, Rows(folder, {}, 16))
    it.feed(after_s=1.0)
    assert it.phone.begun("PR1") == [] and len(it.phone.begun("PR201")) == 1
    summary = it.verifier.close()
    assert summary.lost == {"gap": missing.rows} and summary.violations == []


def test_many_gaps_do_not_hold_up_judging(tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    it = bench(tmp_path, pack)
    waited: list[float] = []

    def slow(run: Path, gap: Gap, *, wait_s: float) -> Any:
        from proctor.verify.transport.fill import Filled

        waited.append(wait_s)
        it.clock.seconds += wait_s
        return Filled({}, 1, "nothing there")

    monkeypatch.setattr("proctor.verify.service.job.fill", slow)
    it.feed(*(Gap(f"{rank}-1", f"{rank}-1", 0, 1, {"calls": (0, 1)}) for rank in range(64)))
    assert len(waited) == 64 and sum(waited) < 5.0


def test_peers_that_were_refused_are_counted_once(tmp_path: Path, pack: Pack) -> None:
    it = bench(tmp_path, pack)
    it.refused = {"wrong token": 3}
    for _ in range(5):
        it.feed(after_s=1.0)
    it.refused = {"wrong token": 4}
    it.feed(after_s=1.0)
    assert it.verifier.close().lost == {"bad_peer: wrong token": 4}
    assert len(it.phone.begun("PR201")) == 1


def test_a_rank_that_never_comes_is_told(tmp_path: Path, pack: Pack) -> None:
    it = bench(tmp_path, pack)
    play(write_run(tmp_path / "one", [loop(steps=12, world=2)]), it.feed)
    for _ in range(100):
        it.feed(Rows("0-1000", {}, 12), after_s=4.0)
    assert [n.title for n in it.phone.begun("PR202")] == ["rank 1 of 2 is silent"]


def test_a_rank_that_is_known_by_its_later_word_is_not_missing(tmp_path: Path, pack: Pack) -> None:
    it = bench(tmp_path, pack)
    it.feed(*(Joined(f"0-{p}", f"0-{p}", "here", {"rank": 0, "world": 1}, resumed=False) for p in (1, 2)))
    it.feed(*(Told(f"0-{p}", {"rank": p - 1, "world": 2}) for p in (1, 2)))
    it.feed(*(Rows(f"0-{p}", {}, 20) for p in (1, 2)))
    assert list(it.verifier.job.missing()) == [] and len(it.verifier.processes) == 2


def test_only_packs_that_fit_are_judged(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    other = msgspec.structs.replace(pack, requires={"no_such_library": ">=1"})
    it = Bench(tmp_path / "watched", [other, pack], fitting=True, pack_names=["other", "ours"])
    play(faulty, it.feed)
    assert it.verifier.job.packs == [pack] and it.verifier.job.pack_names == ["ours"]
    assert len(it.phone.begun()) == 1


def test_a_suppressed_rule_tells_nobody(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    loud = bench(tmp_path, pack)
    loud.play(faulty)
    rules = {v.id for v in loud.verifier.close().violations}
    quiet = Bench(tmp_path / "quiet", [pack], suppressions=[Suppression(rule=rule, reason="known") for rule in rules])
    quiet.play(faulty)
    assert rules and quiet.verifier.close().violations == [] and quiet.phone.told == []


def test_what_only_the_whole_run_shows_is_told_once(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    it = Bench(faulty, [pack])  # the files are there, but nothing was sent
    folder = next((faulty / "procs").iterdir()).name
    it.feed(Joined(folder, folder, "here", {"rank": 0, "world": 1}, resumed=False), Left(folder, "bye"))
    summary = it.verifier.close()
    assert summary.result is not None and summary.violations
    assert len(it.phone.begun()) == 1

    live = Bench(write_run(tmp_path / "again", [loop(steps=16, skip=FAULT)]), [pack])
    live.play(live.run)
    seen = len(live.phone.begun())
    live.verifier.close()
    assert seen == len(live.phone.begun()) == 1


class Counts(NoMetrics):
    """What was counted."""

    def __init__(self) -> None:
        self.codes: list[str] = []
        self.last = -1

    def violated(self, code: str, severity: Severity, count: int = 1) -> None:
        self.codes.append(code)

    def step(self, step: int, at: float) -> None:
        self.last = step


class Draws:
    """A writer that keeps the last step of a curve."""

    last = -1

    def series(self, step: int, values: Mapping[str, float]) -> None:
        self.last = step

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(("lost", "draws", "judged_live"), [(0, False, False), (3, False, True), (0, True, True)])
def test_the_last_steps_are_judged_once_unless_the_disk_lacks_records_or_somebody_draws_them(
    lost: int, draws: bool, judged_live: bool, tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, asked = OnlineChecker.finish, list[str]()
    monkeypatch.setattr(OnlineChecker, "finish", lambda self: asked.append("finish") or finish(self))
    sent = write_run(tmp_path / "sent", [loop(steps=16, skip={14: ["backward"]})])
    run = write_run(tmp_path / "run", [loop(steps=16, skip={} if lost else {14: ["backward"]}, dropped=lost)])
    counts = Counts()
    it = Bench(run, [pack], pace=lambda: Pace(share=1e-9, most_s=1e9), metrics=counts, writers=[Draws()] if draws else [])
    it.play(sent)
    assert not it.phone.begun()
    summary = it.verifier.close()
    assert bool(asked) == judged_live
    assert summary.judged == counts.last >= 15
    assert sorted(counts.codes) == sorted(v.code for v in summary.violations)
    events = [json.loads(line)["data"] for line in (run / "verify" / "events.jsonl").read_text().splitlines()]
    assert [event["checked"] > 0 for event in events if event.get("finished")] == [True]
    assert [notice.step for notice in it.phone.begun()] == [14]


def test_what_the_whole_run_does_not_show_is_taken_back(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    it = Bench(write_run(tmp_path / "healthy", [loop(steps=16)]), [pack])  # the disk knows better than what was sent
    it.play(faulty)
    told = it.phone.begun()
    assert told
    summary = it.verifier.close()
    assert summary.violations
    assert {v.severity for v in summary.violations} == {Severity.WARNING} and {v.tier for v in summary.violations} == {Tier.TICKET}
    assert summary.worst() is Severity.WARNING  # nothing that fails a job
    assert it.spoke("a mistake of Proctor's") == len(summary.violations)
    assert summary.result is not None and any("a mistake of Proctor's" in note for note in summary.result.notes)
    ended = [n for n in it.phone.told if n.action is Action.RESOLVE]
    assert {n.key for n in ended} == {n.key for n in told} and all("holds in the run as a whole" in n.text for n in ended)


def test_a_mistake_of_ours_costs_a_step_not_the_watch(
    tmp_path: Path, pack: Pack, faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = bench(tmp_path, pack)
    rounds, calls = it.verifier._checker.rounds, [0]

    def sometimes(*, some: bool) -> Any:
        calls[0] += 1
        if calls[0] in (5, 6, 7):
            raise ZeroDivisionError("mistake")
        return rounds(some=some)

    monkeypatch.setattr(it.verifier._checker, "rounds", sometimes)
    play(faulty, it.feed)
    it.feed(after_s=1.0)
    assert it.spoke("mistake") == 1
    assert [n.step for n in it.phone.begun()] == [8]
    assert len(it.phone.begun("PR201")) == 1
    assert it.verifier.close().lost == {"internal": 3}


def test_a_verifier_that_can_do_nothing_any_more_gives_way_to_a_new_one(
    tmp_path: Path, pack: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = bench(tmp_path, pack)

    def never(*, some: bool) -> Any:
        raise ZeroDivisionError("mistake")

    monkeypatch.setattr(it.verifier._checker, "rounds", never)
    for _ in range(20):
        it.feed(after_s=1.0)
    it.clock.seconds += 20.0
    with pytest.raises(ZeroDivisionError):
        it.feed()


@pytest.mark.parametrize("broken", ["_count_refused", "_look_at_waiting", "_look_at_ranks", "_teller.show", "_measure"])
def test_what_fails_at_a_tick_leaves_the_rest_alone(
    tmp_path: Path, pack: Pack, faulty: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    it = bench(tmp_path, pack)

    def fails() -> None:
        raise OSError("hiccup")

    whose, _, what = broken.rpartition(".")
    monkeypatch.setattr(getattr(it.verifier, whose) if whose else it.verifier, what, fails)
    play(faulty, lambda *events: it.feed(*events, after_s=0.6))
    assert [n.step for n in it.phone.begun()] == [8] and it.spoke("hiccup") == 1
    assert it.verifier.close().worst() is not None


def test_a_pager_that_fails_is_told_later(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    it = bench(tmp_path, pack)
    it.phone.broken = 3
    play(faulty, it.feed)
    assert it.phone.told == [] and it.verifier.book.unsent
    for _ in range(4):
        it.feed(after_s=1.0)
    assert [n.step for n in it.phone.begun()] == [8] and it.verifier.book.unsent == []
    assert it.spoke("no line") == 1 and it.spoke("[") == len(it.phone.told)


def test_a_full_disk_ends_nothing(tmp_path: Path, pack: Pack, faulty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = bench(tmp_path, pack)

    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("proctor.verify.lifecycle.book.write", full)
    monkeypatch.setattr("proctor.verify.view.events.os.write", full)
    play(faulty, lambda *events: it.feed(*events, after_s=0.6))
    summary = it.verifier.close()
    assert [n.step for n in it.phone.begun()] == [8] and summary.worst() is not None
    assert it.verifier.log.lost > 0 and it.verifier.book.save_error


@dataclass
class Notebook:
    """A writer that fails."""

    closed: bool = False

    def series(self, step: int, values: Mapping[str, float]) -> None:
        raise ValueError("page torn")

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None:
        raise ValueError("page torn")

    def close(self) -> None:
        self.closed = True
        raise ValueError("page torn")


def test_closing_does_all_of_it_whatever_fails(
    tmp_path: Path, pack: Pack, faulty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    books = [Notebook(), Notebook()]
    it = Bench(faulty, [pack], writers=books)
    play(faulty, it.feed)

    def fails(*_: object, **__: object) -> Any:
        raise ZeroDivisionError("whole")

    monkeypatch.setattr("proctor.verify.service.whole.check", fails)
    monkeypatch.setattr(it.verifier._checker, "finish", fails)
    summary = it.verifier.close()
    assert all(book.closed for book in books) and it.phone.closed is False
    assert summary.result is None and summary.worst() is not None
    assert b'"finished":false' in (faulty / "verify" / "incidents.json").read_bytes().replace(b" ", b"")
    assert it.verifier.log._descriptor == -1


def test_a_process_that_no_table_fits_is_refused_and_the_others_judged(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    it = bench(tmp_path, pack)
    it.feed(Joined("7-7", "7-7", "here", {"rank": "x", "world": None, "pid": [], "dropped": -4}, resumed=False))
    it.feed(Rows("7-7", {"calls": next(iter(flushes(faulty)))[1]["names"]}, 3), Told("7-7", {"rank": True}))
    it.feed(Left("7-7", "bye"), Left("nobody", "eof"))
    play(faulty, it.feed)
    assert [n.step for n in it.phone.begun()] == [8]


def end(it: Bench, seconds: float) -> Summary | None:
    """Turn for a while; what it says when the job is over."""
    until = it.clock.seconds + seconds
    while it.clock.seconds < until:
        if it.verifier._over():
            return it.verifier.close()
        it.feed(after_s=0.5)
    return None


def test_the_job_is_over_when_its_command_is_and_its_processes_are_gone(tmp_path: Path, pack: Pack) -> None:
    going = [True]
    it = bench(tmp_path, pack, going=lambda: going[0])
    assert end(it, 300) is None, "a command that has not trained yet"
    names = play(write_run(tmp_path / "fine", [loop(steps=5)]), it.feed)
    it.feed(*(Left(name, "bye") for name in names))
    assert end(it, 300) is None, "a command that goes on after training"
    going[0] = False
    assert end(it, 5) is not None


def test_a_process_that_never_leaves_is_not_waited_for_long(tmp_path: Path, pack: Pack) -> None:
    it = bench(tmp_path, pack, going=lambda: False)
    play(write_run(tmp_path / "fine", [loop(steps=5)]), it.feed)
    begun = it.clock.seconds
    assert end(it, 60) is not None and it.clock.seconds - begun < LINGER_S + 2


@pytest.mark.parametrize(("how", "least", "most"), [("bye", 2, 10), ("eof", 45, 70)])
def test_without_a_command_processes_may_come_back(tmp_path: Path, pack: Pack, how: str, least: float, most: float) -> None:
    it = bench(tmp_path, pack)
    assert end(it, 300) is None, "nobody came yet"
    it.play(write_run(tmp_path / "fine", [loop(steps=5)]), bye=how)
    assert end(it, least) is None
    assert end(it, most) is not None


def test_one_who_is_asked_to_stop_does_not_wait_for_the_job(tmp_path: Path, pack: Pack, faulty: Path) -> None:
    stopped: list[int] = []
    it = bench(tmp_path, pack, going=lambda: True, stopped=lambda: bool(stopped))
    play(faulty, it.feed)
    stopped.append(15)
    summary = end(it, 6)
    assert summary is not None and summary.worst() is not None and it.verifier.finished is False


def test_a_job_that_never_trained_is_said_to_be_unjudged(tmp_path: Path, pack: Pack) -> None:
    it = bench(tmp_path, pack, going=lambda: False)
    summary = end(it, 10)
    assert summary is not None and summary.judged == -1 and it.spoke("nothing was judged") == 1
