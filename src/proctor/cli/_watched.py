"""What a verifier is told of its job: a file in the run directory, so that one that died can be started again."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import TraceError, UsageError
from proctor.invariants.files import UNREADABLE, read_file, replace_file

_MAX_BYTES: Final = 16 << 20  # of a small file of ours

LEVELS: Final = ("info", "warning", "error", "critical", "never")


class Verdict(msgspec.Struct, kw_only=True):
    """`RUN/verify/verdict.json`, written when the verifier is done.

    Args:
        worst: severity of the worst violation; `None`: there is none.
        violations: rules that were violated.
        steps: that were judged.
        lost: records that did not reach the verifier, by reason.
        delivering: id of the process that still delivers notices; 0: nothing is left to deliver, or nobody tries.
    """

    worst: str | None = None
    violations: int = 0
    steps: int = 0
    lost: dict[str, int] = {}
    delivering: int = 0

    def fails(self, fail_on: str) -> bool:
        """Whether something of this severity was found."""
        return self.worst in LEVELS[:-1] and LEVELS.index(str(self.worst)) >= LEVELS.index(fail_on)


class Settings(msgspec.Struct, kw_only=True):
    """`RUN/verify/watch.json`.

    Args:
        run: run directory, absolute.
        job: name of the job.
        packs: files of rules, absolute.
        fitting: of these only those that fit the job count.
        page: `page.toml`, absolute; "": nobody is told.
        listen_to: addresses at which the verifier listens, the first for the ranks of its host.
        token_file: of the job.
        metrics: `HOST:PORT` of the Prometheus endpoint; "": none.
        export: where else to write, `tensorboard:DIR` and the like.
        suppressions: files, absolute.
        fail_on: severity that matters to the exit code; "never": none does.
        pid, started: of the command, and its start time as the kernel counts it; 0: not known.
    """

    run: str
    job: str
    packs: list[str]
    fitting: bool = False
    page: str = ""
    listen_to: list[str] = []
    token_file: str = ""
    metrics: str = ""
    export: list[str] = []
    suppressions: list[str] = []
    fail_on: str = "never"
    pid: int = 0
    started: int = 0

    @property
    def address(self) -> str:
        """For the ranks of this host."""
        return self.listen_to[0]

    @property
    def folder(self) -> Path:
        return Path(self.run) / "verify"

    def write(self) -> None:
        """Raises `TraceError`: the run directory cannot be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            replace_file(self.folder / "watch.json", msgspec.json.format(msgspec.json.encode(self), indent=1), mode=0o600)
        except OSError as e:
            raise TraceError(f"{self.folder}: cannot be written: {e.strerror or e}") from None

    def write_job(self, pid: int) -> None:
        """Say which process is the job."""
        self.pid, self.started = pid, start_time(pid)
        self.write()

    def verdict(self) -> Verdict | None:
        """What a verifier that is done has found; `None`: it is not done."""
        with contextlib.suppress(OSError, *UNREADABLE):
            return msgspec.json.decode(read_file(self.folder / "verdict.json", _MAX_BYTES), type=Verdict)
        return None

    def give(self, verdict: Verdict) -> None:
        """Raises OSError."""
        replace_file(self.folder / "verdict.json", msgspec.json.encode(verdict))


def read_settings(run: Path) -> Settings:
    """Of a run that is or was watched.

    Raises:
        TraceError: there are none, or they cannot be read.
    """
    path = run / "verify" / "watch.json"
    try:
        return msgspec.json.decode(read_file(path, _MAX_BYTES), type=Settings)
    except OSError as e:
        raise TraceError(f"{path}: {e.strerror or e}", hint="proctor watch -o RUN -- CMD…") from None
    except UNREADABLE as e:
        raise TraceError(f"{path}: {e}") from None


def settings_of(args: argparse.Namespace, target: Path) -> Settings:
    """From the command line of `watch`; every file is read once, so that a mistake shows before the job starts.

    Raises:
        ProctorError: a pack, the paging configuration or a suppression cannot be used, or a package is missing.
    """
    from proctor.cli._inputs import load_packs, shipped
    from proctor.invariants.peer import parse_address, read_token
    from proctor.invariants.suppression import read_suppressions
    from proctor.verify.metrics import metrics
    from proctor.verify.paging.config import exposed_secrets, read_config
    from proctor.verify.writers import parse

    named = [Path(p) for p in args.packs]
    load_packs(named)
    for path in args.suppressions:
        read_suppressions(Path(path))
    config = read_config(args.page) if args.page else None
    for warning in exposed_secrets(config) if config is not None else ():
        print(f"proctor: {args.page}: {warning}", file=sys.stderr)
    if args.metrics:
        metrics("", (), wanted=True)
    for text in args.export:
        parse(text)
    host, _, port = (args.metrics or "").rpartition(":")
    if args.metrics and not (port.isdecimal() and int(port) < 1 << 16):
        raise UsageError(f"--metrics {args.metrics}: expected PORT or HOST:PORT")
    if args.metrics:
        _free(host or "127.0.0.1", int(port), "--metrics")
    listen_to = parse_address(f"tcp:{args.listen}") if args.listen else None
    if listen_to is not None:
        _free(listen_to.host, listen_to.port, "--listen")
    if args.token_file:
        read_token(Path(args.token_file))
    name = args.job or (config.job.name if config is not None else "") or target.name
    return Settings(
        run=str(target),
        job=name,
        packs=[str(p.resolve()) for p in named or shipped()],
        fitting=not named,
        page=str(Path(args.page).resolve()) if args.page else "",
        listen_to=[f"unix:{target / 'verify' / 'live' / 'socket'}", *([f"tcp:{args.listen}"] if args.listen else [])],
        token_file=str(Path(args.token_file).resolve() if args.token_file else target / "boot" / "token"),
        metrics=f"{host or '127.0.0.1'}:{port}" if args.metrics else "",
        export=list(args.export),
        suppressions=[str(Path(p).resolve()) for p in args.suppressions],
        fail_on=args.fail_on or "never",
    )


def _free(host: str, port: int, option: str) -> None:
    """Raises `UsageError`: nobody can listen there, which the verifier would find out when the job runs already."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as e:
        raise UsageError(f"{option} {host}:{port}: cannot listen there: {os.strerror(e.errno) if e.errno else e}") from None


def watched_now(run: Path) -> bool:
    """Whether a verifier is at work on this run."""
    from proctor.errors import ProctorError
    from proctor.invariants.peer import connect, parse_address

    try:
        connect(parse_address(f"unix:{run / 'verify' / 'live' / 'socket'}"), 1.0).close()
    except (OSError, ProctorError):
        return False
    return True


def begin(settings: Settings, pid: int, *, aloud: bool, apart: bool) -> subprocess.Popen[bytes] | None:
    """Start a verifier for the job that is, or is about to be, this process.

    Args:
        aloud: it says on our stderr what it finds; else in `RUN/verify/verifier.log`, so that a pipe that the job's output
            goes to ends with the job.
        apart: it is no child of ours, so that a job that waits for all its children does not wait for it.

    Returns:
        the process, unless it is apart.

    Raises:
        TraceError: the run directory cannot be written, or no process can be made.
    """
    settings.write_job(pid)
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PROCTOR_RUN", None)
    command = [sys.executable, "-m", "proctor.cli", "verify", settings.run, "--keep-alive"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=None if aloud else log,
            start_new_session=True,
        )

    try:
        with open(settings.folder / "verifier.log", "ab", opener=_owner_s) as log:
            if not apart:
                return start()
            _orphan(start)
    except OSError as e:
        raise TraceError(f"{settings.folder}: the verifier was not started: {e.strerror or e}") from None
    return None


def deliver_later(settings: Settings, limit_s: float) -> int:
    """Go on delivering what waits in the outbox, in a process of its own that ends when nothing waits, or after a while.

    Returns:
        its id; 0 where it could not be started, or there is no time for it.
    """
    if limit_s < 1:
        return 0
    command = [sys.executable, "-m", "proctor.cli", "page", "flush", "--run", settings.run, "--config", settings.page]
    nothing = subprocess.DEVNULL
    try:
        with open(settings.folder / "verifier.log", "ab", opener=_owner_s) as log:
            return _orphan(
                lambda: subprocess.Popen(
                    [*command, "--timeout", f"{int(limit_s)}s"], stdin=nothing, stdout=log, stderr=log, start_new_session=True
                )
            )
    except OSError:
        return 0


def _owner_s(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _orphan(start: Callable[[], subprocess.Popen[bytes]]) -> int:
    """Start a process through one that ends at once; its id. Raises OSError."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(send, str(start().pid).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(send)
    with open(receive, "rb") as told:
        said = told.read(32)
    if os.waitpid(pid, 0)[1]:
        raise OSError("no process could be made")
    return int(said)


def start_time(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 when there is none. Tells a process from a later one of its id."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
