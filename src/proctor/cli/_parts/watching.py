"""The options of a verifier, which `watch` and `verify` share, and its settings made of them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.errors import UsageError
from proctor.verify.service.settings import LEVELS as LEVELS

if TYPE_CHECKING:
    from proctor.verify.paging.config import PageConfig
    from proctor.verify.service.settings import Settings


def add_verifier(parser: argparse.ArgumentParser) -> None:
    """Declare who is told, and where else it is written."""
    parser.add_argument("--page", metavar="FILE", help="who is told (docs/paging.md)")
    parser.add_argument("--job", metavar="NAME", help="what pages call it (default: of --page, else the run directory)")
    parser.add_argument("--metrics", metavar="[HOST:]PORT", help="serve Prometheus metrics there (default host 127.0.0.1)")
    parser.add_argument("--export", metavar="WHERE", action="append", default=[], help="also write to tensorboard:DIR, …")
    parser.add_argument("--suppressions", metavar="FILE", action="append", default=[], help="violations that are expected")
    parser.add_argument(
        "--hang-after", metavar="S", type=float,
        help="tell a rank that waits so many seconds for another one (default: five times the longest wait that was learned, at least 10; 3 where nothing can end it)",
    )


def settings_of(args: argparse.Namespace, target: Path) -> Settings:
    """From a command line; every file is read once, so that a mistake shows before the job starts.

    Raises:
        ProctorError: a pack, the paging configuration or a suppression cannot be used, or a package is missing.
    """
    from proctor.cli._parts.needs import known
    from proctor.invariants.pack import shipped
    from proctor.invariants.wire.peer import parse_address, read_token
    from proctor.verify.service.settings import Settings

    if args.hang_after is not None and not 1.0 <= args.hang_after <= 86_400:
        raise UsageError(f"--hang-after {args.hang_after:g}: expected seconds, from 1 to 86400")
    named = [Path(p) for p in args.packs]
    if known(named or shipped()) is None:
        from proctor.invariants.fit import load_packs

        load_packs(named)
    config = _read(args)
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
        hang_after=args.hang_after,
    )


def _read(args: argparse.Namespace) -> PageConfig | None:
    """The paging configuration, if one is named; also reads all else that is named. What nobody names is not imported."""
    config = None
    if args.suppressions:
        from proctor.invariants.suppression import read_suppressions

        for path in args.suppressions:
            read_suppressions(Path(path))
    if args.page:
        from proctor.verify.paging.config import exposed_secrets, read_config

        config = read_config(args.page)
        for warning in exposed_secrets(config):
            print(f"proctor: {args.page}: {warning}", file=sys.stderr)
    if args.metrics:
        from proctor.verify.metrics import metrics

        metrics("", (), wanted=True)
    if args.export:
        from proctor.verify.writers import parse

        for text in args.export:
            parse(text)
    return config


def _free(host: str, port: int, option: str) -> None:
    """Raises `UsageError`: nobody can listen there, which the verifier would find out when the job runs already."""
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as e:
        raise UsageError(f"{option} {host}:{port}: cannot listen there: {os.strerror(e.errno) if e.errno else e}") from None
