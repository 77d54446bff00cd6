"""The format of a capsule: what is written is what is read, and what is damaged is refused in one line."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("safetensors")
from proctor.cli import main
from proctor.errors import TraceError
from proctor.invariants.capsule import (
    HEAD,
    TENSORS,
    Batch,
    Blob,
    Call,
    Capsule,
    Generator,
    Print,
    Seen,
    Variable,
    capsules_of,
    folder_name,
    read_capsule,
    siblings,
    tensor_table,
    write_capsule,
)


def blob(key: str, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Blob:
    return Blob(key, "F32", array.shape, array.nbytes, lambda: memoryview(array).cast("B"))


WEIGHT = np.arange(6, dtype=np.float32).reshape(2, 3)


def capsule(**changes: object) -> Capsule:
    made = Capsule(
        key="PR101 weights differ",
        step=7,
        world=2,
        program="train.py",
        command=("python", "train.py"),
        by_value=True,
        updates=1,
        batches=(Batch(3, (Seen("[0]", "float32", (2, 3), "cpu", Print(5, 0, 1.5), "weight"),)),),
        calls=(Call("module", "Net", (Seen("0", value=3),)),),
        generators=(Generator("torch", "rng"),),
        state=(Variable("parameter", "fc.weight", "float32", (2, 3), "cpu", Print(2**64 - 1, 0), Print(4, 0), "weight"),),
    )
    return msgspec.structs.replace(made, **changes)


def write(run: Path, made: Capsule | None = None) -> Path:
    made = made or capsule()
    folder = run / "capsules" / folder_name(made.key, made.step, made.rank)
    write_capsule(folder, made, [blob("weight", WEIGHT), blob("rng", np.zeros(3, dtype=np.float32))])
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert read_capsule(folder) == capsule()
    assert tensor_table(folder) == {"weight": ("F32", (2, 3)), "rng": ("F32", (3,))}
    assert capsules_of(tmp_path) == [folder]


def test_other_libraries_read_the_tensors(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    assert (load_file(write(tmp_path) / TENSORS)["weight"] == WEIGHT).all()


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    def full() -> memoryview:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_capsule(tmp_path / "c", capsule(), [Blob("weight", "F32", (1,), 4, full)])
    assert list(tmp_path.iterdir()) == []


def test_a_capsule_is_never_overwritten(tmp_path: Path) -> None:
    folder = write(tmp_path)
    with pytest.raises(OSError, match=r"not empty|exists"):
        write(tmp_path)
    assert read_capsule(folder) == capsule()
    assert len(list(folder.parent.iterdir())) == 1


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / HEAD).unlink(), "not a capsule"),
        (lambda f: (f / HEAD).write_text("{"), "truncated"),
        (lambda f: (f / HEAD).write_text('{"schema": 99}'), "schema 99"),
        (lambda f: (f / HEAD).write_text("[" * 100_000), "capsule.json"),
        (lambda f: (f / HEAD).write_text((f / HEAD).read_text().replace('"step"', '"world": 4000000000, "step"', 1)), "world"),
        (lambda f: (f / TENSORS).unlink(), "missing"),
        (lambda f: (f / TENSORS).write_bytes(b"\xff" * 64), "tensors.safetensors"),
        (lambda f: (f / TENSORS).write_bytes((1 << 40).to_bytes(8, "little") + b"{}"), "tensors.safetensors"),
        (lambda f: os.truncate(f / TENSORS, 40), "tensors.safetensors"),
    ],
)
def test_damage_is_one_line(damage: object, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path)
    damage(folder)  # type: ignore[operator]
    with pytest.raises(TraceError, match=text):
        read_capsule(folder)
    assert main(["capsule", "show", str(folder)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    head = json.loads((folder / HEAD).read_text())
    head["state"][0]["key"] = "../../etc/passwd"
    (folder / HEAD).write_text(json.dumps(head))
    with pytest.raises(TraceError, match=r"no tensor '../../etc/passwd'"):
        read_capsule(folder)


def test_a_key_cannot_leave_the_folder() -> None:
    assert "/" not in folder_name("../../x", 3, 1)
    assert folder_name("a", 3, 1) != folder_name("b", 3, 1)


def test_half_written_and_foreign_folders_are_no_capsules(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder.parent / f".{folder.name}.7.tmp").mkdir()
    (folder.parent / "notes").mkdir()
    (folder.parent / folder_name("x", 1, 0)).symlink_to(folder)
    assert capsules_of(tmp_path) == [folder]


def test_capsules_of_the_other_ranks_are_found(tmp_path: Path) -> None:
    first, second = write(tmp_path), write(tmp_path, capsule(rank=1))
    assert siblings(first, read_capsule(first)) == {0: first, 1: second}


def test_list_and_show_say_what_is_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path, capsule(key="a\x1b[31m key", absent=("call 0/1: 900 bytes, over the budget",)))
    assert main(["capsule", "list", str(tmp_path)]) == 0
    listed = capsys.readouterr().out
    assert "step 7, rank 0 of 2, by value" in listed and "\x1b" not in listed
    assert main(["capsule", "show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "changed   fc.weight" in shown and "over the budget" in shown and "\x1b" not in shown


def test_a_run_without_capsules_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["capsule", "list", str(tmp_path)]) == 0
    assert "holds no capsules" in capsys.readouterr().out
