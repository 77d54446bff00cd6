"""Laws that the finite field and the polynomials must have, and random formulas in all domains."""

from __future__ import annotations

import time
from fractions import Fraction

import numpy as np
import pytest

from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.domains.field import NINF, Field, P
from proctor.oracle.prove.domains.poly import OutOfBudget, Poly
from proctor.oracle.prove.numbers import Root, inverse, product, rational, real


@pytest.fixture(params=["field", "poly"])
def domain(request: pytest.FixtureRequest) -> Field | Poly:
    return Field(1) if request.param == "field" else Poly()


def test_sums_and_products_obey_the_laws_of_a_ring(domain: Field | Poly) -> None:
    a, b, c = (domain.symbol(np.arange(4) + 10 * k + 1) for k in range(3))
    np.testing.assert_array_equal(domain.mul(a, domain.add(b, c)), domain.add(domain.mul(c, a), domain.mul(b, a)))
    np.testing.assert_array_equal(domain.sub(domain.add(a, b), b), a)
    left = domain.matmul(a.reshape(2, 2), domain.matmul(b.reshape(2, 2), c.reshape(2, 2)))
    right = domain.matmul(domain.matmul(a.reshape(2, 2), b.reshape(2, 2)), c.reshape(2, 2))
    np.testing.assert_array_equal(left, right)
    assert not np.array_equal(domain.matmul(a.reshape(2, 2), b.reshape(2, 2)), domain.matmul(b.reshape(2, 2), a.reshape(2, 2)))


@pytest.mark.parametrize("count", [5, 5000])  # few and many elements go other ways
def test_the_field_is_whole_numbers_modulo_p(count: int) -> None:
    field, dice = Field(1), np.random.default_rng(count)
    a, b = (np.where(dice.random(count) < 0.5, P - 1 - dice.integers(0, 3, count), dice.integers(0, P, count)) for _ in range(2))
    pairs = [(int(x), int(y)) for x, y in zip(a, b)]
    assert field.add(a, b).tolist() == [(x + y) % P for x, y in pairs]
    assert field.sub(a, b).tolist() == [(x - y) % P for x, y in pairs]
    assert field.mul(a, b).tolist() == [x * y % P for x, y in pairs]


@pytest.mark.parametrize("shape", [(3, 2, 4), (90, 3, 70), (5, 130, 6), (3, 0, 2)])
def test_products_of_matrices_are_exact(shape: tuple[int, int, int]) -> None:
    n, k, m = shape
    field, dice = Field(1), np.random.default_rng(k)
    a, b = (np.where(dice.random(size) < 0.5, P - 1 - dice.integers(0, 3, size), dice.integers(0, P, size)) for size in ((n, k), (k, m)))
    exact = (a.astype(object)[:, :, None] * b.astype(object)[None]).sum(1) % P
    assert field.matmul(a, b).tolist() == exact.tolist()
    if k:
        assert field.dot(a[:, :, None], b[None], 1).tolist() == exact.tolist()


def test_an_inverse_cancels_and_a_root_squares_away(domain: Field | Poly) -> None:
    a = domain.symbol(np.arange(3) + 1)
    one = domain.const(Fraction(1))
    assert (domain.mul(a, domain.inv(a)) == one).all()
    np.testing.assert_array_equal(domain.square(domain.apply("sqrt", a)), a)
    half = domain.mul(domain.apply("sqrt", a), np.asarray(domain.const(Root(Fraction(1, 2), 2))))
    np.testing.assert_array_equal(domain.square(half), domain.mul(a, np.asarray(domain.const(Fraction(1, 2)))))


def test_an_element_that_meets_a_root_by_chance_is_not_taken_for_one() -> None:
    field = Field(1)
    a = field.symbol(np.arange(3) + 1)
    met = field.apply("sqrt", a)
    met[0] = field.symbol(np.array([9]))[0]
    np.testing.assert_array_equal(field.square(met), met * met % P)


def test_minus_infinity_absorbs_and_its_exponential_is_nothing(domain: Field | Poly) -> None:
    low = np.asarray([domain.const(float("-inf"))])
    a = domain.symbol(np.array([5]))
    zero = domain.const(Fraction(0))
    assert domain.apply("exp", domain.sub(domain.add(a, low), a))[0] == zero
    assert domain.largest(np.concatenate([low, a]), 0) == a[0]


def test_the_largest_of_parts_is_the_largest_of_all(domain: Field | Poly) -> None:
    a = domain.symbol(np.arange(6) + 1)
    parts = np.array([domain.largest(a[:3], 0), domain.largest(a[3:], 0)])
    assert domain.largest(parts, 0) == domain.largest(a[::-1].copy(), 0)


def test_large_contractions_are_exact_in_the_field() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, P, (3, 1000)), rng.integers(0, P, (1000, 2))
    exact = [[sum(int(x) * int(y) for x, y in zip(row, column)) % P for column in b.T] for row in a]
    np.testing.assert_array_equal(Field(1).matmul(a, b), exact)


def test_an_exponential_of_a_logarithm_is_taken_apart_by_polynomials() -> None:
    domain = Poly()
    x, s = domain.symbol(np.array([1])), domain.symbol(np.array([2]))
    found = domain.apply("exp", domain.sub(x, domain.apply("log", s)))
    np.testing.assert_array_equal(found, domain.mul(domain.apply("exp", x), domain.inv(s)))


def test_equal_sums_get_equal_names_and_multiples_keep_their_factor() -> None:
    domain = Poly()
    a, b = domain.symbol(np.array([1, 2])).tolist()
    total = int(domain.add(np.array([a]), np.array([b]))[0])
    twice = int(domain.add(np.array([total]), np.array([total]))[0])
    name = domain.name_of(total)
    assert name == domain.name_of(int(domain.add(np.array([b]), np.array([a]))[0])) != total
    assert domain.name_of(twice) == int(domain.mul(np.array([name]), np.asarray(domain.const(Fraction(2))))[0])


def test_too_many_terms_end_a_proof() -> None:
    with pytest.raises(OutOfBudget):
        Poly(3).symbol(np.arange(9))


def test_the_time_of_a_proof_is_looked_at_between_its_terms() -> None:
    domain = Poly(until=0.0)
    with pytest.raises(OutOfBudget, match="time"):
        domain.symbol(np.arange(200))


def test_numbers_of_a_program_are_what_it_meant() -> None:
    assert rational(1 / 3) == Fraction(1, 3) and rational(0.1) == Fraction(1, 10) and rational(1e-5) == Fraction(1, 100000)
    assert real(0.5**0.5) == Root(Fraction(1, 2), 2) and real(32**-0.25) == Root(Fraction(1, 32), 4)
    assert Field(1).const(float("-inf")) == NINF


def test_a_product_of_roots_is_the_number_of_least_degree() -> None:
    half, eighth = Root(Fraction(1, 2), 2), Root(Fraction(1, 8), 4)
    assert product(half, half) == Fraction(1, 2) and product(product(half, Fraction(-2)), half) == -1
    assert product(Root(Fraction(1, 4), 4), half) == Fraction(1, 2) and product(eighth, inverse(eighth)) == 1 and product(Fraction(0), half) == 0
    assert product(product(eighth, eighth), product(eighth, eighth)) == Fraction(1, 8)
    numbers: list[Fraction | Root] = [half, eighth, Root(Fraction(3), 4, True), Fraction(-5, 3), Root(Fraction(2, 3), 2, True)]
    for a in numbers:
        assert float(inverse(a)) == pytest.approx(1 / float(a)) and float(F64().const(a)) == pytest.approx(float(a))
        for b in numbers:
            assert float(product(a, b)) == pytest.approx(float(a) * float(b))


def test_a_number_below_0_that_is_a_root(domain: Field | Poly) -> None:
    one = np.asarray(domain.const(Root(Fraction(3), 2, True)))
    assert int(domain.add(one, np.asarray(domain.const(Root(Fraction(3), 2))))) == 0
    assert int(domain.square(one)) == int(domain.const(Fraction(3)))


def test_the_largest_cancels_in_a_softmax_and_parts_of_it_are_the_whole() -> None:
    d = Poly()
    x = d.symbol(np.arange(4))

    def softmax(parts: list[np.ndarray], top: np.ndarray) -> np.ndarray:
        tops = [np.asarray(d.largest(part, 0)) for part in parts]
        es = [d.apply("exp", d.sub(part, own)) for part, own in zip(parts, tops)]
        scales = [d.apply("exp", d.sub(own, top)) for own in tops]
        total = d.sum(np.stack([d.mul(d.sum(e, (0,)), scale) for e, scale in zip(es, scales)]), (0,))
        return np.concatenate([d.mul(d.mul(e, scale), d.inv(total)) for e, scale in zip(es, scales)])

    top = np.asarray(d.largest(x, 0))
    whole = softmax([x], top)
    assert np.array_equal(whole, softmax([x[:2], x[2:]], top))
    logs = d.sub(d.sub(x, top), d.apply("log", d.sum(d.apply("exp", d.sub(x, top)), (0,))))
    assert np.array_equal(d.apply("exp", d.each(d.name_of, logs)), whole)
    assert not np.array_equal(whole, softmax([x[:2], x[2:3]], top)[[0, 1, 2, 2]])


def test_names_are_written_out_only_where_formulas_part() -> None:
    d = Poly()
    a, b, c = (int(v) for v in d.symbol(np.arange(3)))
    ab, ac = d.name_of(int(d.add(a, b))), d.name_of(int(d.add(a, c)))
    product = int(d.mul(ab, ac))
    written = int(d.sum(np.array([d.mul(a, a), d.mul(a, c), d.mul(b, a), d.mul(b, c)]), (0,)))
    assert product != written and d.same(product, written) and not d.same(product, int(d.add(written, a)))
    share = d.sum(np.array([d.mul(a, d.inv(np.array(ab))), d.mul(b, d.inv(np.array(ab)))]), (0,))
    assert d.same(int(share), int(d.const(1.0)))


def test_one_product_of_long_sums_keeps_the_time() -> None:
    began = time.process_time()
    domain = Poly(until=began + 0.5)
    a, b = (domain.sum(domain.symbol(np.arange(first, first + 3000)), (0,)) for first in (0, 3000))
    with pytest.raises(OutOfBudget, match="more time"):
        domain.mul(a, b)  # nine million products
    assert time.process_time() - began < 3


def test_the_field_is_that_of_whole_numbers() -> None:
    rng, field = np.random.default_rng(0), Field(1)
    for shape in ((1,), (7,), (3, 5), (2, 33)):
        a, b = rng.integers(1, P, shape), rng.integers(0, P, shape)
        a.flat[0], b.flat[0] = P - 1, P - 1
        for name, right in (("add", lambda x, y: (x + y) % P), ("sub", lambda x, y: (x - y) % P), ("mul", lambda x, y: x * y % P)):
            assert getattr(field, name)(a, b).reshape(-1).tolist() == [right(x, y) for x, y in zip(a.reshape(-1).tolist(), b.reshape(-1).tolist())]
        inverse = field.inv(a)
        assert inverse.shape == shape and (field.mul(a, inverse) == 1).all()
    assert field.inv(np.array([0, 5, NINF, 0]))[0] == field.inv(np.array([0]))[0] != 0
    assert int(field.inv(np.asarray(np.int64(2)))) == int(field.const(Fraction(1, 2)))
    a, b = rng.integers(P - 5, P, (3, 70)), rng.integers(P - 5, P, (70, 2))
    assert field.matmul(a, b).tolist() == [[sum(x * y for x, y in zip(row, column)) % P for column in zip(*b.tolist())] for row in a.tolist()]


@pytest.mark.parametrize(("one", "other", "both"), [("1/294912", "2", "1/147456"), ("2", "3", "6"), ("1/2", "8", "4"), ("5/12", "3/20", "1/16"), ("10007", "10007/4", "100140049/4")])
def test_roots_of_numbers_are_one_whatever_they_are_multiplied_of(one: str, other: str, both: str) -> None:
    poly = Poly()
    for degree in (2, 4):
        x, y, z = (poly.const(Root(Fraction(text), degree)) for text in (one, other, both))
        assert poly.mul(x, y) == z
        assert poly.mul(z, poly.inv(x)) == y
        assert poly.mul(x, poly.inv(x)) == poly.const(Fraction(1))
    assert poly.apply("sqrt", poly.const(Fraction(one))) == poly.const(Root(Fraction(one), 2))
    a, b = poly.symbol(np.arange(2) + 1)
    root = poly.const(Root(Fraction(2), 2))
    assert poly.same(int(poly.mul(root, poly.name_of(int(poly.add(poly.mul(root, a), poly.mul(root, b)))))), int(poly.mul(poly.const(Fraction(2)), poly.add(a, b))))
    assert not poly.same(int(poly.mul(root, a)), int(poly.mul(poly.const(Root(Fraction(3), 2)), a)))
