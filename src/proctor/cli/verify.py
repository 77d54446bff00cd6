"""Judge a job's steps while it runs, as `watch` does, in a process of its own.

    proctor verify RUN                                      a run that is watched and whose verifier died
    proctor verify RUN --listen tcp:0.0.0.0:7077 --token-file job.token -i pack.json --page page.toml
    proctor verify --relay tcp:node0:7077 --listen unix:/run/proctor/socket --token-file job.token

The last form judges nothing: it gathers the ranks of its host into one connection to a verifier elsewhere.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from proctor.cli._inputs import add_packs
from proctor.cli._watched import LEVELS, Settings, read_settings, settings_of, start_time
from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.verify.verifier import Summary, Verifier

_NICE: Final = 10
_RESTARTS: Final = 20
_PAUSE_S: Final = (0.2, 30.0)  # before the first restart, and at most


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", nargs="?", help="run directory; made if it is not there")
    add_packs(parser)
    parser.add_argument("--listen", metavar="ADDRESS", action="append", default=[], help="tcp:HOST:PORT or unix:PATH")
    parser.add_argument("--token-file", metavar="FILE", help="of the job, mode 600 (default RUN/boot/token)")
    parser.add_argument("--page", metavar="FILE", help="who is told (docs/paging.md)")
    parser.add_argument("--job", metavar="NAME", help="what pages call it")
    parser.add_argument("--metrics", metavar="[HOST:]PORT", help="serve Prometheus metrics there")
    parser.add_argument("--export", metavar="WHERE", action="append", default=[], help="also write to tensorboard:DIR, …")
    parser.add_argument("--suppressions", metavar="FILE", action="append", default=[], help="violations that are expected")
    parser.add_argument("--fail-on", choices=LEVELS, default="error", help="least severity that makes the exit code 1")
    parser.add_argument("--relay", metavar="ADDRESS", help="of a verifier: only pass records on")
    parser.add_argument("--keep-alive", action="store_true", help="start again when the verifier dies")


def run(args: argparse.Namespace) -> int:
    """Serve until the job is over."""
    if args.relay:
        return _relay(args)
    if args.run_dir is None:
        raise UsageError("no run directory was named", hint="proctor verify RUN")
    if args.keep_alive:
        return _keep_alive(args)
    target = Path(args.run_dir).resolve()
    if (target / "verify" / "watch.json").is_file() and not (args.listen or args.packs):
        settings = read_settings(target)
    else:
        settings = _own(args, target)
    return _serve(settings)


def _own(args: argparse.Namespace, target: Path) -> Settings:
    """Settings of a verifier that nobody's `watch` made."""
    args.output = str(target)
    listen, args.listen = args.listen, None
    settings = settings_of(args, target)
    settings.listen_to = listen or [settings.address]
    settings.write()
    token = Path(settings.token_file)
    if not args.token_file and not token.exists():
        from proctor.invariants.peer import make_token

        token.parent.mkdir(parents=True, exist_ok=True)
        make_token(token)
    return settings


def _serve(settings: Settings) -> int:
    from proctor.invariants.peer import read_token
    from proctor.verify.inbox import Inbox
    from proctor.verify.server import Server

    logging.basicConfig(level=logging.WARNING, format="proctor: %(message)s", stream=sys.stderr)
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, meant for the command
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    inbox = Inbox()
    with Server(settings.listen_to, read_token(Path(settings.token_file)), inbox) as server:
        verifier = _verifier(settings, inbox, lambda: server.stats().refused)

        def freeze(key: str, step: int) -> None:
            from proctor.invariants.frames import Freeze

            for process in verifier.processes:
                server.send(process, Freeze(key[:256], max(step, -1)))

        verifier.freeze = freeze
        stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
        going = verifier.going
        if going is not None:
            verifier.going = lambda: not stopped and going()
        summary = verifier.work() if going is not None else _until_stopped(verifier, stopped)
    return _report(settings, summary, verifier)


def _until_stopped(verifier: Verifier, stopped: list[int]) -> Summary:
    """Without a command whose end can be seen: until all its processes are gone, or somebody ends us."""
    verifier.going = (lambda: not stopped and not verifier.deserted)
    return verifier.work()


def _verifier(settings: Settings, inbox: Any, refused: Callable[[], Any]) -> Verifier:
    import platform

    from proctor.cli._inputs import load_packs
    from proctor.invariants.suppression import read_suppressions
    from proctor.verify.lifecycle import IncidentBook
    from proctor.verify.metrics import metrics
    from proctor.verify.paging.config import read_config
    from proctor.verify.paging.pager import Pager
    from proctor.verify.verifier import Verifier
    from proctor.verify.view.events import EventLog
    from proctor.verify.writers import parse
    from proctor.verify.writers._background import Background

    def say(text: str) -> None:
        print(f"proctor: {text}", file=sys.stderr, flush=True)

    packs, _ = load_packs([Path(p) for p in settings.packs])
    config = read_config(settings.page) if settings.page else None
    folder = settings.folder
    pager = None
    if config is not None:
        pager = Pager(config, folder / "outbox.db", say=say, job=settings.job)
        pager.start()
    codes = {code for code in _codes()}
    counts = metrics(settings.job, codes, wanted=bool(settings.metrics))
    if settings.metrics:
        host, _, port = settings.metrics.rpartition(":")
        counts.serve(host, int(port))
    book = IncidentBook(
        settings.job,
        platform.node(),
        config.incidents if config is not None else None,
        state_path=folder / "incidents.json",
        run=settings.run,
    )
    return Verifier(
        run=Path(settings.run),
        packs=packs,
        inbox=inbox,
        book=book,
        log=EventLog(Path(settings.run)),
        going=_Job(settings.pid, settings.started) if settings.pid else None,
        refused=refused,
        fitting=settings.fitting,
        pager=pager,
        metrics=counts,
        writers=[Background(parse(text), settings.job, say) for text in settings.export],
        suppressions=[s for path in settings.suppressions for s in read_suppressions(Path(path))],
        say=say,
    )


def _codes() -> list[str]:
    from proctor.invariants.relations import registry

    return [relation.code for relation in registry().values()]


class _Job:
    """Whether a process runs, told from a later one of the same id by its start time."""

    def __init__(self, pid: int, started: int) -> None:
        self._fd = -1
        try:
            fd = os.pidfd_open(pid)
        except OSError:
            return
        if start_time(pid) == started:
            self._fd = fd
        else:
            os.close(fd)

    def __call__(self) -> bool:
        return self._fd >= 0 and not select.select([self._fd], [], [], 0)[0]


def _report(settings: Settings, summary: Summary, verifier: Verifier) -> int:
    """Write the reports of the run, the verdict, and what to do next."""
    from proctor.cli.check import examine, keep
    from proctor.verify import wording

    worst = summary.worst()
    code = wording.EXIT_CLEAN
    page = ""
    if summary.result is not None:
        report = examine(Path(settings.run), [Path(p) for p in settings.packs] if not settings.fitting else [], fail_on=settings.fail_on)
        report, trouble = keep(report, Path(settings.run))
        page, code = report.page, report.exit_code
        if trouble:
            verifier.say(trouble)
    if worst is not None:
        code = wording.EXIT_VIOLATED
    elif summary.judged < 0:
        code = wording.EXIT_INCONCLUSIVE
    verdict = {"worst": worst.value if worst else None, "violations": len(summary.violations), "steps": summary.judged + 1}
    try:
        (settings.folder / "verdict.json").write_bytes(msgspec.json.encode(verdict))
    except OSError as e:
        verifier.say(f"{settings.folder}: the verdict was not written: {e.strerror or e}")
    rules = f"{len(summary.violations)} rules violated" if summary.violations else "no violation"
    verifier.say(f"watched {summary.judged + 1} steps: {rules}" + (f"; report in {page}" if page else ""))
    return code


def _relay(args: argparse.Namespace) -> int:
    from proctor.invariants.peer import read_token
    from proctor.verify.relay import Relay

    if not args.listen or not args.token_file:
        raise UsageError("a relay needs --listen and --token-file", hint="proctor verify --help")
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: stop.append(n))
    with Relay(args.listen, args.relay, read_token(Path(args.token_file))):
        while not stop:
            time.sleep(0.2)
    return 0


def _keep_alive(args: argparse.Namespace) -> int:
    """Run the verifier as a child, and again when it was killed or failed."""
    command = [sys.executable, "-m", "proctor.cli", "verify", args.run_dir]
    ended: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def end(number: int, _: object) -> None:
        ended.append(number)
        if child is not None:
            child.send_signal(number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    pause = _PAUSE_S[0]
    code = 0
    for _ in range(_RESTARTS):
        begin = time.monotonic()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        code = child.wait()
        if ended or (0 <= code < 100):
            return code
        pause = _PAUSE_S[0] if time.monotonic() - begin > 60 else min(2 * pause, _PAUSE_S[1])
        print(f"proctor: the verifier ended ({code}); started again", file=sys.stderr, flush=True)
        time.sleep(pause)
    return code


