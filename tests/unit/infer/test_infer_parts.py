from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from helpers.traces import runs

from proctor.cli import main
from proctor.infer import shards
from proctor.infer.engine import Options, infer
from proctor.infer.shards import partial, tasks
from proctor.infer.shards.partial import Partial
from proctor.infer.shards.parts import Parts
from proctor.invariants.invariant import Invariant
from proctor.invariants.pack import read_pack
from proctor.invariants.relations import Relation, registry

NAMES = ("argument", "contain", "sequence")


@pytest.fixture
def relations() -> list[Relation]:
    return [registry()[name] for name in NAMES]


def learn(paths: list[Path], relations: list[Relation], folder: Path | None) -> tuple[list[Invariant], int]:
    parts = Parts(folder) if folder is not None else None
    rules, report = infer(shards.of_runs(paths), relations, options=Options(strict=True, parts=parts))
    return rules, report.reused


def test_a_second_inference_reads_no_run(tmp_path: Path, relations: list[Relation], monkeypatch: pytest.MonkeyPatch) -> None:
    paths = runs(tmp_path, [1, 2, 3])
    first, reused = learn(paths, relations, tmp_path / "parts")
    assert reused == 0
    monkeypatch.setattr(tasks.shards, "open_shard", lambda *_: pytest.fail("a run was read"))
    again, reused = learn(paths, relations, tmp_path / "parts")
    assert again == first and reused == 2 * len(NAMES) * len(paths)


def test_one_more_run_costs_its_own_survey_only(tmp_path: Path, relations: list[Relation]) -> None:
    paths = runs(tmp_path, [1, 2, 3, 4])
    learn(paths[:3], relations, tmp_path / "parts")
    found, reused = learn(paths, relations, tmp_path / "parts")
    assert found == learn(paths, relations, None)[0]
    assert reused >= len(NAMES) * 3


def test_a_run_that_changed_is_read_again(tmp_path: Path, relations: list[Relation]) -> None:
    (path,) = runs(tmp_path, [1])
    learn([path], relations, tmp_path / "parts")
    table = next(path.glob("procs/*/calls.arrow"))
    table.write_bytes(table.read_bytes() + b"\0")
    assert learn([path], relations, tmp_path / "parts")[1] == 0


@pytest.mark.parametrize("damage", [b"", b"ARROW1\0\0 no", b"\xff" * 4096])
def test_a_damaged_part_is_made_again(tmp_path: Path, relations: list[Relation], damage: bytes) -> None:
    paths = runs(tmp_path, [1, 2])
    whole, _ = learn(paths, relations, tmp_path / "parts")
    for part in (tmp_path / "parts").iterdir():
        part.write_bytes(damage)
    assert learn(paths, relations, tmp_path / "parts") == (whole, 0)


def test_an_interrupted_inference_goes_on(tmp_path: Path, relations: list[Relation]) -> None:
    paths = runs(tmp_path, [1, 2, 3])

    def stop(stage: str, done: int, total: int) -> None:
        if stage == "collecting examples" and done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        infer(shards.of_runs(paths), relations, options=Options(parts=Parts(tmp_path / "parts")), progress=stop)
    rules, reused = learn(paths, relations, tmp_path / "parts")
    assert rules == learn(paths, relations, None)[0]
    assert reused >= len(NAMES) * (3 + 2)


def test_a_partial_survives_the_disk(tmp_path: Path, relations: list[Relation]) -> None:
    whole = Partial(
        pl.DataFrame({"hyp": [0], "passed": [True], "run": [0], "_count": [3], "_place": [7], "_rank": [0], "_site": [""], "phase": ["train"]},
                     schema_overrides={**Partial().frame.schema, "phase": pl.String}),
        frozenset({("phase",)}), frozenset({"phase"}), 3,
    )  # fmt: skip
    again = partial.decode(partial.encode(whole, {}))
    assert again.frame.equals(whole.frame) and (again.orders, again.scope, again.examples) == (whole.orders, whole.scope, 3)
    with pytest.raises(ValueError, match="not a"):
        partial.decode(b"something else")


def test_command_resumes_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths, pack = [str(p) for p in runs(tmp_path, [1, 2])], tmp_path / "p.json"
    args = ["infer", *paths, "-o", str(pack), "--relations", "contain", "--resume"]
    assert main(args) == 0
    first = read_pack(pack).invariants
    assert (tmp_path / "p.json.parts").is_dir()
    capsys.readouterr()
    assert main(args) == 0
    assert "parts reused" in capsys.readouterr().err
    assert read_pack(pack).invariants == first


def test_command_leaves_nothing_beside_the_pack(tmp_path: Path) -> None:
    assert main(["infer", *map(str, runs(tmp_path, [1])), "-o", str(tmp_path / "p.json"), "-q"]) == 0
    assert not (tmp_path / "p.json.parts").exists()


@pytest.mark.parametrize("size", ["lots", "1K", "-4G", "0"])
def test_memory_is_a_size(tmp_path: Path, size: str) -> None:
    assert main(["infer", *map(str, runs(tmp_path, [1])), "-o", str(tmp_path / "p.json"), f"--memory={size}"]) == 2


def test_work_that_cannot_be_kept_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    args = ["infer", *map(str, runs(tmp_path, [1])), "-o", str(tmp_path / "p.json"), "--work", str(tmp_path / "file" / "x")]
    assert main(args) == 2
    assert "cannot keep finished parts" in capsys.readouterr().err
