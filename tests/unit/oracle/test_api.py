"""The Python ways in: trace, trace_reference, compare, assert_equivalent."""

from __future__ import annotations

import functools
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import proctor
from proctor.errors import OracleError, UsageError

torch = pytest.importorskip("torch")

from helpers.small_net import Net, candidate, program, reference, step  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle.recording.ranks import command_of, load  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402
from proctor.oracle.testing import assert_equivalent  # noqa: E402


def test_importing_it_needs_no_torch() -> None:
    code = "import sys, proctor; proctor.oracle.compare, proctor.oracle.trace, proctor.oracle.Plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="nothing"):
        proctor.nothing  # noqa: B018


def test_no_module_has_the_name_of_a_function() -> None:
    """Else the name would be what was imported last."""
    modules = {m.name for m in pkgutil.iter_modules(proctor.oracle.__path__)}
    assert not modules & set(proctor.oracle.__all__)


@pytest.mark.parametrize("first", ["proctor.oracle", "proctor.oracle.numbers.difference, proctor.oracle.recording.tracing, proctor.oracle.localising.localise"])
def test_names_are_functions_whatever_is_imported_first(first: str) -> None:
    code = f"import {first}, proctor.oracle.judging.check; import proctor; assert proctor.oracle.compare.__module__ == 'proctor.oracle.recording.outcome'"
    code += "; assert proctor.oracle.trace.__module__ == 'proctor.oracle.recording.tracing'"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_compare_gives_a_verdict(tmp_path: Path) -> None:
    reference(tmp_path / "reference")
    same = proctor.oracle.compare(tmp_path / "reference", candidate(tmp_path / "same"))
    assert (same.verdict, same.exit_code, same.first) == ("equivalent", 0, None)
    other = proctor.oracle.compare(str(tmp_path / "reference"), candidate(tmp_path / "other", scale=2.0))
    assert (other.verdict, other.exit_code) == ("different", 1)
    assert other.first is not None and (other.first.kind, other.first.note) == ("main_grad", "gradient scale 2")
    wrong = proctor.oracle.compare(tmp_path / "reference", candidate(tmp_path / "wrong", Net(twist=1.001)))
    assert wrong.first is not None and (wrong.first.kind, wrong.first.name) == ("input", "last")


def test_a_plan_is_kept_with_the_recording(tmp_path: Path) -> None:
    reference(tmp_path / "reference")
    plan = proctor.oracle.Plan("tp=2").shard("first.weight", tp=0)
    candidate(tmp_path / "candidate", plan=plan)
    with pytest.raises(OracleError, match="has 2 ranks, the candidate ran with 1"):
        proctor.oracle.compare(tmp_path / "reference", tmp_path / "candidate")
    assert proctor.oracle.compare(tmp_path / "reference", tmp_path / "candidate", proctor.oracle.Plan("tp=1")).exit_code == 0


def test_generated_parameters_make_two_initialisations_one(tmp_path: Path) -> None:
    def net() -> Net:
        made = Net()
        with torch.no_grad():
            for p in made.parameters():
                p.normal_()
        return made

    def train(model: nn.Module) -> None:
        step(model, torch.optim.SGD(model.parameters(), lr=0.1))

    one, two = net(), net()
    proctor.oracle.trace_reference(lambda: train(one), one, out=tmp_path / "reference", samples=2, generate=7)
    with proctor.oracle.trace(two, tmp_path / "candidate", generate=7):
        train(two)
    assert proctor.oracle.compare(tmp_path / "reference", tmp_path / "candidate").verdict == "equivalent"


def test_a_reference_begins_with_the_same_state_each_time(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)

    def train() -> None:
        optimizer.zero_grad()
        net(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()

    proctor.oracle.trace_reference(train, net, optimizer, out=tmp_path / "reference", samples=2)
    verdict = proctor.oracle.compare(tmp_path / "reference", tmp_path / "reference")
    assert verdict.verdict == "equivalent" and not any("deterministic" in note for note in verdict.notes)
    assert Recording(tmp_path / "reference").info.samples == 2


def test_nothing_recorded_is_said(tmp_path: Path) -> None:
    with pytest.raises(OracleError, match="no module of the model was called"), proctor.oracle.trace(Net(), tmp_path / "r"):
        pass


def test_an_exception_passes_and_the_recording_is_not_taken_for_whole(tmp_path: Path) -> None:
    reference(tmp_path / "reference")
    net = Net()
    with pytest.raises(ZeroDivisionError), proctor.oracle.trace(net, tmp_path / "r"):
        _ = step(net, torch.optim.SGD(net.parameters(), lr=0.1)) / 0
    verdict = proctor.oracle.compare(tmp_path / "reference", tmp_path / "r")
    assert verdict.verdict == "inconclusive" and "not complete" in verdict.reason


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"run": "elsewhere"}, {"run": "../x"}])
def test_arguments_that_make_no_sense(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError), proctor.oracle.trace(Net(), tmp_path / "r", **wrong):
        pass
    with pytest.raises(UsageError, match="needs a module"), proctor.oracle.trace([], tmp_path / "r"):
        pass


def test_a_directory_of_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("…")
    for out in (tmp_path, tmp_path / "thesis.tex"):
        with pytest.raises(UsageError), proctor.oracle.trace(Net(), out):
            pass
    candidate(tmp_path / "r")
    with pytest.raises(UsageError, match="already"), proctor.oracle.trace(Net(), tmp_path / "r", overwrite=False):
        pass


def test_a_compiled_model_is_recorded_eagerly_if_asked_to(tmp_path: Path) -> None:
    reference(tmp_path / "reference")
    net = Net()
    compiled = torch.compile(net, backend="eager")
    with proctor.oracle.trace(compiled, tmp_path / "r", eager=True):  # type: ignore[arg-type]
        step(compiled, torch.optim.SGD(net.parameters(), lr=0.1))  # type: ignore[arg-type]
    verdict = proctor.oracle.compare(tmp_path / "reference", tmp_path / "r")
    assert verdict.verdict == "equivalent" and not verdict.unchecked


# -- functions as programs


def train(scale: float = 1.0) -> None:
    """What `assert_equivalent` calls in processes of its own: as reference, and on every rank with its part of the batch."""
    import torch.distributed as dist
    from helpers.small_net import batch

    torch.set_num_threads(1)
    net: nn.Module = Net()
    rows = batch()
    if dist.is_initialized():
        net = nn.parallel.DistributedDataParallel(net)
        rows = rows.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    (net(rows).square().mean() * scale).backward()
    optimizer.step()


def traced(out: str) -> None:
    """Records itself, on every rank."""
    import torch.distributed as dist
    from helpers.small_net import batch

    net = nn.parallel.DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with proctor.oracle.trace(net, out):
        net(batch().chunk(2)[dist.get_rank()]).square().mean().backward()
        optimizer.step()


@pytest.mark.slow
def test_ranks_that_record_themselves(tmp_path: Path) -> None:
    subprocess.run(command_of(functools.partial(traced, str(tmp_path / "candidate")), 2), check=True, timeout=200)
    verdict = proctor.oracle.compare(reference(tmp_path / "reference"), tmp_path / "candidate")
    assert verdict.verdict == "equivalent", verdict.reason
    assert {t.ranks for t in verdict.tensors if t.kind == "main_grad"} == {(0, 1)}


def test_a_function_is_found_by_its_file() -> None:
    command = command_of(functools.partial(train, scale=2.0), 2)
    assert command[1:4] == ["-m", "proctor.oracle.recording.ranks", "2"] and command[4].endswith("test_api.py::train")
    assert load(command[4], "no.such.module", []).__name__ == "train"


def test_functions_that_no_other_process_can_find_are_refused() -> None:
    def inner() -> None: ...

    for function in (inner, lambda: None, functools.partial(train, scale=torch.ones(1)), print):
        with pytest.raises(UsageError, match=r"import it|arguments"):
            command_of(function, 1)  # type: ignore[arg-type]
    for program_ in ("", [], 'python "x'):
        with pytest.raises(UsageError):
            assert_equivalent(program_, "true")


def test_assert_equivalent_with_commands(tmp_path: Path) -> None:
    right, wrong = program(tmp_path), program(tmp_path)
    wrong[-2] = "3"
    with pytest.raises(AssertionError) as failed:
        assert_equivalent(right, wrong, samples=1, localise=False, out=tmp_path / "out")
    text = str(failed.value)
    assert "DIFFERENT" in text and "gradient scale 3" in text and "FIRST WRONG TENSOR" in text and len(text.splitlines()) < 30
    assert (tmp_path / "out" / "candidate" / "oracle.json").is_file()


@pytest.mark.slow
def test_assert_equivalent_with_functions() -> None:
    assert assert_equivalent(train, train, samples=2).verdict == "equivalent"
    with pytest.raises(AssertionError, match="gradient scale 2") as failed:
        assert_equivalent(train, functools.partial(train, scale=2.0), samples=2)
    assert "CULPRIT" in str(failed.value)
