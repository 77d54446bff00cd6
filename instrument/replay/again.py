"""Do the step of a capsule again with the same code, and say whether the same comes out.

The recorded command is started twice with `_replayer` inside; both times the first step becomes that of the capsule.
Everything is compared by fingerprint, in the order in which a step happens. What is *the same every time* follows from
code and data; what is not points at the hardware, or at code whose result is not determined.

A step that comes out alike twice and unlike the record could also depend on something that no capsule holds (a counter of
the program, say). The control tells: another step of the same run, which has to come out as recorded.

Needs no torch here: the processes that are started do.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from proctor.errors import ProctorError, TraceError, UsageError
from proctor.instrument.config import RecordConfig
from proctor.instrument.record.rundir import create_run, with_hook, write_boot
from proctor.instrument.replay.plan import PLAN, Origin, Outcome, Plan, outcome_file
from proctor.invariants.capsule import Call, Capsule, Print, Seen, capsules_of, read_capsule, siblings
from proctor.invariants.redact import hides

STAGES: Final = ("state before", "calls", "inputs", "outputs", "loss", "gradient", "buffer", "parameter", "optimizer", "scaler")
_TAIL: Final = 400  # characters of a failed command's last words
_SHOWN: Final = 20
_MAX_OUTCOME: Final = 64 << 20
_ONE_PROCESS: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Difference(msgspec.Struct, frozen=True):
    """Something that came out otherwise."""

    stage: str
    name: str
    rank: int
    left: str
    right: str


class Judgement(msgspec.Struct, frozen=True):
    """What re-executing a step says.

    Args:
        verdict: `reproduced`: the same as recorded, every time; `differs`: not; `cannot`: nothing can be said.
        reason: one sentence.
        differences: the first of them, in the order of a step.
        control: what came of the control step: "" when none was needed, else `reproduced`, `differs` or `missing`.
    """

    verdict: Literal["reproduced", "differs", "cannot"]
    reason: str
    differences: tuple[Difference, ...] = ()
    control: str = ""
    compared: int = 0  # fingerprints


Steps = dict[int, Capsule]


def judge(
    path: Path, command: Sequence[str] = (), *, timeout_s: float = 600.0, tell: Callable[[str], None] = lambda _: None
) -> Judgement:
    """Re-execute a capsule's step twice.

    Args:
        path: folder of a capsule.
        command: to start instead of the recorded one.
        timeout_s: for one execution.
        tell: gets a line on what is done.

    Raises:
        TraceError: it cannot be read.
        UsageError: its command cannot be started.
    """
    recorded = read_capsule(path)
    ranks = siblings(path, recorded)
    steps = _steps(recorded, ranks)
    if isinstance(steps, str):
        return Judgement("cannot", steps)
    words = tuple(command) or _recorded_command(path, recorded)
    again: list[Steps] = []
    for i in (1, 2):
        tell(f"execution {i} of 2: {' '.join(words)}")
        found = execute(ranks, recorded, words, own=not command, timeout_s=timeout_s)
        if isinstance(found, str):
            return Judgement("cannot", found)
        again.append(found)
    return _conclude(steps, again, lambda: _control(path, recorded, words, own=not command, timeout_s=timeout_s, tell=tell))


def first_bad(
    path: Path, command: Sequence[str] = (), *, timeout_s: float = 600.0, tell: Callable[[str], None] = lambda _: None
) -> dict[int, Origin] | str:
    """Re-execute a capsule's step once, and say where the first NaN or infinity comes from.

    Args: as `judge`.

    Returns:
        by rank, or why nothing can be said.

    Raises:
        TraceError: it cannot be read.
        UsageError: its command cannot be started.
    """
    recorded = read_capsule(path)
    ranks = siblings(path, recorded)
    steps = _steps(recorded, ranks)
    if isinstance(steps, str):
        return steps
    words = tuple(command) or _recorded_command(path, recorded)
    tell(f"execution 1 of 1: {' '.join(words)}")
    found = perform(ranks, recorded, words, own=not command, timeout_s=timeout_s, origin=True)
    return found if isinstance(found, str) else {rank: outcome.origin or Origin() for rank, outcome in found.items()}


def _steps(recorded: Capsule, ranks: Mapping[int, Path]) -> Steps | str:
    """The capsules of all ranks of the step, or why it cannot be executed again."""
    try:
        steps = {rank: recorded if rank == recorded.rank else read_capsule(folder) for rank, folder in ranks.items()}
    except TraceError as e:
        return f"a capsule of another rank: {e.message}"
    return _lacks(recorded, steps) or steps


def _lacks(recorded: Capsule, steps: Steps) -> str:
    gone = sorted(set(range(recorded.world)) - steps.keys())
    if gone:
        return f"of {recorded.world} ranks {len(gone)} have no capsule of this step: {', '.join(map(str, gone[:_SHOWN]))}"
    for rank, step in sorted(steps.items()):
        if not step.by_value:
            why = next((a for a in step.absent if "state by value" in a), "; ".join(step.absent[:3]))
            return f"rank {rank} does not hold the state before the step by value ({why})"
    return ""


def _recorded_command(path: Path, recorded: Capsule) -> tuple[str, ...]:
    """The command in a capsule; only of one's own capsules, since it is going to be run."""
    status = path.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o002:
        raise UsageError(f"{path} is not yours: its command is not run unseen", hint="name the command after --")
    if not recorded.command:
        raise UsageError(f"{path} has no command", hint="name the command after --")
    if hides(recorded.command):
        raise UsageError(f"{path} has the command without its secrets", hint="name the whole command after --")
    # `proctor.watch` knows the script and not its interpreter
    return (sys.executable, *recorded.command) if recorded.command[0].endswith(".py") else recorded.command


def execute(
    ranks: dict[int, Path], recorded: Capsule, command: Sequence[str], *, own: bool, timeout_s: float
) -> Steps | str:
    """As `perform`; of what the ranks say only the steps."""
    found = perform(ranks, recorded, command, own=own, timeout_s=timeout_s)
    return found if isinstance(found, str) else {rank: outcome.step for rank, outcome in found.items() if outcome.step is not None}


def perform(
    ranks: dict[int, Path], recorded: Capsule, command: Sequence[str], *, own: bool, timeout_s: float, origin: bool = False
) -> dict[int, Outcome] | str:
    """Start a command once and make its first step that of these capsules.

    Args:
        ranks: capsule folder by rank.
        recorded: one of them.
        command: to start.
        own: it is the recorded one, and runs where that ran.
        timeout_s: after it the command and what it started are ended.
        origin: look for where the first NaN or infinity comes from.

    Returns:
        the step as it went this time, by rank, or why there is none.
    """
    if shutil.which(command[0]) is None:
        raise UsageError(f"{command[0]}: command not found", hint="name the command after --")
    place = recorded.cwd if own and Path(recorded.cwd).is_dir() else None
    with tempfile.TemporaryDirectory(prefix="proctor-replay-") as scratch:
        run, out = Path(scratch) / "run", Path(scratch) / "out"
        out.mkdir()
        plan = Path(scratch) / PLAN
        plan.write_bytes(msgspec.json.encode(Plan({r: str(p.resolve()) for r, p in ranks.items()}, str(out), origin)))
        create_run(run, command, overwrite=False)
        boot = write_boot(run, RecordConfig(run=str(run), replay=str(plan)))
        variables = {k: v for k, v in os.environ.items() if k not in _ONE_PROCESS and k != "PROCTOR_DISABLE"}
        variables |= {k: v for k, v in recorded.environment.items() if k not in _ONE_PROCESS}
        said, code = _start(command, {**with_hook(variables, boot), "PROCTOR_RUN": str(run)}, place, timeout_s)
        return _outcomes(out, ranks, said, code)


def _start(command: Sequence[str], variables: dict[str, str], place: str | None, timeout_s: float) -> tuple[str, int | None]:
    """Run a command; its last words, and its exit code or `None` when time ran out."""
    with tempfile.TemporaryFile() as words:
        process = subprocess.Popen(
            list(command), env=variables, cwd=place, stdin=subprocess.DEVNULL, stdout=words, stderr=words,
            start_new_session=True,
        )  # fmt: skip
        try:
            code: int | None = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it left behind
            process.wait()
        size = words.seek(0, os.SEEK_END)
        words.seek(max(0, size - _TAIL))
        return " ".join(words.read().decode(errors="replace").split()), code


def _outcomes(out: Path, ranks: dict[int, Path], said: str, code: int | None) -> dict[int, Outcome] | str:
    found: dict[int, Outcome] = {}
    for rank in ranks:
        file = outcome_file(out, rank)
        if not file.is_file() or file.stat().st_size > _MAX_OUTCOME:
            ended = "took too long" if code is None else f"ended with {code}"
            return f"the command {ended} before rank {rank} did the step again: …{said}"
        outcome = msgspec.json.decode(file.read_bytes(), type=Outcome)
        if outcome.step is None:
            return f"rank {rank}: {'; '.join(outcome.trouble[:3])}"
        found[rank] = outcome
    return found


def _control(
    path: Path, recorded: Capsule, command: Sequence[str], *, own: bool, timeout_s: float, tell: Callable[[str], None]
) -> str:
    """Whether another step of the same run comes out as recorded: reproduced, differs or missing."""
    for folder in capsules_of(path.parent.parent):
        try:
            other = read_capsule(folder)
        except ProctorError:
            continue
        if other.key != recorded.key or other.control != recorded.step or other.rank != recorded.rank:
            continue
        ranks = siblings(folder, other)
        try:
            steps = {rank: read_capsule(f) for rank, f in ranks.items()}
        except ProctorError:
            continue
        if _lacks(other, steps):
            continue
        tell(f"control: step {other.step}")
        found = execute(ranks, other, command, own=own, timeout_s=timeout_s)
        if isinstance(found, str):
            continue
        return "differs" if any(differences(steps[r], found[r])[0] for r in steps) else "reproduced"
    return "missing"


def _conclude(recorded: Steps, again: list[Steps], control: Callable[[], str]) -> Judgement:
    first, second = again
    compared = 0
    found: list[list[Difference]] = []
    for left, right in ((recorded, first), (first, second)):
        here: list[Difference] = []
        for rank in sorted(recorded):
            differ, count = differences(left[rank], right[rank])
            here += differ
            compared += count
        found.append(sorted(here, key=lambda d: STAGES.index(d.stage)))
    from_record, between = found
    if not any(v.after is not None for step in recorded.values() for v in step.state):
        return Judgement("cannot", "the capsule has no fingerprints from after the step to compare with")
    if between:
        where = between[0]
        return Judgement(
            "differs",
            f"two executions from the same state differ from each other, first in {_say(where)}: "
            "the code is not deterministic there, or the device errs",
            tuple(between[:_SHOWN]),
            compared=compared,
        )
    if not from_record:
        return Judgement(
            "reproduced",
            f"both executions gave what was recorded, bit by bit ({compared} fingerprints): the cause is in code or data",
            compared=compared,
        )
    where = from_record[0]
    if where.stage == "state before":
        return Judgement("cannot", f"the state could not be put back: {_say(where)}", tuple(from_record[:_SHOWN]), compared=compared)
    seen = control()
    shown = tuple(from_record[:_SHOWN])
    if seen == "reproduced":
        reason = (
            f"both executions agree with each other and not with the record, first in {_say(where)}, while another step of "
            "this run comes out as recorded: the device erred in the recorded step"
        )
        return Judgement("differs", reason, shown, seen, compared)
    if seen == "differs" or where.stage in ("calls", "inputs", "loss"):
        reason = (
            f"the step depends on something that the capsule does not hold: {_say(where)} is not as recorded"
            + (", nor does another step of this run come out as recorded" if seen == "differs" else "")
        )
        return Judgement("cannot", reason, shown, seen, compared)
    reason = (
        f"both executions agree with each other and not with the record, first in {_say(where)}: the device erred, or the step "
        "depends on something that the capsule does not hold (there is no control step)"
    )
    return Judgement("differs", reason, shown, seen, compared)


def _say(where: Difference) -> str:
    return f"{where.stage} {where.name} of rank {where.rank}".replace("  ", " ")


def differences(left: Capsule, right: Capsule) -> tuple[list[Difference], int]:
    """What differs between two executions of a step, in the order of a step, and how many fingerprints both have."""
    found: list[Difference] = []
    compared = 0
    rank = left.rank
    for stage, name, a, b in _pairs(left, right):
        compared += 1
        if a != b:
            found.append(Difference(stage, name, rank, a, b))
    return sorted(found, key=lambda d: STAGES.index(d.stage)), compared


def _pairs(left: Capsule, right: Capsule) -> Iterator[tuple[str, str, str, str]]:
    a, b = {(v.role, v.name): v for v in left.state}, {(v.role, v.name): v for v in right.state}
    for slot in a.keys() & b.keys():
        if a[slot].key and b[slot].key:
            yield from _pair("state before", " ".join(slot), a[slot].before, b[slot].before)
        elif a[slot].value != b[slot].value:
            yield "state before", " ".join(slot), str(a[slot].value), str(b[slot].value)
    calls, others = [_title(c) for c in left.calls], [_title(c) for c in right.calls]
    yield "calls", "", ", ".join(calls), ", ".join(others)
    for i, (one, other) in enumerate(zip(left.calls, right.calls)):
        title = f"of {_title(one)} (call {i})" if one.what != "backward" else f"(call {i})"
        yield from _seen_pairs("inputs", title, one.inputs, other.inputs)
        yield from _seen_pairs("loss" if one.what != "module" else "outputs", title, one.outputs, other.outputs)
    for slot in a:
        if slot in b:
            yield from _pair(slot[0], slot[1], a[slot].after, b[slot].after)


def _title(call: Call) -> str:
    return call.name or call.what


def _seen_pairs(stage: str, title: str, left: Sequence[Seen], right: Sequence[Seen]) -> Iterator[tuple[str, str, str, str]]:
    others = {seen.place: seen for seen in right}
    for seen in left:
        other = others.get(seen.place)
        if other is None:
            yield stage, f"{seen.place} {title}", seen.dtype or str(seen.value), "nothing"
        elif seen.dtype:
            yield from _pair(stage, f"{seen.place} {title}", seen.content, other.content)
        else:
            yield stage, f"{seen.place} {title}", str(seen.value), str(other.value)


def _pair(stage: str, name: str, left: Print | None, right: Print | None) -> Iterator[tuple[str, str, str, str]]:
    if left is not None and right is not None:
        yield stage, name, _text(left), _text(right)


def _text(printed: Print) -> str:
    return "none" if printed.flags & 1 else f"{printed.fp:016x}"
