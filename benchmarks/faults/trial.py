"""One fault: the job without Proctor, the same under `proctor watch`, and what differs, is said, and is left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.faults import job

PROCTOR: Final = [sys.executable, "-P", "-m", "proctor.cli"]
_WAIT_S: Final = 300.0
_SPENT_S: Final = 90.0  # for the verifier, after the job has ended
_OURS: Final = frozenset({"boot", "capsules", "check.json", "procs", "report.html", "run.json", "verify", "violations.jsonl"})


class UnavailableError(Exception):
    """The fault cannot be done on this machine, and why."""


@dataclass
class Stage:
    """What a fault's outside part may touch.

    Args:
        folder: of this trial.
        run: run directory; None where Proctor is not there.
        pids: of the ranks that wait at the gate, by rank.
        job: the process that was started: the command itself, or `torchrun`.
    """

    folder: Path
    run: Path | None
    job: subprocess.Popen[str]
    pids: dict[int, int] = field(default_factory=dict)

    def verifiers(self, *, keeper: bool = False) -> list[int]:
        """Processes that judge the run; with `keeper` those that keep them alive."""
        found = []
        for pid, words in processes():
            if self.run is not None and "verify" in words and str(self.run) in words and ("--keep-alive" in words) is keeper:
                found.append(pid)
        return found

    def hit_verifier(self, number: int, *, keeper: bool = False) -> None:
        """Send a signal to the verifier; with Proctor there is one, sooner or later."""
        if self.run is None:
            return
        until = time.monotonic() + 60
        while not (pids := self.verifiers(keeper=keeper)) and time.monotonic() < until:
            time.sleep(0.1)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


Outside = Callable[[Stage], None]


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Args:
        name, what: for the table.
        true: verdicts that are true: `clean`, `violated`, `unknown`, `none` (there is no trace that could be judged).
        bug: the program has one, after the fault.
        program: parts of the program, see `job.write`.
        outside: done while the program waits at its gate.
        ranks: processes of the job, started by torchrun if more than one.
        prefix: words before the command of the job, such as a limit; with and without Proctor.
        options: of `watch`.
        environment: of both.
        flags: of the interpreter.
        files: beside the program of both, by name.
        around: makes the place of the run, for instance a small disk, and takes it away.
        arrange: prepares files of the trial; gives more options of `watch`.
        output: where the job's output goes: "pipe", or "closed".
        told: what an incident must say.
        after: looks at the run when all is over, and says what is not as it should be.
    """

    name: str
    what: str
    true: frozenset[str] = frozenset({"clean"})
    bug: bool = False
    program: Mapping[str, str] = field(default_factory=dict)
    outside: Outside | None = None
    ranks: int = 1
    prefix: Sequence[str] = ()
    options: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: Sequence[str] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    around: Callable[[Path], contextlib.AbstractContextManager[Path]] | None = None
    arrange: Callable[[Path], Sequence[str]] | None = None
    torchrun: Sequence[str] = ()
    told: str = ""
    after: Callable[[Path], list[str]] | None = None
    leaves: frozenset[str] = frozenset()  # paths in the run directory that nobody is left to take away


@dataclass
class Outcome:
    """What came of a fault; each entry of `wrong` is one thing that is not as it should be."""

    name: str
    what: str
    bits: bool = False
    code: bool = False
    verdict: str = ""
    true: bool = False
    clean: bool = False
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def survived(self) -> bool:
        return self.bits and self.code and self.true and self.clean


def processes() -> Iterator[tuple[int, list[str]]]:
    """Ids and command lines of all processes that are not over."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if words != [""]:
                    yield int(entry.name), words


def attempt(fault: Fault, folder: Path) -> Outcome:
    """Do a fault.

    Args:
        fault: of the table.
        folder: empty; everything of this trial goes there.

    Raises:
        UnavailableError: this machine cannot do it.
    """
    began = time.monotonic()
    out = Outcome(fault.name, fault.what)
    folder.mkdir(parents=True)
    bare = _run(fault, folder / "bare", None)
    around = fault.around or _plain
    with around(folder / "place") as place:
        run = place / "run"
        watched = _run(fault, folder / "watched", run)
        _wait_for_verdict(run, folder)
        out.bits = watched.output == bare.output
        out.code = watched.code == bare.code
        if not out.bits:
            out.wrong.append(f"output: {_first_difference(bare.output, watched.output)}")
        if not out.code:
            out.wrong.append(f"exit code {bare.code} became {watched.code}: {watched.error[-600:]}")
        live, offline = _live(run), _offline(run)
        out.verdict = offline if live in ("none", offline) else f"{live}, then {offline}"
        out.true = offline in fault.true and live in fault.true | {"none"}
        if not out.true:
            out.wrong.append(f"said {out.verdict}, which of {', '.join(sorted(fault.true))} it should be")
        if fault.told and not any(fault.told in title for title in _told(run)):
            out.true = False
            out.wrong.append(f"nobody was told {fault.told!r} but {_told(run)}")
        if "Traceback" in watched.error and "Traceback" not in bare.error:
            out.true = False
            out.wrong.append(f"a traceback: {watched.error[-800:]}")
        if fault.after is not None and (amiss := fault.after(run)):
            out.true = False
            out.wrong += amiss
        left = _left_behind(fault, run, folder)
        out.clean = not left
        out.wrong += left
    out.seconds = time.monotonic() - began
    return out


@dataclass
class _Finished:
    output: list[str]
    error: str
    code: int


@contextlib.contextmanager
def _plain(place: Path) -> Iterator[Path]:
    place.mkdir()
    yield place


def _run(fault: Fault, folder: Path, run: Path | None) -> _Finished:
    folder.mkdir()
    script = folder / "train.py"
    job.write(script, **fault.program)
    for name, text in fault.files.items():
        (folder / name).write_text(text)
    words = [sys.executable, *fault.flags, str(script), *(["--bug"] if fault.bug else []), *(["--gate", str(folder)] if fault.outside else [])]
    if fault.ranks > 1:
        single = ["--nproc-per-node", str(fault.ranks), "--master-port", str(_port()), *fault.torchrun]
        words = [sys.executable, "-m", "torch.distributed.run", *single, *words[1:]]
    if run is not None:
        more = fault.arrange(folder) if fault.arrange is not None else ()
        words = [*PROCTOR, "watch", "-o", str(run), *fault.options, *more, "--", *words]
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PROCTOR", "FAULT")) and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**kept, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **fault.environment}
    if run is not None:
        environment["FAULT_RUN"] = str(run)
    process = subprocess.Popen(
        [*fault.prefix, *words], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, errors="replace", start_new_session=True,
    )  # fmt: skip
    try:
        if fault.outside is not None:
            _at_the_gate(fault, folder, run, process)
        output, error = process.communicate(timeout=_WAIT_S)
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    told = [line for line in output.splitlines() if line.startswith(("step ", "parameters ", "say "))]
    return _Finished(told, error, process.returncode)


def _at_the_gate(fault: Fault, folder: Path, run: Path | None, process: subprocess.Popen[str]) -> None:
    stage = Stage(folder, run, process)
    until = time.monotonic() + _WAIT_S
    while time.monotonic() < until and process.poll() is None:
        stage.pids = {r: int(text) for r in range(fault.ranks) if (text := _text(folder / f"at-{r}-0"))}
        if len(stage.pids) == fault.ranks:
            break
        time.sleep(0.05)
    assert fault.outside is not None
    try:
        if process.poll() is None:
            fault.outside(stage)
    finally:
        (folder / "go").write_text("")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _ours(run: Path) -> list[int]:
    return [pid for pid, words in processes() if any(str(run) in word for word in words) and pid != os.getpid()]


def _wait_for_verdict(run: Path, folder: Path) -> None:
    """Until no process of Proctor is left on this run, or for too long."""
    until = time.monotonic() + _SPENT_S
    while _ours(run) and time.monotonic() < until:
        time.sleep(0.1)


def _live(run: Path) -> str:
    try:
        said: dict[str, Any] = json.loads((run / "verify" / "verdict.json").read_bytes())
    except (OSError, ValueError):
        return "none"
    return "violated" if said.get("worst") in ("error", "critical") else "unknown" if not said.get("steps") or said.get("lost") or said.get("unsure") else "clean"


def _told(run: Path) -> list[str]:
    """Titles of incidents."""
    try:
        return [one["title"] for one in json.loads((run / "verify" / "incidents.json").read_bytes())["incidents"]]
    except (OSError, ValueError, KeyError):
        return []


def _offline(run: Path) -> str:
    """What `proctor check` says of what was recorded."""
    if not run.is_dir():
        return "none"
    done = subprocess.run([*PROCTOR, "check", str(run)], capture_output=True, text=True, timeout=_WAIT_S, check=False)
    if done.returncode not in (0, 1, 2, 3) or "Traceback" in done.stderr:
        return f"crash {done.returncode}"
    return {0: "clean", 1: "violated", 2: "none", 3: "unknown"}[done.returncode]


def _left_behind(fault: Fault, run: Path, folder: Path) -> list[str]:
    wrong = []
    for pid in _ours(run):
        with contextlib.suppress(OSError):
            words = " ".join(Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0"))
            wrong.append(f"process {pid} is left: {words[:160]}")
            os.kill(pid, signal.SIGKILL)
    if run.is_dir():
        wrong += [f"{p.name} is left in the run directory" for p in run.iterdir() if p.name not in _OURS]
        wrong += [f"{p.relative_to(run)} is left" for p in run.rglob(".*.tmp")]
        if not os.statvfs(run).f_flag & os.ST_RDONLY:  # nothing can be taken away there
            wrong += [f"{p.relative_to(run)} is left: a socket" for p in run.rglob("*") if p.is_socket() and str(p.relative_to(run)) not in fault.leaves]
    bare, watched = ({p.name for p in (folder / side).iterdir()} for side in ("bare", "watched"))
    extra = watched - bare - {"arranged"}
    return wrong + [f"{name} is left where the job ran" for name in sorted(extra)]


def _first_difference(one: list[str], other: list[str]) -> str:
    for a, b in zip(one, other, strict=False):
        if a != b:
            return f"{a!r} became {b!r}"
    return f"{len(one)} lines became {len(other)}"


def clear(folder: Path) -> None:
    """Take a trial's folder away."""
    shutil.rmtree(folder, ignore_errors=True)
