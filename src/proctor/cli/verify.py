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
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli._parts.inputs import add_packs
from proctor.cli._parts.watching import LEVELS, add_verifier, settings_of
from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.verify.service.settings import Settings


def prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_dir", metavar="RUN", nargs="?", help="run directory; with --listen made if it is not there")
    add_packs(parser)
    parser.add_argument("--listen", metavar="ADDRESS", action="append", default=[], help="tcp:HOST:PORT or unix:PATH")
    parser.add_argument("--token-file", metavar="FILE", help="of the job, mode 600, made if it is not there (default RUN/boot/token)")
    add_verifier(parser)
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
    if args.keep_alive:
        from proctor.verify.service.supervise import keep_alive

        return keep_alive(settings)
    from proctor.verify.service.serve import serve

    return serve(settings, keeps_steps=_steps_are_kept(settings))


def _watched(args: argparse.Namespace, target: Path) -> Settings:
    """Settings that `watch` made, or an earlier verifier."""
    from proctor.verify.service.settings import read_settings

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
    from proctor.invariants.wire.peer import make_token, parse_address
    from proctor.verify.service.processes import say

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


def _steps_are_kept(settings: Settings) -> bool:
    """Whether the ranks that this job's command starts keep their last steps."""
    import msgspec

    from proctor.instrument.config import read_config

    try:
        return read_config(Path(settings.run) / "boot" / "activation.json").capsules > 0
    except (OSError, msgspec.MsgspecError):
        return False


def _relay(args: argparse.Namespace) -> int:
    from proctor.invariants.wire.peer import read_token
    from proctor.verify.service.serve import NICE
    from proctor.verify.transport.relay import Relay

    if not args.listen or not args.token_file:
        raise UsageError("a relay needs --listen and --token-file", hint="proctor verify --help")
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda n, _: stop.append(n))
    os.nice(NICE)
    with Relay(args.listen, args.relay, read_token(Path(args.token_file))):
        while not stop:
            time.sleep(0.2)
    return 0
