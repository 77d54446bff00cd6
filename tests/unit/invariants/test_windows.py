from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import polars as pl
import pytest
from helpers.loops import loop
from helpers.runs import write_run
from helpers.traces import runs

from proctor.infer import shards
from proctor.infer.engine import Options, infer
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.invariants.trace.windows import FOREVER, PROLOGUE, REACH, Window, cut, spread


def test_windows_cover_every_step_once() -> None:
    windows = spread(20, 6)
    assert windows[0].first == -1 and windows[-1].end == FOREVER
    assert all(a.end == b.first for a, b in pairwise(windows))
    assert spread(3, 6) == [Window(-1, FOREVER)]


def test_examples_of_no_particular_step_count_once() -> None:
    steps = pl.DataFrame({"step": [None, -1, 0, 5, 6, 19]})
    counted = [steps.select(w.core(pl.col("step")).cast(pl.Int8).alias("n"))["n"] for w in spread(20, 6)]
    assert sum(counted[1:], counted[0]).to_list() == [1] * 6


def test_a_window_holds_its_context_and_the_last_value_of_every_variable(tmp_path: Path) -> None:
    trace = Trace.load([write_run(tmp_path / "run", [loop(steps=40)])])
    window = Window(20, 24)
    part = cut(trace, window)
    steps = set(part.calls.join(part.contexts, on="ctx")["step"].to_list())
    assert steps == {*range(PROLOGUE), *range(20 - REACH, 24 + REACH)}
    grads = part.states.join(part.contexts, on="ctx").join(part.variables, on="var").filter(pl.col("attr") == "grad")
    assert grads["step"].sort().to_list().count(20 - REACH - 1) == 1  # carried
    assert part.families.equals(trace.families)


@pytest.mark.parametrize("seed", range(6))
def test_reading_a_window_equals_cutting_it(tmp_path: Path, seed: int) -> None:
    (path,) = runs(tmp_path, [seed])
    whole = Trace.load([path])
    for window in spread(whole.steps, 2, reach=1):
        read, taken = Trace.load([path], window), cut(whole, window)
        for table in ("calls", "states", "values"):
            a, b = (getattr(t, table).drop("ctx") for t in (read, taken))
            assert a.equals(b), (window, table)
        assert read.families.equals(taken.families)


def test_a_run_larger_than_memory_gives_the_same_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "_LEAST_STEPS", 8)
    extra = ("__main__.report", "torch.nn.utils.clip_grad_norm_")
    body = ("zero_grad", "forward", "backward", extra[1], "step", extra[0])
    paths = [write_run(tmp_path / f"run{i}", [loop(steps=24, body=body) for _ in range(2)], program=f"p{i}.py") for i in range(2)]
    relations = list(registry().values())
    pieces = shards.of_runs(paths, memory_bytes=50_000)
    assert len(pieces) > 4 and all(p.window is not None for p in pieces)
    told = []
    for source in (shards.of_runs(paths), pieces):
        rules, report = infer(source, relations, options=Options(strict=True))
        told.append({r.id for r in rules})
        assert len(report.runs) == 2
    assert told[0] == told[1] and told[0]
