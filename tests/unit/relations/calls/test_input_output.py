"""`input_output`: sizes and dtypes that go through a function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.loops import call, details, holds, learn, load, loop, tensor, violations

from proctor.invariants.relations.input_output import InputOutput

RELATION = InputOutput()
PROCESSOR = "vlm.Processor.__call__"


def processed(texts: int, rows: int | None = None, *, nested: bool = True, width: int = 7) -> dict[str, Any]:
    """A processor that makes a batch of texts and images; `rows` is what comes out."""
    me = {"O": "vlm.Processor", "a": {}}
    image: Any = {"L": [tensor(3, 4, 4)], "n": 1} if nested else tensor(3, 4, 4)
    batch = {"D": {"input_ids": {"T": "int64", "s": [rows or texts, width], "d": "cpu"}}, "n": 1}
    return call(PROCESSOR, me, {"L": [image], "n": texts}, {"L": ["a"], "n": texts}, ret=batch, step=0)


def program(*calls: dict[str, Any], model: str = "vlm.Net") -> dict[str, Any]:
    base = loop(3, model=model)
    return {**base, "calls": [*base["calls"], *calls]}


def healthy(tmp_path: Path):
    return load(
        tmp_path,
        [program(*[processed(5, width=w) for w in (9, 11, 13)])],
        [program(*[processed(10, width=w) for w in (8, 12, 14)], model="vlm.Other")],
    )


def test_batch_that_is_merged_is_found_and_named(tmp_path: Path) -> None:
    rules = learn(RELATION, healthy(tmp_path))
    found = details(
        RELATION, rules, load(tmp_path, [program(processed(8, 1, nested=False), model="vlm.Third")])
    )
    assert {d.function for d in found} == {PROCESSOR}
    assert "input_ids" in found[0].seen and "8" in found[0].expected


def test_other_sizes_are_fine(tmp_path: Path) -> None:
    rules = learn(RELATION, healthy(tmp_path))
    trace = load(tmp_path, [program(processed(3), processed(64, width=2), model="vlm.Third")])
    assert not violations(RELATION, rules, trace)
    assert holds(RELATION, rules, trace)


def test_list_of_something_else_is_not_judged(tmp_path: Path) -> None:
    """Five images given as one flat list belong to one text."""
    flat = processed(1, nested=False)
    flat["args"]["a"][1]["n"] = 5
    assert not violations(
        RELATION, learn(RELATION, healthy(tmp_path)), load(tmp_path, [program(flat, model="vlm.Third")])
    )


def test_square_tensors_teach_nothing(tmp_path: Path) -> None:
    turned = [call("lib.turn", tensor(8, 8), ret=tensor(8, 8), step=0) for _ in range(4)]
    assert not [h for h in RELATION.propose(load(tmp_path, [program(*turned)])) if h["fn"] == "lib.turn"]


def test_small_size_seen_once_teaches_nothing(tmp_path: Path) -> None:
    pairs = [call("lib.pair", tensor(2, 9), ret=tensor(2, 7), step=0) for _ in range(4)]
    assert not [h for h in RELATION.propose(load(tmp_path, [program(*pairs)])) if h["fn"] == "lib.pair"]


def test_one_size_only_stays_in_its_family(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [program(*[processed(6, width=w) for w in (9, 11, 13)])]))
    bad = processed(6, 1)
    assert violations(RELATION, rules, load(tmp_path, [program(bad)]))
    assert not violations(RELATION, rules, load(tmp_path, [program(bad, model="vlm.Other")]))


def test_torch_itself_is_not_looked_at(tmp_path: Path) -> None:
    rows = [call("torch.nn.functional.relu", tensor(n, 3), ret=tensor(n, 3), step=0) for n in (5, 6, 7)]
    assert not [
        h for h in RELATION.propose(load(tmp_path, [program(*rows)])) if h.text("fn").startswith("torch.")
    ]


def test_dtype_that_is_passed_on(tmp_path: Path) -> None:
    def norm(given: str, out: str) -> dict[str, Any]:
        return call(
            "lib.Norm.forward",
            {"M": "lib.Norm", "t": 1},
            tensor(9, 4, dtype=given),
            ret=tensor(9, 4, dtype=out),
            step=0,
        )

    rules = learn(
        RELATION, load(tmp_path, [program(*[norm(d, d) for d in ("float32", "bfloat16") for _ in range(3)])])
    )
    (detail,) = [d for d in details(RELATION, rules, load(tmp_path, [program(norm("bfloat16", "float32"))]))]
    assert "dtype" in detail.seen and detail.function == "lib.Norm.forward"


def test_fewer_records_order_and_split_change_nothing(tmp_path: Path) -> None:
    rules = learn(RELATION, healthy(tmp_path))
    good, bad = program(processed(8)), program(processed(8, 1))
    traces = (load(tmp_path, [good, bad]), load(tmp_path, [bad, good]), load(tmp_path, [bad]))
    texts = [set(violations(RELATION, rules, t)) for t in traces]
    assert texts[0] == texts[1] == texts[2] != set()
    assert not violations(RELATION, rules, load(tmp_path, [{**good, "calls": good["calls"][:-1]}]))


def test_needs_and_sentences(tmp_path: Path) -> None:
    for hypothesis in RELATION.propose(healthy(tmp_path)):
        assert RELATION.needs(hypothesis).functions == {hypothesis.text("fn")}
        assert hypothesis.text("fn") in RELATION.say(hypothesis)
    assert RELATION.propose(load(tmp_path, [{"calls": [], "states": []}])) == []
