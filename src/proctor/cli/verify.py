"""Judge a job's steps while it runs, as `watch` does, in a process of its own.

    proctor verify RUN                                      a run that is watched and whose verifier died
    proctor verify RUN --listen tcp:0.0.0.0:7077 --token-file job.token -i pack.json --page page.toml
    proctor verify --relay tcp:node0:7077 --listen unix:/run/proctor/socket --token-file job.token

The second form is for jobs on other hosts, which run `proctor watch --verifier HOST:7077 --token-file job.token -- CMD…`;
a token file that is not there is made. It ends some seconds after the last process said goodbye, or a minute after the last
one was lost. The third form judges nothing: it gathers the ranks of its host into one connection to a verifier elsewhere.

exit code: 0 clean, 1 violations at or above --fail-on, 2 bad usage or input, 3 nothing was judged, 101 internal error
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from proctor.cli import EXIT_INTERNAL
from proctor.cli._inputs import add_packs
from proctor.cli._watched import (
    LEVELS,
    Settings,
    Verdict,
    deliver_later,
    read_settings,
    settings_of,
    start_time,
)
from proctor.errors import ProctorError, TraceError, UsageError

if TYPE_CHECKING:
    from proctor.verify.lifecycle import IncidentBook, Policy
    from proctor.verify.teller import Tells
    from proctor.verify.verifier import Summary, Verifier

_NICE: Final = 10
_RESTARTS: Final = 20  # in a row, each within a minute of the last
_RESTARTS_AFTER: Final = 2  # when the job is over
_HEALTHY_S: Final = 60.0
_PAUSE_S: Final = (0.2, 30.0)  # before the first restart, and at most


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", nargs="?", help="run directory; with --listen made if it is not there")
    add_packs(parser)
    parser.add_argument("--listen", metavar="ADDRESS", action="append", default=[], help="tcp:HOST:PORT or unix:PATH")
    parser.add_argument("--token-file", metavar="FILE", help="of the job, mode 600, made if it is not there (default RUN/boot/token)")
    parser.add_argument("--page", metavar="FILE", help="who is told (docs/paging.md)")
    parser.add_argument("--job", metavar="NAME", help="what pages call it")
    parser.add_argument("--metrics", metavar="[HOST:]PORT", help="serve Prometheus metrics there")
    parser.add_argument("--export", metavar="WHERE", action="append", default=[], help="also write to tensorboard:DIR, …")
    parser.add_argument("--suppressions", metavar="FILE", action="append", default=[], help="violations that are expected")
    parser.add_argument("--fail-on", choices=LEVELS, help="least severity that makes the exit code 1 (default error)")
    parser.add_argument("--relay", metavar="ADDRESS", help="of a verifier: only pass records on")
    parser.add_argument("--keep-alive", action="store_true", help="start again when the verifier dies")


def run(args: argparse.Namespace) -> int:
    """Serve until the job is over."""
    if args.relay:
        return _relay(args)
    if args.run_dir is None:
        raise UsageError("no run directory was named", hint="proctor verify RUN")
    target = Path(args.run_dir).resolve()
    if args.listen or args.packs:
        settings = _own(args, target)
    else:
        settings = _watched(args, target)
    return _keep_alive(settings) if args.keep_alive else _serve(settings)


def _watched(args: argparse.Namespace, target: Path) -> Settings:
    """Settings that `watch` made, or an earlier verifier."""
    if not (target / "verify" / "watch.json").is_file():
        raise UsageError(f"{target}: not a watched run", hint="proctor watch -- CMD…, or --listen tcp:HOST:PORT for processes elsewhere")
    settings = read_settings(target)
    if settings.run != str(target) or not settings.listen_to:
        raise UsageError(f"{target} was watched as {settings.run}", hint="proctor check RUN")
    for option in ("token_file", "page", "job", "metrics", "export", "suppressions"):
        if getattr(args, option):
            raise UsageError(f"--{option.replace('_', '-')} was settled when the run began to be watched", hint=f"{settings.folder}/watch.json")
    settings.fail_on = args.fail_on or "error"  # what `watch` makes of the verdict is its own matter
    return settings


def _own(args: argparse.Namespace, target: Path) -> Settings:
    """Settings of a verifier that nobody's `watch` made."""
    from proctor.invariants.peer import make_token, parse_address

    if not args.listen:
        raise UsageError("nowhere to listen", hint="--listen tcp:HOST:PORT, or proctor check RUN -i PACK for a run that is over")
    for address in args.listen:
        parse_address(address)
    args.output = str(target)
    listen, args.listen = args.listen, None
    token = Path(args.token_file) if args.token_file else target / "boot" / "token"
    made = not token.exists()
    if made:
        try:
            token.parent.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UsageError(f"{token}: cannot be written: {e.strerror or e}") from None
        make_token(token)
    settings = settings_of(args, target)
    settings.listen_to = listen
    settings.fail_on = args.fail_on or "error"
    settings.write()
    if made:
        say(f"made the job's token: {token}; hosts that report here need a copy")
    return settings


def say(text: str) -> None:
    """One line for whoever watches the terminal, which may be gone."""
    with contextlib.suppress(OSError, ValueError):
        print(f"proctor: {text}", file=sys.stderr, flush=True)


def _serve(settings: Settings) -> int:
    from proctor.invariants.peer import read_token
    from proctor.verify._memory import forgo_pandas
    from proctor.verify.inbox import Inbox
    from proctor.verify.server import Server

    forgo_pandas()
    logging.basicConfig(level=logging.WARNING, format="proctor: %(message)s", stream=sys.stderr)
    os.nice(_NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's, meant for the command
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    (settings.folder / "verdict.json").unlink(missing_ok=True)
    inbox = Inbox()
    with Server(settings.listen_to, read_token(Path(settings.token_file)), inbox) as server:
        verifier = _verifier(settings, inbox, lambda: server.stats().refused)
        verifier.heard_at = server.heard_at

        asked: set[str] = set()

        def freeze(key: str, step: int) -> None:
            from proctor.invariants.frames import Freeze

            asked.add(key)
            for process in verifier.processes:
                server.send(process, Freeze(key[:256], max(step, -1)))

        verifier.freeze = freeze
        stopped: list[int] = []
        signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
        verifier.stopped = lambda: bool(stopped)
        if not settings.pid:
            say(f"listening on {', '.join(server.addresses)}")
        summary = verifier.work()
    if _steps_are_kept(settings):
        verifier.miss_capsules(asked)
    return _report(settings, summary, verifier)


def _steps_are_kept(settings: Settings) -> bool:
    """Whether the ranks that this job's command starts keep their last steps."""
    import msgspec

    from proctor.instrument.config import read_config

    try:
        return read_config(Path(settings.run) / "boot" / "activation.json").capsules > 0
    except (OSError, msgspec.MsgspecError):
        return False


def _verifier(settings: Settings, inbox: Any, refused: Callable[[], Any]) -> Verifier:
    import platform

    from proctor.cli._inputs import load_packs
    from proctor.invariants.suppression import read_suppressions
    from proctor.verify.confirm import Confirming, Reference
    from proctor.verify.metrics import metrics
    from proctor.verify.paging.config import read_config
    from proctor.verify.paging.pager import Pager
    from proctor.verify.verifier import Verifier
    from proctor.verify.view.events import EventLog
    from proctor.verify.writers import parse
    from proctor.verify.writers._background import Background

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
        try:
            counts.serve(host, int(port))
        except ProctorError as e:
            say(f"{e}; watching goes on without")
    book = _book(settings, platform.node(), config.incidents if config is not None else None)
    tells: Tells | None = pager
    if pager is not None and config is not None and config.incidents.confirm_with:
        policy = config.incidents
        ask = Reference(Path(settings.run), policy.confirm_with, policy.confirm_plan)
        tells = Confirming(pager, folder, ask, policy.confirm_within_s, partial(_note, book))
    return Verifier(
        run=Path(settings.run),
        packs=packs,
        pack_names=settings.packs,
        inbox=inbox,
        book=book,
        log=EventLog(Path(settings.run)),
        going=_Job(settings.pid, settings.started) if settings.pid else None,
        refused=refused,
        paged=(lambda: pager.status().outcomes) if pager is not None else dict,
        fitting=settings.fitting,
        pager=tells,
        metrics=counts,
        writers=[Background(parse(text), settings.job, say) for text in settings.export],
        suppressions=[s for path in settings.suppressions for s in read_suppressions(Path(path))],
        say=say,
    )


def _note(book: IncidentBook, key: str, text: str) -> None:
    book.attach_fact(key, "reference", text)


def _book(settings: Settings, host: str, policy: Policy | None) -> IncidentBook:
    """The incidents of the job; a damaged list of a watched run is put aside, since nobody is there who could."""
    from proctor.verify.lifecycle import IncidentBook

    path = settings.folder / "incidents.json"

    def opened() -> IncidentBook:
        return IncidentBook(settings.job, host, policy, state_path=path, run=settings.run)

    try:
        return opened()
    except TraceError as e:
        if not settings.pid:
            raise
        say(f"{e}; it is now incidents.json.damaged")
        with contextlib.suppress(OSError):
            path.replace(path.with_name("incidents.json.damaged"))
        return opened()


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
    from proctor.verify import wording

    page = ""
    try:
        page = _pages(settings, summary, verifier)
    except Exception as e:  # noqa: BLE001  whatever is wrong with the report, there is a verdict
        say(f"the report was not written: {type(e).__name__}: {e}  →  proctor report {settings.run}")
    steps = max(summary.judged + 1, summary.trace.steps if summary.trace is not None else 0)
    worst = summary.worst()
    verdict = Verdict(worst=worst.value if worst else None, violations=len(summary.violations), steps=steps, lost=dict(summary.lost))
    if verifier.undelivered:
        verdict.delivering = _deliver_later(settings)
    try:
        settings.give(verdict)
    except OSError as e:
        say(f"{settings.folder}: the verdict was not written: {e.strerror or e}")
    if steps:
        number = len(summary.violations)
        rules = f"{number} rule{'s' if number > 1 else ''} violated" if number else "no violation"
        say(f"watched {steps} steps: {rules}" + (f"; report in {page}" if page else ""))
    if verdict.fails(settings.fail_on):
        return wording.EXIT_VIOLATED
    return wording.EXIT_CLEAN if steps else wording.EXIT_INCONCLUSIVE


def _deliver_later(settings: Settings) -> int:
    """What receivers did not take goes out when they are back; says so. The id of the process that does it, 0 without one."""
    from proctor.verify.paging.config import read_config

    limit_s = 0.0
    with contextlib.suppress(ProctorError):
        limit_s = read_config(settings.page).job.deliver_s
    pid = deliver_later(settings, limit_s)
    if pid:
        say(f"some notices are not delivered yet; process {pid} tries for another {limit_s / 60:.0f} min  →  proctor page status --run {settings.run}")
    else:
        say(f"some notices could not be delivered; they wait in the outbox  →  proctor page flush --run {settings.run} --config {settings.page}")
    return pid


def _pages(settings: Settings, summary: Summary, verifier: Verifier) -> str:
    """Write what `proctor check` writes beside a run, from what the verifier knows; where the page is."""
    from datetime import UTC, datetime

    from proctor.cli.check import keep
    from proctor.invariants.invariant import Severity
    from proctor.verify.checker import exit_code
    from proctor.verify.coverage import coverage
    from proctor.verify.report import Report
    from proctor.verify.report.beside import read_beside

    if summary.result is None or summary.trace is None:
        return ""
    run = Path(settings.run)
    seen = coverage(summary.trace)
    fail_on = None if settings.fail_on == "never" else Severity(settings.fail_on)
    report = Report(
        result=summary.result,
        trace=summary.trace,
        info=summary.info,
        exit_code=exit_code(summary.result, fail_on, complete=seen.complete),
        packs=verifier.pack_names,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        missing=seen.missing,
        beside=read_beside(run),
    )
    report, trouble = keep(report, run)
    if trouble:
        say(trouble)
    return report.page


def _relay(args: argparse.Namespace) -> int:
    from proctor.invariants.peer import read_token
    from proctor.verify.relay import Relay

    if not args.listen or not args.token_file:
        raise UsageError("a relay needs --listen and --token-file", hint="proctor verify --help")
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: stop.append(n))
    os.nice(_NICE)
    with Relay(args.listen, args.relay, read_token(Path(args.token_file))):
        while not stop:
            time.sleep(0.2)
    return 0


def _keep_alive(settings: Settings) -> int:
    """Run the verifier as a child, and again when it was killed or failed."""
    command = [sys.executable, "-m", "proctor.cli", "verify", settings.run]
    going: Callable[[], bool] = _Job(settings.pid, settings.started) if settings.pid else lambda: True
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
    failed = after = code = 0
    while not ended:
        begin = time.monotonic()
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        if ended:  # meanwhile
            child.terminate()
        code = child.wait()
        if ended or 0 <= code < EXIT_INTERNAL:
            break
        healthy = time.monotonic() - begin > _HEALTHY_S
        pause, failed = (_PAUSE_S[0], 1) if healthy else (min(2 * pause, _PAUSE_S[1]), failed + 1)
        after += not going()
        if failed >= _RESTARTS or after > _RESTARTS_AFTER:
            say(f"the verifier ended ({code}) and is not started again  →  proctor verify {settings.run}")
            break
        say(f"the verifier ended ({code}); started again")
        _rest(pause if going() else _PAUSE_S[0], ended)
    return code if code >= 0 else 128 - code


def _rest(pause_s: float, ended: list[int]) -> None:
    until = time.monotonic() + pause_s
    while not ended and time.monotonic() < until:
        time.sleep(0.1)
