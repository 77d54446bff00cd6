"""A proof is a file that is checked again without the search; one that was tampered with proves nothing."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers.oracle.prove_programs import data_parallel, who
from torch import nn

from proctor.errors import OracleError
from proctor.oracle.prove.leaves import align
from proctor.oracle.prove.proofs.file import check, save
from proctor.oracle.prove.prover import decide
from proctor.oracle.prove.recording.world import tape_of
from proctor.oracle.prove.verdict import Verdict


@pytest.fixture(scope="module")
def proof(tmp_path_factory: pytest.TempPathFactory) -> Path:
    reference, candidate = tape_of(data_parallel()), [tape_of(data_parallel(), r, 2) for r in range(2)]
    path = tmp_path_factory.mktemp("proof") / "step.proof"
    save(path, decide(reference, candidate), reference, candidate, align(reference, candidate))
    return path


def test_a_proof_is_checked_again(proof: Path) -> None:
    assert check(proof).verdict == "PROVED"


def changed(proof: Path, out: Path, **what: object) -> Path:
    with zipfile.ZipFile(proof) as archive, zipfile.ZipFile(out, "w") as copy:
        for name in archive.namelist():
            data = archive.read(name)
            copy.writestr(name, json.dumps({**json.loads(data), **what}) if name == "proof.json" else data)
    return out


def test_without_names_a_proof_is_out_of_budget_and_not_believed(proof: Path, tmp_path: Path) -> None:
    verdict = check(changed(proof, tmp_path / "p", cuts={}, lemmas={}, local=False), terms=20_000)
    assert verdict.verdict == "UNPROVED" and "out of budget" in verdict.why


def one_layer() -> None:
    """A step of a linear layer, the rows cut over all ranks: small enough to be multiplied out where nothing cuts it."""
    torch.manual_seed(0)
    rank, world = who()
    model = nn.Linear(3, 2)
    update = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, 3).chunk(world)[rank]).square().mean().backward()
    for parameter in model.parameters():
        if world > 1:
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= world
    update.step()


def test_a_file_that_places_nothing_proves_nothing(tmp_path: Path) -> None:
    reference, candidate = tape_of(one_layer), [tape_of(one_layer, r, 2) for r in range(2)]
    save(tmp_path / "right", decide(reference, candidate), reference, candidate, align(reference, candidate))
    assert check(tmp_path / "right").verdict == "PROVED"
    verdict = check(changed(tmp_path / "right", tmp_path / "p", placed=[]))
    assert verdict.verdict == "UNPROVED" and verdict.exit_code == 3


def test_a_wrong_rank_in_a_proof_is_no_proof(proof: Path, tmp_path: Path) -> None:
    """The tapes of a program whose gradients are not reduced, under the proof of the right one."""
    wrong = [tape_of(data_parallel("one not reduced"), r, 2) for r in range(2)]
    reference = tape_of(data_parallel())
    path = tmp_path / "p"
    save(path, Verdict("PROVED"), reference, wrong, align(reference, wrong))
    assert check(path, terms=20_000).verdict == "UNPROVED"


def test_what_was_not_proved_has_no_file(tmp_path: Path) -> None:
    tape = tape_of(data_parallel())
    with pytest.raises(OracleError, match="nothing was proved"):
        save(tmp_path / "p", Verdict("EQUAL"), tape, [tape], align(tape, [tape]))


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"PK no zip")
    with pytest.raises(OracleError, match="is no proof"):
        check(tmp_path / "p")
