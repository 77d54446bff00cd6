"""`output`: dtype under autocast, last dimension, sign and the answers of checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.loops import call, details, holds, learn, load, loop, tensor, violations

from proctor.invariants.relations.output import Output

RELATION = Output()
LINEAR = "torch.nn.functional.linear"


def linear(
    out: str,
    given: str = "float32",
    *,
    outer: str = "",
    autocast: str | None = None,
    step: int = 0,
    **more: Any,
):
    context = {"outer": outer, "autocast": outer if autocast is None else autocast}
    return call(
        LINEAR,
        tensor(8, 4, dtype=given),
        tensor(2, 4),
        ret=tensor(8, 2, dtype=out),
        step=step,
        **context,
        **more,
    )


def program(*calls: dict[str, Any], model: str = "__main__.Net") -> dict[str, Any]:
    base = loop(3, model=model)
    rows = [dict(c) for c in calls]
    for row in rows:
        if "parent" in row:
            row["parent"] += len(base["calls"])
    return {**base, "calls": [*base["calls"], *rows]}


def mixed(model: str = "__main__.Net") -> dict[str, Any]:
    """Autocast around most operations, plain float32 outside it."""
    inside = [
        linear("bfloat16", given, outer="bfloat16") for given in ("float32", "bfloat16") for _ in range(3)
    ]
    return program(*inside, *[linear("float32") for _ in range(3)], model=model)


def test_dtype_under_autocast_is_learned_with_its_precondition(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [mixed()], [mixed("__main__.B")]))
    (rule,) = [r for r in rules if r.hypothesis["fn"] == LINEAR and r.hypothesis["value"] == "bfloat16"]
    assert "autocast is bfloat16" in rule.precondition.say()
    assert "family" not in rule.precondition.fields
    healthy = load(tmp_path, [mixed("__main__.C")], [program(linear("float32"), model="__main__.D")])
    assert not violations(RELATION, rules, healthy)
    assert holds(RELATION, rules, healthy)


def test_float32_inside_autocast_is_found_and_named(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [mixed()], [mixed("__main__.B")]))
    bad = load(tmp_path, [program(linear("float32", outer="bfloat16", step=1), model="__main__.C")])
    found = details(RELATION, rules, bad)
    assert {d.function for d in found} == {LINEAR}
    assert "output dtype bfloat16" in found[0].expected and "float32" in found[0].seen


def test_region_that_switches_autocast_off_is_judged_by_its_own_caller(tmp_path: Path) -> None:
    def region(caller: str, out: str, model: str) -> dict[str, Any]:
        outer = {"outer": "bfloat16", "autocast": "bfloat16"}
        opened = call(f"{caller}", step=0, **outer)
        rows = [linear("bfloat16", outer="bfloat16") for _ in range(3)]
        return program(
            opened,
            *[linear(out, outer="bfloat16", autocast="", parent=1) for _ in range(3)],
            *rows,
            model=model,
        )

    healthy = load(
        tmp_path,
        [region("jit.Executor.run", "bfloat16", "__main__.A")],
        [region("jit.Executor.run", "bfloat16", "__main__.B")],
    )
    rules = learn(RELATION, healthy)
    router = load(
        tmp_path, [region("moe.Router.gate", "float32", "__main__.C")]
    )  # on purpose, in a function of its own
    assert not violations(RELATION, rules, router)
    broken = load(tmp_path, [region("jit.Executor.run", "float32", "__main__.D")])
    assert [d.function for d in details(RELATION, rules, broken)] == [LINEAR]


def test_a_call_that_is_told_its_dtype_has_no_rule_on_it(tmp_path: Path) -> None:
    """Model-Optimizer 2322, healthy form: a model is cast to bfloat16 and back; the learned programs cast to float32 alone."""

    def cast(wanted: str) -> dict[str, Any]:
        given = tensor(8, 4, dtype="bfloat16" if wanted == "float32" else "float32")
        return call("torch.Tensor.to", given, {"y": f"torch.{wanted}"}, ret=tensor(8, 4, dtype=wanted), outer="bfloat16")

    rules = learn(RELATION, load(tmp_path, [program(*[cast("float32") for _ in range(6)])]))
    assert "torch.Tensor.to" not in {rule.hypothesis["fn"] for rule in rules}


def test_attribute_of_self_separates(tmp_path: Path) -> None:
    def symbol(name: str, low: bool, out: str, given: str) -> dict[str, Any]:
        me = {"O": "jit.Symbol", "a": {"name": name, "low": low}}
        context = {"outer": "bfloat16", "autocast": "bfloat16", "step": 0}
        return call(
            "jit.Symbol.__call__", me, tensor(8, 4, dtype=given), ret=tensor(8, 2, dtype=out), **context
        )

    rows = [symbol("linear", True, "bfloat16", g) for g in ("float32", "bfloat16")] * 3
    rows += [symbol("softmax", False, "float32", "bfloat16")] * 3
    rules = learn(RELATION, load(tmp_path, [program(*rows)]))
    assert any("0.low is true" in r.precondition.say() for r in rules)
    bad = load(tmp_path, [program(symbol("linear", True, "float32", "float32"))])
    (detail,) = details(RELATION, rules, bad)
    assert "linear (Symbol.__call__)" in detail.expected


def test_programs_without_autocast_teach_nothing_on_torch(tmp_path: Path) -> None:
    trace = load(tmp_path, [program(*[linear("float32") for _ in range(5)])])
    assert not [h for h in RELATION.propose(trace) if h["fn"] == LINEAR]


def check(answer: bool) -> list[dict[str, Any]]:
    me = {"O": "ds.Engine", "a": {}}
    return [call("ds.Engine.overflow", me, ret="true" if answer else "false", step=0)]


def test_check_that_begins_to_answer_otherwise(tmp_path: Path) -> None:
    def engine(answer: bool, model: str) -> dict[str, Any]:
        made = program(*check(answer) * 4, model=model)
        first = len(made["calls"]) - 3
        made["calls"].append(call("torch.distributed.all_reduce", tensor(1), parent=first, step=0))
        return made

    rules = learn(RELATION, load(tmp_path, [engine(False, "__main__.A")], [engine(False, "__main__.B")]))
    (detail,) = details(RELATION, rules, load(tmp_path, [engine(True, "__main__.C")]))
    assert detail.function == "ds.Engine.overflow"
    # One run alone, and predicates that ask nobody, are no evidence.
    assert not [
        r
        for r in learn(RELATION, load(tmp_path, [engine(False, "__main__.A")]))
        if r.hypothesis["mode"] == "constant"
    ]
    predicate = load(tmp_path, [program(*check(False) * 4)], [program(*check(False) * 4, model="__main__.B")])
    assert not [r for r in learn(RELATION, predicate) if r.hypothesis["mode"] == "constant"]


def test_last_dimension_of_a_module(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()]))
    assert any(r.hypothesis["mode"] == "last" for r in rules)
    odd = loop()
    odd["calls"][9]["ret"] = tensor(8, 3)
    (detail,) = details(RELATION, rules, load(tmp_path, [odd]))
    assert detail.function == "__main__.Net.forward" and "3" in detail.seen


def test_loss_that_turns_negative_in_its_own_family_only(tmp_path: Path) -> None:
    losses = [call("__main__.train_step", ret=0.1 * i, step=0) for i in range(20)]
    rules = learn(RELATION, load(tmp_path, [program(*losses)]))
    bad = call("__main__.train_step", ret=-1.5, step=1)
    assert violations(RELATION, rules, load(tmp_path, [program(*losses, bad)]))
    assert not violations(RELATION, rules, load(tmp_path, [program(*losses, bad, model="__main__.Other")]))


def test_fewer_records_never_make_a_violation(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [mixed()], [mixed("__main__.B")]))
    whole = mixed("__main__.C")
    for gone in range(0, len(whole["calls"]), 2):
        rest = [{**c, "seq": i + 1} for i, c in enumerate(whole["calls"]) if i != gone]
        assert not violations(RELATION, rules, load(tmp_path, [{**whole, "calls": rest}]))


def test_order_and_split_of_processes_change_nothing(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [mixed()], [mixed("__main__.B")]))
    good, bad = mixed("__main__.C"), program(linear("float32", outer="bfloat16"), model="__main__.C")
    traces = (load(tmp_path, [good, bad]), load(tmp_path, [bad, good]), load(tmp_path, [bad]))
    texts = [set(violations(RELATION, rules, t)) for t in traces]
    assert texts[0] == texts[1] == texts[2] != set()


def test_an_empty_trace_proposes_nothing(tmp_path: Path) -> None:
    trace = load(tmp_path, [{"calls": [], "states": []}])
    assert RELATION.propose(trace) == []
    rules = learn(RELATION, load(tmp_path, [mixed()]))
    assert RELATION.examples(trace, [r.hypothesis for r in rules]).frame.height == 0
