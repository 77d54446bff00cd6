"""Which violations are one cause, which of them comes first, and what the incident is called."""

from __future__ import annotations

import random
import time

import pytest
from helpers.relations import ALL, rule
from helpers.runs import write_run

from proctor.invariants.condition import ALWAYS
from proctor.invariants.invariant import Hypothesis, Invariant, Severity, Support
from proctor.invariants.pack import Pack
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import Violation
from proctor.verify.checker import check
from proctor.verify.incident import STORM, callers, group, nearness, title


def violation(name: str, step: int | None = 0, **more) -> Violation:
    plain = {
        "id": name,
        "code": "PR190",
        "relation": "r",
        "severity": Severity.ERROR,
        "text": f"rule {name}",
        "when": "always",
        "step": step,
        "rank": 0,
        "function": "",
        "variable": "",
        "module": "",
        "source": "",
        "expected": "a",
        "seen": "something else",
        "support": Support(10, 0, 1, 1),
        "confirmed": True,
        "advice": "",
        "count": 2,
        "places": [(step, 0), (step, 1)],
    }
    return Violation(**(plain | more))


def ids(incidents):
    return [[v.id for v in i.violations] for i in incidents]


def test_no_violation_no_incident():
    assert group([]) == []


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"variable": "fc.weight"}, {"variable": "fc.weight"}),
        ({"variable": "fc.weight"}, {"variable": "fc.bias"}),
        ({"variable": "weight grad"}, {"variable": "weight, bias"}),
        ({"variable": "layers.0.attn.q.weight"}, {"variable": "layers.0.attn.k.weight"}),
        ({"variable": "layers.0.attn.q.weight"}, {"module": "layers.0.attn"}),
        ({"function": "torch.f"}, {"function": "torch.f"}),
    ],
)
def test_same_subject_within_a_step_is_one_incident(a, b):
    assert ids(group([violation("a", 3, **a), violation("b", 4, **b)])) == [["a", "b"]]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ({"variable": "fc1.weight"}, {"variable": "fc2.weight"}),
        ({"variable": "weight"}, {"variable": "bias"}),
        ({"function": "f", "seen": "one thing"}, {"function": "g", "seen": "another"}),
        ({"module": "torch.nn.Linear"}, {"module": "torch.nn.LayerNorm"}),
        ({}, {}),
    ],
)
def test_unrelated_violations_stay_apart(a, b):
    assert ids(group([violation("a", 3, **a), violation("b", 3, **b)])) == [["a"], ["b"]]


def test_siblings_far_apart_in_time_stay_apart():
    far = [violation("a", 1, variable="layers.0.q.weight"), violation("b", 9, variable="layers.0.k.weight")]
    assert ids(group(far)) == [["a"], ["b"]]


def test_later_violation_of_the_same_variable_is_a_consequence():
    later = [violation("b", 90, variable="fc.weight"), violation("a", 1, variable="fc.weight"), violation("c", 95, variable="fc.bias")]
    assert ids(group(later)) == [["a", "b", "c"]]


def test_a_gradient_that_parts_after_its_parameter_did_is_a_consequence():
    later = [violation("a", 0, variable="emb.weight"), violation("b", 2, variable="emb.weight.grad"), violation("c", 2, variable="head.weight.grad")]
    assert ids(group(later)) == [["a", "b"], ["c"]]


def test_the_same_deviating_ranks_are_one_cause_and_all_ranks_are_none():
    few = {"places": [(1, 2)], "rank": 2}
    pair = [violation("a", 1, variable="x", **few), violation("b", 7, variable="y", **few)]
    assert ids(group(pair, ranks=4)) == [["a", "b"]]
    assert ids(group(pair, ranks=1)) == [["a"], ["b"]]


def test_caller_and_callee_are_one_cause():
    pair = [violation("a", 1, function="outer", seen="one thing"), violation("b", 1, function="inner", seen="another")]
    assert ids(group(pair, calls=frozenset({("outer", "inner")}))) == [["a", "b"]]
    assert len(group(pair)) == 2


def test_callers_are_found_through_functions_nobody_complains_about(tmp_path):
    calls = [
        {"fn": "outer", "seq": 1, "step": 2},
        {"fn": "middle", "seq": 2, "parent": 1, "step": 2},
        {"fn": "inner", "seq": 3, "parent": 2, "step": 2},
        {"fn": "apart", "seq": 4, "step": 2},
    ]
    trace = Trace.load([write_run(tmp_path / "r", [{"calls": calls}])])
    named = [violation(f, 2, function=f) for f in ("outer", "inner", "apart", "not in the trace")]
    assert callers(trace, named) == {("outer", "inner")}
    assert callers(trace, [violation("x", None, function="outer"), violation("y", None, function="inner")]) == frozenset()


def test_earliest_first_then_upstream_then_severity_then_support():
    f = {"function": "f"}
    items = [
        violation("late", 2, **f),
        violation("down", 1, relation="down", **f),
        violation("warn", 1, relation="up", severity=Severity.WARNING, **f),
        violation("weak", 1, relation="up", **f),
        violation("strong", 1, relation="up", support=Support(10, 0, 5, 4), **f),
    ]
    random.Random(1).shuffle(items)
    (one,) = group(items, upstream={"up": 1, "down": 8})
    assert [v.id for v in one.violations] == ["strong", "weak", "warn", "down", "late"]
    assert one.first_step == 1


def test_setup_comes_before_every_step():
    found = group([violation("b", 0, variable="x"), violation("a", None, variable="y"), violation("c", -1, variable="z")])
    assert [i.violations[0].id for i in found] == ["a", "c", "b"]
    assert [i.first_step for i in found] == [None, -1, 0]


def test_storm_is_one_incident_that_says_so():
    items = [violation(f"s{i}", 5, variable=f"v{i}") for i in range(STORM + 1)]
    (one,) = group([*items, violation("other", 50, variable="elsewhere.w")])[:1]
    assert len(one.violations) == STORM + 1
    assert one.title.endswith("and 20 more rules at once")
    assert len(group(items[:-1])) == STORM


def test_what_one_relation_says_of_several_functions_at_once_is_one_cause() -> None:
    items = [violation(f"f{i}", 7, function=f"net.part{i}", seen="step 7 does not call it") for i in range(3)]
    assert [len(incident.violations) for incident in group(items)] == [3]
    later = violation("g", 12, function="net.other", seen="step 7 does not call it")
    other = violation("h", 7, function="net.another", seen="step 7 calls it twice")
    named = violation("i", 7, function="net.named", variable="a.weight", seen="step 7 does not call it")
    assert [len(incident.violations) for incident in group([*items, later, other, named])] == [3, 1, 1, 1]


def test_order_of_input_does_not_matter():
    items = [violation(f"v{i}", i % 7, variable=f"layers.{i % 5}.w{i % 3}", function=f"f{i % 11}") for i in range(40)]
    expected = ids(group(items))
    for seed in range(5):
        random.Random(seed).shuffle(items)
        assert ids(group(items)) == expected


def test_thousands_of_violations_are_grouped_quickly():
    items = [violation(f"v{i}", i % 100, variable=f"layers.{i}.attn.weight") for i in range(4000)]
    began = time.perf_counter()
    assert sum(len(i.violations) for i in group(items)) == 4000
    assert time.perf_counter() - began < 5


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"seen": "NaN in it.", "variable": "fc.weight"}, "fc.weight: NaN in it (from step 3)"),
        ({"seen": "w is twice what it was (4 of 4 places)", "variable": "w grad"}, "w is twice what it was (from step 3)"),
        ({"seen": "no call at all"}, "No call at all (from step 3)"),
        ({"seen": "x", "count": 1, "variable": "w"}, "w: x (at step 3)"),
        ({"seen": "x", "step": -1, "variable": "w"}, "w: x (before the first step)"),
        ({"seen": "x", "step": None, "variable": "w"}, "w: x"),
        (
            {"seen": "torch.optim.Optimizer.zero_grad never ran before torch.Tensor.backward", "function": "torch.optim.Optimizer.zero_grad"},
            "Optimizer.zero_grad never ran before Tensor.backward (from step 3)",
        ),
        ({"seen": "", "text": "the rule"}, "The rule (from step 3)"),
        ({"seen": "a\x1b[31m\nb", "variable": "w"}, "w: a\\x1b[31m b (from step 3)"),
    ],
)
def test_title_says_what_was_seen_on_what_and_since_when(more, expected):
    assert title(violation("a", **({"step": 3} | more))) == expected


def test_title_is_bounded():
    assert len(title(violation("a", seen="very " * 1000))) < 260


def test_cause_and_consequence_of_a_real_trace_are_one_incident(tmp_path):
    calls = [{"fn": f, "step": s} for s in range(6) for f in (["z", "b"] if s < 3 else ["b"])]
    states = [{"var": {"name": "fc.weight"}, "step": s, "flags": 4 if s > 3 else 0} for s in range(6)]
    run = write_run(tmp_path / "r", [{"rank": 0, "world": 2, "calls": calls, "states": states}, {"rank": 1, "world": 2}])
    rules = [rule("test_happens", first="z", then="b"), rule("test_finite", variable="fc.weight")]
    result = check(Trace.load([run]), [Pack(rules)], relations=ALL)
    assert ids(result.incidents) == [[r.id for r in rules]]


def test_what_happened_to_values_comes_before_calls_that_are_left_out():
    """An optimizer of another model's parameters shifts the steps, too: that a function is not called in one of them is a consequence."""
    hypotheses = {
        "each": Hypothesis.of("manner", mode="each", what="ops.permute", family="f"),
        "covers": Hypothesis.of("sequence", mode="cover", a="ops.permute", b="torch.optim.Optimizer.step", program="p"),
        "calls": Hypothesis.of("contain", kind="call", parent="train", child="ops.permute", family="f", layout="one rank"),
        "holds": Hypothesis.of("contain", kind="change", parent="torch.optim.Optimizer.step", attr="grad", who="some", role="parameter"),
    }
    rules = [Invariant(name, h, ALWAYS, Support(10, 0, 1, 1), name) for name, h in hypotheses.items()]
    upstream = nearness(registry(), rules)
    found = [violation(name, 0, relation=h.relation, function=name) for name, h in hypotheses.items()]
    assert ids(group(found, upstream=upstream))[0][0] == "holds"
    assert upstream["holds"] < upstream["each"] == upstream["covers"] == upstream["calls"]
