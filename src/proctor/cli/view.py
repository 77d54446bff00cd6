"""Show a run in a browser, also while it goes on: incidents as they come, and the report of what is recorded so far.

Listens on this machine alone by default. Readers need a token, which is part of the address that is printed, since others may have an account
on this machine, too; `--no-token` does without. To be reached from other machines make one that stays with
`openssl rand -hex 24 > FILE; chmod 600 FILE`, and pass --token-file FILE.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import socket
import stat
import sys
from pathlib import Path
from typing import Final
from urllib.parse import quote

from proctor.errors import ProctorError, TraceError, UsageError

MAX_TOKEN: Final = 4096
MIN_TOKEN: Final = 16
_NEEDED: Final = ("starlette", "uvicorn")


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", help="directory that `proctor record` or `proctor watch` writes")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--token-file", metavar="FILE", help="what readers must know; needed unless the address is this machine's own")
    parser.add_argument("--no-token", action="store_true", help="whoever is on this machine may look")
    parser.add_argument("--allow-host", metavar="NAME", action="append", default=[], help="another name that readers use for this machine")


def run(args: argparse.Namespace) -> int:
    """Serve until interrupted."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"the live view needs {' and '.join(missing)}", hint="pip install 'proctor[view]'")
    from proctor.verify.sinks._http import is_loopback

    folder = Path(args.run_dir)
    if not folder.is_dir():
        what = "not a directory" if folder.exists() else "no such directory"
        raise TraceError(f"{folder}: {what}", hint="proctor record -o RUN -- python train.py")
    if not 0 <= args.port < 65536:
        raise UsageError(f"--port {args.port}: expected 0 to 65535")
    token = read_token(Path(args.token_file)) if args.token_file else ""
    if not token and not is_loopback(args.host):
        raise UsageError(
            f"--host {args.host} can be reached from other machines, and there is no token",
            hint="openssl rand -hex 24 > FILE; chmod 600 FILE; proctor view RUN --host … --token-file FILE",
        )
    if args.no_token and token:
        raise UsageError("--no-token and --token-file contradict each other")
    token = token or ("" if args.no_token else secrets.token_hex(24))
    listener = _listen(args.host, args.port)
    hosts = [args.host, *args.allow_host]
    if token:
        hosts += [socket.gethostname(), socket.getfqdn()]
    _serve(folder, listener, hosts, token)
    return 0


def read_token(path: Path) -> str:
    """The token in a file that only its owner can read.

    Raises:
        UsageError: it cannot be read, others can read it, or it is too short.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_TOKEN + 1).decode("ascii", "replace").strip() if stat.S_ISREG(status.st_mode) else ""
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    if status.st_mode & 0o077:
        raise UsageError(f"{path} can be read by others", hint=f"chmod 600 {path}")
    if not MIN_TOKEN <= len(text) <= MAX_TOKEN or not text.isprintable() or "\ufffd" in text:
        raise UsageError(f"{path}: expected a token of at least {MIN_TOKEN} printable characters", hint=f"openssl rand -hex 24 > {path}")
    return text


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ProctorError(f"cannot listen on {host}:{port}: {error.strerror or error}", hint="--port 0 takes a free one") from None
    return listener


def _serve(folder: Path, listener: socket.socket, hosts: list[str], token: str) -> None:
    import uvicorn

    from proctor.verify.view.app import application

    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    address = f"http://{shown}:{port}/" + (f"?token={quote(token, safe='')}" if token else "")
    print(f"proctor: {folder} is at {address}", file=sys.stderr, flush=True)
    config = uvicorn.Config(
        application(folder, hosts=hosts, token=token),
        log_level="warning",
        access_log=False,  # an address may hold a token
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=2,
        limit_concurrency=256,
        h11_max_incomplete_event_size=16 * 1024,
    )
    uvicorn.Server(config).run(sockets=[listener])
