"""Curves read off a trace: what they are, which ranks stand out, and that they stay small."""

from __future__ import annotations

import math

import pytest
from helpers.runs import write_run
from hypothesis import given
from hypothesis import strategies as st

from proctor.invariants.trace import Trace
from proctor.verify.report.formats.html.plots import plots
from proctor.verify.series import MAX_POINTS, curves, series, thin


def of(tmp_path, processes):
    trace = Trace.load([write_run(tmp_path / f"run{len(list(tmp_path.iterdir()))}", processes)])
    return {one.name: one for one in series(trace)}


def data(name, step, norm, attr="data", **more):
    return {"var": {"name": name, "attr": attr, "module": "torch.nn.Linear"}, "step": step, "norm": norm, "fp": int(norm * 1e6) + step, **more}


def test_norms_are_over_all_parameters_also_those_that_rest(tmp_path):
    states = [data("a", -1, 3.0), data("b", -1, 4.0), data("a", 0, 6.0), data("a", 1, 0.0), data("b", 2, 5.0)]
    found = of(tmp_path, [{"states": states}])
    norm = found["parameter_norm"].middle
    assert norm.steps == [0, 1, 2]
    assert norm.values == pytest.approx([math.sqrt(36 + 16), 4.0, 5.0])
    assert found["changed"].middle.values == pytest.approx([50.0, 50.0, 50.0])
    ratio = found["update_ratio"].middle
    assert ratio.values == pytest.approx([3 / 5, 6 / math.sqrt(52), 1 / 4])


def test_another_name_of_a_tensor_counts_once(tmp_path):
    states = [data("a", s, 3.0 + s) for s in range(3)] + [{**data("tied", s, 3.0 + s), "var": {"name": "tied", "alias": "a"}} for s in range(3)]
    assert of(tmp_path, [{"states": states}])["parameter_norm"].middle.values == pytest.approx([3, 4, 5])


def test_the_gradient_is_the_last_one_of_a_step_and_clearing_is_none(tmp_path):
    states = []
    for s in range(3):
        states += [data("a", s, 9.0, "grad"), data("a", s, 2.0 + s, "grad"), data("a", s, 0.0, "grad", flags=1), data("b", s, 0.0, "grad", flags=2)]
    assert of(tmp_path, [{"states": states}])["gradient_norm"].middle.values == pytest.approx([2, 3, 4])


def test_a_norm_is_unknown_while_a_tensor_is_not_finite(tmp_path):
    states = [data("a", s, 2.0) if s != 2 else data("a", s, 1.0, flags=4) for s in range(4)]
    values = of(tmp_path, [{"states": states}])["parameter_norm"].middle.values
    assert [math.isfinite(v) for v in values] == [True, True, False, True]


def test_the_loss_is_what_backward_was_called_on(tmp_path):
    values = [{"kind": "number", "place": f"__main__.train:{name}", "number": v, "step": s} for s in range(3) for name, v in (("backward[0]", 2.0 - s), ("backward[0]", 4.0 - s), ("loss()", 9.0))]
    loss = of(tmp_path, [{"values": values}])["loss"]
    assert loss.middle.values == [3.0, 2.0, 1.0]
    assert "__main__.train" in loss.how
    values = [{**v, "place": v["place"].replace("backward[0]", "rate")} for v in values]
    assert of(tmp_path, [{"values": values}])["loss"].middle.values == [9.0, 9.0, 9.0]


def test_step_time_is_from_one_step_to_the_next(tmp_path):
    calls = [{"fn": "f", "step": s, "t": s * 7_000_000, "dur": 1} for s in range(4)]
    assert of(tmp_path, [{"calls": calls}])["step_time"].middle.values == [7.0, 7.0, 7.0]


def test_of_many_ranks_those_apart_are_drawn_alone(tmp_path):
    def loss(rank, step):
        return 1.0 + 0.01 * ((rank * 7 + step * 3) % 5) + (0.5 if rank == 11 and step > 15 else 0.0)

    processes = [{"values": [{"kind": "number", "place": "m:backward[0]", "number": loss(r, s), "step": s} for s in range(20)]} for r in range(24)]
    found = of(tmp_path, processes)["loss"]
    assert list(found.alone) == [11]
    assert found.ranks == 24
    assert found.high is not None
    assert max(found.high.values) > 1.4
    assert found.low is not None
    (plot,) = [p for p in plots([found], 20, 5) if p.name == "loss"]
    assert [line.label for line in plot.lines] == ["median of the ranks", "rank 11"]
    assert plot.band
    few = of(tmp_path, processes[:3])["loss"]
    assert list(few.alone) == [0, 1, 2]


def test_an_empty_trace_has_no_curves(tmp_path):
    assert of(tmp_path, [{}]) == {}
    assert curves(Trace.load([write_run(tmp_path / "x", [])])) == {}


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=3000))
def test_thinning_keeps_the_extremes_and_a_sign_of_what_is_not_finite(values):
    curve = thin(range(len(values)), values)
    assert len(curve.steps) <= MAX_POINTS
    assert curve.steps == sorted(set(curve.steps))
    finite = [v for v in values if math.isfinite(v)]
    if finite:
        kept = [v for v in curve.values if math.isfinite(v)]
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    assert any(not math.isfinite(v) for v in curve.values) == (len(finite) < len(values))


@pytest.mark.parametrize("values", [[1e308, -1e308], [1e-310, 1e300], [5.0, 5.0], [0.0, 0.0], [math.nan, math.inf], [-1.0, 1e-300]])
def test_odd_numbers_are_drawn_inside_the_picture(tmp_path, values):
    rows = [{"kind": "number", "place": "m:backward[0]", "number": v, "step": s} for s, v in enumerate(values)]
    (plot,) = plots(list(of(tmp_path, [{"values": rows}]).values()), 2, 0)
    assert "nan" not in plot.lines[0].path
    assert "inf" not in plot.lines[0].path
    for y, _ in plot.y_ticks:
        assert 0 <= y <= plot.height
