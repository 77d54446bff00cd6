"""Formulas that are not written out, and lemmas about them."""

from __future__ import annotations

import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.oracle.prove_programs import who
from torch import nn

from proctor.oracle.prove.domains.applied import Applied
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.domains.poly import Poly
from proctor.oracle.prove.leaves import align
from proctor.oracle.prove.numbers import Root
from proctor.oracle.prove.proofs.chase import Known
from proctor.oracle.prove.proofs.file import check, save
from proctor.oracle.prove.proofs.lemma import Lemmas
from proctor.oracle.prove.prover import decide
from proctor.oracle.prove.recording.world import tape_of


@pytest.mark.parametrize("seed", range(60))
def test_elements_have_one_id_only_if_they_are_one_formula(seed: int) -> None:
    """Against polynomials, in which equal formulas are equal numbers."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(1, 4, (2, 3, 3))
    applied, poly = Applied(), Poly()
    both = [(applied.symbol(keys), poly.symbol(keys))]
    for _ in range(6):
        (a, x), (b, y) = (both[k] for k in rng.integers(0, len(both), 2))
        made = [
            lambda d, a, b: d.matmul(a, b), lambda d, a, b: d.add(a, b), lambda d, a, b: d.mul(a, b[:, :1]), lambda d, a, b: d.apply("exp", a),
            lambda d, a, b: d.sub(a, d.sum(b, (2,), True)), lambda d, a, b: d.add(d.sum(a, (0, 1)), b), lambda d, a, b: d.mul(a, d.largest(b, 1)[:, None]),
            lambda d, a, b: d.mul(a, d.const(Fraction(2, 3))), lambda d, a, b: d.mul(d.ints(np.array([[2, 0, 1]])), b), lambda d, a, b: d.inv(d.add(a, d.const(0.25))),
            lambda d, a, b: d.sub(d.mul(a, d.const(4)), d.square(d.mul(b, d.const(2)))), lambda d, a, b: d.add(a, d.sum(d.ints(np.array([[2, 0, 3]])), (1,), True)),
        ][rng.integers(0, 12)]  # fmt: skip
        both.append((made(applied, a, b), made(poly, x, y)))
    for ids, polys in both:
        assert ids.shape == polys.shape
        where: dict[int, int] = {}
        for i, p in zip(ids.reshape(-1).tolist(), polys.reshape(-1).tolist()):
            assert where.setdefault(i, p) == p


def test_a_number_in_front_is_taken_out_of_what_is_linear_and_of_powers() -> None:
    applied = Applied()
    x, w = applied.symbol(np.arange(6).reshape(2, 3) + 1), applied.symbol(np.arange(6).reshape(3, 2) + 11)
    four, quarter = applied.const(Fraction(4)), applied.const(Fraction(1, 4))

    def same(one: np.ndarray, other: np.ndarray) -> None:
        np.testing.assert_array_equal(one, other)

    same(applied.mul(applied.mul(x, four), quarter), x)
    same(applied.matmul(applied.mul(x, four), w), applied.mul(applied.matmul(x, w), four))
    same(applied.sum(applied.mul(x, quarter), (1,)), applied.mul(quarter, applied.sum(x, (1,))))
    same(applied.square(applied.mul(x, four)), applied.mul(applied.square(x), applied.const(Fraction(16))))
    same(applied.inv(applied.mul(x, four)), applied.mul(applied.inv(x), quarter))
    same(applied.sub(applied.mul(x, four), applied.ints(np.array([8]))), applied.mul(applied.sub(x, applied.ints(np.array([2]))), four))
    assert (applied.add(applied.mul(x, four), x) != applied.mul(applied.add(x, x), four)).all()
    same(applied.sum(applied.ints(np.array([[1, 2], [0, 3]])), (1,)), applied.ints(np.array([3, 3])))


@pytest.mark.parametrize("seed", range(30))
def test_roots_in_front_are_taken_out_and_stay_the_same_numbers(seed: int) -> None:
    """Against doubles."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(1, 1 << 30, (2, 3, 3))
    applied, doubles = Applied(), F64()
    both = [(applied.symbol(keys), doubles.symbol(keys))]
    for _ in range(6):
        (a, x), (b, y) = (both[k] for k in rng.integers(0, len(both), 2))
        root = [Root(Fraction(1, 2), 2), Root(Fraction(2), 4, True), Root(Fraction(8), 4), Fraction(-3)][rng.integers(0, 4)]
        made = [
            lambda d, a, b, r: d.matmul(d.mul(a, d.const(r)), b), lambda d, a, b, r: d.add(d.mul(a, d.const(r)), d.mul(b, d.const(r))), lambda d, a, b, r: d.sub(a, d.mul(b, d.const(r))),
            lambda d, a, b, r: d.square(d.mul(a, d.const(r))), lambda d, a, b, r: d.sum(d.mul(a, d.const(r)), (1,), True), lambda d, a, b, r: d.add(a, d.sum(d.mul(np.broadcast_to(d.const(r), (3,)), d.const(r)), (0,))),
            lambda d, a, b, r: d.inv(d.mul(a, d.const(r))),
        ][rng.integers(0, 7)]  # fmt: skip
        both.append((np.broadcast_to(made(applied, a, b, root), (2, 3, 3)), np.broadcast_to(made(doubles, x, y, root), (2, 3, 3))))
    where: dict[int, float] = {}
    for ids, numbers in both:
        for i, p in zip(ids.reshape(-1).tolist(), numbers.reshape(-1).tolist()):
            assert where.setdefault(i, p) == pytest.approx(p, rel=1e-6)


def test_a_scale_in_two_halves_is_the_scale() -> None:
    applied = Applied()
    x, y = applied.symbol(np.arange(6).reshape(2, 3) + 1), applied.symbol(np.arange(6).reshape(3, 2) + 11)
    root, half = applied.const(Root(Fraction(1, 2), 2)), applied.const(Fraction(1, 2))
    np.testing.assert_array_equal(applied.matmul(applied.mul(x, root), applied.mul(y, root)), applied.mul(applied.matmul(x, y), half))


def test_of_several_numbers_the_smallest_is_taken_out() -> None:
    """Gradients of queries and keys have a root in front, those of values beside them have none."""
    applied = Applied()
    x, y, w = (applied.symbol(np.arange(4).reshape(2, 2) + start) for start in (1, 11, 21))
    both = np.concatenate([applied.mul(x, applied.const(Root(Fraction(1, 2), 2))), y], 1)
    w = np.concatenate([w, w])
    for number in (Fraction(4), Fraction(-1, 3), Root(Fraction(1, 8), 2)):
        times = applied.const(number)
        np.testing.assert_array_equal(applied.matmul(applied.mul(both, times), w), applied.mul(applied.matmul(both, w), times))
    assert (applied.matmul(both, w) != applied.matmul(np.concatenate([x, y], 1), w)).all()


def test_rows_of_one_token_are_one_row() -> None:
    applied = Applied()
    x, w = applied.symbol(np.array([[1, 2], [3, 4], [1, 2]])), applied.symbol(np.arange(4).reshape(2, 2) + 10)
    made = applied.apply("exp", applied.matmul(x, w))
    np.testing.assert_array_equal(made[0], made[2])
    assert len(np.unique(made)) == 4
    assert len(np.unique(applied.sum(made, (1,)))) == 2


def test_what_is_made_of_a_part_of_the_rows_is_that_part_of_what_is_made_of_all() -> None:
    applied = Applied()
    x, w, b = applied.symbol(np.arange(12).reshape(4, 3) + 1), applied.symbol(np.arange(6).reshape(3, 2) + 101), applied.symbol(np.arange(2) + 201)

    def made(x: np.ndarray) -> np.ndarray:
        h = applied.add(applied.matmul(x, w), b)
        return applied.mul(applied.apply("exp", h), applied.inv(applied.sum(h, (1,), True)))

    whole, groups = made(x), len(applied.groups)
    np.testing.assert_array_equal(made(x[2:]), whole[2:])
    np.testing.assert_array_equal(made(x[[3, 0]]), whole[[3, 0]])
    assert len(applied.groups) == groups
    assert (applied.matmul(x[:, :2], w[:2]) != applied.matmul(x, w)).all()
    total = applied.sum(x, (0, 1))  # an array of no axes
    assert applied.apply("sqrt", applied.add(total, total)).shape == applied.sub(applied.mul(total, applied.const(Fraction(2))), applied.inv(total)).shape == ()
    assert (applied.apply("maximum", x[0], x[1]) != applied.apply("maximum", x[1], x[0])).all()


def test_numbers_in_front_of_a_row_do_not_depend_on_the_rows_beside_it() -> None:
    applied = Applied()
    x, w, root = applied.symbol(np.arange(6).reshape(2, 3) + 1), applied.symbol(np.arange(6).reshape(3, 2) + 11), applied.const(Root(Fraction(2), 2))
    both = np.concatenate([applied.mul(x[:1], root), x[1:]])
    np.testing.assert_array_equal(applied.matmul(both, w)[1:], applied.matmul(x, w)[1:])
    np.testing.assert_array_equal(applied.matmul(both, w)[:1], applied.mul(applied.matmul(x, w)[:1], root))
    np.testing.assert_array_equal(applied.sum(both, (1,))[0], applied.mul(applied.sum(x, (1,))[0], root))


def test_what_was_shown_is_put_where_it_is_made_again_with_any_number_in_front() -> None:
    applied = Applied()
    x, y = applied.symbol(np.arange(3) + 1), applied.symbol(np.arange(3) + 11)
    known, three = Known(applied), applied.const(Fraction(3))
    known.learn(applied.mul(applied.apply("exp", x), three), applied.mul(applied.apply("tanh", y), three))
    view = np.concatenate([applied.apply("exp", x)[1:], applied.mul(applied.apply("exp", x), applied.const(Fraction(1, 2))), y])
    known.put(view)
    tanh = applied.apply("tanh", y)
    np.testing.assert_array_equal(view, np.concatenate([tanh[1:], applied.mul(tanh, applied.const(Fraction(1, 2))), y]))


def test_some_elements_of_a_lemma_are_shown_where_others_are_not() -> None:
    applied = Applied()
    lemmas = Lemmas(applied, time.process_time() + 60)
    a, b, c = (applied.symbol(np.arange(3) + 10 * k + 1) for k in range(3))
    one = applied.mul(applied.add(a, b), c)
    other = applied.add(applied.mul(a, c), applied.mul(b, c))
    mixed = np.array([other[0], other[2], other[2]])
    assert lemmas.alike(one, mixed).tolist() == [True, False, True]
    assert lemmas.alike(one, other).all() and lemmas.same(one, other)
    assert not lemmas.same(one, mixed)


def test_a_lemma_that_ends_early_shows_no_more_than_it_has() -> None:
    """Twelve elements that are not alike end it: those behind them stay open, and are not taken for shown."""
    applied = Applied()
    lemmas = Lemmas(applied, time.process_time() + 60)
    a, b = (applied.symbol(np.arange(30) + 100 * k + 1) for k in range(2))
    one, other = applied.add(a, b), np.concatenate([applied.mul(a, b)[:20], applied.add(b, a)[20:]])
    assert not lemmas.alike(one, other)[:20].any()


def rows_alike() -> None:
    """Attention over three rows that begin with one token, one of them with the same token again; by data parallel ranks, one sequence each."""
    rank, world = who()
    torch.manual_seed(1)
    model = nn.ModuleList([nn.Embedding(5, 4), nn.Linear(4, 12, bias=False), nn.Linear(4, 5)])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.parts[0](tokens)
            for _ in range(2):
                q, k, v = self.parts[1](x).chunk(3, -1)
                scores = (q @ k.transpose(-1, -2)).masked_fill(torch.ones(tokens.shape[1], tokens.shape[1]).triu(1).bool(), float("-inf"))
                x = x + scores.softmax(-1) @ v
            found: torch.Tensor = self.parts[2](x)
            return found

    whole = Model()
    tokens, target = torch.tensor([[1, 1, 3], [1, 2, 3], [1, 2, 4]]), torch.tensor([[1, 3, 0], [2, 3, 1], [2, 4, 0]])
    mine = slice(rank * 3 // world, (rank + 1) * 3 // world)
    update = torch.optim.SGD(whole.parameters(), lr=0.1)
    nn.functional.cross_entropy(whole(tokens[mine]).flatten(0, 1), target[mine].flatten()).backward()
    for parameter in whole.parameters():
        assert parameter.grad is not None
        if world > 1:
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad /= world
    update.step()


def test_repeated_tokens_leave_nothing_to_the_whole_step_and_the_proof_is_checked_again(tmp_path: Path) -> None:
    reference, candidate = tape_of(rows_alike), [tape_of(rows_alike, rank, 3) for rank in range(3)]
    verdict = decide(reference, candidate)
    assert verdict.verdict == "PROVED" and verdict.local, str(verdict)
    save(tmp_path / "step.proof", verdict, reference, candidate, align(reference, candidate))
    assert check(tmp_path / "step.proof").verdict == "PROVED"
