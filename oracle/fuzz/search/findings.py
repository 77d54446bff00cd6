"""Findings: failures of one signature, with the smallest scenario that shows them; and the list of those that are known.

A signature of a crash or a hang is what was raised and where; of an inconsistency it is the trigger set, because one cause shows in
many tensors. A failure that a finding's trigger set explains is counted and not looked into again. Known findings are data
(`known/<library>.toml`): an id, the versions they hold for, the reason, the trigger set, the symptom.
"""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import OracleError
from proctor.invariants.files import UNREADABLE, read_file
from proctor.oracle.fuzz.axes import axis_of, wrappers
from proctor.oracle.fuzz.models import template_of
from proctor.oracle.fuzz.program import model_code
from proctor.oracle.fuzz.running.observe import KINDS
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.attribute import triggers
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario

Scalar = str | int | float | bool
Parts = Mapping[str, Scalar | Sequence[Scalar]]  # axis → a value, or several of which one will do
FORM: Final = 3  # of an entry of a known list: 1 has one value for each trigger, 2 may have several, 3 may name a place by a pattern, or say that its settings run
_MAX_BYTES: Final = 16 << 20  # of a file of known findings
# Traits that every model of a template has say nothing about a finding.
GENERAL: Final = frozenset({"norm", "tokens", "attention", "embedding bag", "convolution", "recurrent", "routed", "needs rows", "torchrec", "keywords", "transformers", "operator", "classes", "smoothing", *(f"tensor {name}" for name in "abvim"), "collective", "exchange", "keras", "keras dense"})

MISSED: Final = ("no gradient", "has none", "shape")  # ways of being wrong that no other mistake looks like

WIDE: Final = frozenset({"wrapper", "world", "precision"})  # axes that say nothing of what is switched on


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A finding that is known.

    Attributes:
        id: short name.
        library: whose it is.
        versions: "2.13" stands for every 2.13.x; empty for all.
        reason: one sentence, with a link where there is one.
        verdict: of `outcome.FAILURES`.
        triggers: axis → value, or a list of them, any of which will do; `world` stands for any number of ranks above one. A list may name the value that an axis has by itself.
        unless: axis → a value, or a list of them; it holds for no setting that has one of these.
        what, way, where: of the symptom; empty for any. Of an inconsistency `what` is the kind of tensor that differs first, and `way` is read where a tensor is missing or has another shape.
            A `*` in `where` stands for a part of a file's name, since one cause may raise in each optimizer's file, and `**` for any place. Such an entry recognises a crash where its trigger set holds, too; it passes no setting over.
        needs: traits that the model must have.
        runs: its settings run all the same, since not all of them fail so; what it explains is not looked into.
        form: of the entry: 2 where a trigger is a list, 3 where `where` has a `*` or `runs` is written.

    Raises:
        ValueError: a list of values says nothing, or the entry is of another form than it says.
    """

    id: str
    library: str
    reason: str
    verdict: str
    versions: tuple[str, ...] = ()
    triggers: Parts = {}
    unless: Parts = {}
    what: str = ""
    way: str = ""
    where: str = ""
    needs: tuple[str, ...] = ()
    runs: bool = False
    form: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.form <= FORM:
            raise ValueError(f"{self.id}: form {self.form} is not known; this Proctor reads up to form {FORM}")
        if self.form < 3 and ("*" in self.where or self.runs):
            raise ValueError(f"{self.id}: {'runs' if self.runs else 'a * in where'} needs form = 3")
        for axis, values in self.triggers.items():
            if isinstance(values, Scalar):
                continue
            if self.form == 1:
                raise ValueError(f"{self.id}: triggers.{axis} is a list, which needs form = 2")
            if not values or any(values.count(v) > 1 for v in values):
                raise ValueError(f"{self.id}: triggers.{axis} must list one value or more, each of them once")

    @property
    def broad(self) -> bool:
        """Whether its settings run all the same: tensors that differ hide no others that differ earlier, and a wrapper alone names all that is drawn of it; a place by a pattern says where it was seen, not where it will be."""
        return self.runs or "*" in self.where or (self.verdict not in ("crash", "hang") and set(self.triggers) <= WIDE)

    def passes(self, setting: Point, traits: frozenset[str]) -> bool:
        """Whether it explains why a setting fails, before it has run."""
        return bool(self.triggers) and not self._apart(setting) and holds(self.triggers, setting) and set(self.needs) <= traits

    def _apart(self, setting: Point) -> bool:
        """Whether a setting has what it does not hold under."""
        return any(setting.get(name) in ((value,) if isinstance(value, Scalar) else value) for name, value in self.unless.items())

    def explains(self, symptom: Symptom, setting: Point, traits: frozenset[str], step: int = 1) -> bool:
        """Whether it explains a failure.

        Args:
            symptom: of the failure.
            setting, traits: that failed.
            step: in which tensors differ first; 0 is the first one, before which nothing was updated.
        """
        if self.verdict in ("crash", "hang"):
            if "*" in self.where:
                own = Symptom(self.verdict, self.what, self.way, symptom.where)
                return own == symptom and self._there(symptom.where) and (not self.triggers or self.passes(setting, traits))
            own = Symptom(self.verdict, self.what, self.way, self.where)
            return own == symptom or (not self.what and symptom.verdict == self.verdict and self.passes(setting, traits))
        holds_here = self.passes(setting, traits) or self._elsewhere(setting, traits)
        return symptom.verdict in ("inconsistent", "replicas") and holds_here and not (step == 0 and self._later(symptom))

    def _elsewhere(self, setting: Point, traits: frozenset[str]) -> bool:
        """Whether it is of the same operator, of which the same tensors are cut, in another way. Such a setting runs, since this one says nothing of it beforehand; where it fails, nobody looks for the cause again."""
        cuts = [name for name in self.triggers if axis_of(name).places]
        if not cuts or not self.needs or self._apart(setting) or any(setting.get(name) in (None, axis_of(name).choice.neutral) for name in cuts):
            return False
        return self.passes({**setting, **{name: _one(self.triggers[name]) for name in cuts}}, traits)

    def _there(self, where: str) -> bool:
        return re.fullmatch(".*".join("[^/:]*".join(map(re.escape, part.split("*"))) for part in self.where.split("**")), where) is not None

    def _later(self, symptom: Symptom) -> bool:
        """Whether it comes too late in a step for what differs: a gradient that is wrong in the first step is not explained by an update that is; nor one that is wrong by one that is missing."""
        if self.what not in KINDS or symptom.what not in KINDS:
            return False
        order = KINDS.index(symptom.what) - KINDS.index(self.what)
        return order < 0 or (order == 0 and self.way in MISSED and symptom.way != self.way)


class Finding(msgspec.Struct):
    """One signature.

    Attributes:
        id: of the signature.
        scenario: the smallest one that shows it.
        outcome: of that.
        triggers: minimal setting, the trigger set.
        needs: traits of the smallest model.
        found: setting and model that showed it first.
        count: scenarios that it explains.
        runs: that attribution and shrinking took.
        confirmed: "" until its script ran; then "yes", or why not.
        known: id of the known finding that it is; "" for a new one.
        culprit: where the oracle sees the programs part (`sessions.culprit`); "" where it was not asked.
        perhaps: id of what explains a smaller scenario that fails like this one, as with another optimizer: one cause, or two.
    """

    id: str
    scenario: Scenario
    outcome: Outcome
    triggers: Point
    needs: tuple[str, ...]
    found: Scenario
    count: int = 1
    runs: int = 0
    confirmed: str = ""
    known: str = ""
    culprit: str = ""
    perhaps: str = ""

    @property
    def denied(self) -> str:
        """Why it is not confirmed; "" where it is."""
        return "" if self.confirmed == "yes" else self.confirmed or "its script has not run yet; --resume runs it"

    def as_known(self, library: str, version: str, reason: str = "") -> Known:
        """The entry of a known list that it would be."""
        symptom = self.outcome.symptom or Symptom("inconsistent", "")
        crash = symptom.verdict in ("crash", "hang")
        short = ".".join(version.split("+")[0].split(".")[:2])
        return Known(
            id=self.id, library=library, versions=(short,), reason=reason or self.outcome.why[:200], verdict=symptom.verdict, triggers=self.triggers,
            what=symptom.what, way=symptom.way if crash or symptom.way in MISSED else "", where=symptom.where if crash else "", needs=self.needs,
        )


def holds(part: Parts, setting: Point) -> bool:
    """Whether a setting has all of a trigger set: one value of each list; any number of ranks above one will do where it names a number."""
    return all(_has(setting, k, v) for k, v in part.items())


def _one(value: Scalar | Sequence[Scalar]) -> Scalar:
    return value if isinstance(value, Scalar) else value[0]


def _has(setting: Point, axis: str, value: Scalar | Sequence[Scalar]) -> bool:
    if not isinstance(value, Scalar):
        return (setting[axis] if axis in setting else axis_of(axis).choice.neutral) in value
    return setting.get("world", 1) != 1 if axis == "world" and value != 1 else setting.get(axis) == value


def signature(symptom: Symptom, minimal: Point, subject: str = "", needs: Iterable[str] = ()) -> str:
    """Short name of a signature.

    Args:
        symptom: of the failure.
        minimal: the trigger set.
        subject: of the model (`ModelCode`).
        needs: traits of the smallest model: an inconsistency of others is another one.
    """
    crash = [symptom.verdict, symptom.what, symptom.way, symptom.where]
    words = crash if symptom.verdict in ("crash", "hang") else ["inconsistent", *triggers(minimal), *filter(None, [subject]), *needs]
    return hashlib.blake2b("\0".join(words).encode(), digest_size=4).hexdigest()


def needs(scenario: Scenario) -> tuple[str, ...]:
    """What is special about a model."""
    return tuple(sorted(model_code(scenario).traits - GENERAL))


def shipped(version: str, libraries: Iterable[str] = ("torch",)) -> list[Known]:
    """Known findings that come with Proctor, for a version of the library."""
    found: list[Known] = []
    for library in libraries:
        file = resources.files("proctor.oracle.fuzz").joinpath("known", f"{library}.toml")
        if file.is_file():
            found += [k for k in _parsed(file.read_bytes(), str(file)) if _holds_for(k, version)]
    return found


def library_of(finding: Finding) -> str:
    """Whose finding it is: the library of its axes, its wrapper and its model; torch where none of them is another's."""
    setting = finding.scenario.setting
    wrapper = wrappers().get(str(setting.get("wrapper", "none")))
    found = [template_of(finding.scenario.template).library, *(axis_of(name).library for name in setting), wrapper.library if wrapper else "torch"]
    return next((name for name in found if name != "torch"), "torch")


def read_known(path: Path, versions: Mapping[str, str]) -> list[Known]:
    """Known findings of a file, of libraries and versions that are here.

    Args:
        path: of the file.
        versions: library → version.

    Raises:
        OracleError: it cannot be read, or is no list of known findings.
    """
    try:
        return [k for k in _parsed(read_file(path, _MAX_BYTES), str(path)) if k.library in versions and _holds_for(k, versions[k.library])]
    except OSError as e:
        raise OracleError(f"{path}: {e.strerror or e}", hint="give a known.toml that a campaign wrote") from None


def _holds_for(known: Known, version: str) -> bool:
    return not known.versions or any(version == v or version.startswith((f"{v}.", f"{v}+")) for v in known.versions)


def _parsed(text: bytes, where: str) -> list[Known]:
    try:
        return msgspec.convert(tomllib.loads(text.decode()).get("known", []), list[Known])
    except UNREADABLE as e:
        raise OracleError(f"{where}: no list of known findings: {e}", hint="see docs/fuzz.md, Known findings") from None


def toml(entries: Iterable[Known]) -> str:
    """A list as TOML."""
    lines = []
    for known in entries:
        lines.append("[[known]]")
        for key, value in msgspec.to_builtins(known).items():
            if value and (key, value) != ("form", 1):
                lines.append(f"{key} = {_value(value)}")
        lines.append("")
    return "\n".join(lines)


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_value, value)) + "]"
    return msgspec.json.encode(value).decode()
