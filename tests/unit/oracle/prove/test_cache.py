"""A verdict is kept by the content of what was judged: the same programs are not judged again, others are."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

import pytest
from helpers.oracle.prove_programs import data_parallel, tensor_parallel

from proctor.oracle.prove import cache as caches
from proctor.oracle.prove import prove
from proctor.oracle.prove.cache import Cache
from proctor.oracle.prove.verdict import Verdict


def entry(folder: Path) -> Path:
    (path,) = folder.glob("verdict-*.json")
    return path


def test_the_same_programs_are_answered_at_once(tmp_path: Path) -> None:
    first = prove(tensor_parallel(), tensor_parallel(), "tp=2", cache=tmp_path)
    began = time.process_time()
    again = prove(tensor_parallel(), tensor_parallel(), "tp=2", cache=tmp_path)
    assert first.verdict == again.verdict == "PROVED" and "from the cache" in again.seconds and "proof" not in again.seconds
    assert (again.why, again.lemmas, again.cuts, again.local) == (first.why, first.lemmas, first.cuts, first.local)
    assert time.process_time() - began < 1.0
    assert entry(tmp_path).stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("mistake", ["forward missing", "average", "same shard"])
def test_a_changed_program_is_not_taken_from_it(tmp_path: Path, mistake: str) -> None:
    assert prove(tensor_parallel(), tensor_parallel(), "tp=2", cache=tmp_path).verdict == "PROVED"
    verdict = prove(tensor_parallel(), tensor_parallel(mistake), "tp=2", cache=tmp_path)
    assert verdict.verdict == "DIFFERENT" and "from the cache" not in verdict.seconds
    assert prove(tensor_parallel(), tensor_parallel(mistake), "tp=2", cache=tmp_path).verdict == "DIFFERENT"


def test_other_code_does_not_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prove(data_parallel(), data_parallel(), "dp=2", cache=tmp_path)
    monkeypatch.setattr(caches, "_code", lambda: "another")
    assert "from the cache" not in prove(data_parallel(), data_parallel(), "dp=2", cache=tmp_path).seconds


def test_what_lacked_time_is_tried_again_with_more(tmp_path: Path) -> None:
    assert prove(data_parallel(), data_parallel(), "dp=2", proof_s=0, cache=tmp_path).verdict == "EQUAL"
    assert "from the cache" in prove(data_parallel(), data_parallel(), "dp=2", proof_s=0, cache=tmp_path).seconds
    assert prove(data_parallel(), data_parallel(), "dp=2", cache=tmp_path).verdict == "PROVED"


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "verdict", "key", "form"])
def test_a_damaged_entry_is_told_and_not_believed(tmp_path: Path, damage: str) -> None:
    one = Cache(tmp_path)
    one.keep("a" * 64, Verdict("DIFFERENT", "made up"), 1.0)
    path = entry(tmp_path)
    data = path.read_bytes()
    body = json.loads(data.partition(b"\n")[2])
    if damage == "verdict":
        body["verdict"]["verdict"] = "PROVED"  # without its digest
    elif damage == "key":
        body["key"] = "b" * 64
    elif damage == "form":
        body = {"key": "a" * 64}
    text = json.dumps(body).encode()
    digest = hashlib.sha256(text).hexdigest().encode() if damage in ("key", "form") else data[:64]
    path.write_bytes({"cut": data[:-20], "bit": data[:-9] + bytes([data[-9] ^ 1]) + data[-8:], "empty": b""}.get(damage, digest + b"\n" + text))
    assert one.find("a" * 64, 1.0) is None
    assert len(one.said) == 1 and str(path) in one.said[0] and "judged anew" in one.said[0] and "\n" not in one.said[0]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    one = Cache(tmp_path / "file" / "below")
    one.keep("a" * 64, Verdict("EQUAL"), 1.0)
    assert len(one.said) == 1 and "not kept" in one.said[0]


def test_old_entries_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "_MOST_ENTRIES", 3)
    one = Cache(tmp_path)
    for k in range(6):
        one.keep(f"{k}" * 64, Verdict("EQUAL"), 1.0)
    assert len(list(tmp_path.iterdir())) == 3
