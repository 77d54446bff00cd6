"""Runs scenarios of Keras and compares them: the reference once for each program, without a strategy; its noise once something differs."""

from __future__ import annotations

import base64
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from proctor.oracle.fuzz.axes import declared, whole, why_invalid
from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.keras.client import Server
from proctor.oracle.fuzz.keras.program import ASKED, replicas, text
from proctor.oracle.fuzz.program import reference_of
from proctor.oracle.fuzz.running.judge import FLOORS, MAX_REPORTED, Difference, Reference, judge
from proctor.oracle.fuzz.running.observe import Array, Seen
from proctor.oracle.fuzz.running.outcome import Outcome, outcome_of
from proctor.oracle.fuzz.running.worlds import Answer
from proctor.oracle.fuzz.spec import Scenario

PERMUTED: Final = (1, 2, 3, 4)  # samples of noise
STEADY: Final = ("SGD",)
_KEPT: Final = 64  # references
_FLOORS: Final = {"float64": FLOORS["torch.float64"], "float32": FLOORS["torch.float32"]}


class Made:
    """A reference, or why there is none; its noise once it was asked for."""

    def __init__(self, tensors: dict[str, Array], why: str = "") -> None:
        self.tensors, self.why = tensors, why
        self.noise: dict[str, float] | None = None


class KerasRunner:
    """Scenario → outcome.

    Args:
        server: that runs programs.
        plant: source text that the server executes before each program that is no reference (a mutation, in tests).
    """

    most = 24  # runs that making a failure small may take: each costs 1 to 3 s of processor

    def __init__(self, server: Server, plant: str = "") -> None:
        self.server, self._plant = server, plant
        self.runs = 0
        self._references: dict[str, Made] = {}

    def run_all(self, scenarios: Sequence[Scenario]) -> list[Outcome]:
        """Several, one after the other."""
        return [self.run(s) for s in scenarios]

    def run(self, scenario: Scenario) -> Outcome:
        """One scenario."""
        why = why_invalid(scenario.setting, facts(scenario))
        if why:
            return Outcome("no program", why=why)
        made = self._reference(scenario)
        if made.why:
            return Outcome("no program", why=made.why)
        answer = self._answer(scenario, plant=self._plant)
        self.runs += 1
        rules = declared(scenario.setting, facts(scenario))
        seen = answer.ranks[0]
        if seen is None or "raised" in seen:
            return outcome_of(answer, rules)
        tolerance = max((r.tolerance for r in rules), default=0.0)
        found = self._differences(scenario, made, seen, tolerance)
        if found and not any(r.effect == "different" for r in rules):
            self._listen(scenario, made)
            found = self._differences(scenario, made, seen, tolerance)
        return outcome_of(_answered(found, seen["apart"], answer.seconds), rules)

    def _answer(self, scenario: Scenario, *, plant: str = "", permuted: int = 0, asked: tuple[str, ...] = ()) -> Answer:
        folder = tempfile.mkdtemp(prefix="saved-", dir=self.server.folder)
        try:
            return self.server.ask({"text": text(scenario, permuted=permuted, asked=asked), "world": replicas(scenario), "folder": folder, "plant": plant})
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _reference(self, scenario: Scenario) -> Made:
        reference = reference_of(scenario)
        key = reference.key()
        if key not in self._references:
            if len(self._references) >= _KEPT:
                self._references.pop(next(iter(self._references)))
            self._references[key] = self._made(reference)
        return self._references[key]

    def _made(self, reference: Scenario) -> Made:
        answer = self._answer(reference, asked=ASKED)
        seen = answer.ranks[0]
        if seen is None:
            return Made({}, f"the reference does not end: {answer.ended}"[:200])
        if "raised" in seen:
            return Made({}, f"the reference raises {seen['raised']['type']}: {seen['raised']['message'][:160]}")
        tensors = {f"0/{s.kind}/{s.name}": s.values for s in seen_of(seen)}
        unfit = next((key for key, values in tensors.items() if not np.all(np.isfinite(values))), "")
        return Made(tensors, f"the reference has values that are not finite: {unfit}" if unfit else "")

    def _listen(self, scenario: Scenario, made: Made) -> None:
        """Measure how far the reference moves with its rows in another order, and its numbers by a rounding."""
        if made.noise is not None:
            return
        made.noise = {}
        reference = reference_of(scenario)
        for seed in PERMUTED:
            seen = self._answer(reference, permuted=seed, asked=ASKED).ranks[0]
            if seen is None or "raised" in seen:
                continue
            for one in seen_of(seen):
                key = f"0/{one.kind}/{one.name}"
                if key in made.tensors and made.tensors[key].shape == one.values.shape and one.values.size:
                    made.noise[key] = max(made.noise.get(key, 0.0), float(np.abs(one.values - made.tensors[key]).max()))

    def _differences(self, scenario: Scenario, made: Made, seen: dict[str, Any], tolerance: float) -> list[Difference]:
        given = whole(scenario.setting)
        floor = _FLOORS.get(str(given["keras_precision"]), FLOORS["autocast"])
        reference = Reference(made.tensors, made.noise or {}, floor, steady=given["keras_optimizer"] in STEADY)
        found = [d for one in seen_of(seen) if (d := judge(one, 0, reference, tolerance)) is not None]
        here = {f"0/{s.kind}/{s.name}" for s in seen_of(seen)}
        for key in made.tensors:
            _, kind, name = key.split("/", 2)
            if key not in here and kind != "evaluation":  # it may not have been asked
                found.append(Difference(0, kind, name, 1e300, 0.0, 0.0, "the candidate has none"))
        return found[:MAX_REPORTED]


def seen_of(answer: dict[str, Any]) -> list[Seen]:
    """Tensors of the server's answer."""
    found = []
    for one in answer["seen"]:
        values = np.frombuffer(base64.b64decode(one["data"]), dtype=one["dtype"]).reshape(one["shape"])
        found.append(Seen(one["kind"], one["name"], values))
    return found


def _answered(found: list[Difference], apart: str, seconds: float) -> Answer:
    """As ranks would answer: where replicas are apart, there are two that do not agree."""
    differences = [msgspec.to_builtins(d) for d in found]
    key = f"0/parameter/{apart}|"
    if apart:
        return Answer(({"differences": differences, "digests": {key: 1}}, {"differences": [], "digests": {key: 2}}), seconds=seconds)
    return Answer(({"differences": differences, "digests": {}},), seconds=seconds)
