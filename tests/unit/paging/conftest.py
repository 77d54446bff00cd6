from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.live.pages import Clock, FakeSink
from helpers.live.receivers import PagerDuty, Webhook

from proctor.verify.paging.config import Budget, PageConfig
from proctor.verify.paging.pager import Pager


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def pager_of(tmp_path: Path, clock: Clock, said: list[str]) -> Iterator[Callable[..., Pager]]:
    """Makes a pager without threads whose sinks are `FakeSink`s; `step(pager)` lets it work."""
    made: list[Pager] = []

    def make(*sinks: FakeSink, path: str = "verify/outbox.db", **config: Any) -> Pager:
        settings = PageConfig(sinks={}, **{"budget": Budget(digest_s=0), **config})
        pager = Pager(settings, tmp_path / path, now=clock, clock=clock, say=said.append, sinks=list(sinks))
        made.append(pager)
        return pager

    yield make
    for pager in made:
        pager.close(0.1)


@pytest.fixture
def pagerduty() -> Iterator[PagerDuty]:
    server = PagerDuty()
    yield server
    server.close()


@pytest.fixture
def webhook() -> Iterator[Webhook]:
    server = Webhook()
    yield server
    server.close()

