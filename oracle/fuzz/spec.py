"""What one run of a campaign is: a model, an input and a setting, as JSON and nothing else.

    Scenario(template="chain", model={"layers": ["linear", "layernorm"]}, input={"batch": 5},
             setting={"world": 3, "wrapper": "fsdp2", "optimizer": "Adam"})

Values that are left out are the neutral ones. A scenario of a file is checked against the templates and axes before any
source text is made of it, so that a file from others can say nothing but a point of our own spaces.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import OracleError
from proctor.invariants.files import UNREADABLE, read_file
from proctor.oracle.fuzz.space import Choice, Point, Value, check

VERSION: Final = 1  # 1: first
MAX_BYTES: Final = 1 << 20  # of a scenario file

# What a generated input has; every template adds what is its own.
INPUT: Final = (
    Choice("batch", (2, 4, 3, 6, 8, 7, 12)),
    Choice("steps", (2, 1, 3)),
    Choice("seed", tuple(range(64))),
)


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One model on one input under one setting.

    Attributes:
        template: name of the model's template.
        model: a point of the template's choices.
        input: a point of `INPUT`.
        setting: a point of the axes.
        version: of this form.
    """

    template: str
    model: Point = {}
    input: Point = {}
    setting: Point = {}
    version: int = VERSION

    @property
    def world(self) -> int:
        """Ranks of the candidate."""
        return int(str(self.setting.get("world", 1)))

    def given(self, name: str) -> Value:
        """A value of the input, neutral ones too."""
        return self.input.get(name, next(c.neutral for c in INPUT if c.name == name))

    def with_setting(self, setting: Point) -> Scenario:
        """The same model and input under another setting."""
        return msgspec.structs.replace(self, setting=setting)

    def key(self) -> str:
        """Short name of exactly this scenario."""
        return hashlib.blake2b(encode(self), digest_size=8).hexdigest()

    def pair(self) -> str:
        """Short name of its model and input."""
        return self.with_setting({}).key()


def encode(scenario: Scenario) -> bytes:
    """As JSON, keys in order."""
    return msgspec.json.encode(scenario, order="sorted")


def decode(text: bytes, where: str) -> Scenario:
    """From JSON.

    Args:
        text: the JSON.
        where: file, for the error.

    Raises:
        OracleError: it is no scenario of this version, or its values lie outside the known spaces.
    """
    from proctor.oracle.fuzz.axes import all_axes
    from proctor.oracle.fuzz.models import template_of

    try:
        scenario = msgspec.json.decode(text, type=Scenario)
    except (msgspec.ValidationError, msgspec.DecodeError) as e:
        raise OracleError(f"{where}: no scenario: {e}", hint="give a file that `proctor oracle fuzz` wrote") from None
    if scenario.version != VERSION:
        raise OracleError(f"{where}: version {scenario.version}, this Proctor reads {VERSION}", hint="run the campaign again")
    check(template_of(scenario.template).choices, scenario.model, f"{where}: model")
    check(INPUT, scenario.input, f"{where}: input")
    check([a.choice for a in all_axes()], scenario.setting, f"{where}: setting")
    return scenario


def read(path: Path) -> Scenario:
    """A scenario's file; of a finding's file, the scenario in it.

    Raises:
        OracleError: it cannot be read or is none.
    """
    try:
        text = read_file(path, MAX_BYTES)
    except OSError as e:
        raise OracleError(f"{path}: {e.strerror or e}", hint="give a finding's scenario.json") from None
    try:
        inner = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    except UNREADABLE as e:
        raise OracleError(f"{path}: no scenario: {e}", hint="give a file that `proctor oracle fuzz` wrote") from None
    return decode(bytes(inner.get("scenario", msgspec.Raw(text))), str(path))
