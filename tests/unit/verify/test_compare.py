"""What differs between two runs before the first number does, and where the numbers part."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import write_run

from proctor.cli import main
from proctor.invariants.trace import open_run
from proctor.verify.compare import Comparison, compare_runs, renderer
from proctor.verify.compare._sections import arguments


def process(*, values: dict[tuple[int, str], int] | None = None, batches: tuple[int, ...] = (1, 2, 3, 4), rank: int = 0, **more: Any) -> dict[str, Any]:
    """A rank whose two parameters change in each of four steps; `values` replaces fingerprints by step and name."""
    fps = {(step, name): 100 * (step + 2) + i for step in range(-1, 4) for i, name in enumerate(("a.weight", "b.weight"))} | (values or {})
    return {
        "rank": rank,
        "calls": [{"fn": "torch.optim.Optimizer.step", "step": s, "site": "train.py:7"} for s in range(4)],
        "states": [
            {"var": {"name": name}, "step": step, "seq": step + 1, "call": max(step + 1, 0), "fp": fp, "norm": float(fp), "meta": {"shape": "[4]"}}
            for (step, name), fp in sorted(fps.items(), key=lambda item: item[0])
        ],
        "values": [{"kind": "batch", "step": s, "seq": s + 1, "fp": fp} for s, fp in enumerate(batches)],
        **more,
    }


def compared(tmp_path: Path, one: list[dict[str, Any]], other: list[dict[str, Any]], **info: Any) -> Comparison:
    first = write_run(tmp_path / "first", one)
    return compare_runs(open_run(first), open_run(write_run(tmp_path / "second", other, **info)))


def section(found: Comparison, name: str) -> dict[str, tuple[str, str]]:
    return {d.name: (d.first, d.second) for s in found.sections if s.name == name for d in s.differences}


def test_runs_that_are_alike_do_not_differ(tmp_path: Path) -> None:
    found = compared(tmp_path, [process()], [process()])
    assert not found.differs and found.values > 8 and found.steps == 4
    assert "are the same" in found.said


def test_the_first_value_that_differs_is_named_with_its_place(tmp_path: Path) -> None:
    found = compared(tmp_path, [process()], [process(values={(2, "b.weight"): 7, (3, "a.weight"): 8, (3, "b.weight"): 9})])
    assert found.parted is not None and found.apart == 1
    assert (found.parted.step, found.parted.name, found.parted.kind) == (2, "b.weight", "value of")
    assert "Optimizer.step" in found.parted.where and "train.py:7" in found.parted.where


def test_a_value_that_one_run_lacks_differs(tmp_path: Path) -> None:
    found = compared(tmp_path, [process()], [process(values={(1, "c.weight"): 5})])
    assert found.parted is not None
    assert (found.parted.step, found.parted.name, found.parted.first) == (1, "c.weight", "not there")


def test_a_run_that_is_shorter_does_not_differ_by_that(tmp_path: Path) -> None:
    short = process()
    short["states"] = [row for row in short["states"] if row["step"] < 3]
    short["values"] = [row for row in short["values"] if row["step"] < 3]
    found = compared(tmp_path, [process()], [short])
    assert found.parted is None and found.steps >= 2


def test_parameters_at_start_are_compared(tmp_path: Path) -> None:
    found = compared(tmp_path, [process()], [process(values={(-1, "a.weight"): 3})])
    assert list(section(found, "parameters at start")) == ["a.weight"]
    assert found.parted is not None and found.parted.step == -1


@pytest.mark.parametrize(
    ("batches", "how"), [((1, 3, 2, 4), "the same in another order"), ((1, 9, 8, 4), "2 of 4 are also in the other run"), ((1, 2, 3, 4), "")]
)
def test_the_order_of_the_data_is_compared(tmp_path: Path, batches: tuple[int, ...], how: str) -> None:
    found = section(compared(tmp_path, [process()], [process(batches=batches)]), "data order")
    assert (list(found) == ["batch 1 of rank 0"] and how in found["batch 1 of rank 0"][1]) if how else not found


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    found = compared(tmp_path, [process()], [process(batches=())])
    said = {s.name: s for s in found.sections}["data order"]
    assert said.compared == 0 and "the second run has fingerprints" in said.note and not said.differences


def test_ranks_are_compared_each_with_itself(tmp_path: Path) -> None:
    found = compared(tmp_path, [process(), process(rank=1)], [process(), process(rank=1, values={(0, "a.weight"): 1})])
    assert found.parted is not None and found.parted.rank == 1
    fewer = tmp_path / "fewer"
    fewer.mkdir()
    found = compared(fewer, [process(), process(rank=1)], [process()])
    assert section(found, "ranks")["ranks"] == ("2", "1") and any("rank 1" in note for note in found.notes)


def test_commands_environment_code_and_versions_are_compared(tmp_path: Path) -> None:
    one, other = process(definitions={"__main__.f": "x" * 40}), process(definitions={"__main__.f": "y" * 40})
    found = compared(tmp_path, [one], [other], command=("python", "train.py", "--lr", "0.1"), environment={"OMP_NUM_THREADS": "4"})
    assert section(found, "arguments") == {"--lr": ("", "0.1")}
    assert section(found, "environment") == {"$OMP_NUM_THREADS": ("", "4")}
    assert list(section(found, "code")) == ["__main__.f"]
    for name, version in (("first", "1.26"), ("second", "2.0")):
        path = next((tmp_path / name).glob("procs/*/process.json"))
        path.write_text(json.dumps({**json.loads(path.read_text()), "packages": {"numpy": version}}))
    found = compare_runs(open_run(tmp_path / "first"), open_run(tmp_path / "second"))
    assert section(found, "versions") == {"numpy": ("1.26", "2.0")}


def test_arguments_are_told_apart_by_name() -> None:
    assert arguments(["python", "t.py", "--lr=1", "--fast", "--n", "3", "x", "--lr", "2"]) == {
        "word 1": "python", "word 2": "t.py", "--lr": "1", "--fast": "set", "--n": "3", "word 3": "x", "--lr (2)": "2",
    }  # fmt: skip


@pytest.mark.parametrize("format_", ["terminal", "json", "html"])
def test_secrets_and_markup_reach_no_report(tmp_path: Path, format_: str) -> None:
    name = "<script>alert(1)</script>\x1b[31m"
    one, other = process(values={(0, name): 1}), process(values={(0, name): 2})
    found = compared(tmp_path, [one], [other], command=("python", "train.py", "--api-key", "hunter22"), environment={"HF_TOKEN": "hunter22"})
    text = renderer(format_).render(found)
    assert "hunter22" not in text
    assert "\x1b" not in text or format_ == "html"
    assert "<script>alert" not in text or format_ != "html"
    assert format_ != "json" or json.loads(text)["partings"][0]["step"] == 0


def test_the_command_says_it_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = write_run(tmp_path / "a", [process()]), write_run(tmp_path / "b", [process()])
    c = write_run(tmp_path / "c", [process(values={(1, "a.weight"): 1})])
    assert main(["compare", str(a), str(b)]) == 0
    assert main(["compare", str(a), str(c), "--html", str(tmp_path / "page.html")]) == 1
    assert "FIRST APART  step 1" in capsys.readouterr().out
    assert "FIRST" not in (page := (tmp_path / "page.html").read_text()) and "a.weight" in page
    assert main(["compare", str(a), str(a)]) == 2
    assert main(["compare", str(a), str(tmp_path / "none")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 2
