from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers.processes import BACK, ZERO, process
from helpers.relations import ALL, rule
from helpers.runs import write_run

from proctor.cli import main
from proctor.invariants import relations
from proctor.invariants.invariant import Invariant
from proctor.invariants.pack import Pack, Provenance, write_pack


@pytest.fixture(autouse=True)
def _test_relations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The relations of the tests, and no others, are known."""
    monkeypatch.setattr(relations, "registry", lambda: dict(ALL))
    import proctor.verify.checker

    monkeypatch.setattr(proctor.verify.checker, "registry", lambda: dict(ALL))
    monkeypatch.delenv("PROCTOR_DEBUG", raising=False)
    return


@pytest.fixture
def happens() -> Invariant:
    return rule("test_happens", first=ZERO, then=BACK)


@pytest.fixture
def pack(tmp_path: Path, happens: Invariant) -> Path:
    path = tmp_path / "a pack.json"
    write_pack(Pack([happens], Provenance("proctor 0", "2.13", 3, ["a.py", "b.py"], 99)), path)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write_run(tmp_path / "good run ✓", [process()])


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    return write_run(tmp_path / "bad run ✗", [process(lost_from=2)])


@pytest.fixture
def proctor(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command line; exit code, stdout and stderr."""

    def _proctor(*args: str | Path) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(a) for a in args])
        out, err = capsys.readouterr()
        return code, out, err

    return _proctor


@pytest.fixture
def fresh() -> Callable[[str], str]:
    """Run Python source in a fresh interpreter; its stdout."""

    def _fresh(source: str) -> str:
        return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True).stdout

    return _fresh
