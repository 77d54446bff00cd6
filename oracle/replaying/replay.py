"""Does a trusted reference, from the state and data of one kept step, compute what the job computed in that step?

The reference's command runs once as it is, to learn its parameters; then with the capsules' state and data forced into
its first step: once, again, and with noise for the tolerances (`record.py`). What the capsules say of the job's
gradients, parameters, outputs and loss is held against it (`replay_judge.py`).
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from proctor.errors import OracleError, TraceError
from proctor.invariants.capsule import Blob, Capsule, capsules_of, read_capsule, siblings, write_tensors
from proctor.oracle.collect.replay.replay_plan import PLAN, TENSORS, Draw, Feed, ReplayPlan, Slot
from proctor.oracle.plans.plan import Plan
from proctor.oracle.recording.record import SAMPLES, Recorder
from proctor.oracle.replaying.data import Stream, batch_streams, loss_streams, model_streams
from proctor.oracle.replaying.judge import Judgement, Later, judge
from proctor.oracle.replaying.state import (
    CODES,
    Files,
    State,
    borrow,
    hyperparameters,
    place_state,
)
from proctor.oracle.store import Recording

SHOWN: Final = 3


class Job(NamedTuple):
    """Capsules of all ranks of one step.

    Args:
        step: of the job.
        asked: the step that was asked about; another where that one is not held by value.
        capsules: by rank.
        files: their tensors.
        later: the parameters after the step, from capsules of the next one; `None` where there are none.
    """

    step: int
    asked: int
    capsules: dict[int, Capsule]
    files: Files
    later: Later | None = None


def replay(
    path: Path,
    command: Sequence[str],
    plan: Plan | None = None,
    *,
    samples: int = SAMPLES,
    timeout_s: float = 600.0,
    within_s: float | None = None,
    keep: Path | None = None,
    tell: Callable[[str], None] = lambda _: None,
) -> Judgement:
    """Hold the step of a capsule against a reference.

    Args:
        path: folder of a capsule; those of the other ranks lie beside it.
        command: trains the reference in one process.
        plan: how the job is cut; what it does not say is found out where that is possible.
        samples: runs with noise.
        timeout_s: of one run of the command.
        within_s: of all of them.
        keep: where recordings are left; a temporary folder without it.
        tell: gets a line on what is done.

    Raises:
        TraceError: the capsule cannot be read.
        OracleError: the reference cannot be recorded.
        UsageError: its command cannot be started.
    """
    end = time.monotonic() + within_s if within_s is not None else math.inf
    job = _job(path)
    if isinstance(job, str):
        return Judgement.open(job)
    if plan is not None and plan.mesh.world != len(job.capsules):
        raise OracleError(f"the plan's mesh ({plan.mesh}) has {plan.mesh.world} ranks, the job {len(job.capsules)}", hint="change [mesh] sizes")
    with tempfile.TemporaryDirectory(prefix="proctor-oracle-") as scratch:
        out = keep if keep is not None else Path(scratch)
        try:
            found = _ask(job, command, plan, out, Path(scratch) / "state", samples=samples, timeout_s=timeout_s, end=end, tell=tell)
        except OracleError:
            if time.monotonic() < end:
                raise
            return Judgement.open("the reference has not answered in time")
    return _of_step_asked(job, found)


def _ask(
    job: Job,
    command: Sequence[str],
    plan: Plan | None,
    out: Path,
    given: Path,
    *,
    samples: int,
    timeout_s: float,
    end: float,
    tell: Callable[[str], None],
) -> Judgement:
    """Run the reference as it is, then with what is put into `given`."""
    tell("what the reference's parameters are")
    first = Recorder(out / "plain", command, samples=0, timeout_s=timeout_s, overwrite=True, eager=True)
    first.until = end
    world = first.record().world
    if world != 1:
        return Judgement.open(f"the reference ran with {world} ranks: it must be one process")
    prepared = _prepare(Recording(out / "plain"), job, plan, given)
    if isinstance(prepared, Judgement):
        return prepared
    state, ranks = prepared
    tell(f"step {job.step} in the reference, twice and with {samples} samples of noise")
    options = {"replay": str(given.resolve())}
    again = Recorder(out / "replayed", command, samples=samples, timeout_s=timeout_s, overwrite=True, eager=True, options=options)
    again.until = end
    again.record()
    return judge(Recording(out / "replayed"), job.capsules, state, ranks, job.later)


def _of_step_asked(job: Job, found: Judgement) -> Judgement:
    if job.step == job.asked:
        return found
    note = f"step {job.asked} is not held by value: step {job.step}, the next one that is, was computed again"
    if found.verdict == "cleared":
        return msgspec.structs.replace(found, verdict="inconclusive", reason=f"{note}, and it is the reference's; step {job.asked} may not be")
    return msgspec.structs.replace(found, notes=(*found.notes, note))


def _job(path: Path) -> Job | str:
    """The step of a capsule in all ranks, or why it cannot be done again."""
    asked = read_capsule(path)
    complete = _complete(path, asked)
    if isinstance(complete, Job):
        return complete
    for other in capsules_of(path.parent.parent):
        found = _readable(other)
        if found is not None and (found.key, found.rank) == (asked.key, asked.rank) and found.step > asked.step:
            later = _complete(other, found)
            if isinstance(later, Job):
                return later._replace(asked=asked.step)
    return complete


def _complete(path: Path, capsule: Capsule) -> Job | str:
    """The step of one capsule."""
    folders = siblings(path, capsule)
    gone = sorted(set(range(capsule.world)) - folders.keys())
    if gone:
        return f"of {capsule.world} ranks {len(gone)} have no capsule of step {capsule.step}: rank {', '.join(map(str, gone[:8]))}"
    held: dict[int, Capsule] = {}
    for rank, place in sorted(folders.items()):
        found = _readable(place)
        if found is None:
            return f"the capsule of rank {rank} cannot be read: {place.name}"
        held[rank] = found
    borrowed = borrow(held)
    if isinstance(borrowed, int):
        absent = held[borrowed].absent
        why = next((a for a in absent if "state by value" in a), "; ".join(absent[:SHOWN]))
        return f"rank {borrowed} does not hold the state before step {capsule.step} by value ({why or 'fingerprints only'})"
    capsules, lent = borrowed
    return Job(capsule.step, capsule.step, capsules, Files(folders, lent), _later(path.parent.parent, capsules))


def _readable(path: Path) -> Capsule | None:
    try:
        return read_capsule(path)
    except TraceError:
        return None


def _later(run: Path, capsules: Mapping[int, Capsule]) -> Later | None:
    """Capsules of the next step hold by value what this one left."""
    step = next(iter(capsules.values())).step + 1
    for folder in capsules_of(run):
        if f"-step{step}-" not in folder.name:
            continue
        found = _readable(folder)
        if found is None or not found.by_value or found.step != step or found.world != len(capsules):
            continue
        folders = siblings(folder, found)
        others = {rank: c for rank, place in folders.items() if (c := _readable(place)) is not None and c.by_value}
        if others.keys() == capsules.keys():
            return Later(others, Files(folders))
    return None


def _prepare(reference: Recording, job: Job, plan: Plan | None, folder: Path) -> tuple[State, list[int]] | Judgement:
    """Write what the reference is given; the job's state and its data-parallel ranks, or what can be said without."""
    entries = reference.ranks()[0].entries
    shapes = {e.name: (e.dtype, e.shape) for e in entries if e.kind == "param" and e.step == 0}
    state = place_state(shapes, job.capsules, job.files, plan)
    if state.apart:
        return Judgement("confirmed", f"the step began wrong: {state.apart[0]} before it", notes=tuple(state.apart[1:]))
    if state.trouble:
        more = f" (and {len(state.trouble) - 1} more)" if len(state.trouble) > 1 else ""
        return Judgement.open(f"the job's state is not the reference's: {state.trouble[0]}{more}")
    inputs = [(e.dtype, len(e.shape)) for e in entries if e.kind == "input" and e.name == "" and e.step == e.call == 0 and not e.recompute]
    feeds, ranks, why = model_streams(job.capsules, inputs)
    if why:
        return Judgement.open(why)
    calls = 1 + max((e.call for e in entries if e.kind == "output" and e.name == "" and e.step == 0), default=0)
    streams = [("model", feeds), ("loss", loss_streams(job.capsules, ranks)), ("batch", batch_streams(job.capsules, ranks))]
    try:
        _write(folder, job, state, streams, job.files, calls)
    except OSError as e:
        raise OracleError(f"{folder}: cannot be written: {e.strerror or e}") from None
    return state, ranks


def _write(
    folder: Path, job: Job, state: State, streams: Sequence[tuple[str, Sequence[Stream]]], files: Files, calls: int
) -> None:
    tensors: dict[str, Blob] = {}

    def put(name: str, dtype: str, values: np.ndarray[Any, Any]) -> str:
        if name not in tensors:
            flat = np.ascontiguousarray(values)
            tensors[name] = Blob(name, CODES[dtype], values.shape, values.nbytes, lambda: flat.reshape(-1).view(np.uint8).data)
        return name

    kinds = {v.name: v.dtype for c in job.capsules.values() for v in c.state if v.role == "parameter"}
    types = {name: kinds[shards[0].name] for name, shards in state.shards.items()}
    first = job.capsules[min(job.capsules)]
    alone = len(job.capsules) == 1
    kind, options = hyperparameters(job.capsules)

    def draws(generators: Sequence[Any], where: str) -> tuple[Draw, ...]:
        out = []
        for g in generators:
            values = files(first.rank, g.key)
            out.append(Draw(g.name, put(f"{where}{g.name}", "uint8" if values.dtype == np.uint8 else "uint32", values), g.plain))
        return tuple(out)

    slots: dict[str, dict[str, Slot]] = {}
    for name, entries in state.optimizer.items():
        for place, value in entries.items():
            slot = Slot(value=value)
            if isinstance(value, tuple):
                dtype, array = value
                slot = Slot(put(f"optimizer {name}{place}", dtype, array), on_cpu=_on_cpu(job.capsules, place))
            slots.setdefault(name, {})[place] = slot
    model_calls = [c for c in first.calls if c.what == "module"]
    planned = ReplayPlan(
        parameters={name: put(f"parameter {name}", types[name], values) for name, values in state.tensors.items()},
        buffers={name: put(f"buffer {name}", dtype, values) for name, (dtype, values) in state.buffers.items()},
        feeds=tuple(
            Feed(kind_, s.place, tuple(put(f"data {rank} {key}", s.dtype, files(rank, key)) for rank, key in s.items), s.dtype)
            for kind_, found in streams
            for s in found
        ),
        optimizer=kind,
        options=options,
        state=slots,
        generators=draws(first.generators, "generator "),
        draws=tuple(draws(c.generators, f"generator {i} ") for i, c in enumerate(model_calls)) if alone and len(model_calls) == calls else (),
    )
    folder.mkdir(parents=True)
    write_tensors(folder / TENSORS, list(tensors.values()))
    (folder / PLAN).write_bytes(msgspec.json.encode(planned))


def _on_cpu(capsules: Mapping[int, Capsule], place: str) -> bool:
    return all(v.device == "cpu" for c in capsules.values() for v in c.state if v.role == "optimizer" and v.name.endswith(place) and v.key)


__all__ = ["Judgement", "replay"]
