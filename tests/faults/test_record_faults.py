"""Whatever happens to the program, the disk or us: the program's own fate is unchanged, and flushed records survive."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.warm import python
from pyarrow import ipc

pytest.importorskip("torch")
import proctor
from proctor.errors import TraceError
from proctor.instrument.record.writer import Stream
from proctor.invariants.trace import Trace

TRAIN = """
import os, sys, time, torch
from torch import nn
def train(steps, pause=0.0, at_end=lambda: None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(16, 4)).square().mean()
        loss.backward()
        optimizer.step()
        print("step", step, float(loss), flush=True)
        time.sleep(pause)
    at_end()
    return float(loss)
"""


def script(folder: Path, body: str, name: str = "train.py") -> Path:
    path = folder / name
    path.write_text(TRAIN + textwrap.dedent(body))
    return path


def record(out: Path | str, *command: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proctor.cli", "record", "-o", str(out), "--", *command],
        capture_output=True, text=True, timeout=400, check=False, cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
    )


def steps(run: Path) -> int:
    return Trace.load([run]).steps


@dataclass(frozen=True)
class Finished:
    """A job of 40 steps that is over."""

    script: Path
    run: Path
    done: subprocess.CompletedProcess[str]

    def copy(self, to: Path) -> Path:
        return Path(shutil.copytree(self.run, to))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    folder = tmp_path_factory.mktemp("läufe und mehr 数据")
    path = script(
        folder, "train(40, pause=0.02); print('to stdout'); print('to stderr', file=sys.stderr); sys.exit(7)", "mein training ü.py"
    )
    run = folder / "der lauf ø"
    return Finished(path, run, record(run, python(), str(path)))


def test_exit_code_and_output_are_the_program_s(finished: Finished) -> None:
    assert finished.done.returncode == 7
    assert finished.done.stdout.splitlines()[-1] == "to stdout"
    assert "to stderr" in finished.done.stderr
    assert steps(finished.run) == 40


@pytest.mark.slow
def test_script_that_raises(tmp_path: Path) -> None:
    path = script(tmp_path, "train(4); raise ValueError('the user’s own')")
    done = record(tmp_path / "run", python(), str(path))
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: the user’s own")
    assert "proctor/" not in done.stderr.split("Traceback", 1)[1]  # no frame of ours in the user's traceback
    assert steps(tmp_path / "run") == 4
    assert proctor.open_run(str(tmp_path / "run")).processes[0].finished


@pytest.mark.slow
def test_exception_inside_an_observed_call_is_recorded_and_passes(tmp_path: Path) -> None:
    path = script(tmp_path, """
        train(2)
        try:
            torch.matmul(torch.ones(2, 3), torch.ones(2, 3))
        except RuntimeError as e:
            print('caught', type(e).__name__, flush=True)
    """)
    done = record(tmp_path / "run", python(), str(path))
    assert done.returncode == 0 and "caught RuntimeError" in done.stdout
    calls = proctor.open_run(str(tmp_path / "run")).calls
    assert calls.filter((calls["fn"] == "torch.matmul") & (calls["flags"] % 2 == 1)).height == 1


def test_os_exit_loses_nothing(tmp_path: Path) -> None:
    path = script(tmp_path, "train(5); os._exit(3)")
    assert record(tmp_path / "run", python(), str(path)).returncode == 3
    assert steps(tmp_path / "run") == 5


@pytest.mark.slow
def test_exec_loses_nothing_and_records_what_it_becomes(tmp_path: Path) -> None:
    script(tmp_path, "train(2)", "second.py")
    path = script(tmp_path, f"train(3); os.execv(sys.executable, [sys.executable, {str(tmp_path / 'second.py')!r}])")
    done = record(tmp_path / "run", sys.executable, str(path))
    assert done.returncode == 0 and done.stdout.count("step") == 5
    trace = Trace.load([tmp_path / "run"])
    assert trace.steps in (2, 3)


def test_kill_9_keeps_what_was_flushed(tmp_path: Path) -> None:
    path = script(tmp_path, "train(10_000, pause=0.05)")
    process = subprocess.Popen(
        [sys.executable, "-m", "proctor.cli", "record", "-o", str(tmp_path / "run"), "--", sys.executable, str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    assert process.stdout is not None
    seen = 0
    for line in process.stdout:
        seen = int(line.split()[1])
        if seen == 60:
            break
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    trace = Trace.load([tmp_path / "run"])
    # At most 1 s of steps is lost; on a loaded machine the writer thread may come late, so half is demanded.
    assert trace.steps >= 30
    assert not trace.processes[0].finished


@pytest.mark.slow
def test_signals_reach_the_program(tmp_path: Path) -> None:
    path = script(tmp_path, """
        import signal
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(42))
        train(10_000, pause=0.05)
    """)
    process = subprocess.Popen(
        [sys.executable, "-m", "proctor.cli", "record", "-o", str(tmp_path / "run"), "--", sys.executable, str(path)],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step 5 "):
            break
    process.send_signal(signal.SIGTERM)  # the pid is the program's own
    process.stdout.read()
    assert process.wait() == 42
    assert steps(tmp_path / "run") >= 5


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_disk_full_does_not_hurt_the_program_and_is_said(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96k", "tmpfs", str(small)], check=False, capture_output=True).returncode:
        pytest.skip("no permission to mount a tmpfs")
    try:
        path = script(tmp_path, "print('final', train(400, pause=0.005))")
        bare = subprocess.run([python(), str(path)], capture_output=True, text=True, check=True, timeout=400)
        done = record(small / "run", python(), str(path))
        assert done.returncode == 0
        assert done.stdout == bare.stdout
        assert "cannot write the trace" in done.stderr and "sampling" in done.stderr
        assert done.stderr.count("cannot write the trace") == 1
        assert 0 < steps(small / "run") <= 400
    finally:
        subprocess.run(["umount", str(small)], check=False)


def test_unwritable_directory_is_one_line_and_exit_2(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in ("/proc/proctor-run", str(tmp_path / "file" / "run"), str(tmp_path / "file")):
        done = record(target, sys.executable, "-c", "print('ran')")
        assert done.returncode == 2
        assert "ran" not in done.stdout
        assert len(done.stderr.strip().splitlines()) == 1 and "Traceback" not in done.stderr


@pytest.mark.slow
def test_run_directory_that_vanishes_does_not_hurt_the_program(tmp_path: Path) -> None:
    path = script(tmp_path, f"import shutil; shutil.rmtree({str(tmp_path / 'run')!r}); print('final', train(3))")
    done = record(tmp_path / "run", python(), str(path))
    assert done.returncode == 0 and "final" in done.stdout


def test_paths_with_spaces_and_unicode(finished: Finished) -> None:
    opened = proctor.open_run(str(finished.run))
    assert opened.info["program"] == "mein training ü.py"
    assert any("mein training ü.py:" in site for site in opened.calls["site"])


@pytest.mark.slow
def test_program_that_patches_torch_itself(tmp_path: Path) -> None:
    path = script(tmp_path, """
        import torch.nn.functional as F
        original, calls = F.linear, []
        def mine(x, w, b=None):
            calls.append(1)
            return original(x, w, b)
        F.linear = mine
        step = torch.optim.SGD.step
        torch.optim.SGD.step = lambda self, closure=None: step(self, closure)
        print('final', train(3), len(calls), F.linear is mine)
        F.linear = original
        print('restored', F.linear(torch.ones(1, 2), torch.ones(3, 2)).shape)
    """)
    bare = subprocess.run([python(), str(path)], capture_output=True, text=True, check=True, timeout=400)
    done = record(tmp_path / "run", python(), str(path))
    assert (done.returncode, done.stdout) == (0, bare.stdout)
    assert steps(tmp_path / "run") == 3


def test_an_update_that_a_test_has_replaced_is_none_and_blinds_nothing(tmp_path: Path) -> None:
    path = script(tmp_path, """
        from unittest import mock
        with mock.patch('torch.optim.SGD.step') as replaced:
            train(2)
        print('replaced', replaced.call_count)
        print('final', train(3))
    """)
    done = record(tmp_path / "run", python(), str(path))
    assert done.returncode == 0 and "replaced 2" in done.stdout
    assert "is off" not in done.stderr
    assert steps(tmp_path / "run") >= 3


def test_an_error_of_ours_is_said_once_and_the_program_goes_on(tmp_path: Path) -> None:
    path = script(tmp_path, """
        import proctor.instrument.observe.state as state
        def broken(*args, **kwargs):
            raise RuntimeError('a probe of ours broke')
        state.look = broken
        print('final', train(5))
    """)
    bare = subprocess.run([python(), str(path)], capture_output=True, text=True, check=True, timeout=400)
    done = record(tmp_path / "run", python(), str(path))
    assert (done.returncode, done.stdout) == (0, bare.stdout)
    assert done.stderr.count("a probe of ours broke") == 1


def test_missing_command_and_missing_double_dash(tmp_path: Path) -> None:
    for arguments in (["record", "-o", str(tmp_path / "run")], ["record", "-o", str(tmp_path / "run"), "--", "no-such-command-here"]):
        done = subprocess.run([sys.executable, "-m", "proctor.cli", *arguments], capture_output=True, text=True, check=False)
        assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1
        assert not (tmp_path / "run").exists()


def test_an_earlier_run_is_not_overwritten(finished: Finished) -> None:
    done = record(finished.run, python(), str(finished.script))
    assert done.returncode == 2 and "--overwrite" in done.stderr
    assert steps(finished.run) == 40


def test_truncated_and_corrupt_traces_are_read_as_far_as_they_go(tmp_path: Path, finished: Finished) -> None:
    run = finished.copy(tmp_path / "run")
    calls = next((run / "procs").glob("*/calls.arrow"))
    with ipc.open_stream(calls) as stream:
        table = stream.read_all()
    longer = Stream(calls, table.schema)  # as of a run of several seconds
    for batch in table.combine_chunks().to_batches(max_chunksize=table.num_rows // 6):
        longer.append(batch)
    longer.close()
    whole, blob = Trace.load([run]), calls.read_bytes()
    assert whole.calls.height == table.num_rows and not whole.notes
    calls.write_bytes(blob[: len(blob) * 2 // 3])
    cut = Trace.load([run])
    assert 0 < cut.calls.height < whole.calls.height
    assert any("calls.arrow: cut" in note for note in cut.notes)
    damaged = bytearray(blob)
    damaged[len(blob) // 2 : len(blob) // 2 + 64] = os.urandom(64)
    calls.write_bytes(damaged)
    assert Trace.load([run]).calls.height <= whole.calls.height
    calls.write_bytes(b"")
    assert Trace.load([run]).calls.height == 0
    calls.write_bytes(os.urandom(5000))
    with pytest.raises(TraceError, match="not a Proctor trace"):
        Trace.load([run])


def test_a_gigabyte_of_garbage_is_refused_at_once(tmp_path: Path, finished: Finished) -> None:
    run = finished.copy(tmp_path / "run")
    calls = next((run / "procs").glob("*/calls.arrow"))
    with calls.open("wb") as file:
        file.write(os.urandom(1 << 16))
        file.truncate(1 << 30)
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "proctor.cli", "report", str(run)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "not a Proctor trace" in done.stderr and "Traceback" not in done.stderr
    assert time.monotonic() - started < 30


def test_newer_trace_schema_is_said(tmp_path: Path) -> None:
    (tmp_path / "run" / "procs").mkdir(parents=True)
    (tmp_path / "run" / "run.json").write_text('{"schema": 99}')
    with pytest.raises(TraceError, match="schema 99"):
        Trace.load([tmp_path / "run"])


def test_what_a_program_gives_to_functions_is_kept_without_its_secrets(tmp_path: Path) -> None:
    body = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)
        def forward(self, x, api_key="", note=""):
            return self.layer(x)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(4, 4), api_key="s3cr3t-1", note="https://me:s3cr3t-2@host/x").sum().backward()
        optimizer.step()
    torch.save({"hub_token": "s3cr3t-3", "kept": "word"}, "hf_s3cr3ts3cr3ts3cr3ts3cr3t.pt")
    """
    done = record(tmp_path / "run", python(), str(script(tmp_path, body)), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names = Trace.load([tmp_path / "run"]).processes
    (names_file,) = (tmp_path / "run").glob("procs/*/names.arrow")
    import pyarrow.ipc

    with pyarrow.ipc.open_stream(names_file) as stream:
        text = str(stream.read_all().to_pylist())
    assert names and "word" in text and "[hidden]" in text and "s3cr3t" not in text
    assert not [p for p in (tmp_path / "run" / "procs").rglob("*") if p.is_file() and p.stat().st_mode & 0o077]
