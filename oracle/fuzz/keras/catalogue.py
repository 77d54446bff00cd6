"""What was read off Keras: its optimizers, their arguments and defaults.

`catalogue.json` is what the server answered for the version that is named in it, so that scenarios can be read where there is no Keras. A campaign asks the
library that it runs, and calls `use` before anything is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import resources
from typing import Final

import msgspec

Default = None | bool | int | float | str | list[float]

# What has an axis of its own, or is no part of an update.
_OWN: Final = (
    "learning_rate", "name", "clipnorm", "clipvalue", "global_clipnorm", "use_ema", "ema_momentum", "ema_overwrite_frequency", "gradient_accumulation_steps", "loss_scale_factor",
)  # fmt: skip
_NONES: Final = {"weight_decay": "0.05", "exclude_layers": "['l1']"}
_WHOLE: Final = {"ns_steps": "3", "warmup_steps": "2"}


class Catalogue(msgspec.Struct, frozen=True):
    """What the library says of itself.

    Attributes:
        versions: of Keras and TensorFlow.
        optimizers: class → argument → default; "required" where there is none.
        compile: argument of `Model.compile` → default.
    """

    versions: dict[str, str]
    optimizers: dict[str, dict[str, Default]]
    compile: dict[str, Default]

    def classes(self) -> tuple[str, ...]:
        """Optimizers that update weights themselves: others hold optimizers."""
        return tuple(sorted(name for name, given in self.optimizers.items() if "learning_rate" in given))

    def options(self) -> tuple[str, ...]:
        """`name=value` of every argument of every optimizer that can be changed."""
        found = {f"{name}={new}" for cls in self.classes() for name, default in self.optimizers[cls].items() if (new := changed(name, default)) is not None}
        return tuple(sorted(found))

    def has(self, cls: str, option: str) -> bool:
        """Whether an optimizer has an option."""
        name, _, new = option.partition("=")
        given = self.optimizers.get(cls, {})
        return name in given and changed(name, given[name]) == new


def changed(name: str, default: Default) -> str | None:
    """Another value of an argument, as text; None if we know of none."""
    if name in _OWN:
        return None
    if isinstance(default, bool):
        return repr(not default)
    if name in _WHOLE:
        return _WHOLE[name]
    if isinstance(default, int | float):
        return repr(default / 2) if default else "0.1"
    return _NONES.get(name) if default is None else None


@cache
def shipped() -> Catalogue:
    """The one that comes with Proctor."""
    return read(resources.files("proctor.oracle.fuzz.keras").joinpath("catalogue.json").read_bytes())


def read(text: bytes) -> Catalogue:
    """A catalogue from JSON."""
    return msgspec.json.decode(text, type=Catalogue)


_used: list[Catalogue] = []
_listeners: list[Callable[[], None]] = []


def current() -> Catalogue:
    """The one that axes go by."""
    return _used[-1] if _used else shipped()


def use(catalogue: Catalogue) -> None:
    """Axes go by this one from now on."""
    _used.append(catalogue)
    for listener in _listeners:
        listener()


def listen(listener: Callable[[], None]) -> None:
    """Call something whenever another catalogue is used."""
    _listeners.append(listener)
