"""Ways to the verifier that lead through a relay or a message broker, and lose connections."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from benchmarks.faults.outside import LAST, interrupted, verifier_elsewhere
from benchmarks.faults.trial import PROCTOR, Stage, UnavailableError

if TYPE_CHECKING:
    from proctor.verify.transport.nats import Bridge

_SUBJECT: Final = "proctor.fault"


def lossy_relay(folder: Path) -> Sequence[str]:
    """Records go through a relay whose connections to the verifier break after 64 KiB each, and are away for 2 s."""
    port, token = verifier_elsewhere(folder, folder.parent / "elsewhere")
    way = interrupted(port)
    address = f"unix:{folder / 'arranged' / 'relay'}"
    LAST["relay"] = subprocess.Popen([*PROCTOR, "verify", "--relay", f"tcp:127.0.0.1:{way.port}", "--listen", address, "--token-file", str(token)])
    return ["--verifier", address, "--token-file", str(token)]


def lossy_broker(folder: Path) -> Sequence[str]:
    """Both halves of a detour over NATS reach the broker by a way that cuts connections after 64 KiB each, and is away for 2 s."""
    return _over_nats(folder, f"nats://127.0.0.1:{interrupted(_broker()).port}")


def broker(folder: Path) -> Sequence[str]:
    """A detour over a NATS broker, which `restart_broker` kills."""
    return _over_nats(folder, f"nats://127.0.0.1:{_broker()}")


def restart_broker(stage: Stage) -> None:
    if stage.run is None:
        return
    process, port = LAST["broker"], LAST["broker port"]
    assert isinstance(process, subprocess.Popen) and isinstance(port, int)
    process.kill()
    process.wait()
    time.sleep(1.0)
    LAST["broker"] = _started(port)


def _broker() -> int:
    try:
        import nats  # noqa: F401 - the extra may not be there
    except ImportError:
        raise UnavailableError("needs proctor[nats]") from None
    if shutil.which("nats-server") is None:
        raise UnavailableError("needs nats-server")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    LAST["broker"], LAST["broker port"] = _started(port), port
    return port


def _started(port: int) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(["nats-server", "-a", "127.0.0.1", "-p", str(port)], stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return process
        time.sleep(0.05)
    raise AssertionError("the broker does not listen")


def _over_nats(folder: Path, url: str) -> Sequence[str]:
    from proctor.verify.transport.nats import Bridge

    port, token = verifier_elsewhere(folder, folder.parent / "elsewhere")
    entrance = f"unix:{folder / 'arranged' / 'entrance'}"
    halves: list[Bridge] = [Bridge.exit(url, _SUBJECT, f"tcp:127.0.0.1:{port}"), Bridge.entrance(entrance, url, _SUBJECT)]
    for half in halves:
        half.start()
    LAST["bridges"] = halves
    return ["--verifier", entrance, "--token-file", str(token)]
