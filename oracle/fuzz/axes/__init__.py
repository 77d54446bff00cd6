"""Axes of settings: one file each, which registers itself; this module finds them by listing the folder.

An axis has values, the neutral one first. *Program* axes (optimizer, clipping, precision) belong to what is computed: the
reference has the same value. The others say how it is computed (world, wrapper, sharding, accumulation): the reference has the neutral
value. `apply` writes a value into the draft of the training program. Values are read off the library where it can be asked.

What does not combine, what is not expected to be equal, and why, is data: the `Rule`s of each axis.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from typing import ClassVar, Literal

import msgspec

from proctor.errors import OracleError
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

ALONE = ("keras",)  # libraries that are not torch underneath

Effect = Literal["invalid", "different", "approximate"]


class Rule(msgspec.Struct, frozen=True):
    """What is known of settings before they run.

    Attributes:
        effect: "invalid": it is no program, and is not run; "different": the library does not promise equality; "approximate": equality
            within `tolerance`.
        why: the reason, one sentence.
        when: axis → values; all of them must match.
        unless: axis → values; the rule is off where one of them matches.
        traits: of the model, and facts (`proctor.oracle.fuzz.facts`); all must be there.
        lacks: traits and facts of which none may be there.
        tolerance: relative to the largest element of a tensor.
    """

    effect: Effect
    why: str
    when: dict[str, tuple[Value, ...]] = {}
    unless: dict[str, tuple[Value, ...]] = {}
    traits: frozenset[str] = frozenset()
    lacks: frozenset[str] = frozenset()
    tolerance: float = 0.0

    def matches(self, setting: Mapping[str, Value], traits: frozenset[str]) -> bool:
        """Whether it speaks of a setting.

        Args:
            setting: with every axis.
            traits: of the model.
        """
        return self.of(traits) and self.fits(setting)

    def fits(self, setting: Mapping[str, Value]) -> bool:
        """Whether it speaks of a setting with every axis, whatever the model is."""
        for axis, values in self.when.items():
            if setting.get(axis) not in values:
                return False
        return not any(setting.get(axis) in values for axis, values in self.unless.items())

    def of(self, traits: frozenset[str]) -> bool:
        """Whether it speaks of a model."""
        return self.traits <= traits and not self.lacks & traits


def fixed(why: str, traits: frozenset[str], values: Mapping[str, tuple[Value, ...]]) -> tuple[Rule, ...]:
    """Rules by which models with some traits have no other values of some axes.

    Args:
        why: the reason.
        traits: of the models.
        values: axis → what it may have.
    """
    return tuple(Rule("invalid", why, unless={axis: given}, traits=traits) for axis, given in values.items())


def not_of_calls(values: Mapping[str, tuple[Value, ...]]) -> tuple[Rule, ...]:
    """Rules by which models of one expression or one collective have no other values of some axes: the call is what is looked at.

    Args:
        values: axis → what it may have.
    """
    subjects = {"operator": "expression", "collective": "collective", "exchange": "collective"}
    return tuple(rule for trait, subject in subjects.items() for rule in fixed(f"the {subject} is what is looked at", frozenset({trait}), values))


class Axis(ABC):
    """One thing that settings differ in.

    Attributes:
        choice: name and values.
        program: whether the reference has the same value.
        order: axes with small numbers write into the draft first.
        rules: what is known of it.
        costs: value as text → what it adds to the time of a setting, in times of a plain one (some 30 ms a rank); nothing for values that are not named.
        sorts: whether its values are implementations of their own, as optimizers are: what fails under one may be sound under another.
        places: whether its values say how a tensor of one operator is cut: what is wrong there is the operator's, and is shown by one cut as by another.
    """

    choice: Choice
    program: ClassVar[bool] = False
    order: ClassVar[int] = 50
    library: ClassVar[str] = "torch"
    rules: tuple[Rule, ...] = ()
    costs: ClassVar[Mapping[str, float]] = {}
    sorts: ClassVar[bool] = False
    places: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """Of the key in a setting."""
        return self.choice.name

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """Why a value cannot be combined so; "" if it can. For what `rules` cannot say."""
        return ""

    def cost(self, value: Value) -> float:
        """What a value adds to the time of a setting, as in `costs`."""
        return self.costs.get(str(value), 0.0)

    @abstractmethod
    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Write a value that is not neutral into the draft.

        Args:
            value: of `choice`.
            draft: of the training program.
            setting: with every axis.
        """


class OfWrapper(Axis):
    """An option of some wrappers, which read it themselves; it is no setting without one of them.

    Attributes:
        of: names of the wrappers.
        absent: what is said where it has another one.
    """

    order = 35
    of: ClassVar[tuple[Value, ...]]
    absent: ClassVar[str]

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return "" if setting["wrapper"] in self.of else self.absent

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: the wrapper reads it."""


class Wrapper(ABC):
    """A way to distribute a model: a value of the axis `wrapper`.

    Attributes:
        name: the value.
        library: whose it is.
        rules: what is known of it.
        asks: what programs must have to be wrapped so, one of these at a time, by chance; empty for nothing.
        besides: whether models of its library are put into torch's wrappers, too; so are those of a library without a wrapper.
        usual: values that half of its rows have where they fit: without them little is seen of what it does.
        named: whether the oracle finds parameters under it by their names: not flat ones, tables within a kernel, stages that are models of their own.
    """

    name: ClassVar[str]
    asks: ClassVar[tuple[Point, ...]] = ()
    usual: ClassVar[Point] = {}
    named: ClassVar[bool] = True
    besides: ClassVar[bool] = False
    library: ClassVar[str] = "torch"
    rules: ClassVar[tuple[Rule, ...]] = ()

    def invalid(self, setting: Point, traits: frozenset[str]) -> str:
        """Why it cannot wrap a model so; "" if it can. For what `rules` cannot say."""
        return ""

    @abstractmethod
    def apply(self, draft: Draft, setting: Point) -> None:
        """Write it into the draft: how the model is wrapped, which rows a rank has, what the loss is multiplied by."""


_AXES: dict[str, Axis] = {}
_WRAPPERS: dict[str, Wrapper] = {}


def register(cls: type[Axis]) -> type[Axis]:
    """Class decorator: makes an axis known."""
    axis = cls()
    _AXES[axis.name] = axis
    return cls


def register_wrapper(cls: type[Wrapper]) -> type[Wrapper]:
    """Class decorator: makes a wrapper known."""
    _WRAPPERS[cls.name] = cls()
    return cls


@cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        if module.name not in ("draft", "wrapper"):
            importlib.import_module(f"{__name__}.{module.name}")
    importlib.import_module("proctor.oracle.fuzz.keras.axes")
    importlib.import_module(f"{__name__}.wrapper")  # its values are the wrappers of all other files


def all_axes(libraries: Sequence[str] | None = None) -> list[Axis]:
    """Every axis of some libraries, in the order in which they write."""
    _load()
    found = (a for a in _AXES.values() if libraries is None or a.library in libraries)
    return sorted(found, key=lambda a: (a.order, a.name))


def axes_for(libraries: Sequence[str]) -> list[Axis]:
    """Axes of a campaign: a library's models are trained with torch's optimizers, but for those of a library that has its own of everything (`ALONE`)."""
    if not set(libraries) & set(ALONE):
        return all_axes(("torch", *libraries))
    return [a for a in all_axes() if a.library in libraries or a.name in ("world", "wrapper")]


def wrappers() -> dict[str, Wrapper]:
    """Every wrapper by name."""
    return _WRAPPERS


def axis_of(name: str) -> Axis:
    """An axis by name.

    Raises:
        OracleError: there is none of that name.
    """
    _load()
    if name not in _AXES:
        raise OracleError(f"there is no axis {name!r}", hint=f"axes: {', '.join(sorted(_AXES))}")
    return _AXES[name]


@cache
def all_rules() -> tuple[Rule, ...]:
    """What all axes and wrappers know."""
    return tuple(r for axis in all_axes() for r in axis.rules) + tuple(r for w in _WRAPPERS.values() for r in w.rules)


@cache
def _neutral() -> Point:
    return {a.name: a.choice.neutral for a in all_axes()}


def whole(setting: Point) -> Point:
    """A setting with every axis."""
    return {**_neutral(), **setting}


def program_of(setting: Point) -> Point:
    """The reference's setting: what belongs to the program."""
    return {k: v for k, v in setting.items() if axis_of(k).program}


def why_invalid(setting: Point, traits: frozenset[str]) -> str:
    """Why a setting is no program for a model; "" if it is one."""
    given = whole(setting)
    by_value, by_axis, always = _forbidding(traits)
    rules = list(always)
    for name in setting:
        rules += by_axis.get(name, ())
    for name, value in setting.items():
        rules += () if isinstance(value, list) else by_value.get((name, value), ())
    for rule in rules:
        if rule.fits(given):
            return rule.why
    asking = _asking()
    return next((why for name, value in setting.items() if name in asking and (why := asking[name].invalid(value, given, traits))), "")


@cache
def _asking() -> dict[str, Axis]:
    """Axes that forbid more than their rules do."""
    return {a.name: a for a in all_axes() if type(a).invalid is not Axis.invalid}


@lru_cache(256)
def _forbidding(traits: frozenset[str]) -> tuple[dict[tuple[str, Value], list[Rule]], dict[str, list[Rule]], list[Rule]]:
    """Rules of a model by a value that is not neutral and that they ask for; by an axis that they ask not to be neutral; and the others.

    Drawing the rows of one pair asks for fourteen thousand settings, most of which have five values that are not neutral.
    """
    by_value: dict[tuple[str, Value], list[Rule]] = {}
    by_axis: dict[str, list[Rule]] = {}
    always: list[Rule] = []
    for rule in all_rules():
        if rule.effect != "invalid" or not rule.of(traits):
            continue
        asked = next((a for a, values in rule.when.items() if _neutral()[a] not in values), "")
        off = next((a for a, values in rule.unless.items() if _neutral()[a] in values), "")
        for value in rule.when.get(asked, ()):
            by_value.setdefault((asked, value), []).append(rule)
        if not asked and off:
            by_axis.setdefault(off, []).append(rule)
        elif not asked:
            always.append(rule)
    return by_value, by_axis, always


def declared(setting: Point, traits: frozenset[str]) -> list[Rule]:
    """What is declared of a setting that is a program: differences and approximations."""
    given = whole(setting)
    return [r for r in all_rules() if r.effect != "invalid" and r.matches(given, traits)]
