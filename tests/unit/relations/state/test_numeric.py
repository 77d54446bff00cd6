"""`numeric`: finite, alive, and norms that do not run away, with a false-alarm rate that is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from helpers.live.flushes import flushes
from helpers.runs import write_run
from helpers.trained import record

from proctor.invariants.condition import ALWAYS
from proctor.invariants.invariant import Hypothesis, Invariant, Severity, Support
from proctor.invariants.pack import Pack
from proctor.invariants.relations import numeric
from proctor.invariants.relations.numeric import Numeric
from proctor.invariants.relations.numeric import norms as _norms
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import StateFlag, Value
from proctor.invariants.trace import Trace
from proctor.verify.live.online import OnlineChecker

RELATION = Numeric()
META = {"requires_grad": True, "in_optimizer": True, "optimizer": "#0"}
UPDATE = {"fn": "torch.optim.Optimizer.step", "args": {"a": [{"O": "torch.optim.SGD", "v": "#0", "a": {}}], "k": {}}, "site": "train.py:9"}
_numbers = itertools.count()
PROGRAM = """
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        optimizer.zero_grad()
        loss = (model(torch.ones(2, WIDTH)) * (step < 2)).square().sum()
        loss.backward()
        optimizer.step()
"""


def job(
    folder: Path, grads: Sequence[float], *, weights: Sequence[float] = (), flags: dict[int, StateFlag] | None = None,
    kept: Sequence[int] = (), broken: Sequence[int] = (), spent: Sequence[int] = (), **info: Any,
) -> Trace:  # fmt: skip
    """One process whose gradients have these norms at its updates.

    Args:
        flags: of both gradients, by step.
        kept: steps whose update changes nothing.
        broken: steps after which a parameter is not finite.
        spent: steps whose loss is exactly 0.
    """
    calls: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    values: list[dict[str, Any]] = []

    def see(name: str, attr: str, step: int, fp: int, norm: float, flag: int, call: int) -> None:
        var = {"name": name, "attr": attr, "module": "torch.nn.Linear", "kind": "weight"}
        states.append({"var": var, "step": step, "seq": len(calls), "call": call, "edge": 1, "fp": fp, "meta": META, "norm": norm, "flags": flag})

    for name in ("a.weight", "b.weight"):
        see(name, "data", -1, 1, 1.0, 0, 0)
    for step, norm in enumerate(grads):
        calls.append({"fn": "torch.Tensor.backward", "step": step})
        if step in spent:
            values.append({"kind": "spent", "seq": len(calls), "place": "loss", "number": 0.0, "step": step})
        for name in ("a.weight", "b.weight"):
            see(name, "grad", step, 100 + step, norm, int((flags or {}).get(step, 0)), len(calls))
        calls.append({**UPDATE, "step": step})
        for name in ("a.weight", "b.weight") if step not in kept else ():
            flag = int(StateFlag.NONFINITE) if step in broken else 0
            see(name, "data", step, 200 + step, weights[step] if weights else 1.0, flag, len(calls))
    return Trace.load([write_run(folder / f"run{next(_numbers)}", [{"calls": calls, "states": states, "values": values, **info}])])


def failing(trace: Trace, what: str, **params: str) -> list[int]:
    frame = RELATION.examples(trace, [Hypothesis.of("numeric", what=what, **params)]).frame
    return sorted(set(frame.filter(~frame["passed"].fill_null(value=True))["step"]))


def test_a_healthy_run_teaches_all_and_fails_none(tmp_path: Path) -> None:
    trace = job(tmp_path, [1.0 / (1 + s) for s in range(30)])
    found = RELATION.propose(trace)
    assert {h.text("what") for h in found} == {"applied", "finite", "alive", "burst", "drift", "growth"}
    assert RELATION.examples(trace, found).frame["passed"].all()


def test_a_short_run_has_no_bounds(tmp_path: Path) -> None:
    assert {h.text("what") for h in RELATION.propose(job(tmp_path, [1.0] * 8))} == {"applied", "finite", "alive"}


@pytest.mark.parametrize("norm", [1.0, 0.0, float("inf"), float("nan")])
def test_what_is_remembered_of_a_run_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, norm: float) -> None:
    monkeypatch.setattr(_norms, "_REMEMBERED", 8)
    monkeypatch.setattr(_norms, "_LEAST_REMEMBERED", 8)
    grads = [1.0, 5.0, 2.0, 3.0, 1.0, *[norm] * 5, 7.0, *[norm] * 60]
    kept = RELATION.remember(job(tmp_path, grads, weights=grads), 0, len(grads))
    assert kept is not None
    rows = kept.filter(pl.col("kind") == "gradients")
    assert len(rows) <= _norms.WARM_UP + 8 + 1 and len(kept) <= 2 * len(rows) + 1
    assert rows.filter(pl.col("norm").is_finite())["norm"].max() == pytest.approx(7.0 * 2**0.5)  # the largest one, of two parameters


def test_gradients_that_are_not_finite_are_told_when_they_are_applied(tmp_path: Path) -> None:
    bad = {3: StateFlag.NONFINITE}
    assert failing(job(tmp_path, [1.0] * 6, flags=bad, broken=(3,)), "applied") == [3]
    assert failing(job(tmp_path, [1.0] * 6, flags=bad, kept=(3,)), "applied") == []  # an overflow that was skipped


def test_a_parameter_that_becomes_not_finite_is_named_once(tmp_path: Path) -> None:
    trace = job(tmp_path, [1.0] * 6, broken=(3,))
    assert failing(trace, "finite") == [3]
    frame = RELATION.examples(trace, [Hypothesis.of("numeric", what="finite")]).frame
    assert frame.filter(~pl.col("passed"))["_name"].to_list() == ["a.weight"]


def test_gradients_that_are_all_zero_are_told(tmp_path: Path) -> None:
    assert failing(job(tmp_path, [1.0] * 6, flags={3: StateFlag.ZERO, 4: StateFlag.ZERO}), "alive") == [4]
    assert failing(job(tmp_path, [1.0] * 6, flags={2: StateFlag.ZERO, 4: StateFlag.ZERO}), "alive") == [], "once it may be right"


def test_a_loss_of_which_nothing_is_left_gives_no_gradient_and_that_is_right(tmp_path: Path) -> None:
    none = dict.fromkeys(range(6), StateFlag.ZERO)
    late = {step: none[step] for step in (3, 4, 5)}
    assert failing(job(tmp_path, [1.0] * 6, flags=late, spent=(3, 4, 5)), "alive") == []
    assert failing(job(tmp_path, [1.0] * 6, flags=late, spent=(3,)), "alive") == [5]
    assert failing(job(tmp_path, [1.0] * 6, flags=none, spent=range(6)), "alive") == [1, 2, 3, 4, 5], "it never had one: a term that is always 0"


def test_a_backward_from_zero_is_noted_and_from_another_number_not(tmp_path: Path) -> None:
    record(tmp_path, {"hinge": PROGRAM}, [("hinge", "run", 0, 4, "")])
    rows = _sightings.sightings(Trace.load([tmp_path / "hinge-run"]), Value.SPENT)
    assert rows["step"].to_list() == [2, 3]


def test_a_burst_is_held_against_the_runs_own_past(tmp_path: Path) -> None:
    small, large = [1e-4] * 20, [1e4] * 20
    for norms in (small, large):
        assert failing(job(tmp_path, norms), "burst", bound="2.5") == []
        assert failing(job(tmp_path, [*norms, norms[0] * 1000]), "burst", bound="2.5") == [20]


def test_drift_needs_more_than_one_exceedance(tmp_path: Path) -> None:
    quiet = [1.0] * 30
    assert failing(job(tmp_path, [*quiet, 100.0, *quiet]), "drift", bound="1.5") == []
    found = failing(job(tmp_path, [*quiet, *[100.0] * 20]), "drift", bound="1.5")
    assert found
    assert 32 <= found[0] <= 38


def test_weights_that_jump_are_told(tmp_path: Path) -> None:
    assert failing(job(tmp_path, [1.0] * 8, weights=[1.0] * 5 + [50.0] * 3), "growth", bound="1") == [5]


def test_lost_records_make_a_burst_unknown(tmp_path: Path) -> None:
    assert failing(job(tmp_path, [*[1.0] * 20, 5000.0], dropped=3), "burst", bound="2.5") == []


def test_bounds_of_several_runs_cover_the_wildest(tmp_path: Path) -> None:
    calm, wild = job(tmp_path, [1.0] * 25), job(tmp_path, [*[1.0] * 20, 80.0, 1.0, 1.0, 1.0, 1.0])
    both = RELATION.settle(RELATION.merge([RELATION.survey(calm), RELATION.survey(wild)]))
    bound = {h.text("what"): float(h.text("bound")) for h in both if h.get("bound")}
    assert bound["burst"] >= 3.4
    assert RELATION.examples(wild, both).frame["passed"].all()


def test_only_what_is_not_finite_is_an_error() -> None:
    assert RELATION.severity_of(Hypothesis.of("numeric", what="applied")) is Severity.ERROR
    assert RELATION.severity_of(Hypothesis.of("numeric", what="burst", bound="3")) is Severity.WARNING


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_the_chance_of_any_alarm_in_a_long_run_stays_below_alpha(share: float) -> None:
    """At the granted rate of exceedances, 400 runs of 2,000 updates, with α = 0.05 so that a failure would show."""
    alpha, rate, runs, updates = 0.05, 0.02, 400, 2000
    drawn = np.random.default_rng(5).random((runs, updates)) < rate * share
    frame = pl.DataFrame({"run": np.repeat(np.arange(runs), updates), "exceeds": drawn.ravel()})
    frame = frame.with_columns((pl.int_range(pl.len()).over("run") + 1).alias("update"))
    frame = frame.with_columns((_norms.log_wealth(["run"], rate) > _norms.level(alpha)).alias("alarm"))
    alarmed = frame.group_by("run").agg(pl.col("alarm").any())["alarm"].sum()
    assert alarmed / runs <= alpha
    assert numeric.ALPHA <= 1e-4


def test_all_updates_of_a_short_run_are_remembered(tmp_path: Path) -> None:
    grads = [1.0 + step for step in range(60)]
    kept = RELATION.remember(job(tmp_path, grads, weights=grads), 0, 50)
    assert kept is not None
    for kind in ("gradients", "weights"):
        assert kept.filter(pl.col("kind") == kind)["step"].to_list() == list(range(50))


def test_live_a_norm_that_grows_slowly_is_held_against_its_whole_past(tmp_path: Path) -> None:
    job(tmp_path, [10 ** (step / 130) for step in range(300)])
    drift = Invariant("drift", Hypothesis.of("numeric", what="drift", bound="1.5"), ALWAYS, Support(20, 0, 1, 1), "drift")
    checker = OnlineChecker([Pack([drift])], relations={"numeric": RELATION})
    found = []
    for process, records, info, reached in flushes(next(tmp_path.glob("run*"))):
        checker.live.add(process, records, info, reached)
        if reached % 40 == 0:
            found += [v for one in checker.rounds() for v in one.violations]
    assert [v.seen for v in [*found, *(v for one in checker.finish() for v in one.violations)]] == []


def test_drift_is_said_of_what_it_is_true_of(tmp_path: Path) -> None:
    frame = RELATION.examples(job(tmp_path, [*[1.0] * 30, *[100.0] * 8, 5.0]), [Hypothesis.of("numeric", what="drift", bound="1.5")]).frame
    said = frame.filter(~pl.col("passed")).sort("step")["_seen"].to_list()
    assert "141.0, 100.0 times the median" in said[0]
    assert said[-1] == "gradients of norm 7.07, after many that were more than 31.6 times the median before"
