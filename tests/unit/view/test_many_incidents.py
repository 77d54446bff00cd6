"""Two thousand incidents in a browser: true counts, a page at a time, found by words, also on a telephone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.live.browser import CHROMIUM, browsing
from helpers.processes import process
from helpers.runs import write_run

from proctor.verify.view.events import EventLog, IncidentEvent
from proctor.verify.view.feed import MAX_INCIDENTS, Feed

MANY = 2000


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "run", [process()])
    log = EventLog(run)
    for i in range(MANY):
        state = ("firing", "firing", "firing", "suspected", "resolved")[i % 5]
        details = {"Where": f"train_{i}.py:17", "Seen": "another value on this rank " * 5}
        log.append(IncidentEvent(key=f"k{i}", title=f"layers.{i}.weight differs", state=state, began=1e9 + i, first_step=i, details=details))
    return run


def test_none_of_them_is_forgotten(run: Path) -> None:
    assert MAX_INCIDENTS >= 2 * MANY
    feed = Feed(run)
    feed.poll()
    reader = feed.join(None)
    assert reader is not None
    texts = []
    while not reader.queue.empty():
        texts.append(reader.queue.get_nowait() or "")
    assert sum("event: incident" in text for text in texts) == MANY


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [1200, 390])
def test_a_browser_shows_true_counts_and_a_page_at_a_time(serve: Callable[..., Any], run: Path, tmp_path: Path, width: int) -> None:
    with browsing(tmp_path / "browser", f"http://127.0.0.1:{serve(run).port}/", width) as page:
        assert page.until("document.getElementById('live-page').textContent.endsWith('of 2,000')")
        assert page.ask("document.getElementById('live-title').textContent") == "1,200 incidents are firing, 400 suspected, 400 over"
        assert page.ask("document.querySelectorAll('#live-incidents li').length") == 25
        assert page.ask("document.querySelector('#live-incidents').offsetHeight") < 4000
        assert page.ask("document.documentElement.scrollWidth") <= width
        page.ask("document.getElementById('live-on').click()")
        assert page.ask("document.getElementById('live-page').textContent") == "26–50 of 2,000"
        page.ask("var f = document.getElementById('live-find'); f.value = 'train_1234.py'; f.dispatchEvent(new Event('input'))")
        assert page.ask("document.getElementById('live-page').textContent") == "1–1 of 1"
        assert page.ask("document.querySelector('#live-incidents details').open") is False
        page.ask("document.querySelector('#live-incidents summary').click()")
        assert page.until("document.querySelector('#live-incidents details').open")
        EventLog(run).append(IncidentEvent(key="new", title="another", state="suspected", began=2e9))
        assert page.until("document.getElementById('live-title').textContent.includes('401 suspected')")
        assert page.ask("document.querySelector('#live-incidents details').open"), "what a reader opened stays open"
        assert page.ask("Array.from(document.querySelectorAll('th')).every(th => th.hasAttribute('scope'))")
