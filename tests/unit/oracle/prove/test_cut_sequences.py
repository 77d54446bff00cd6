"""A sequence over ranks: rings of sends, heads exchanged for positions; and what right programs were wrongly refuted by."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers.oracle.prove_programs import who
from helpers.oracle.prove_sequence import exchanged, ring

from proctor.oracle.prove import prove
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.meanings import Context, Floats, find

Program = Callable[[], None]


@pytest.mark.parametrize(
    ("make", "mistake", "mesh", "word"),
    [
        (ring, "", "cp=2", "CLOSE"), (ring, "", "cp=3", "CLOSE"),  # laws of exp are for a proof
        (ring, "not scaled again", "cp=2", "DIFFERENT"), (ring, "not sent home", "cp=2", "DIFFERENT"), (ring, "not sent home", "cp=3", "DIFFERENT"),
        (exchanged, "", "cp=2", "EQUAL"), (exchanged, "no offset", "cp=2", "DIFFERENT"), (exchanged, "padding counts", "cp=2", "DIFFERENT"),
    ],
)  # fmt: skip
def test_a_cut_sequence(make: Callable[[str], Program], mistake: str, mesh: str, word: str) -> None:
    verdict = prove(make(""), make(mistake), mesh, proof_s=0)
    assert verdict.verdict == word, str(verdict)


@pytest.mark.parametrize("mesh", ["cp=2", "cp=3"])
def test_keys_that_go_round_are_proved(mesh: str) -> None:
    """What softmax subtracts is another one in each part, and the gradient of the keys' bias is 0: doubles have rounding there."""
    verdict = prove(ring(), ring(), mesh, proof_s=120)
    assert verdict.verdict == "PROVED" and verdict.local, str(verdict)


def test_an_expert_that_gets_no_token() -> None:
    means = find("aten.index_add.default")
    assert means is not None
    rows: Any = means(Context(F64()), Floats(np.ones((2, 3))), 0, np.zeros(0, np.int64), Floats(np.zeros((0, 3))))
    np.testing.assert_array_equal(rows, np.ones((2, 3)))


def test_ranks_that_bring_other_shapes_to_a_collective_are_named() -> None:
    def train() -> None:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2)
        update = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 4)).sum().backward()
        if who()[1] > 1:
            dist.all_reduce(model.weight.grad.view(-1)[: 8 - who()[0]])
        update.step()

    verdict = prove(train, train, "dp=2")
    assert verdict.verdict == "DIFFERENT" and verdict.culprit is not None
    assert "[8]" in verdict.culprit.said and "[7]" in verdict.culprit.said, str(verdict)
