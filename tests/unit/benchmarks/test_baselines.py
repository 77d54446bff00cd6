"""The baseline detectors alarm on what they are for, and are silent on a series that falls as it should."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def baselines() -> ModuleType:
    spec = importlib.util.spec_from_file_location("baselines", BENCHMARKS / "baselines.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FALLING = np.linspace(2.0, 0.5, 20)


def test_a_falling_loss_is_neither_a_spike_nor_a_bad_trend(baselines: ModuleType) -> None:
    assert not baselines.spike(FALLING).size
    assert not baselines.trend(FALLING, rises=False).size


@pytest.mark.parametrize("value", [1e4, float("nan"), float("inf")])
def test_a_spike_is_beyond_the_threshold_or_no_number(baselines: ModuleType, value: float) -> None:
    series = FALLING.copy()
    series[7] = value
    assert baselines.spike(series).tolist() == [7]


def test_a_trend_alarms_after_three_steps_without_a_better_value(baselines: ModuleType) -> None:
    flat = np.asarray([3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.0])
    assert baselines.trend(flat, rises=False).tolist() == [5]
    assert baselines.trend(-flat, rises=True).tolist() == [5]


def test_outlier_detectors_find_one_value_far_from_the_rest(baselines: ModuleType) -> None:
    pytest.importorskip("sklearn")
    series = np.full(30, 1.0) + np.linspace(0, 0.01, 30)
    series[11] = 50.0
    for detector in ("z-score", "local outlier factor", "isolation forest"):
        assert 11 in [i for i, _ in baselines.alarms(detector, {"loss": series})], detector


def test_a_short_series_is_not_judged(baselines: ModuleType) -> None:
    assert not baselines.alarms("spike", {"loss": np.asarray([1.0, 1e9])})


def test_signals_are_those_of_the_program_and_its_result_is_unchanged(baselines: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "torch.manual_seed(0)\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for i in range(6):\n"
        "    optimizer.zero_grad()\n"
        "    loss = model(torch.ones(2, 3)).pow(2).mean()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "    print(f'step {i} acc {i / 10}')\n"
    )
    found = baselines.signals(script, timeout_s=800)
    assert {name: len(values) for name, values in found.items()} == {"loss": 6, "gradient norm": 6, "accuracy": 6}
    assert found["accuracy"].tolist() == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert found["loss"][-1] < found["loss"][0]


def test_a_script_that_does_not_train_is_an_error(baselines: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = tmp_path / "idle.py"
    script.write_text("print('nothing')\n")
    with pytest.raises(RuntimeError, match="no process called backward"):
        baselines.signals(script, timeout_s=800)
