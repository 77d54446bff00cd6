"""A campaign: draws models, inputs and settings, runs them, and makes findings of what fails.

For each (model, input) pair: rows of the cover → outcomes → for a failure that no finding explains, the minimal trigger set → a smaller scenario
under the same symptom → a finding. What a finding explains is counted and passed. Pair i is drawn from (seed, i) alone, its model from (seed, i // `INPUTS`).
"""

from __future__ import annotations

import random
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec

from proctor.oracle.fuzz.axes import ALONE
from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.models import templates_for
from proctor.oracle.fuzz.program import model_code
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.attribute import OPTIMIZERS, minimal
from proctor.oracle.fuzz.search.board import Board
from proctor.oracle.fuzz.search.cover import Cover
from proctor.oracle.fuzz.search.findings import Finding, Known, needs, signature
from proctor.oracle.fuzz.search.shrink import shrunk
from proctor.oracle.fuzz.space import Point, drawn
from proctor.oracle.fuzz.spec import INPUT, Scenario

ROWS: Final = 16  # settings of a pair
INPUTS: Final = 10  # pairs in a row that are of one model, as in D3: ranks then know its shapes, which are half of what a new model costs them
SHARED: Final = 4  # of them are of one program, so that they share a reference
TRIES: Final = 20  # models that a library's wrapper does not take are drawn again
AGAIN: Final = 0.02  # of settings that a finding explains are run all the same, so that they are counted; asked of up to eight candidates for a row
NEUTRAL: Final = "SGD"  # the optimizer of a setting that names none
LATER: Final = 4  # failures of one symptom are kept while another worker looks into it
WAIT_S: Final = 0.5  # between looks at what other workers do
LIKENED: Final = 2  # findings that fail for a known reason once a value is exchanged are kept apart from it; the next are taken for it
HANGS: Final = 2  # of one symptom are looked into; each run of one costs its timeout


class Row(msgspec.Struct, frozen=True):
    """A setting of a pair, and what came of it.

    Attributes:
        setting: of the row.
        verdict: of `outcome.VERDICTS`.
        why: in a sentence.
        finding: id of the finding that explains it, or "".
    """

    setting: Point
    verdict: str
    why: str = ""
    finding: str = ""


class Pair(msgspec.Struct, frozen=True):
    """A model, an input, and its rows.

    Attributes:
        number: of the pair.
        scenario: model and input.
        rows: settings and verdicts.
        passed: settings that were not run because a finding explains them.
        seconds: of all rows; what was spent on findings is not in it.
    """

    number: int
    scenario: Scenario
    rows: tuple[Row, ...]
    passed: int
    seconds: float


def following(number: int, workers: int) -> int:
    """The pair after one, of the same worker: a worker takes all pairs of a model."""
    return number + 1 if (number + 1) % INPUTS else number + 1 + (workers - 1) * INPUTS


class Runs(Protocol):
    """What runs scenarios of a library."""

    runs: int
    most: int  # runs that shrinking may take

    def run(self, scenario: Scenario) -> Outcome:
        """One scenario."""

    def run_all(self, scenarios: Sequence[Scenario]) -> list[Outcome]:
        """Several, outcomes in their order."""


class Campaign:
    """State of a campaign in one process. With a `board` there are other workers, and none of them makes small what another one does."""

    def __init__(self, runner: Runs, seed: int, known: list[Known], *, libraries: tuple[str, ...] = ("torch",), rows: int = ROWS, models: tuple[str, ...] = (),
                 axes: tuple[str, ...] = (), board: Board | None = None) -> None:
        self.runner, self.seed, self.known, self.rows, self.board = runner, seed, known, rows, board
        self.cover = Cover(libraries, around=axes)
        self.templates = [t for t in templates_for(libraries) if not models or t.name in models]
        self._sorting = tuple(a.name for a in self.cover.axes if a.sorts)
        self._anew = bool(set(libraries) & set(ALONE))
        self.findings: dict[str, Finding] = {}
        self.counted: Counter[str] = Counter()
        self._hangs: Counter[Symptom] = Counter()
        self._later: defaultdict[Symptom, list[tuple[Scenario, Outcome]]] = defaultdict(list)  # another worker looks into them
        self._likened: Counter[str] = Counter()  # findings that are perhaps this one
        self._seen: defaultdict[str, list[tuple[str, ...]]] = defaultdict(list)  # finding → what it was seen under: `_sorts`

    def pair(self, number: int, until: float = float("inf")) -> Iterator[Finding | Pair]:
        """Draw a pair and run it; gives new findings, then the pair. After `until` (monotonic) failures are no longer looked into."""
        yield from self.settled(until)
        rng = random.Random(f"{self.seed}/{number}")
        scenario = self.drawn(number)
        traits = facts(scenario)
        passed = 0

        def known(point: Point) -> bool:
            nonlocal passed
            explained = rng.random() >= AGAIN and any(not k.broad and k.passes(point, traits) and self._general(k.id, point) for k in self._explaining())
            passed += explained
            return explained

        programs = self.cover.programs(rng, traits, max(1, self.rows // SHARED))
        settings = [self.cover.row(rng, traits, known, programs[i % len(programs)]) for i in range(self.rows)]
        settings = list({msgspec.json.encode(s, order="sorted"): s for s in settings}.values())
        begun = time.monotonic()
        scenarios = [scenario.with_setting(s) for s in settings]
        outcomes = self.runner.run_all(scenarios)
        seconds = time.monotonic() - begun
        rows = []
        for one, outcome in zip(scenarios, outcomes, strict=True):
            by = ""
            if outcome.failed and time.monotonic() < until:
                for finding in self.explain(one, outcome):
                    if isinstance(finding, Finding):
                        yield finding
                        by = finding.id
                    else:
                        by = finding
            rows.append(Row(one.setting, outcome.verdict, outcome.why, by))
        yield Pair(number, scenario, tuple(rows), passed, seconds)

    def drawn(self, number: int) -> Scenario:
        """Model and input of a pair, by chance; `INPUTS` pairs have one model, where that saves anything: not where each program is traced anew.

        Of a template of single calls (`Template.apart`) they have one model each: there are hundreds of calls, and one says nothing of another.
        """
        rng = random.Random(f"{self.seed}/model {number // (1 if self._anew else INPUTS)}")
        own = random.Random(f"{self.seed}/call {number}")
        given = drawn(INPUT, random.Random(f"{self.seed}/input {number}"))
        for _ in range(TRIES):
            template = rng.choice(self.templates)
            scenario = Scenario(template.name, drawn(template.choices, own if template.apart else rng), given)
            if self.cover.takes(facts(scenario)):
                break
        return scenario

    def explain(self, scenario: Scenario, outcome: Outcome) -> Iterator[Finding | str]:
        """A new finding, or the id of the one that explains a failure; nothing where it does not come again."""
        symptom = outcome.symptom
        assert symptom is not None
        by = _explained(self._explaining(), scenario, outcome)
        if by:
            self.counted[by] += 1
            self._seen[by].append(self._sorts(scenario.setting))
            if by in self.findings:
                self.findings[by].count += 1
            yield by
            return
        if self.board is not None and not self.board.claim(symptom):
            if len(self._later[symptom]) < LATER:
                self._later[symptom].append((scenario, outcome))
            return
        try:
            self._hangs[symptom] += symptom.verdict == "hang"
            if self._hangs[symptom] <= HANGS:
                yield from self._new(scenario, outcome, symptom)
        finally:
            if self.board is not None:
                self.board.release(symptom)

    def settled(self, until: float = float("inf")) -> Iterator[Finding]:
        """Take up what other workers found, and look again at failures that were left to them; gives findings that are new after all."""
        self._hear()
        waiting, self._later = self._later, defaultdict(list)
        for scenario, outcome in (one for several in waiting.values() for one in several):
            if time.monotonic() < until:
                yield from (found for found in self.explain(scenario, outcome) if isinstance(found, Finding))

    def ended(self, until: float) -> Iterator[Finding]:
        """After the last pair: wait for workers that look into failures of this one."""
        yield from self.settled(until)
        while self._later and time.monotonic() < until:
            time.sleep(WAIT_S)
            yield from self.settled(until)

    def _hear(self) -> None:
        for finding in self.board.news(self.findings) if self.board is not None else ():
            self.findings[finding.id] = finding
            self._seen[finding.id] += [self._sorts(s.setting) for s in (finding.found, finding.scenario)]

    def _new(self, scenario: Scenario, outcome: Outcome, symptom: Symptom) -> Iterator[Finding | str]:
        before = self.runner.runs
        if not self._alike(scenario, symptom):
            self.counted["not seen again"] += 1
            return
        least = minimal(scenario.setting, lambda s: self._alike(scenario.with_setting(s), symptom), facts(scenario))
        small = scenario.with_setting(least)
        like: list[str] = []
        if symptom.verdict != "hang":
            small, _ = shrunk(small, lambda s: self._fails_so(s, symptom, like), self.runner.most)
            least = minimal(small.setting, lambda s: self._alike(small.with_setting(s), symptom), facts(small))
            small = small.with_setting(least)
        final = self.runner.run(small)
        if final.symptom is None:
            self.counted["not seen again"] += 1
            return
        id_ = signature(final.symptom, least, model_code(small).subject, needs(small))
        self._hear()
        if id_ in self.findings:
            self.findings[id_].count += 1
            yield id_
            return
        finding = Finding(id_, small, final, least, needs(small), scenario, runs=self.runner.runs - before, perhaps=next(iter(like), ""))
        self._likened[finding.perhaps] += 1
        finding.known = _explained(self.known, small, final)
        self.findings[id_] = finding
        self._seen[id_] += [self._sorts(s.setting) for s in (scenario, small)]
        yield finding

    def _general(self, id_: str, point: Point) -> bool:
        """Whether a finding may be taken to hold under a setting's optimizer: it was seen under that one, or under two others. So with other axes whose values are implementations of their own.

        A trigger set that names no optimizer was minimal under SGD, which has no state: what fails so may be sound under Adam.
        """
        return id_ not in self._seen or all(len(seen := set(found)) > 1 or own in seen for own, found in zip(self._sorts(point), zip(*self._seen[id_], strict=True), strict=True))

    def _sorts(self, setting: Point) -> tuple[str, ...]:
        """The optimizer of a setting, and its values of axes whose values are implementations of their own; "" where it has none."""
        optimizer = next((setting[name] for name in OPTIMIZERS if name in setting), NEUTRAL)
        return (str(optimizer), *(str(setting.get(name, "")) for name in self._sorting))

    def _alike(self, scenario: Scenario, symptom: Symptom) -> bool:
        found = self.runner.run(scenario).symptom
        return found is not None and symptom.alike(found)

    def _fails_so(self, scenario: Scenario, symptom: Symptom, like: list[str]) -> bool:
        """Whether a smaller scenario fails in the same way, and not for a reason that something else explains: what is made small is explained by nothing.

        A value that was exchanged for a simpler one may fail for a reason of its own, and a new mistake would go by the name of a known one. Where `LIKENED` findings
        were kept apart from one for this reason, the next are taken for it.

        Args:
            like: takes the ids of what explains a smaller scenario.
        """
        outcome = self.runner.run(scenario)
        if outcome.symptom is None or not symptom.alike(outcome.symptom):
            return False
        by = _explained(self._explaining(), scenario, outcome)
        if by and self._likened[by] < LIKENED:
            like.append(by)
            return False
        return True

    def _explaining(self) -> list[Known]:
        """What explains failures: the known list, and findings of this campaign."""
        return [*self.known, *(f.as_known("torch", "") for f in self.findings.values())]


def _explained(among: Iterable[Known], scenario: Scenario, outcome: Outcome) -> str:
    """The id of what explains a failure; "" where nothing does."""
    symptom, traits, step = outcome.symptom, model_code(scenario).traits, _step(outcome)
    return next((k.id for k in among if symptom is not None and k.explains(symptom, scenario.setting, traits, step)), "")


def _step(outcome: Outcome) -> int:
    """In which tensors differ first; 1 where none do."""
    return outcome.first.step if outcome.first is not None else 1
