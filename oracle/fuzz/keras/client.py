"""The process that has Keras: it is started with another interpreter, is given one task a line, and is killed where it does not answer."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.errors import OracleError
from proctor.oracle.fuzz.keras import catalogue
from proctor.oracle.fuzz.running.worlds import PREFIX, Answer, swept

START_S: Final = 240.0  # importing TensorFlow takes 5 to 60 s
TASKS: Final = 150  # of one process: graphs that it made stay
_MOST_BYTES: Final = 256 << 20  # of an answer
HINT: Final = "--python FILE names an interpreter that has keras and tensorflow (docs/fuzz.md, Keras)"


class Server:
    """One process; it is started with the first task, and again after it died or was killed. Use as a context manager.

    Args:
        python: the interpreter.
        timeout_s: of a task.
        script: that it runs; that of this folder unless a test has another one.
    """

    def __init__(self, python: str, timeout_s: float, script: str | None = None) -> None:
        self._python, self._timeout_s = python, timeout_s
        swept(Path(tempfile.gettempdir()))
        self.folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        text = script if script is not None else resources.files("proctor.oracle.fuzz.keras").joinpath("server.py").read_text()
        (self.folder / "server.py").write_text(text)
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self.tasks = self.starts = 0

    def __enter__(self) -> Server:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End it, and remove its files."""
        self.close()

    def close(self) -> None:
        """End it, and remove its files."""
        self._kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def catalogue(self) -> catalogue.Catalogue:
        """What the library says of itself.

        Raises:
            OracleError: the interpreter has no Keras.
        """
        answer = self.ask({"ask": "catalogue"})
        found = answer.ranks[0]
        if found is None or "raised" in found:
            why = answer.ended or (found or {})["raised"]["message"]
            raise OracleError(f"{self._python}: no Keras: {why}"[:400], hint=HINT)
        return msgspec.convert(found, catalogue.Catalogue)

    def ask(self, task: dict[str, Any]) -> Answer:
        """Give it a task; what it says is the answer of a world of one rank."""
        if self._process is None or self.tasks >= TASKS:
            self._start()
        process = self._process
        assert process is not None and process.stdin is not None
        self.tasks += 1
        begun = time.monotonic()
        with suppress(BrokenPipeError):  # it died: that is seen when its answer is read
            process.stdin.write(msgspec.json.encode({"folder": str(self.folder), **task}) + b"\n")
            process.stdin.flush()
        line = self._line(process, begun + self._timeout_s + (START_S if self.tasks == 1 else 0.0))
        seconds = time.monotonic() - begun
        if line is None:
            stack = self._stack(process) if process.poll() is None else ""
            ended = "timeout" if stack or process.poll() is None else self._death(process)
            self._kill()
            return Answer((None,), ended, (stack,) if stack else (), seconds)
        return Answer((msgspec.json.decode(line),), seconds=seconds)

    def _start(self) -> None:
        self._kill()
        log = (self.folder / "log").open("wb")
        clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
        try:
            self._process = subprocess.Popen(
                [self._python, str(self.folder / "server.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, start_new_session=True, cwd=self.folder,
                env={**clean, "PYTHONWARNINGS": "ignore"},
            )
        except OSError as e:
            raise OracleError(f"{self._python}: {e.strerror or e}", hint=HINT) from None
        finally:
            log.close()
        self._rest, self.tasks = b"", 0
        self.starts += 1

    def _line(self, process: subprocess.Popen[bytes], end: float) -> bytes | None:
        """Its next line; None where it died, or does not answer by then."""
        assert process.stdout is not None
        while b"\n" not in self._rest:
            left = end - time.monotonic()
            if left <= 0 or len(self._rest) > _MOST_BYTES:
                return None
            if select.select([process.stdout], [], [], min(left, 1.0))[0]:
                data = os.read(process.stdout.fileno(), 1 << 20)
                if not data:
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(5)
                    return None
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def _stack(self, process: subprocess.Popen[bytes]) -> str:
        """What its main thread waits in, innermost call first."""
        with suppress(OSError):
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.3)
        said = (self.folder / "log").read_text(errors="replace")[-20_000:]
        found = re.findall(r"(?:Current thread|Thread) 0x[0-9a-f]+ .*?(?=\n\n|\nThread|\nCurrent|\Z)", said, re.S)
        return next((part for part in reversed(found) if "server.py" in part), said[-2000:] or "native code")[:3000]

    def _death(self, process: subprocess.Popen[bytes]) -> str:
        code = process.returncode
        how = f"signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"exit code {code}"
        lines = [line for line in (self.folder / "log").read_text(errors="replace").strip().splitlines() if line.strip()]
        telling = [line for line in lines if "rror" in line or "Check failed" in line]
        said = (telling or lines or [""])[-1].strip()[:300]
        return f"rank 0 died: {how}{f': {said}' if said else ''}"

    def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            with suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for end in (process.stdin, process.stdout):
            if end is not None:
                with suppress(OSError):
                    end.close()
