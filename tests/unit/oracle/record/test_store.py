"""oracle/store/__init__.py: what is written comes back, and what is damaged is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from proctor.errors import OracleError
from proctor.oracle.store import (
    MissingRank,
    ProcessInfo,
    RankWriter,
    Recording,
    RunInfo,
    write_json,
)


def add(writer: RankWriter, values: Any, kind: str = "output", name: str = "net", **more: Any) -> None:
    array = np.asarray(values, order="C")
    fields = {"step": 0, "call": 0, "kind": kind, "name": name, "slot": "", "cls": "", "source": "", **more}
    writer.add(array, dtype=str(array.dtype), size=array.nbytes, **fields)


def recording(path: Path, ranks: int = 1, world: int = 1) -> list[RankWriter]:
    path.mkdir()
    write_json(path / "oracle.json", RunInfo(1, ["python", "train.py"], "train.py", world=world))
    return [RankWriter(path / "runs" / "clean" / f"rank{rank}", save_file) for rank in range(ranks)]


def test_tensors_come_back_as_they_were(tmp_path: Path) -> None:
    (writer,) = recording(tmp_path / "r")
    values = [np.arange(6, dtype=np.float32).reshape(2, 3), np.array(7, np.int64), np.zeros((0, 3), np.float64), np.array([True])]
    for number, value in enumerate(values):
        add(writer, value, name=f"m{number}")
    writer.close(ProcessInfo(rank=0, world=1, done=True))
    rank = Recording(tmp_path / "r").ranks()[0]
    assert [e.name for e in rank.entries] == ["m0", "m1", "m2", "m3"]
    for entry, value in zip(rank.entries, values, strict=True):
        found = rank.array(entry)
        assert found.dtype == value.dtype and np.array_equal(found, value) and not found.flags.writeable


def test_much_is_spread_over_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proctor.oracle.store.SHARD_BYTES", 4096)
    (writer,) = recording(tmp_path / "r")
    for number in range(10):
        add(writer, np.full(512, number, np.float32), name=f"m{number}")
        assert len(writer._waiting) <= 2
    writer.close(ProcessInfo(rank=0, world=1, done=True))
    assert len(list((tmp_path / "r").rglob("data-*.safetensors"))) == 5
    rank = Recording(tmp_path / "r").ranks()[0]
    assert [float(rank.array(e)[0]) for e in rank.entries] == list(range(10))


def test_flat_spans_that_are_whole_become_one_tensor(tmp_path: Path) -> None:
    (writer,) = recording(tmp_path / "r")
    values = np.arange(12, dtype=np.float32)
    add(writer, values.reshape(3, 4), "param", "w")
    add(writer, values.reshape(3, 4), "param", "v")
    add(writer, values[5:], "main_grad", "w", span=(5, 12))
    add(writer, values[:5], "main_grad", "w", span=(0, 5))
    add(writer, values[:5], "main_grad", "v", span=(0, 5))
    writer.close(ProcessInfo(rank=0, world=1, done=True))
    rank = Recording(tmp_path / "r").ranks()[0]
    whole, part = sorted((e for e in rank.entries if e.kind == "main_grad"), key=lambda e: e.name, reverse=True)
    assert whole.span is None and whole.shape == (3, 4) and np.array_equal(rank.array(whole), values.reshape(3, 4))
    assert part.name == "v" and part.span == (0, 5)


def test_a_recording_that_lost_a_line_is_refused(tmp_path: Path) -> None:
    (writer,) = recording(tmp_path / "r")
    add(writer, np.zeros(3), name="a")
    add(writer, np.zeros(3), name="b")
    writer.close(ProcessInfo(rank=0, world=1, done=True))
    index = writer.folder / "index.jsonl"
    index.write_bytes(index.read_bytes()[:-1])
    with pytest.raises(MissingRank, match="1 of 2 lines are lost"):
        Recording(tmp_path / "r").ranks()


@pytest.mark.parametrize("offsets", ["[0,1e999]", "[0,null]", '"x"', "[0]"])
def test_a_header_that_says_nonsense_is_refused(tmp_path: Path, offsets: str) -> None:
    (writer,) = recording(tmp_path / "r")
    add(writer, np.ones(4, np.float32))
    writer.close(ProcessInfo(rank=0, world=1, done=True))
    rank = Recording(tmp_path / "r").ranks()[0]
    path = tmp_path / "r" / "runs" / "clean" / "rank0" / rank.entries[0].file
    header = b'{"0":{"dtype":"F32","shape":[4],"data_offsets":' + offsets.encode() + b"}}"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(OracleError, match="damaged"):
        rank.array(rank.entries[0])


def test_missing_and_unfinished_ranks_are_said(tmp_path: Path) -> None:
    writers = recording(tmp_path / "r", ranks=2, world=4)
    for rank, writer in enumerate(writers):
        writer.close(ProcessInfo(rank=rank, world=4, done=True))
    with pytest.raises(MissingRank, match="ranks 2, 3 of 4 missing"):
        Recording(tmp_path / "r").ranks()
    (alone,) = recording(tmp_path / "s")
    alone.close(ProcessInfo(rank=0, world=1, notes=["the disk was full"]))
    with pytest.raises(MissingRank, match="rank 0 is not complete: the disk was full"):
        Recording(tmp_path / "s").ranks()


def test_a_tensor_that_cannot_be_written_is_noted(tmp_path: Path) -> None:
    def full(tensors: Any, path: str) -> None:
        Path(path).write_bytes(b"part of it")
        raise OSError(28, "No space left on device")

    path = tmp_path / "r"
    path.mkdir()
    write_json(path / "oracle.json", RunInfo(1, [], "train.py"))
    writer = RankWriter(path / "runs" / "clean" / "rank0", full)
    add(writer, np.zeros(3))
    writer.close(ProcessInfo(rank=0, world=1, done=True))
    assert not list(path.rglob("data-*"))
    with pytest.raises(MissingRank, match="No space left"):
        Recording(path).ranks()


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OracleError, match="not a recording"):
        Recording(tmp_path)
    write_json(tmp_path / "oracle.json", RunInfo(2, [], ""))
    with pytest.raises(OracleError, match="schema 2"):
        Recording(tmp_path)
    write_json(tmp_path / "oracle.json", RunInfo(1, [], ""))
    with pytest.raises(OracleError, match="no rank recorded anything"):
        Recording(tmp_path).ranks()
    for name in ("clean", "noise-0", "noise-1", "elsewhere", "noise-x", "again"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert Recording(tmp_path).runs() == ["again", "clean", "noise-0", "noise-1"]


def test_what_a_damaged_recording_says_costs_no_memory(tmp_path: Path) -> None:
    """A world of billions of ranks is none, and is not counted through; a type that is a list is none."""
    (writer,) = recording(tmp_path / "r")
    add(writer, np.zeros(2, np.float32))
    writer.close(ProcessInfo(rank=0, world=1, done=True))
    process = tmp_path / "r" / "runs" / "clean" / "rank0" / "process.json"
    sound = process.read_text()
    process.write_text(re.sub(r'"world": *1', '"world": 4611686018427387904', sound))
    with pytest.raises(OracleError, match="world"):
        Recording(tmp_path / "r").ranks()
    process.write_text(sound)
    rank = Recording(tmp_path / "r").ranks()[0]
    file = rank.folder / rank.entries[0].file
    file.write_bytes(file.read_bytes().replace(b'"F32"', b"[123]"))
    with pytest.raises(OracleError, match="does not hold"):
        Recording(tmp_path / "r").ranks()[0].array(rank.entries[0])
