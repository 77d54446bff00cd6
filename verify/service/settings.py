"""What a verifier is told of its job, and what it says at the end: files in the run directory.

`watch` writes `RUN/verify/watch.json` before the command starts; a verifier that died is started again from it. It answers
with `RUN/verify/verdict.json`, for which `watch --fail-on` waits.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import TraceError
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
        unsure: why a run without a violation is not clean: records that rules need are missing or unsure; "" where it is.
        delivering: id of the process that still delivers notices; 0: nothing is left to deliver, or nobody tries.
    """

    worst: str | None = None
    violations: int = 0
    steps: int = 0
    lost: dict[str, int] = {}
    unsure: str = ""
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
        hang_after: seconds after which a wait of a rank for another one is told; `None`: as rules grant.
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
    hang_after: float | None = None
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
