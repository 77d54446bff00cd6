"""Runs a command with the collector in its processes, as often as a comparison needs.

A job that turns out to have one rank can be a reference, so it is run again: once as it is (is it deterministic?) and
with noise, from which the tolerance of every tensor is estimated. The command is the user's own and runs unchanged; it
is stopped once every rank has recorded what was asked for, unless it shall run to its end.
"""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.errors import OracleError, UsageError
from proctor.invariants.redact import without_secrets
from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.judging.choices import write_own
from proctor.oracle.recording.budget import Budget, session_cpu_s
from proctor.oracle.recording.drawn import give_drawn, keep_drawn
from proctor.oracle.recording.running import LOG, cause, run_hooked
from proctor.oracle.store import (
    AGAIN,
    CLEAN,
    EAGER,
    PLACED,
    SCHEMA,
    ProcessInfo,
    Recording,
    RunInfo,
    draws,
    write_json,
)
from proctor.oracle.store.ended import ended
from proctor.oracle.tensors import DRAWN

SAMPLES: Final = 4  # one sample can be 2× too low for a tensor, four ≤ 1.25× (findings, §3)
ENDING_S: Final = 30.0  # for a command to end whose ranks have ended in the middle of a step
LOOK_S: Final = 0.5  # between looks at how much a command has used
GIVEN: Final = "given"  # folder of a recording: what its runs get for their data
_COMPILER_ERROR: Final = re.compile(r"torch\._(dynamo|inductor|functorch)\S*\.\w+(Error|Exception|Failed|Unsupported)\b|torch\._dynamo\.exc\.\w+")


class Recorder:
    """Records one command.

    Args:
        out: directory to make.
        command: the user's whole command line.
        steps: optimizer updates to record.
        whole: of several steps the one that is recorded in full, beside the first; of the others parameters, gradients and buffers.
        samples: noise samples of a job of one rank.
        plan: as JSON; stored with the recording.
        to_the_end: let the command finish.
        eager: what `torch.compile` wraps runs uncompiled.
        reference: it can be trusted although it has several ranks, as a pipeline of a model that no device holds (TTrace §6.4).
        timeout_s: after which it is ended.
        options: further fields of `CollectConfig`.
        given: folder with values for each rank that take the place of its data (`oracle/recording/inputs.py`); kept with the recording.
        beside: the reference of a candidate; needed where that gets what it drew (`--rng`).

    Attributes:
        until: when all of it is ended, by the monotonic clock.
        budget: of CPU seconds for all that it runs; `None` for no bound.
    """

    until: float = math.inf
    budget: Budget | None = None

    def __init__(
        self,
        out: Path,
        command: Sequence[str],
        *,
        steps: int = 1,
        whole: int = 0,
        samples: int = SAMPLES,
        plan: str = "",
        to_the_end: bool = False,
        timeout_s: float = 3600.0,
        overwrite: bool = False,
        reference: bool = False,
        eager: bool = False,
        options: Mapping[str, Any] | None = None,
        given: Path | None = None,
        beside: Recording | None = None,
    ) -> None:
        self.out, self.command, self.steps, self.samples = out, list(command), steps, samples
        self.to_the_end, self.timeout_s = to_the_end, timeout_s
        self.options, self.reference, self.eager = dict(options or {}), reference, eager
        self.beside = beside
        generate, dropout = self.options.get("generate"), self.options.setdefault("dropout", "keep")
        self.info = RunInfo(SCHEMA, without_secrets(command), program_of(command), steps=steps, plan=plan, generate=generate, dropout=dropout)
        self.info.whole, self.info.forward = sorted({0, whole}) if steps > 1 else [], bool(self.options.get("forward"))
        self.info.statistics = bool(self.options.get("statistics"))
        _make(out, overwrite)
        if given is not None:
            _copy(given, out / GIVEN)
        write_json(out / "oracle.json", self.info)

    @classmethod
    def again(cls, recording: Recording, command: Sequence[str], *, timeout_s: float = 3600.0) -> Recorder:
        """One that adds runs to a recording that is there already."""
        made = cls.__new__(cls)
        made.out, made.command, made.info = recording.path, list(command), recording.info
        made.reference, made.eager, made.beside = False, True, None
        made.steps, made.samples, made.options = recording.info.steps, 0, {"dropout": recording.info.dropout or "draw", "statistics": recording.info.statistics}
        made.to_the_end, made.timeout_s = False, timeout_s
        return made

    def record(self) -> RunInfo:
        """Record the command; returns what is written in `oracle.json`.

        Raises:
            OracleError: it failed before everything was recorded, or no rank trained anything.
            UsageError: it cannot be started.
        """
        drawn = self.options["dropout"] in DRAWN
        if drawn and self.beside is not None and not give_drawn(self, self.beside):
            ranks = list(read_ranks(self.out / "runs" / CLEAN))
        else:
            ranks = self._first()
        self.info.world = max(r.world for r in ranks)
        for rank in ranks:
            self.info.notes += [f"rank {rank.rank}: {note}" for note in rank.notes]
        if (self.info.world == 1 or self.reference) and self.samples > 0:
            trusted = CLEAN
            if any(rank.compiled for rank in ranks):  # what is trusted is the eager program
                trusted, ranks = EAGER, self.once(EAGER, watch_fp8=True)
            if drawn and keep_drawn(self.out, trusted):
                self.once(PLACED, dropout="place")
            self._sample(trusted, tuple(sorted({name for rank in ranks for name in rank.fp8})))
        write_json(self.out / "oracle.json", self.info)
        return self.info

    def _sample(self, trusted: str, fp8: tuple[str, ...]) -> None:
        """Run the reference once more, and with noise, each time with the choices of the run that is trusted."""
        chosen = self.out / "choices"
        try:
            common = {"fp8": fp8, "decisions": str(chosen.resolve()) if self._write_choices(trusted, chosen) else ""}
            again = self.once(AGAIN, **common, watch_busy=True)
            common["busy"] = tuple(sorted({name for rank in again for name in rank.busy}))
            jobs: list[tuple[str, dict[str, Any]]] = [(f"noise-{k}", {"noise": k}) for k in range(self.samples)]
            if self.options["dropout"] == "replay":
                jobs.append((PLACED, {"dropout": "place"}))
            if fp8:
                jobs += [(f"strict-{k}", {"noise": k, "fp8": ()}) for k in range(self.samples)]
            with ThreadPoolExecutor(max_workers=max(1, min(len(jobs), _cpus()))) as pool:
                for done in [pool.submit(self.once, name, **{**common, **more}) for name, more in jobs]:
                    done.result()
        finally:
            shutil.rmtree(chosen, ignore_errors=True)
        self.info.samples = self.samples

    def _write_choices(self, run: str, folder: Path) -> bool:
        """Keep what a run chose for the others; not of a capsule's step, whose job chose by itself."""
        if self.options.get("replay"):
            return False
        return write_own(Recording(self.out).ranks(run), folder) > 0

    def _first(self) -> list[ProcessInfo]:
        """The run as the user wrote it; without `torch.compile` where the compiler fails, or compiled code drops by chance."""
        if self.eager:
            return self.once(CLEAN, watch_fp8=True)
        log, failure = self.out / "runs" / CLEAN / "output.log", None
        try:
            ranks = self.once(CLEAN, watch_fp8=True, compiled=True)
        except OracleError as e:
            ranks, failure = [], e
        failed = failure is not None or self.info.exit_code not in (0, None) or not all(rank.steps for rank in ranks)
        why = f"torch.compile failed: {said}" if failed and (said := _compiler_error(log)) else ""
        if not why and self.options["dropout"] != "draw" and any(rank.random for rank in ranks):
            why = "compiled code draws random numbers, and dropout can be kept from dropping only outside of it"
        if why:
            self.info.notes[:] = [f"the program ran without torch.compile: {why}"]
            return self.once(CLEAN, watch_fp8=True)
        if failure is not None:
            raise failure
        return ranks

    def once(self, run: str, **options: Any) -> list[ProcessInfo]:
        """Run the command once; returns what its ranks said."""
        folder = self.out / "runs" / run
        shutil.rmtree(folder, ignore_errors=True)
        _writable(folder)
        given = self.out / GIVEN
        config = CollectConfig(
            folder=str(folder.resolve()),
            steps=self.steps,
            whole=tuple(self.info.whole),
            plan=self.info.plan,
            given=str(given.resolve()) if given.is_dir() else "",
            draws=str((self.out / draws.FOLDER).resolve()) if (self.out / draws.FOLDER / draws.DRAWN).is_file() else "",
            **{**self.options, **options},
        )
        log = folder / LOG
        code = self._run(config, folder)
        ranks = list(read_ranks(folder))
        world = max((r.world for r in ranks), default=0)
        killed = ended(code, log, folder) if code not in (0, None) else ""
        if killed and not (ranks and all(r.steps >= self.steps and not r.open for r in ranks) and len(ranks) == world):
            raise OracleError(f"{self.info.program}: {killed}", hint=f"its output is in {log}")
        if not ranks:
            why = f"ended with code {code}" if code else "ended without training a torch module"
            raise OracleError(f"{self.info.program}: {why}{cause(log)}", hint=f"its output is in {log}")
        absent = sorted(set(range(world)) - {r.rank for r in ranks})
        if absent:
            raise OracleError(
                f"{self.info.program}: {len(absent)} of {world} ranks recorded nothing (rank {absent[0]}){cause(log)}",
                hint=f"its output is in {log}",
            )
        unfinished = [r for r in ranks if not r.done]
        if unfinished and unfinished[0].notes:
            raise OracleError(f"{self.info.program}: rank {unfinished[0].rank}: {unfinished[0].notes[-1]}", hint=f"its output is in {log}")
        if code not in (0, None):
            short = min((r for r in ranks if r.steps < self.steps or r.open), key=lambda r: r.steps, default=None)
            if short is not None:  # what it left is no training step, and would differ in whatever is missing
                where = f"rank {short.rank}: " if world > 1 else ""
                raise OracleError(
                    f"{self.info.program}: {where}ended with code {code} in step {short.steps + (not short.open)} of {self.steps}{cause(log)}", hint=f"its output is in {log}"
                )
            self.info.notes.append(f"{run}: the command ended with code {code}{cause(log)}")
        if run == CLEAN:
            self.info.exit_code = code
        shutil.rmtree(folder / "boot", ignore_errors=True)
        return ranks

    def _run(self, config: CollectConfig, folder: Path) -> int | None:
        """The command's exit code; `None` when it was stopped because everything was there."""
        return run_hooked(
            self.command,
            folder,
            msgspec.json.encode(config),
            mark="PROCTOR_ORACLE",
            value=str(self.out),
            variables={} if config.compiled else {"TORCHDYNAMO_DISABLE": "1"},  # compiled regions cannot be looked into (findings, §4)
            complete=self._complete(folder),
            look=self._look(),
        )

    def _complete(self, folder: Path) -> Callable[[], bool]:
        """Whether all ranks have written everything. Those that ended in the middle of a step are given a while: the exit code says whether they failed."""
        since = math.inf

        def complete() -> bool:
            nonlocal since
            ranks = [] if self.to_the_end else list(read_ranks(folder))
            if not ranks or not all(r.done for r in ranks) or {r.rank for r in ranks} != set(range(ranks[0].world)):
                return False
            since = min(since, time.monotonic())
            return all(r.steps >= self.steps and not r.open for r in ranks) or time.monotonic() - since > ENDING_S

        return complete

    def _look(self) -> Callable[[int, float], None]:
        """Charges what the command uses, and ends it when its time is over."""
        looked, used_s = -math.inf, 0.0

        def look(pid: int, passed_s: float) -> None:
            nonlocal looked, used_s
            if self.budget is not None and passed_s - looked > LOOK_S:
                looked, before_s, used_s = passed_s, used_s, session_cpu_s(pid)
                self.budget.charge(used_s - before_s)
            if passed_s > self.timeout_s or time.monotonic() > self.until or (self.budget is not None and self.budget.over()):
                raise OracleError(
                    f"{self.info.program}: did not record {self.steps} step(s) within {min(self.timeout_s, passed_s):.0f} s",
                    hint="--timeout SECONDS, or a smaller model",
                )

        return look


def read_ranks(folder: Path) -> Iterator[ProcessInfo]:
    """What the ranks of one run wrote about themselves."""
    for path in sorted(folder.glob("rank*/process.json")):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=ProcessInfo)
        except (OSError, msgspec.MsgspecError):
            continue


def _make(out: Path, overwrite: bool) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file, not a directory")
    ours = (out / "oracle.json").is_file()
    if ours and not overwrite:
        raise UsageError(f"{out} holds a recording already", hint="choose another -o, or --overwrite")
    if out.is_dir() and not ours and any(out.iterdir()):
        raise UsageError(f"{out} is not empty and not a recording", hint="choose another -o")
    try:
        for old in ("runs", GIVEN, draws.FOLDER):
            shutil.rmtree(out / old, ignore_errors=True)
        (out / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise OracleError(f"{out}: cannot be written: {e.strerror or e}", hint="choose another -o") from None


def dropout_of(asked: str, *, trusted: bool) -> str:
    """How dropout is recorded on a side: masks that are to be replayed must first be placed, by a candidate that drops nothing."""
    return "place" if asked == "replay" and not trusted else asked


def _copy(given: Path, there: Path) -> None:
    try:
        shutil.copytree(given, there)
    except OSError as e:
        raise OracleError(f"{there}: cannot be written: {e.strerror or e}") from None


def _writable(folder: Path) -> None:
    """Make the folder of a run, with room for what its command says."""
    try:
        folder.mkdir(parents=True)
        (folder / "output.log").write_bytes(b" " * 4096)
    except OSError as e:
        raise OracleError(f"{folder}: cannot be written: {e.strerror or e}", hint="choose another -o") from None


def _compiler_error(log: Path) -> str:
    """What the compiler said when a program ended by it; "" if something else ended it."""
    try:
        lines = log.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    at = max((i for i, line in enumerate(lines) if _COMPILER_ERROR.search(line)), default=None)
    return "" if at is None else " ".join(line.strip() for line in lines[at : at + 2])[:300]


def program_of(command: Sequence[str]) -> str:
    from proctor.instrument.record.rundir import program_name

    return program_name(command)


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
