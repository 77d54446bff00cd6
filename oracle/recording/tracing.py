"""Recording from within a program: a `with` statement around training steps, in scripts, tests and notebooks.

    with proctor.oracle.trace(model, out="candidate"):       # on every rank
        train_step()

    proctor.oracle.trace_reference(train_step, model, optimizer, out="reference")     # on one device, with noise samples
    print(proctor.oracle.compare("reference", "candidate").reason)

What `proctor oracle record` writes, without its start-up hook: the models are named, and ranks are those of
torch.distributed. Nothing stays behind in the process, and values are the same with and without it, but for dropout (`dropout`).
"""

from __future__ import annotations

import contextlib
import copy
import os
import random
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec

from proctor.errors import OracleError, UsageError
from proctor.invariants.redact import without_secrets
from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.judging.choices import write_own
from proctor.oracle.plans.plan import Plan
from proctor.oracle.plans.plan_toml import plan_of
from proctor.oracle.store import (
    AGAIN,
    CLEAN,
    RUN_NAME,
    SCHEMA,
    ProcessInfo,
    RankRecord,
    Recording,
    RunInfo,
    write_json,
)

if TYPE_CHECKING:
    from torch import nn

SAMPLES: Final = 4  # one noise sample can be 2× too low for a tensor, four ≤ 1.25×
_RUN: Final = re.compile(r"clean|again|eager|noise-\d{1,3}")
_RANK: Final = re.compile(r"rank(\d{1,7})")


@contextlib.contextmanager
def trace(
    model: nn.Module | Sequence[nn.Module],
    out: str | Path,
    *,
    plan: Plan | str | Path | None = None,
    steps: int = 1,
    run: str = "clean",
    generate: int | None = None,
    dropout: Literal["keep", "draw"] = "keep",
    overwrite: bool = True,
    eager: bool = False,
    statistics: bool = False,
) -> Iterator[None]:
    """Record what happens inside the `with` statement.

    Args:
        model: what trains, wrapped (DDP, FSDP) or not; several for the stages of a pipeline or a GAN, the main one first.
        out: directory of the recording; the same for all ranks.
        plan: how the candidate is cut; kept with the recording.
        steps: optimizer updates that are recorded; what comes after them is not.
        run: `clean`; `eager` is a compiled candidate without `torch.compile`; `again` and `noise-0`, … are further runs of a reference (`trace_reference`).
        generate: seed of generated parameters that take the place of the model's own.
        dropout: `keep`: in these steps it keeps everything, since masks cannot be alike on both sides; `draw`: it is left alone.
        overwrite: replace what this rank recorded there before.
        eager: what `torch.compile` wraps runs uncompiled, as it does in all runs but `clean`.
        statistics: of tensors that are large, sums over tiles and five numbers are kept instead of all elements (`oracle run --statistics`).

    Raises:
        UsageError: the arguments make no sense, or `out` is something else.
        OracleError: nothing was recorded or it could not be written; raised at the end, so that the step is through.
    """
    from torch import nn

    from proctor.instrument.observe.mesh import position

    models = [model] if isinstance(model, nn.Module) else list(model)
    if not models or not all(isinstance(m, nn.Module) for m in models):
        raise UsageError("oracle.trace needs a module, or a list of them")
    if steps < 1 or _RUN.fullmatch(run) is None:
        raise UsageError(f"oracle.trace: steps={steps}, run={run[:40]!r}", hint="steps from 1, run clean, again or noise-0")
    found, where = plan_of(plan), position()
    text = found.to_json().decode() if found is not None else ""
    folder = _make(Path(out), run, int(where["rank"]), int(where["world"]), overwrite=overwrite)
    chosen, noise = _chosen(folder, int(where["rank"])), int(run.partition("-")[2]) if run.startswith("noise-") else None
    eager = eager or run != CLEAN
    collector = _collector(
        CollectConfig(
            folder=str(folder.resolve()), steps=steps, noise=noise, generate=generate, plan=text,
            fp8=_said(folder.parent / CLEAN, int(where["rank"]), "fp8"), watch_fp8=run == CLEAN, dropout=dropout, decisions=chosen,
            busy=_said(folder.parent / AGAIN, int(where["rank"]), "busy") if noise is not None else (), watch_busy=run == AGAIN,
            compiled=not eager, statistics=statistics,
        )
    )
    collector.install()
    try:
        collector.adopt(models)
        with _uncompiled() if eager else contextlib.nullcontext():
            yield
    except BaseException:
        collector.info.notes.append("the traced block was ended by an exception")
        collector.abandon()
        with contextlib.suppress(OracleError):
            _describe(Path(out), text, collector.info, steps, generate, dropout, statistics)
        raise
    collector.end()
    if chosen:
        shutil.rmtree(chosen, ignore_errors=True)
    info = collector.info
    _describe(Path(out), text, info, steps, generate, dropout, statistics)
    if not info.done:
        why = info.notes[-1] if info.notes else "no module of the model was called for training inside the with statement"
        raise OracleError(f"{folder}: rank {info.rank}: {why}")


def trace_reference(
    step: Callable[[], object],
    model: nn.Module | Sequence[nn.Module],
    *optimizers: Any,
    out: str | Path,
    samples: int = SAMPLES,
    steps: int = 1,
    generate: int | None = None,
    dropout: Literal["keep", "draw"] = "keep",
    statistics: bool = False,
) -> None:
    """Record a reference in this process: once, once more, and with noise, from the same state each time.

    Args:
        step: does the training of `steps` updates; the same data each time it is called.
        model: as of `trace`; on one device.
        optimizers: and schedulers, gradient scalers: what `step` changes and `state_dict` tells.
        out: directory of the recording; what was there is replaced.
        samples: runs with noise.
        steps, generate, dropout, statistics: as of `trace`.

    Raises:
        as `trace`.
    """
    import torch

    if samples < 1:
        raise UsageError("oracle.trace_reference: samples must be at least 1")
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    stateful = [*models, *optimizers]
    before = [copy.deepcopy(o.state_dict()) for o in stateful]
    draws = _random_state()
    for run in ("clean", "again", *(f"noise-{k}" for k in range(samples))):
        for item, state in zip(stateful, before, strict=True):
            item.load_state_dict(copy.deepcopy(state))
        for one in models:
            one.zero_grad(set_to_none=True)
        _set_random_state(draws)
        with trace(models, out, steps=steps, run=run, generate=generate, dropout=dropout, eager=True, statistics=statistics):
            step()


def _make(out: Path, run: str, rank: int, world: int, *, overwrite: bool) -> Path:
    """The folder of a run, without what this rank left there before."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, not a directory")
    if out.is_dir() and not (out / "runs").is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} is not empty and not a recording", hint="choose another directory")
    folder = out / "runs" / run
    if (folder / f"rank{rank}").exists() and not overwrite:
        raise UsageError(f"{folder} holds a recording of rank {rank} already", hint="choose another directory, or overwrite=True")
    try:
        if run == "clean" and rank == 0:  # of an earlier recording
            stale = [p for p in (out / "runs").glob("*") if p.name != "clean" and RUN_NAME.fullmatch(p.name)]
            stale += [p for p in folder.glob("rank*") if (m := _RANK.fullmatch(p.name)) and int(m[1]) >= world]
            for path in stale:
                shutil.rmtree(path, ignore_errors=True)
        shutil.rmtree(folder / f"rank{rank}", ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OracleError(f"{folder}: cannot be written: {e.strerror or e}", hint="choose another directory") from None
    return folder


def _collector(config: CollectConfig) -> Any:
    from proctor.oracle.collect.collector import Collector

    return Collector(config)


def _said(run: Path, rank: int, field: str) -> tuple[str, ...]:
    """Modules that an earlier run found to cast to 8-bit floats, or to be busy."""
    try:
        found: list[str] = msgspec.json.decode((run / f"rank{rank}" / "process.json").read_bytes()).get(field, [])
    except (OSError, msgspec.MsgspecError):
        return ()
    return tuple(map(str, found))


def _chosen(folder: Path, rank: int) -> str:
    """What this rank chose in the clean run, which the others repeat; "" where there is nothing."""
    clean = folder.parent / "clean" / f"rank{rank}"
    if folder.name == "clean" or not (clean / "process.json").is_file():
        return ""
    where = folder / f"choices{rank}"
    return str(where.resolve()) if write_own({rank: RankRecord(clean)}, where) else ""


def _describe(out: Path, plan: str, rank: ProcessInfo, steps: int, generate: int | None, dropout: str, statistics: bool) -> None:
    """Write `oracle.json`, on one rank."""
    if rank.rank != 0:
        return
    program = Path(sys.argv[0]).name or "python"
    info = RunInfo(SCHEMA, without_secrets(sys.argv), program, world=rank.world, steps=steps, generate=generate, plan=plan, dropout=dropout, statistics=statistics)
    write_json(out / "oracle.json", info)
    info.samples = len(Recording(out).noise())
    write_json(out / "oracle.json", info)


@contextlib.contextmanager
def _uncompiled() -> Iterator[None]:
    """Compiled regions run eagerly: they cannot be looked into (docs/oracle.md, limits)."""
    import torch

    if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
        with torch.compiler.set_stance("force_eager"):
            yield
        return
    before = os.environ.get("TORCHDYNAMO_DISABLE")  # torch._dynamo reads it when it is imported
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TORCHDYNAMO_DISABLE", None)
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before


def _random_state() -> list[Any]:
    import numpy as np
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else None
    return [torch.get_rng_state(), cuda, np.random.get_state(), random.getstate()]


def _set_random_state(state: list[Any]) -> None:
    import numpy as np
    import torch

    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state_all(state[1])
    np.random.set_state(state[2])
    random.setstate(state[3])
