"""Options of the whole suite. The place of this file puts its folder on the path: `from helpers.runs import write_run`."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# A change is judged by what it did, not by what chance drew: `--hypothesis-profile=default` draws anew (`make laws`).
settings.register_profile("suite", derandomize=True, deadline=None)
settings.load_profile("suite")

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # thousands of processes of tests would compile every module again
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="proctor-tests-")  # what commands remember is the user's
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's background job; programs of tests would inherit it, and Ctrl-C would not reach them
    signal.signal(signal.SIGINT, signal.default_int_handler)
gc.set_threshold(10_000, 10, 10)  # a full collection walks all that thousands of tests hold
os.environ.pop("COLUMNS", None)  # what is printed is as wide as into a file, also where a terminal or a runner says its width


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `slow` run with PROCTOR_SLOW=1 (`make test-slow`)."""
    if os.environ.get("PROCTOR_SLOW"):
        return
    skip = pytest.mark.skip(reason="set PROCTOR_SLOW=1 to run tests that take long")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


ROOT = Path(__file__).parent.parent
BEFORE = pytest.StashKey[set[str]]()
LEFT_BY_TOOLS = {".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", ".import_linter_cache", ".coverage", "__pycache__"}


def pytest_sessionstart(session: pytest.Session) -> None:
    """Note what lies at the top of the repository: tests write into folders of their own."""
    session.config.stash[BEFORE] = {path.name for path in ROOT.iterdir()}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail where a test wrote there: it would be committed with the next change."""
    if hasattr(session.config, "workerinput"):
        return  # of xdist: the process that started it looks
    before = session.config.stash[BEFORE]
    left = {path.name for path in ROOT.iterdir()} - before - LEFT_BY_TOOLS
    if left:
        sys.stderr.write(f"\nERROR: tests left {', '.join(sorted(left))} at the top of the repository\n")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
