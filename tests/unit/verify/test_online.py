from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from helpers.loops import loop
from helpers.runs import write_run

from proctor.errors import TraceError
from proctor.infer.engine import infer
from proctor.invariants.pack import Pack
from proctor.invariants.relations import registry
from proctor.invariants.schema import TABLES
from proctor.invariants.trace import Trace, read_stream
from proctor.verify.checker import check
from proctor.verify.online import OnlineChecker

NAMES = ("contain", "sequence")
KNOWN = {name: registry()[name] for name in NAMES}


@pytest.fixture(scope="module")
def pack(tmp_path_factory: pytest.TempPathFactory) -> Pack:
    folder = tmp_path_factory.mktemp("healthy")
    paths = [write_run(folder / f"run{i}", [loop(steps=12)]) for i in range(2)]
    return Pack(infer(Trace.load(paths), list(KNOWN.values()), strict=True)[0])


def by_step(path: Path) -> Iterator[tuple[str, dict[str, pa.Table], dict[str, Any]]]:
    """Records of a run as they are written: all of a step, process by process."""
    made: dict[int, list[tuple[str, dict[str, pa.Table], dict[str, Any]]]] = {}
    for folder in sorted((path / "procs").iterdir()):
        info = json.loads((folder / "process.json").read_bytes())
        tables = {name: read_stream(folder / f"{name}.arrow", name)[0] for name in TABLES}
        steps = dict(zip(tables["context"]["ctx"].to_pylist(), tables["context"]["step"].to_pylist(), strict=True))
        yield folder.name, {"names": tables["names"]}, info
        for step in sorted(set(steps.values())):
            part = {}
            for name in ("context", "calls", "states"):
                part[name] = tables[name].filter(pa.array([steps[c] == step for c in tables[name]["ctx"].to_pylist()]))
            made.setdefault(step, []).append((folder.name, part, info))
    for step in sorted(made):
        yield from made[step]


def test_a_violation_is_told_a_few_steps_after_it_happened(tmp_path: Path, pack: Pack) -> None:
    path = write_run(tmp_path / "run", [loop(steps=60, skip={20: ["backward"]})])
    checker = OnlineChecker([pack], relations=KNOWN)
    told = []
    for process, records, info in by_step(path):
        now = max(records["context"]["step"].to_pylist(), default=-1) if "context" in records else -1
        told += [(now, v) for v in checker.feed(process, records, info)]
    assert told and all(v.step == 20 for _, v in told)
    assert max(now for now, _ in told) <= 20 + 2 * 8 + 4
    assert {v.id for v in checker.finish().violations} == {v.id for _, v in told}


@pytest.mark.parametrize("keep", [10**6, 50])
def test_a_run_that_is_too_long_to_keep_has_the_verdict_of_its_windows(tmp_path: Path, pack: Pack, keep: int) -> None:
    path = write_run(tmp_path / "run", [loop(steps=90, skip={50: ["zero_grad"]}, clears=True)])
    checker = OnlineChecker([pack], relations=KNOWN, keep_records=keep)
    most = 0
    for process, records, info in by_step(path):
        checker.feed(process, records, info)
        most = max(most, sum(live.rows for live in checker._live.values()))
    result, offline = checker.finish(), check(Trace.load([path]), [pack], relations=KNOWN)
    assert {v.id for v in result.violations} == {v.id for v in offline.violations} != set()
    assert (result.checked, result.unknown) == (offline.checked, offline.unknown)
    if keep == 50:
        assert most < 250 and any("windows" in note for note in result.notes)


def test_nothing_is_judged_while_a_rank_has_not_come(tmp_path: Path, pack: Pack) -> None:
    path = write_run(tmp_path / "run", [loop(steps=30, skip={3: ["backward"]}), loop(steps=30)])
    checker = OnlineChecker([pack], relations=KNOWN)
    first = [c for c in by_step(path) if c[0].startswith("0-")]
    assert not any(checker.feed(*chunk) for chunk in first)
    rest = [c for c in by_step(path) if c[0].startswith("1-")]
    assert any(checker.feed(*chunk) for chunk in rest)


def test_a_rank_that_hangs_is_not_waited_for_for_ever(tmp_path: Path, pack: Pack) -> None:
    path = write_run(tmp_path / "run", [loop(steps=60, skip={3: ["backward"]}), loop(steps=60)])
    checker = OnlineChecker([pack], relations=KNOWN, patience=16)
    found = [v for chunk in by_step(path) if chunk[0].startswith("0-") for v in checker.feed(*chunk)]
    assert {v.step for v in found} == {3}


def test_foreign_records_are_refused() -> None:
    checker = OnlineChecker([], relations=KNOWN)
    with pytest.raises(TraceError, match="calls"):
        checker.feed("0-1", {"calls": pa.table({"x": [1]})})
    with pytest.raises(TraceError, match="secrets"):
        checker.feed("0-1", {"secrets": pa.table({"x": [1]})})
