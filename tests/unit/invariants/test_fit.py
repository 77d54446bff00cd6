"""Which packs fit a run: versions of torch, libraries that it uses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from helpers.processes import process
from helpers.runs import write_run

from proctor.invariants.fit import load_packs, misfit, parse_requirement, used, within
from proctor.invariants.trace import Trace


@pytest.mark.parametrize(
    ("version", "wanted", "fits"),
    [
        ("2.6.0+cpu", ">=2.6,<3", True),
        ("2.6.0", "==2.6", True),
        ("2.10.1", ">=2.9", True),
        ("3.0.0a0+git", "<3", False),
        ("2.5.1", ">=2.6,<3", False),
        ("2.6", "!=2.6.0", False),
        ("2.7", ">2.7", False),
        ("2.7", "<=2.7", True),
        ("unknown", "<3", False),
        ("unknown", "", True),
    ],
)
def test_a_version_is_in_its_range(version, wanted, fits):
    assert within(version, wanted) is fits


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("torch>=2.6,<3", ("torch", ">=2.6,<3")),
        ("torch >= 2.6, < 3", ("torch", ">=2.6,<3")),
        ("transformers", ("transformers", "")),
    ],
)
def test_a_requirement_is_a_name_and_versions(text, parsed):
    assert parse_requirement(text) == parsed


@pytest.mark.parametrize("text", ["", ">=2", "torch=2", "torch>=two", "torch>=2;os", "a b", "torch~=2.6"])
def test_what_is_no_requirement_is_refused(text):
    with pytest.raises(ValueError, match="requirement"):
        parse_requirement(text)


def test_a_pack_fits_a_run_that_uses_its_libraries_in_these_versions():
    run = {"torch": frozenset({"2.7.0"}), "transformers": frozenset[str]()}
    assert misfit({}, run) == ""
    assert misfit({"torch": ">=2.6,<3", "transformers": ""}, run) == ""
    assert misfit({"torch": "<2.6"}, run) == "it is for torch <2.6, the run used 2.7.0"
    assert misfit({"lightning": ""}, run) == "the run does not use lightning"


def test_what_a_run_uses_is_read_from_its_calls_and_processes(tmp_path):
    calls = [{"fn": f, "step": 0} for f in ("transformers.Trainer.training_step", "__main__.f", "torch.add", "<model>.forward")]
    run = write_run(tmp_path / "run", [process() | {"calls": calls}])
    (file,) = (run / "procs").glob("*/process.json")
    info = json.loads(file.read_text()) | {"torch": "2.6.0+cpu", "libraries": {"accelerate": "1.2"}}
    file.write_text(json.dumps(info))
    expected = {"torch": {"2.6.0+cpu"}, "transformers": set(), "accelerate": {"1.2"}}
    assert used(Trace.load([run])) == expected


@pytest.mark.parametrize(("library", "version"), [("peft", "0.21.2"), ("diffusers", "0.42.1"), ("deepspeed", "0.19.8"), ("transformers", "5.24.0"), ("accelerate", "1.15.0"), ("lightning", "2.6.6")])
def test_a_run_that_imports_a_library_is_judged_by_its_pack_and_no_other_run_is(library: str, version: str, tmp_path: Path) -> None:
    taken = []
    for name, libraries in (("with", {library: version}), ("without", {})):
        run = write_run(tmp_path / name, [process() | {"calls": [{"fn": "torch.add", "step": 0}]}])
        (file,) = (run / "procs").glob("*/process.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {"torch": "2.13.0+cpu", "libraries": libraries}))
        taken.append({Path(pack).stem for pack in load_packs([], Trace.load([run]))[1]})
    assert library in taken[0]
    assert taken[0] - taken[1] == {library}
