"""Patterns of a plan that may match for ever are refused, others are not, and those that are taken are quick."""

from __future__ import annotations

import random
import time

import pytest

from proctor.errors import OracleError
from proctor.oracle.plans.names import compiled

LONG = ["a" * 300, "layers.0." * 40 + "!", "1.1.1." * 60 + "x", "a.b_c" * 60 + "!", "." * 300 + "x", "ab" * 150]


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+b", r"(a*)*b", r"(a|a)*b", r"(ab|a.)*c", r"(.*)*x", r"(\w+\.?)*x", r"((a{1,100}){1,100}){1,100}b", r"(a?){40}a{40}",
        r".*.*.*.*x", r"\d+\d+\d+\d+\d+x", r"(\w+)\1", r"(\w*\d*)+x", r"(x+x+)+y", r"(?:(?:a+)b?)+c", r"((ab)*)*c",
        r"(layers\.)?(.+)+z", r"^(([a-z])+.)+[A-Z]([a-z])+$",
        "a?" * 40 + "a" * 40, r"(üx|\wx)*x", r"(?i:(ax|Ay)*)x", r"(?=(a+)+b)a", r"((?:a|b)*?)*c", r"(\Wx|\.x)+x",
    ],
)  # fmt: skip
def test_what_may_take_for_ever_is_refused(pattern: str) -> None:
    with pytest.raises(OracleError, match="may match for ever"):
        compiled(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        r"layers\.\d+\.attn\.qkv\.(weight|bias)", r"layers\.(\d+)\.(.*)", r"(embedding\.word_embeddings|output_layer)\.(weight|bias)",
        r".*\.(linear_qkv|linear_fc1)\.(weight|bias)", r"(\d+)\.layers\.(\d+)\.(.*)", r".*", r"e\.(?P<n>\d+)\.w", r"a(\.\d+)*", r"(\w+\.)*weight",
        r"(?:layers|blocks)\.\d+(?:\.\w+)*\.weight", r".*attn.*weight.*", r"\d+\.\d+\.\d+\.\d+\.\d+", "|".join(f"a{i}x.*|.*a{i}" for i in range(30)),
        r"embedding\.dropout|decoder|.*layernorm|decoder\.layers\.\d+(\.(self_attention|mlp)(\.linear_(qkv|fc1))?)?|output_layer", r"(ab|cd)*x", "", r"(a|ab)*c", r"(\W|\.)+x", r"a{3}(b|c)?",
        r"model\.(encoder|decoder)\.layers\.(\d+)\.(self_attn|encoder_attn)\.(q|k|v)_proj\.(weight|bias)",
    ],
)  # fmt: skip
def test_what_people_write_is_taken_and_quick(pattern: str) -> None:
    made = compiled(pattern)
    began = time.process_time()
    for name in LONG:
        made.fullmatch(name)
    assert time.process_time() - began < 5.0


@pytest.mark.parametrize("seed", range(8))
def test_no_pattern_that_is_taken_is_slow(seed: int) -> None:
    rng = random.Random(seed)
    atoms = ["a", "b", r"\.", r"\d", r"\w", ".", "[a-c]", "[^.]", "ab", "(a|b)", "(a|ab)", "(?:a|)", "(a?b)"]
    taken = 0
    for _ in range(400):
        pattern = _grow(rng, atoms, 3)
        try:
            made = compiled(pattern)
        except OracleError:
            continue
        taken += 1
        began = time.process_time()
        for name in ("a" * 100, "ab" * 60, "a.b" * 30, "1" * 100, "a" * 60 + "!"):
            made.fullmatch(name)
        assert time.process_time() - began < 5.0, pattern
    assert taken > 20


def _grow(rng: random.Random, atoms: list[str], depth: int) -> str:
    if depth == 0:
        return rng.choice(atoms)
    inner = "".join(_grow(rng, atoms, depth - 1) for _ in range(rng.randint(1, 3)))
    return f"({inner}){rng.choice(['', '', '*', '+', '?', '{2}', '{0,40}', '*?', '+?'])}" if rng.random() < 0.7 else inner
