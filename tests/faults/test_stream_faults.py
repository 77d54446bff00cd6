"""Whatever happens to the verifier, the process goes on as if there were none, and what was missed is found or told."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.live import verifier as verifier_script
from helpers.live.network import THERE, link, other_host
from helpers.live.transport import Rows, sender, serving, take, until

from proctor.instrument.guard import Guard
from proctor.instrument.record import stream
from proctor.instrument.record.stream import Sender
from proctor.instrument.record.writer import TraceWriter
from proctor.invariants.schema import TABLES
from proctor.invariants.wire.peer import make_token
from proctor.verify.transport.inbox import Joined, Left
from proctor.verify.transport.inbox import Rows as RowsEvent

BUSY_S = 50.0  # for a process that starts on a busy machine; less than a peer may be silent


class Verifier:
    """A process that counts what reaches it, and can be killed, stopped and started again."""

    def __init__(self, folder: Path, run: Path | None, address: str = "", prefix: tuple[str, ...] = ()) -> None:
        self.out = folder / f"seen-{time.monotonic_ns()}.json"
        address = address or f"unix:{folder}/live/sock"
        command = [*prefix, sys.executable, verifier_script.__file__, address, str(folder / "token"), str(self.out)]
        self.process = subprocess.Popen([*command, *([str(run)] if run else [])], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def seen(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.out.read_bytes())
        except FileNotFoundError:
            return {"seen": {}, "gaps": [], "left": {}}
        return found

    def signal(self, number: int) -> None:
        self.process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.process.wait(10)


@pytest.fixture
def verifiers(tmp_path: Path) -> Iterator[Callable[..., Verifier]]:
    make_token(tmp_path / "token")
    started: list[Verifier] = []

    def start(*args: Any, **kwargs: Any) -> Verifier:
        started.append(Verifier(tmp_path, *args, **kwargs))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(10)


class Rank:
    """A process's writer with its sender, fed with numbered rows."""

    def __init__(self, folder: Path, address: str = "", name: str = "0-1", **settings: Any) -> None:
        self.made, self.step, self.guard = Rows(), 0, Guard()
        self.sender = Sender(
            address or f"unix:{folder}/live/sock", folder / "token", lambda: (name, "here", {"rank": 0}), self.guard, **settings
        )
        self.writer = TraceWriter(folder / "run" / "procs" / name, self._drain, lambda: {"rank": 0, "dropped": self.writer.lost},
                                  lambda failing: None, self.guard, self.sender)  # fmt: skip
        self.calls = 20
        self.durations: list[float] = []
        self.writer.start()

    def _drain(self) -> dict[str, Any]:
        rows = self.made.next(self.calls, names=1) if self.step else {}
        return {t: {c: rows[t].column(c).to_pylist() for c in TABLES[t].names} if t in rows else [] for t in TABLES}

    def steps(self, count: int, pause_s: float = 0.0) -> None:
        for _ in range(count):
            self.step += 1
            began = time.perf_counter()
            self.writer.step_ended(100, self.step)
            self.durations.append(time.perf_counter() - began)
            self.writer.flush()
            time.sleep(pause_s)

    def leave(self) -> None:
        """Close when all is sent: a goodbye waits for what was said before, but not for long."""
        assert until(lambda: self.sender.ring.waiting == 0, BUSY_S)
        self.writer.close()

    def whole(self, seen: dict[str, Any], name: str = "0-1") -> bool:
        """Whether all rows of all tables were seen, in order, each once; names and contexts may be said again."""
        tables = seen["seen"].get(name, {})
        return all(
            (sorted(set(tables.get(t, []))) if t in ("names", "context") else tables.get(t, [])) == list(range(n))
            for t, n in self.made.at.items()
            if n
        )


def test_a_verifier_that_comes_late_gets_everything(tmp_path: Path, verifiers: Callable[..., Verifier]) -> None:
    rank = Rank(tmp_path)
    rank.steps(30, 0.005)
    one = verifiers(tmp_path / "run")
    rank.steps(10, 0.005)
    rank.writer.close()
    assert until(lambda: one.seen()["left"] == {"0-1": "bye"}, BUSY_S)
    assert rank.whole(one.seen())
    assert one.seen()["gaps"] == []


def test_a_verifier_that_is_killed_and_started_again_lacks_nothing_that_is_on_disk(
    tmp_path: Path, verifiers: Callable[..., Verifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proctor.instrument.record.ring.KEPT_BYTES", 20_000)
    one = verifiers(tmp_path / "run")
    rank = Rank(tmp_path)
    rank.steps(60, 0.005)
    assert until(lambda: one.seen()["seen"], BUSY_S)
    one.signal(signal.SIGKILL)
    rank.steps(20, 0.005)
    two = verifiers(tmp_path / "run")
    rank.steps(20, 0.01)
    assert until(lambda: rank.sender.connections == 2, BUSY_S)
    rank.leave()
    assert until(lambda: two.seen()["left"] == {"0-1": "bye"}, BUSY_S)
    seen = two.seen()
    assert seen["gaps"] and all(gap["missing"] == 0 for gap in seen["gaps"])
    assert rank.whole(seen)


def test_a_verifier_without_the_files_knows_what_it_lacks_and_can_read_what_comes(
    tmp_path: Path, verifiers: Callable[..., Verifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proctor.instrument.record.ring.KEPT_BYTES", 20_000)
    one = verifiers(None)
    rank = Rank(tmp_path)
    rank.steps(60, 0.002)
    assert until(lambda: one.seen()["seen"], BUSY_S)
    one.signal(signal.SIGKILL)
    two = verifiers(None)
    rank.steps(20, 0.01)
    assert until(lambda: rank.sender.connections == 2, BUSY_S)
    rank.leave()
    assert until(lambda: two.seen()["left"] == {"0-1": "bye"}, BUSY_S)
    seen = two.seen()
    assert sorted(set(seen["seen"]["0-1"]["names"])) == list(range(rank.made.at["names"]))
    (gap,) = seen["gaps"]
    counted = sum(len(seen["seen"]["0-1"][t]) for t in ("calls", "states"))
    tables = {t: rank.made.at[t] for t in ("calls", "states")}
    assert gap["first"] == 0 and gap["missing"] == gap["rows"]
    assert sum(tables.values()) - counted == (gap["last"] + 1) * 30


def test_a_stopped_verifier_costs_no_time_and_catches_up_from_disk(
    tmp_path: Path, verifiers: Callable[..., Verifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = verifiers(tmp_path / "run")
    rank = Rank(tmp_path, ring_bytes=400_000)
    rank.calls = 100
    rank.steps(30, 0.002)
    before = statistics.quantiles(rank.durations, n=20)[-1]
    assert until(lambda: one.seen()["seen"], BUSY_S)
    one.signal(signal.SIGSTOP)
    rank.durations.clear()
    rank.steps(300, 0.002)
    after = statistics.quantiles(rank.durations, n=20)[-1]
    assert rank.sender.ring.dropped_flushes > 0
    assert rank.sender.ring.size <= 400_000
    assert after < max(20 * before, 0.002), (before, after)
    woken: list[int] = []
    with monkeypatch.context() as patched:
        patched.setattr(rank.sender, "_wake", lambda: woken.append(1))
        rank.steps(50, 0.002)
    assert len(woken) < 5  # its thread waits for room in the socket, and is left alone
    one.signal(signal.SIGCONT)
    assert until(lambda: rank.sender.ring.waiting == 0, BUSY_S)
    rank.steps(20, 0.01)
    rank.writer.close()
    assert until(lambda: one.seen()["left"] == {"0-1": "bye"}, BUSY_S)
    seen = one.seen()
    assert sum(g["last"] - g["first"] + 1 for g in seen["gaps"]) == rank.sender.ring.dropped_flushes
    assert sum(g["rows"] for g in seen["gaps"]) == rank.sender.dropped
    assert all(g["missing"] == 0 for g in seen["gaps"]), seen["gaps"]
    for table, rows in seen["seen"]["0-1"].items():
        assert sorted(set(rows)) == list(range(rank.made.at[table])), table
    assert len(seen["seen"]["0-1"]["calls"]) == rank.made.at["calls"]


@pytest.mark.parametrize("state", ["absent", "stopped"])
def test_leaving_waits_for_the_verifier_only_so_long(tmp_path: Path, verifiers: Callable[..., Verifier], state: str) -> None:
    one = verifiers(None) if state == "stopped" else None
    rank = Rank(tmp_path, ring_bytes=1 << 20)
    if one is not None:
        assert until(lambda: rank.sender.connected)
        one.signal(signal.SIGSTOP)
    rank.calls = 400
    rank.steps(50)
    began = time.monotonic()
    rank.writer.close()
    assert time.monotonic() - began < stream.CLOSE_S + 1.5


def test_a_child_of_the_process_does_not_hold_its_connection(tmp_path: Path) -> None:
    make_token(tmp_path / "token")
    with serving(tmp_path, grace_s=0.0) as (_, inbox):
        code = textwrap.dedent(f"""
            import os, sys, time
            sys.path.insert(0, {str(Path(__file__).parents[1])!r})
            from pathlib import Path
            from helpers.live.transport import Rows, encoded, sender, until
            end, made = sender(Path({str(tmp_path)!r})), Rows()
            end.start()
            end.offer(encoded(made.next()), 0)
            assert until(lambda: end.connected and not end.ring.waiting)
            if os.fork() == 0:
                assert not end.offer(encoded(made.next()), 1)
                end.close()
                sys.stdout.close()
                time.sleep(30)
                os._exit(0)
            time.sleep(0.3)
            os.kill(os.getpid(), 9)
        """)
        process = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stdout=subprocess.DEVNULL)
        events = take(inbox, lambda e: any(isinstance(x, RowsEvent) for x in e), 60)  # a machine may be busy while it starts
        events += take(inbox, lambda e: any(isinstance(x, Left) for x in e), 15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
    assert [type(e) for e in events] == [Joined, RowsEvent, Left]
    assert isinstance(events[-1], Left) and events[-1].how == "eof"


def test_the_program_s_random_state_and_signals_are_its_own(tmp_path: Path) -> None:
    import random

    random.seed(1)
    before = random.getstate()
    end = sender(tmp_path)
    end.start()
    time.sleep(0.3)
    assert random.getstate() == before
    heard: list[int] = []
    old = signal.signal(signal.SIGUSR1, lambda *_: heard.append(1))
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert until(lambda: heard == [1], 2.0)
    finally:
        signal.signal(signal.SIGUSR1, old)
    end.close()


def test_a_token_that_is_wrong_or_missing_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path) as (server, _):
        (tmp_path / "token").unlink()
        end = sender(tmp_path)
        end.start()
        assert until(lambda: "No such file" in capsys.readouterr().err)
        make_token(tmp_path / "token")
        assert until(lambda: server.stats().refused.get("wrong token", 0) >= 2)
        end.close()
    assert "No such file" not in capsys.readouterr().err


@pytest.fixture
def cut_network() -> Iterator[str]:
    with other_host() as name:
        yield name


def test_a_cut_network_is_noticed_and_nothing_is_lost(
    tmp_path: Path, verifiers: Callable[..., Verifier], cut_network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_STALLED_S", 1.0)
    monkeypatch.setattr(stream, "_PING_S", 0.2)
    one = verifiers(tmp_path / "run", address=f"tcp:{THERE}:7077", prefix=("ip", "netns", "exec", cut_network))
    rank = Rank(tmp_path, f"tcp:{THERE}:7077")
    rank.steps(20, 0.005)
    assert until(lambda: rank.sender.connected and one.seen()["seen"])
    link(cut_network, up=False)
    rank.calls = 2000  # more than the socket's buffer holds
    rank.durations.clear()
    rank.steps(40, 0.01)
    assert until(lambda: not rank.sender.connected, 15)
    assert statistics.median(rank.durations) < 0.001
    link(cut_network, up=True)
    rank.calls = 20
    assert until(lambda: rank.sender.connected, 15)
    rank.steps(10, 0.01)
    rank.writer.close()
    assert until(lambda: one.seen()["left"] == {"0-1": "bye"}, BUSY_S)
    assert rank.whole(one.seen())
    assert all(gap["missing"] == 0 for gap in one.seen()["gaps"])


TRAIN = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(25):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    print(loss.item().hex())
"""


@pytest.mark.slow
def test_training_is_bit_identical_with_a_verifier_that_listens_and_one_that_is_stopped(
    tmp_path: Path, verifiers: Callable[..., Verifier]
) -> None:
    pytest.importorskip("torch")
    from proctor.instrument.config import RecordConfig
    from proctor.instrument.record.rundir import create_run, write_boot

    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    one = verifiers(None)

    def run(name: str) -> str:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if name:
            out = tmp_path / name
            create_run(out, ["train.py"], overwrite=False)
            config = RecordConfig(run=str(out), stream=one.address, token_file=str(tmp_path / "token"))
            environment["PYTHONPATH"] = str(write_boot(out, config))
        done = subprocess.run(
            [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=400, check=True
        )
        return done.stdout

    bare = run("")
    assert run("listening") == bare
    assert until(lambda: any(process in one.seen()["left"] for process in one.seen()["seen"]))
    one.signal(signal.SIGSTOP)
    assert run("stopped") == bare
