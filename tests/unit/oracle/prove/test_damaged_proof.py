"""A proof that was damaged anywhere proves nothing, and ends in one line: never in a traceback, never in more memory than there is."""

from __future__ import annotations

import io
import json
import random
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.oracle.prove_programs import data_parallel

from proctor.errors import OracleError
from proctor.oracle.prove.leaves import align
from proctor.oracle.prove.proofs.file import check, save
from proctor.oracle.prove.prover import decide
from proctor.oracle.prove.recording.world import tape_of

VALUES: tuple[Any, ...] = (-1, 0, 3, 2**40, 10**18, -(10**18), None, "", "x", [], {}, 1.5, True, "c10d.allreduce_", "aten.mm.default")


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, dict[str, bytes]]:
    """The file, and what is in it."""
    reference, candidate = tape_of(data_parallel()), [tape_of(data_parallel(), r, 2) for r in range(2)]
    path = tmp_path_factory.mktemp("proof") / "step.proof"
    save(path, decide(reference, candidate), reference, candidate, align(reference, candidate))
    with zipfile.ZipFile(path) as archive:
        return path.read_bytes(), {name: archive.read(name) for name in archive.namelist()}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*at, key))


def with_another(document: Any, dice: random.Random) -> bytes:
    """JSON with one value replaced."""
    *before, last = dice.choice(list(places(document)))
    inner = document
    for key in before:
        inner = inner[key]
    inner[last] = dice.choice(VALUES)
    return json.dumps(document).encode()


def damaged(whole: bytes, members: dict[str, bytes], dice: random.Random) -> bytes:
    if dice.random() < 0.3:
        data = bytearray(whole)
        for _ in range(dice.randint(1, 4)):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        return bytes(data[: dice.choice([len(data), dice.randrange(len(data))])])
    changed, name = dict(members), dice.choice(list(members))
    if name == "proof.json":
        changed[name] = with_another(json.loads(members[name]), dice)
    else:
        size = int.from_bytes(members[name][:8], "little")
        text = with_another(json.loads(members[name][8 : 8 + size]), dice)
        changed[name] = len(text).to_bytes(8, "little") + text + members[name][8 + size :]
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for key, value in changed.items():
            archive.writestr(key, value)
    return out.getvalue()


def judged(path: Path) -> str:
    """The verdict, or the one line of an error."""
    try:
        return check(path).verdict
    except OracleError as error:
        return str(error)


@pytest.mark.parametrize("seed", range(6))
def test_a_damaged_proof_is_one_line(members: tuple[bytes, dict[str, bytes]], tmp_path: Path, seed: int) -> None:
    dice, path, refused = random.Random(seed), tmp_path / "p", 0
    for _ in range(10):
        path.write_bytes(damaged(*members, dice))
        said = judged(path)
        assert said in ("PROVED", "UNPROVED") or ("\n" not in said and str(path) in said)  # a line that is named otherwise changes no formula
        refused += str(path) in said
    assert refused


@pytest.mark.parametrize("where", [(0, 1), (0, 2, 0), (0, 3, 0)])
@pytest.mark.parametrize("value", [10**18, 2**40, -(10**18)])
def test_a_tensor_larger_than_memory_is_refused_before_it_is_made(members: tuple[bytes, dict[str, bytes]], tmp_path: Path, where: tuple[int, ...], value: int) -> None:
    name = "rank1.tape"
    size = int.from_bytes(members[1][name][:8], "little")
    head = json.loads(members[1][name][8 : 8 + size])
    window = next(node[3] for node in head["tape"]["nodes"] if node[3] and node[3][0][2])
    for key in where[:-1]:
        window = window[key]
    window[where[-1]] = value
    text = json.dumps(head).encode()
    with zipfile.ZipFile(tmp_path / "p", "w") as archive:
        for key, data in (members[1] | {name: len(text).to_bytes(8, "little") + text + members[1][name][8 + size :]}).items():
            archive.writestr(key, data)
    with pytest.raises(OracleError, match="outside of what a tape may hold"):
        check(tmp_path / "p")
