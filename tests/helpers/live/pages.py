"""Notices, a clock and a receiver in memory, for tests of paging."""

from __future__ import annotations

from typing import Any, ClassVar

from proctor.errors import DeliveryError
from proctor.invariants.invariant import Severity, Tier
from proctor.verify.notice import Action, Notice
from proctor.verify.paging.pager import Pager
from proctor.verify.sinks import Delivery, Sink, SinkConfig

START = 1_800_000_000.0


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now


def notice(key: str = "proctor:job:r1:dp", action: str = "trigger", **more: Any) -> Notice:
    """A page about one incident."""
    given: dict[str, Any] = {
        "tier": Tier.PAGE,
        "severity": Severity.ERROR,
        "title": "layers.3.norm.weight differs between ranks",
        "text": "Replicas stay identical.\nSince step 40.",
        "job": "job",
        "code": "PR101",
        "step": 40,
        "began": START,
        "at": START,
    }
    return Notice(action=Action(action), key=key, **{**given, **more})


class FakeConfig(SinkConfig, frozen=True, kw_only=True):
    pass


class FakeSink(Sink):
    """Takes everything, unless `down` says why not."""

    kind: ClassVar[str] = "fake"
    Config = FakeConfig
    acknowledges = True

    def __init__(self, name: str = "fake", *, merges: bool = True, **config: Any) -> None:
        super().__init__(name, FakeConfig(type="fake", **config))
        self.merges = merges  # type: ignore[misc]
        self.got: list[Delivery] = []
        self.down: DeliveryError | None = None
        self.tries = 0

    def send(self, delivery: Delivery) -> None:
        self.tries += 1
        if self.down is not None:
            raise self.down
        self.got.append(delivery)

    @property
    def told(self) -> list[tuple[str, str]]:
        return [(d.notice.action.value, d.notice.key) for d in self.got]


def step(pager: Pager, times: int = 50) -> None:
    """Let the keeper and every sender work, without waiting."""
    pager.tick()
    for sender in pager.senders:
        for _ in range(times):
            if sender.step() > 0:
                break
