"""A process that will be forked has one thread, whatever is installed beside torch."""

from __future__ import annotations

import sys
import types

import pytest

pytest.importorskip("torch")

from proctor.oracle.fuzz.running import warm


def test_tqdm_begins_no_thread(monkeypatch):
    class Bar:
        monitor_interval = 10

    fake = types.ModuleType("tqdm")
    fake.tqdm = Bar
    monkeypatch.setitem(sys.modules, "tqdm", fake)
    warm._without_monitor()
    assert Bar.monitor_interval == 0


def test_tqdm_need_not_be_there(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    warm._without_monitor()
