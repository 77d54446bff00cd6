"""Creating a run directory: `run.json`, and the folder that is put first on PYTHONPATH."""

from __future__ import annotations

import multiprocessing
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from proctor.errors import TraceError, UsageError
from proctor.instrument.config import RecordConfig
from proctor.invariants.files import is_unfinished, replace_file
from proctor.invariants.redact import without_secrets
from proctor.invariants.schema import TRACE_SCHEMA

_KEPT = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "PYTHONHASHSEED")
_KEPT_PREFIXES = ("NCCL_", "TORCH_", "PYTORCH_", "CUBLAS_")
_JOB_IDS = ("SLURM_JOB_ID", "SLURM_STEP_ID", "RAY_JOB_ID")
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
    if run.is_dir() and not earlier and not all(shared and _is_begun(p.name) for p in run.iterdir()):
        raise UsageError(f"{run} is not empty and not a run directory", hint="choose another -o")
    try:
        if earlier:
            for part in ("procs", "boot", "capsules"):
                shutil.rmtree(run / part, ignore_errors=True)
            for part in ("report.html", "violations.jsonl", "check.json", "run.json"):
                (run / part).unlink(missing_ok=True)
        run.parent.mkdir(parents=True, exist_ok=True)
        run.mkdir(mode=0o700, exist_ok=True)  # arguments of the program's functions are recorded, and may be secrets
        (run / "procs").mkdir(exist_ok=True)
        info = {
            "schema": TRACE_SCHEMA,
            "command": without_secrets(command),
            "program": program_name(command),
            "cwd": os.getcwd(),
            "host": platform.node(),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "environment": environment(os.environ),
            **(sampling or {}),
        }
        # Whole or not at all: the ranks of `proctor.watch` make their run at the same moment.
        replace_file(run / "run.json", msgspec.json.format(msgspec.json.encode(info), indent=1), mode=0o600)
    except OSError as e:
        raise TraceError(f"{run}: cannot be written: {e.strerror or e}", hint="choose another -o") from None


def write_boot(run: Path, config: RecordConfig) -> Path:
    """Write the start-up hook of a run and its activation record; returns the folder for PYTHONPATH."""
    boot = run / "boot"
    try:
        put_hook(boot, msgspec.json.encode(config))
    except OSError as e:
        raise TraceError(f"{boot}: cannot be written: {e.strerror or e}") from None
    return boot


def put_hook(boot: Path, activation: bytes) -> None:
    """Write the start-up hook and what it reads; may raise OSError."""
    boot.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).parents[1] / "boot" / "sitecustomize.py", boot / "sitecustomize.py")
    (boot / "activation.json").write_bytes(activation)


def with_hook(variables: Mapping[str, str], boot: Path) -> dict[str, str]:
    """An environment with the start-up hook first on PYTHONPATH."""
    return {**variables, "PYTHONPATH": os.pathsep.join(filter(None, [str(boot.resolve()), variables.get("PYTHONPATH")]))}


def _is_begun(name: str) -> bool:
    """Whether a run directory may hold this while another rank makes it."""
    return name in ("procs", "run.json") or is_unfinished(name, "run.json")


def default_run(variables: Mapping[str, str]) -> Path:
    """Where a job is recorded that nobody named a directory for: one that all its ranks find without talking.

    A rank knows its job by the scheduler's id, or by the rendezvous address, and on one host by the process that
    started all ranks. torchrun's default port is the same every day; its agent's process id is not.

    Args:
        variables: the environment of a rank.
    """
    if variables.get("WORLD_SIZE", "1") in ("", "1"):
        return Path("proctor-runs") / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    parts = [variables.get(name, "") for name in _JOB_IDS]
    if not any(parts):
        parts = [variables.get("MASTER_ADDR", ""), variables.get("MASTER_PORT", "")]
    one_host = variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"]) == variables["WORLD_SIZE"]
    if one_host and ("TORCHELASTIC_RUN_ID" in variables or multiprocessing.parent_process() is not None):
        parts.append(str(os.getppid()))
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", "-".join(filter(None, parts)))
    return Path("proctor-runs") / f"job-{name[:100]}"


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
