"""Runs scenarios: makes a reference once for each program, sends candidates to worlds, reads verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.oracle.fuzz import judge
from proctor.oracle.fuzz.axes import declared, whole, why_invalid
from proctor.oracle.fuzz.outcome import Outcome, outcome_of
from proctor.oracle.fuzz.program import model_code, program, reference_of
from proctor.oracle.fuzz.spec import Scenario
from proctor.oracle.fuzz.worlds import REFERENCE, Worlds

_KEPT: Final = 64  # references on the memory disk
_PERMUTATIONS: Final = (1, 2)


class Made(msgspec.Struct, frozen=True):
    """A reference, or why there is none."""

    path: str
    why: str = ""


class Runner:
    """Scenario → outcome, in worlds that stay."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self.runs = 0
        self._references: dict[str, Made] = {}

    def run(self, scenario: Scenario) -> Outcome:
        """One scenario."""
        return self.run_all([scenario])[0]

    def run_all(self, scenarios: Sequence[Scenario]) -> list[Outcome]:
        """Several at once, those of different world sizes side by side; outcomes in their order."""
        found: dict[int, Outcome] = {}
        tasks: list[tuple[int, dict[str, Any]]] = []
        numbers: list[int] = []
        for i, scenario, outcome in self._prepared(scenarios):
            if outcome is not None:
                found[i] = outcome
            else:
                numbers.append(i)
                tasks.append((scenario.world, self._task(scenario)))
        for number, answer in self.worlds.run_all(tasks):
            i = numbers[number]
            traits = model_code(scenarios[i]).traits
            found[i] = outcome_of(answer, declared(scenarios[i].setting, traits))
        self.runs += len(tasks)
        return [found[i] for i in range(len(scenarios))]

    def _prepared(self, scenarios: Sequence[Scenario]) -> Iterator[tuple[int, Scenario, Outcome | None]]:
        for i, scenario in enumerate(scenarios):
            why = why_invalid(scenario.setting, model_code(scenario).traits)
            if not why:
                why = self._reference(scenario).why
            yield i, scenario, Outcome("no program", why=why) if why else None

    def _task(self, scenario: Scenario) -> dict[str, Any]:
        given = whole(scenario.setting)
        rules = declared(scenario.setting, model_code(scenario).traits)
        precision = str(given["precision"])
        floor = judge.FLOORS["autocast" if precision == "autocast" else f"torch.{precision}"]
        return {
            "text": program(scenario).text(),
            "reference": self._reference(scenario).path,
            "floor": floor,
            "tolerance": max((r.tolerance for r in rules), default=0.0),
            "steady": given["optimizer"] in judge.STEADY,
        }

    def _reference(self, scenario: Scenario) -> Made:
        reference = reference_of(scenario)
        key = reference.key()
        if key not in self._references:
            while len(self._references) >= _KEPT:
                oldest = self._references.pop(next(iter(self._references)))
                Path(oldest.path).unlink(missing_ok=True)
            self._references[key] = self._make(reference, f"{self.worlds.folder}/{key}.safetensors")
        return self._references[key]

    def _make(self, reference: Scenario, path: str) -> Made:
        texts = [program(reference, permuted=seed).text() for seed in _PERMUTATIONS]
        answer = self.worlds.run(REFERENCE, {"make": program(reference).text(), "permuted": texts, "to": path})
        raised = answer.raised()
        if raised:
            return Made(path, f"the reference raises {raised[0]['type']}: {raised[0]['message'][:160]}")
        made = answer.ranks[0]
        if answer.ended or made is None:
            return Made(path, f"the reference does not end: {answer.ended}")
        return Made(path, f"the reference has values that are not finite: {made['unfit']}" if made["unfit"] else "")
