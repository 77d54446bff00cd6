"""Runs scenarios: makes a reference once for each program, sends candidates to worlds, reads verdicts.

How far a reference moves when its rows come in another order (its noise) costs two more runs of it. So it is measured only
once something differs by more than the floor, and what differed is then judged again. What still differs is judged once more beside what the program's own
rounding does (`rounding`): a difference of that size is said as such, and is no finding.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.errors import OracleError
from proctor.oracle.fuzz.axes import Rule, declared, whole, why_invalid
from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.program import first_of, program, reference_of
from proctor.oracle.fuzz.running import judge
from proctor.oracle.fuzz.running.child import REFERENCES
from proctor.oracle.fuzz.running.outcome import Outcome, outcome_of
from proctor.oracle.fuzz.running.worlds import Answer, Worlds
from proctor.oracle.fuzz.spec import Scenario

_KEPT: Final = 64  # references on the memory disk
_PERMUTATIONS: Final = (1, 2, 3, 4)  # as many samples of noise as everywhere in the oracle
FULL: Final = re.compile(r"No space left on device|Disk quota exceeded|os error 28")


class Made(msgspec.Struct, frozen=True):
    """A reference, or why there is none."""

    path: str
    why: str = ""


class Job(msgspec.Struct, frozen=True):
    """A scenario to be run: its number among those asked for, and how far gradients move in the runs that give the reference its noise, relative to the largest; 0 without such runs. `unit`: one unit in the last place by which operations of runs of the reference are moved; 0 without such runs."""

    number: int
    scenario: Scenario
    noise: float = 0.0
    unit: float = 0.0

    @property
    def reference(self) -> tuple[str, float, float]:
        """By which the reference is known."""
        return reference_of(self.scenario).key(), self.noise, self.unit


class Runner:
    """Scenario → outcome, in worlds that stay."""

    most = 150  # runs that making a failure small may take

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self.runs = 0
        self._references: dict[tuple[str, float, float], Made] = {}

    def run(self, scenario: Scenario) -> Outcome:
        """One scenario."""
        return self.run_all([scenario])[0]

    def run_all(self, scenarios: Sequence[Scenario]) -> list[Outcome]:
        """Several at once, those of different world sizes side by side; outcomes in their order."""
        found: dict[int, Outcome] = {}
        self._run([Job(i, s) for i, s in enumerate(scenarios)], found)
        self._run([Job(i, s, _noise(s)) for i, s in enumerate(scenarios) if found[i].verdict == "inconsistent"], found)
        self._run([Job(i, s, _noise(s), judge.unit_of(_tolerance(s), _precision(s))) for i, s in enumerate(scenarios) if found[i].verdict == "inconsistent"], found)
        return [found[i] for i in range(len(scenarios))]

    def _run(self, jobs: Sequence[Job], found: dict[int, Outcome]) -> None:
        """Run jobs and put their outcomes into `found`."""
        valid = []
        for job in jobs:
            why = why_invalid(job.scenario.setting, facts(job.scenario))
            if why:
                found[job.number] = Outcome("no program", why=why)
            else:
                valid.append(job)
        self._make(valid)
        ready = []
        for job in valid:
            made = self._reference(job)
            if made.why:
                found[job.number] = Outcome("no program", why=made.why)
            else:
                ready.append(job)
        folders = {j.number: self._folder(j) for j in ready}
        try:
            ready = self._first_lives(ready, folders, found)
            for number, answer in self.worlds.run_all([(j.scenario.world, self._task(j.scenario, j, folders[j.number])) for j in ready]):
                job = ready[number]
                _room(self.worlds.folder, answer)
                found[job.number] = outcome_of(answer, _declared(job.scenario))
        finally:
            for folder in filter(None, folders.values()):
                shutil.rmtree(folder, ignore_errors=True)
        self.runs += len(folders)

    def _folder(self, job: Job) -> str:
        """Where a program saves; "" if it does not."""
        return tempfile.mkdtemp(prefix="saved-", dir=self.worlds.folder) if {"disk", "ds_state"} & set(job.scenario.setting) else ""

    def _first_lives(self, jobs: list[Job], folders: dict[int, str], found: dict[int, Outcome]) -> list[Job]:
        """Run the programs that save for others; gives the jobs that can go on from there, or that begin by themselves."""
        first = [(job, one) for job in jobs if (one := first_of(job.scenario)) is not None]
        ended = set()
        for number, answer in self.worlds.run_all([(one.world, self._task(one, job, folders[job.number], life=1)) for job, one in first]):
            job = first[number][0]
            _room(self.worlds.folder, answer)
            if not answer.well:
                outcome = outcome_of(answer, _declared(job.scenario))
                if outcome.verdict == "rounding":
                    continue
                if outcome.failed and (job.unit or outcome.verdict != "inconsistent"):  # it is looked into where it is no first life
                    outcome = Outcome("no program", why=f"the program that saves fails by itself: {outcome.why}"[:300])
                found[job.number] = outcome
                ended.add(job.number)
        return [job for job in jobs if job.number not in ended]

    def _task(self, scenario: Scenario, job: Job, folder: str, life: int | None = None) -> dict[str, Any]:
        given = whole(scenario.setting)
        return {
            "codes": program(scenario, life=life).codes(),
            "folder": folder,
            "reference": self._reference(job).path,
            "floor": judge.FLOORS[_precision(job.scenario)],
            "tolerance": _tolerance(job.scenario),
            "steady": given["optimizer"] in judge.STEADY,
            # What differs is asked again with the noise known, or is declared: a world in which something raised before need not be doubted.
            "settled": not job.unit or any(r.effect == "different" for r in _declared(job.scenario)),
        }

    def _reference(self, job: Job) -> Made:
        return self._references[job.reference]

    def _make(self, jobs: Sequence[Job]) -> None:
        """Make the references that are not there yet, two at once."""
        needed = {job.reference: reference_of(job.scenario) for job in jobs}
        missing = {key: s for key, s in needed.items() if key not in self._references}
        if len(self._references) + len(missing) > _KEPT:
            for key in [k for k in self._references if k not in needed]:
                Path(self._references.pop(key).path).unlink(missing_ok=True)
        keys, tasks = list(missing), []
        for i, (key, scenario) in enumerate(missing.items()):
            permuted = [program(scenario, permuted=seed).codes() for seed in _PERMUTATIONS] if key[1] else []
            rounded = [program(scenario, permuted=seed + 1).codes() for seed in range(judge.RUNS)] if key[2] else []
            tasks.append((REFERENCES[i % 2], {"make": program(scenario).codes(), "permuted": permuted, "shaken": key[1], "rounded": rounded, "unit": key[2], "to": self._path(key)}))
        for number, answer in self.worlds.run_all(tasks):
            self._references[keys[number]] = _made(self._path(keys[number]), answer)

    def _path(self, key: tuple[str, float, float]) -> str:
        return f"{self.worlds.folder}/{key[0]}{''.join(f'-{part:g}' for part in key[1:] if part)}.safetensors"


def _precision(scenario: Scenario) -> str:
    """Of a program, as `judge.FLOORS` names it."""
    precision = str(whole(scenario.setting)["precision"])
    return precision if precision == "autocast" else f"torch.{precision}"


def _noise(scenario: Scenario) -> float:
    """How far gradients move in the runs that give the reference its noise."""
    return max(_tolerance(scenario), judge.SHAKEN)


def _tolerance(scenario: Scenario) -> float:
    """Declared for the setting; 0 for none."""
    return max((r.tolerance for r in _declared(scenario)), default=0.0)


def _declared(scenario: Scenario) -> list[Rule]:
    """What is declared of a setting, and of that of the program that saves for it."""
    first = first_of(scenario)
    return [r for one in (scenario, first) if one is not None for r in declared(one.setting, facts(one))]


def _room(folder: Path, answer: Answer) -> None:
    """See that no rank met a full disk: that is no finding of a library.

    Raises:
        OracleError: one did.
    """
    if any(FULL.search(r["message"]) for r in answer.raised()):
        raise OracleError(f"{folder}: the disk is full", hint="references of a campaign, and what its programs save, lie there; make room, then --resume")


def _made(path: str, answer: Answer) -> Made:
    raised = answer.raised()
    _room(Path(path).parent, answer)
    if raised:
        return Made(path, f"the reference raises {raised[0]['type']}: {raised[0]['message'][:160]}")
    made = answer.ranks[0]
    if answer.ended or made is None:
        return Made(path, f"the reference does not end: {answer.ended}")
    return Made(path, f"the reference has values that are not finite: {made['unfit']}" if made["unfit"] else "")
