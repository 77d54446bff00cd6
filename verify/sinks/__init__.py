"""Where notices go: one file a kind of receiver, found by import.

A sink file declares a `SinkConfig` with the keys of its section in `page.toml`, and a `Sink` that turns a `Delivery`
into one request. It knows nothing of queues, retries, budgets or mutes (`verify/paging/`): it sends once and returns,
or raises `DeliveryError` that says whether to try again. Adding a receiver is one file here and one test file.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Final, Literal, TypeVar

import msgspec

from proctor.invariants.invariant import Severity, Tier
from proctor.verify.notice import Notice
from proctor.verify.sinks._secret import Secret

Reach = Literal["page", "ticket", "all"]

__all__ = ["Delivery", "Reach", "Secret", "Sink", "SinkConfig", "register", "registry"]


class SinkConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What every sink's section may say.

    Args:
        type: kind of receiver.
        tier: which notices it gets: those that deserve a page, those that do not, or all.
        min_severity: quieter notices are not sent.
        timeout_s: seconds until a receiver that says nothing counts as down.
    """

    type: str
    tier: Reach = "all"
    min_severity: Severity = Severity.WARNING
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not 0.1 <= self.timeout_s <= 120:
            raise ValueError("`timeout_s` must be from 0.1 to 120")

    def wants(self, tier: Tier, severity: Severity) -> bool:
        """Whether notices of this kind are for it."""
        return self.tier in ("all", tier.value) and severity.level >= self.min_severity.level


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """One notice on its way to one receiver.

    Args:
        notice: what to say.
        event_id: equal at every attempt of the same notice, so that a receiver can drop the second.
        at: epoch seconds of this attempt.
        opened: the notice that this receiver took as the beginning of the incident; None for the first.
        last: the latest that it took.
        outlives: the sender is about to end, and the incident is not over.
    """

    notice: Notice
    event_id: str
    at: float
    opened: Notice | None = None
    last: Notice | None = None
    outlives: bool = False


class Sink(ABC):
    """One receiver. `name` is its section's: what people call it in `page mute` and `page status`."""

    kind: ClassVar[str]  # the `type` of its section
    Config: ClassVar[type[SinkConfig]]
    interval_s: float = 0.0  # least time between two requests
    merges: ClassVar[bool] = True  # a repeated trigger updates the incident there and notifies nobody anew
    update_s: ClassVar[float] = 60.0  # least time between two updates of one incident
    resend_s: float = 0.0  # a firing incident is told again this often; 0: never
    resend_resolved_s: ClassVar[float] = 0.0  # an incident that is over is told again for so long
    acknowledges: ClassVar[bool] = False
    keeps_alive: ClassVar[bool] = False  # can carry the heartbeat

    def __init__(self, name: str, config: Any) -> None:  # Any: each sink narrows it to its own Config
        self.name, self.settings = name, config
        self.left_out = ""  # whom the last notice does not reach though it was taken, in words

    @abstractmethod
    def send(self, delivery: Delivery) -> None:
        """Hand over one notice; raises `DeliveryError`."""

    def change(self, summary: str, at: float, source: str) -> None:  # noqa: B027  most receivers know no changes
        """Tell of a planned change, such as a restart; raises `DeliveryError`."""

    def alive(self, delivery: Delivery, interval_s: float) -> None:
        """Say that the monitor lives; raises `DeliveryError`."""
        raise NotImplementedError(f"{self.kind} carries no heartbeat")

    def way(self) -> Callable[[str], str] | None:
        """For receivers that take a notice now and tell people later: before a test is sent, what follows it to people.

        Returns:
            a function that is given the incident's key after the test was taken, waits until people must have been told, and says who; it
            raises `DeliveryError` when nobody is told. `None`: what is taken is told.
        """
        return None


S = TypeVar("S", bound=Sink)

_SINKS: Final[dict[str, type[Sink]]] = {}


def register(cls: type[S]) -> type[S]:
    """Make a sink known by its `kind`."""
    if cls.kind in _SINKS:
        raise ValueError(f"two sinks are called {cls.kind!r}")
    _SINKS[cls.kind] = cls
    return cls


def registry() -> dict[str, type[Sink]]:
    """All sinks by type; imports every file of this folder once."""
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            importlib.import_module(f"{__name__}.{module.name}")
    return dict(_SINKS)
