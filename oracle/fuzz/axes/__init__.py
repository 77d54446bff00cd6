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


class Axis(ABC):
    """One thing that settings differ in.

    Attributes:
        choice: name and values.
        program: whether the reference has the same value.
        order: axes with small numbers write into the draft first.
        rules: what is known of it.
    """

    choice: Choice
    program: ClassVar[bool] = False
    order: ClassVar[int] = 50
    library: ClassVar[str] = "torch"
    rules: tuple[Rule, ...] = ()

    @property
    def name(self) -> str:
        """Of the key in a setting."""
        return self.choice.name

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """Why a value cannot be combined so; "" if it can. For what `rules` cannot say."""
        return ""

    @abstractmethod
    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Write a value that is not neutral into the draft.

        Args:
            value: of `choice`.
            draft: of the training program.
            setting: with every axis.
        """


class Wrapper(ABC):
    """A way to distribute a model: a value of the axis `wrapper`."""

    name: ClassVar[str]
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
    importlib.import_module(f"{__name__}.wrapper")  # its values are the wrappers of all other files


def all_axes(libraries: Sequence[str] | None = None) -> list[Axis]:
    """Every axis of some libraries, in the order in which they write."""
    _load()
    found = (a for a in _AXES.values() if libraries is None or a.library in libraries)
    return sorted(found, key=lambda a: (a.order, a.name))


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
    indexed, always = _forbidding(traits)
    for rule in always:
        if rule.fits(given):
            return rule.why
    for one in setting.items():
        for rule in indexed.get(one, ()) if not isinstance(one[1], list) else ():
            if rule.fits(given):
                return rule.why
    return next((why for name, value in setting.items() if (why := axis_of(name).invalid(value, given, traits))), "")


@lru_cache(256)
def _forbidding(traits: frozenset[str]) -> tuple[dict[tuple[str, Value], list[Rule]], list[Rule]]:
    """Rules of a model by a value that is not neutral and that they ask for, and those that ask for none: drawing rows asks for thousands of settings."""
    indexed: dict[tuple[str, Value], list[Rule]] = {}
    always = []
    for rule in all_rules():
        if rule.effect != "invalid" or not rule.of(traits):
            continue
        axis = next((a for a, values in rule.when.items() if _neutral()[a] not in values), "")
        if not axis:
            always.append(rule)
        for value in rule.when.get(axis, ()):
            indexed.setdefault((axis, value), []).append(rule)
    return indexed, always


def declared(setting: Point, traits: frozenset[str]) -> list[Rule]:
    """What is declared of a setting that is a program: differences and approximations."""
    given = whole(setting)
    return [r for r in all_rules() if r.effect != "invalid" and r.matches(given, traits)]
