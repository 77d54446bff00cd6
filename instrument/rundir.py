"""Creating a run directory: `run.json`, and the folder that is put first on PYTHONPATH."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from proctor.errors import TraceError, UsageError
from proctor.instrument.config import RecordConfig
from proctor.invariants.schema import TRACE_SCHEMA

_KEPT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONHASHSEED")
_KEPT_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "CUBLAS_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")


def create_run(
    run: Path, command: Sequence[str], *, overwrite: bool, shared: bool = False, sampling: Mapping[str, int] | None = None
) -> None:
    """Make the directory of a run and write `run.json`.

    Args:
        run: the directory; it may exist when it is empty.
        command: the user's command line.
        overwrite: replace an earlier run that lies there.
        sampling: `every` and `warmup`, for readers that must tell an unsampled step from an empty one.
        shared: an existing run directory is joined (the ranks of `proctor.watch`).

    Raises:
        UsageError: something else lies there.
        TraceError: it cannot be written.
    """
    if run.exists() and not run.is_dir():
        raise UsageError(f"{run} is a file, not a directory")
    earlier = (run / "run.json").exists()
    if earlier and shared:
        return
    if earlier and not overwrite:
        raise UsageError(f"{run} holds a recorded run already", hint="choose another -o, or --overwrite")
    if run.is_dir() and any(run.iterdir()) and not earlier:
        raise UsageError(f"{run} is not empty and not a run directory", hint="choose another -o")
    try:
        if earlier:
            for part in ("procs", "boot"):
                shutil.rmtree(run / part, ignore_errors=True)
            for part in ("report.html", "violations.jsonl", "check.json", "run.json"):
                (run / part).unlink(missing_ok=True)
        (run / "procs").mkdir(parents=True, exist_ok=True)
        info = {
            "schema": TRACE_SCHEMA,
            "command": list(command),
            "program": program_name(command),
            "cwd": os.getcwd(),
            "host": platform.node(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "environment": environment(os.environ),
            **(sampling or {}),
        }
        (run / "run.json").write_bytes(msgspec.json.format(msgspec.json.encode(info), indent=1))
    except OSError as e:
        raise TraceError(f"{run}: cannot be written: {e.strerror or e}", hint="choose another -o") from None


def write_boot(run: Path, config: RecordConfig) -> Path:
    """Write the start-up hook of a run and its activation record; returns the folder for PYTHONPATH."""
    boot = run / "boot"
    source = Path(__file__).parent / "boot" / "sitecustomize.py"
    try:
        boot.mkdir(exist_ok=True)
        shutil.copyfile(source, boot / "sitecustomize.py")
        (boot / "activation.json").write_bytes(msgspec.json.encode(config))
    except OSError as e:
        raise TraceError(f"{boot}: cannot be written: {e.strerror or e}") from None
    return boot


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables that change a training run, without anything that looks like a secret."""
    return {
        k: v[:200]
        for k, v in sorted(variables.items())
        if (k in _KEPT or k.startswith(_KEPT_PREFIXES)) and not any(s in k.upper() for s in _SECRET)
    }


def program_name(command: Sequence[str]) -> str:
    """What is run: the script or module in a command line, whatever launches it."""
    for i, word in enumerate(command):
        if word.endswith(".py"):
            return Path(word).name
        if word == "-m" and i + 1 < len(command) and not command[i + 1].startswith("torch.distributed"):
            return command[i + 1]
    return Path(command[0]).name if command else "python"
