"""Templates of models: one file each, which registers itself; this module finds them by listing the folder.

A template says what varies (`choices`) and writes the model down as source text (`code`). The text is what ranks execute and
what a finding's stand-alone script contains, so the two cannot part. All models are small, without dropout unless said,
and give an output that nothing squashes.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache
from typing import ClassVar

import msgspec

from proctor.errors import OracleError
from proctor.oracle.fuzz.space import Choice, Point, full


class ModelCode(msgspec.Struct, frozen=True):
    """A model as text.

    Attributes:
        net: lines at top level that define the class `Net`.
        x: expression: the tuple of inputs, rows first; `n` is the batch, `g` a generator.
        y: shape of the output, without its rows.
        after: lines at the level of a function that change `net` once it is made (what is frozen).
        units: expressions of the modules that FSDP shards by themselves.
        tensor_parallel: name of a module → "linear" or "embedding": what tensor parallelism can cut.
        pairs: names of linear layers that follow one another with nothing between them that mixes features.
        sequence: name of a module → source text of the style by which what lies between layers stays cut along rows or tokens; "" is the whole model; empty for
            models that have layers which no style covers.
        cut_outputs: names of linear layers whose output may stay cut: a head before a loss over a cut vocabulary.
        stages: expressions of modules that make the model when called one after the other, in parts of which each has parameters; empty if none do.
        traits: what constraints and reports ask about ("batchnorm", "sparse", "tied", "unused", "frozen", …).
        subject: the one operator that the model is made of; an inconsistency of another one is another finding. "" for models of layers.
    """

    net: tuple[str, ...]
    x: str
    y: tuple[int, ...]
    after: tuple[str, ...] = ()
    units: tuple[str, ...] = ()
    tensor_parallel: dict[str, str] = {}
    pairs: tuple[tuple[str, str], ...] = ()
    sequence: dict[str, str] = {}
    cut_outputs: tuple[str, ...] = ()
    stages: tuple[tuple[str, ...], ...] = ()
    traits: frozenset[str] = frozenset()
    subject: str = ""


class Template(ABC):
    """A family of models.

    Attributes:
        name: of the family.
        choices: what varies.
        library: whose models they are.
        apart: it has wrappers of its own, and no library's wrapper takes it.
        besides: its library is given torch's models as well.
    """

    name: ClassVar[str]
    choices: ClassVar[tuple[Choice, ...]]
    library: ClassVar[str] = "torch"
    apart: ClassVar[bool] = False
    besides: ClassVar[bool] = False

    def code(self, point: Point) -> ModelCode:
        """Write a model.

        Args:
            point: of `choices`.
        """
        return self.write(full(self.choices, point))

    @abstractmethod
    def write(self, point: Point) -> ModelCode:
        """Write a model, given every value."""


_TEMPLATES: dict[str, Template] = {}


def register(cls: type[Template]) -> type[Template]:
    """Class decorator: makes a template known."""
    _TEMPLATES[cls.name] = cls()
    return cls


@cache
def _load() -> None:
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")
    importlib.import_module("proctor.oracle.fuzz.keras.models")


def all_templates(library: str | None = None) -> list[Template]:
    """Every template, of one library or of all, in order of names."""
    _load()
    return [t for _, t in sorted(_TEMPLATES.items()) if library in (None, t.library)]


def templates_for(libraries: Sequence[str]) -> list[Template]:
    """Templates that campaigns of some libraries draw from; a library that has no models of its own (accelerate) is given torch's."""
    found = []
    for library in libraries:
        own = all_templates(library)
        found += own
        if not own or any(t.besides for t in own):
            found += [t for t in all_templates("torch") if not t.apart]
    return found


def template_of(name: str) -> Template:
    """A template by name.

    Raises:
        OracleError: there is none of that name.
    """
    _load()
    if name not in _TEMPLATES:
        raise OracleError(f"there is no template {name!r}", hint=f"templates: {', '.join(sorted(_TEMPLATES))}")
    return _TEMPLATES[name]
