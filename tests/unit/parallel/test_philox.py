"""Philox by numpy against Python's whole numbers, and against the published test vectors."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from proctor.oracle.parallel.streams.philox import blocks, words


def by_whole_numbers(key, counter, domain=0):
    c = [counter & 0xFFFFFFFF, counter >> 32, domain, 0]
    k = [key & 0xFFFFFFFF, key >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def test_the_published_vector_of_zeros():
    # Random123, kat_vectors: philox4x32 10, counter and key of zeros.
    assert blocks(0, np.zeros(1, np.int64))[0].tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**62), st.integers(0, 3))
def test_blocks_are_those_of_whole_numbers(key, counter, domain):
    assert blocks(key, np.array([counter]), domain)[0].tolist() == by_whole_numbers(key, counter, domain)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=5), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_a_stretch_may_begin_anywhere(starts, length, each):
    found = words(7, np.array(starts), length, each)
    for row, start in zip(found, starts):
        for at, got in enumerate(row):
            first = (start + at) * each
            assert got.tolist() == [by_whole_numbers(7, (first + w) // 4)[(first + w) % 4] for w in range(each)]
