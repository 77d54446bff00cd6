"""`argument`: what functions are given, over calls and ranks and by whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.loops import ROOT, call, details, holds, learn, load, loop, tensor, violations

from proctor.invariants.relations.argument import Argument

RELATION = Argument()
ATTENTION = "torch.nn.functional.scaled_dot_product_attention"
ALL_REDUCE = "torch.distributed.all_reduce"
SET_EPOCH = "torch.utils.data.DistributedSampler.set_epoch"
GROUP = {"O": "torch.distributed.distributed_c10d.ProcessGroup", "v": "group of 1", "a": {}}


def program(
    *calls: dict[str, Any], model: str = "__main__.Net", steps: int = 3, **process: Any
) -> dict[str, Any]:
    base = loop(steps, model=model, **process)
    rows = [dict(c) for c in calls]
    for row in rows:
        if "parent" in row:
            row["parent"] += len(base["calls"])
    return {**base, "calls": [*base["calls"], *rows]}


def reduce(grouped: bool, *, size: int = 1, step: int = 0, **more: Any) -> dict[str, Any]:
    return call(ALL_REDUCE, tensor(size), named={"group": GROUP} if grouped else {}, step=step, **more)


def engine(grouped: bool, model: str = "__main__.Net") -> dict[str, Any]:
    """A library's function that reduces in a group of its own."""
    rows = []
    for step in range(4):
        rows += [call("ds.Engine.reduce", step=step), reduce(grouped, step=step, parent=2 * step + 1)]
    return program(*rows, model=model, steps=4)


def test_collective_that_lost_its_group_is_found_and_named(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [engine(True)]))
    assert not violations(RELATION, rules, load(tmp_path, [engine(True, "__main__.Other")]))
    (detail,) = details(RELATION, rules, load(tmp_path, [engine(False, "__main__.Other")]))
    assert detail.function == f"{ALL_REDUCE} (group argument)"
    assert detail.module == "ds.Engine.reduce"
    assert "default" in detail.seen


def test_shapes_of_collectives_agree_on_all_ranks(tmp_path: Path) -> None:
    def ranks(*sizes: int) -> list[dict[str, Any]]:
        return [
            program(*[reduce(False, size=n, step=s) for s in range(3)], rank=i) for i, n in enumerate(sizes)
        ]

    rules = learn(RELATION, load(tmp_path, ranks(4, 4)))
    assert violations(RELATION, rules, load(tmp_path, ranks(4, 6)))
    assert holds(RELATION, rules, load(tmp_path, ranks(6, 6)))


def test_different_numbers_of_calls_are_undecided(tmp_path: Path) -> None:
    same = [program(*[reduce(False, size=4, step=s) for s in range(3)], rank=i) for i in range(2)]
    rules = learn(RELATION, load(tmp_path, same))
    more = [same[0], program(*[reduce(False, size=9, step=0) for _ in range(2)], rank=1)]
    assert not violations(RELATION, rules, load(tmp_path, more))


def test_groups_of_some_ranks_are_not_compared(tmp_path: Path) -> None:
    parts = [program(*[reduce(True, size=n, step=s) for s in range(3)], rank=i) for i, n in enumerate((4, 6))]
    modes = {h["mode"] for h in RELATION.propose(load(tmp_path, parts))}
    assert "ranks_same" not in modes


def seeds(first: int, second: int) -> list[dict[str, Any]]:
    return [
        program(*[call("torch.manual_seed", s + i, step=-1) for i in range(4)], rank=r)
        for r, s in enumerate((first, second))
    ]


def test_seeds_that_must_differ_between_ranks(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, seeds(10, 20)))
    (detail,) = [
        d
        for d in details(RELATION, rules, load(tmp_path, seeds(7, 7)))
        if "different on each rank" in d.expected
    ]
    assert "torch.manual_seed" in detail.function


def epochs(*values: int, model: str = "__main__.Net") -> dict[str, Any]:
    rows = [call(SET_EPOCH, {"O": "Sampler", "a": {}}, v, step=2 * i) for i, v in enumerate(values)]
    return program(*rows, steps=2 * len(values) + 1, model=model)


def test_epoch_that_does_not_advance(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [epochs(0, 1, 2, 3)], [epochs(0, 1, 2, 3, 4, model="__main__.B")]))
    (detail,) = details(RELATION, rules, load(tmp_path, [epochs(0, 0, 0, 0, model="__main__.C")]))
    assert SET_EPOCH in detail.function and "does not advance" in detail.advice


def test_counters_of_steps_are_no_rule(tmp_path: Path) -> None:
    """An index within an epoch starts again in the next one."""
    indices = [call("__main__.train_step", i, step=i) for i in range(8)]
    modes = {(h["mode"], h["fn"]) for h in RELATION.propose(load(tmp_path, [program(*indices, steps=8)]))}
    assert ("never_repeats", "__main__.train_step") not in modes


def test_switch_that_changes_between_calls(tmp_path: Path) -> None:
    def steps(*flags: bool, model: str = "__main__.Net") -> dict[str, Any]:
        return program(*[call("lib.attend", f, step=i) for i, f in enumerate(flags)], model=model, steps=5)

    rules = learn(RELATION, load(tmp_path, [steps(True, True, True, True, True)]))
    assert violations(RELATION, rules, load(tmp_path, [steps(True, True, False, True)]))
    assert not violations(
        RELATION, rules, load(tmp_path, [steps(True, True, False, True, model="__main__.Other")])
    )


def test_a_result_of_each_epoch_is_no_switch(tmp_path: Path) -> None:
    """That each epoch was the best so far says nothing of another run."""

    def rules(every: int) -> set[tuple[Any, Any]]:
        saves = [call("__main__.save", {"epoch": 1}, True, step=step) for step in range(0, 40, every)]
        return {(h["mode"], h["fn"]) for h in RELATION.propose(load(tmp_path, [program(*saves, steps=40)]))}

    assert ("same", "__main__.save") in rules(1) and ("same", "__main__.save") not in rules(10)


def evaluation(model: str, training: int, grad: bool, step: int = 2) -> dict[str, Any]:
    return call(
        f"{model}.forward",
        {"M": model, "p": "", "t": training},
        tensor(8, 4),
        ret=tensor(8, 2),
        flags=ROOT,
        grad=grad,
        step=step,
    )


def test_training_goes_on_in_evaluation_mode(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.B")]))
    stuck = loop(model="__main__.C")
    for row in stuck["calls"]:
        if row["fn"].endswith("forward") and row["step"] > 2:
            row["args"]["a"][0]["t"] = 0
    (detail,) = details(RELATION, rules, load(tmp_path, [stuck]))
    assert detail.function == "__main__.C.forward" and "evaluation" in detail.seen
    after = [evaluation("__main__.D", 0, grad=False)] * 3  # an evaluation between is no training
    assert not violations(RELATION, rules, load(tmp_path, [program(*after, model="__main__.D")]))


def test_a_wrapped_model_is_judged_and_not_the_loss_behind_it(tmp_path: Path) -> None:
    """Where no rule asks for the model's own forward, only the wrapper's is recorded; and a loss that is a module always trains."""
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.B")]))
    wrapper = "torch.nn.parallel.distributed.DistributedDataParallel"

    def wrapped(mode: int, told: bool) -> list[Any]:
        job = loop(model="__main__.C")
        for state in job["states"]:
            state["meta"] = {**state["meta"], "root": wrapper} if told else state["meta"]
        rows: list[dict[str, Any]] = []
        for row in job["calls"]:
            if row["fn"].endswith("forward"):
                row = {**row, "fn": f"{wrapper}.forward", "args": {**row["args"], "a": [{"M": wrapper, "p": "", "t": 1 if row["step"] < 3 else mode}]}}
                loss = {**row, "fn": "torch.nn.CrossEntropyLoss.forward", "args": {**row["args"], "a": [{"M": "torch.nn.CrossEntropyLoss", "p": "", "t": 1}]}}
                rows += [row, loss]
            else:
                rows.append(row)
        return violations(RELATION, rules, load(tmp_path, [{**job, "calls": rows}]))

    assert wrapped(0, told=True) and not wrapped(1, told=True)
    assert not wrapped(0, told=False)  # of older traces


def test_a_part_that_was_set_to_train_after_the_rest_evaluates(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.B")]))

    def frozen(*modes: dict[str, Any]) -> dict[str, Any]:
        job = loop(model="__main__.C")
        for row in job["calls"]:
            if row["fn"].endswith("forward"):
                row["args"]["a"][0]["t"] = 0
        return violations(RELATION, rules, load(tmp_path, [{**job, "calls": [*modes, *job["calls"]]}]))

    model, head = {"M": "__main__.C", "p": "", "t": 1}, {"M": "__main__.Head", "p": "head", "t": 0}
    off, on = call("torch.nn.Module.eval", model, step=0), call("torch.nn.Module.train", head, step=0)
    early = call("torch.nn.Module.train", {**head, "p": ""}, step=0)  # before it is known whose part that is
    other = call("torch.nn.Module.train", {**model, "t": 0}, step=0)
    assert not frozen(off, on) and not frozen(off, early)
    assert frozen(on, off) and frozen(off) and frozen() and frozen(off, other)
    assert frozen(off, call("torch.nn.Module.train", head, False, step=0))
    (rule,) = [r for r in rules if r.hypothesis["mode"] == "training"]
    assert "torch.nn.Module.train" in RELATION.needs(rule.hypothesis).functions


def test_a_teacher_of_the_students_class_evaluates_rightly_behind_it(tmp_path: Path) -> None:
    """Its result is detached, or its parameters are frozen: the student trains since the backward before."""
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.B")]))

    def distilled(student: int, *, first: bool) -> list[Any]:
        job = loop(model="__main__.C")
        rows: list[dict[str, Any]] = []
        for row in job["calls"]:
            if row["fn"].endswith("forward"):
                pair = [{**row, "args": {**row["args"], "a": [{"M": "__main__.C", "p": "", "t": mode}, *row["args"]["a"][1:]]}} for mode in (student, 0)]
                rows += pair[::-1] if first else pair
            else:
                rows.append(row)
        return violations(RELATION, rules, load(tmp_path, [{**job, "calls": rows}]))

    for first in (True, False):
        assert not distilled(1, first=first) and distilled(0, first=first), first


def test_evaluation_in_training_mode_is_judged_in_its_family(tmp_path: Path) -> None:
    def evaluated(training: int, model: str = "__main__.Net") -> list[dict[str, Any]]:
        return [program(*[evaluation(model, training, grad=False)] * 3, model=model)]

    rules = learn(RELATION, load(tmp_path, evaluated(0)))
    assert violations(RELATION, rules, load(tmp_path, evaluated(1)))
    assert not violations(RELATION, rules, load(tmp_path, evaluated(1, "__main__.Other")))
    (frozen,) = evaluated(1)
    for row in frozen["calls"]:
        if row["fn"].endswith("forward") and row.get("grad", True):
            row["args"]["a"][0]["t"] = 0
    model, head = {"M": "__main__.Net", "p": "", "t": 1}, {"M": "__main__.Head", "p": "head", "t": 0}
    modes = [call("torch.nn.Module.eval", model, step=0), call("torch.nn.Module.train", head, step=0)]
    told = violations(RELATION, rules, load(tmp_path, [{**frozen, "calls": [*modes, *frozen["calls"]]}]))
    assert set(told) == {"the model is in evaluation mode when it runs without gradients"}  # also of one of which only a part trains


def test_order_of_ranks_changes_nothing(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, seeds(10, 20)))
    ranks = seeds(7, 7)
    texts = [set(violations(RELATION, rules, load(tmp_path, order))) for order in (ranks, ranks[::-1])]
    assert texts[0] == texts[1] != set()


def test_fewer_records_never_make_a_violation(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [engine(True)]))
    whole = engine(True)
    for gone in range(0, len(whole["calls"])):
        if whole["calls"][gone]["fn"] == "ds.Engine.reduce":
            continue
        rest = [{"seq": i + 1, **c} for i, c in enumerate(whole["calls"]) if i != gone]
        assert not violations(RELATION, rules, load(tmp_path, [{**whole, "calls": rest}]))


def test_a_missing_rank_is_unknown(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, seeds(10, 20)))
    alone = [{**seeds(7, 7)[0], "world": 2}]
    assert not [t for t in violations(RELATION, rules, load(tmp_path, alone)) if "rank" in t]


def test_needs_and_sentences(tmp_path: Path) -> None:
    for hypothesis in RELATION.propose(load(tmp_path, [engine(True)], seeds(1, 2))):
        assert hypothesis.text("fn") in RELATION.needs(hypothesis).functions
        assert RELATION.say(hypothesis)
    assert RELATION.propose(load(tmp_path, [{"calls": [], "states": []}])) == []


def functional(
    how: dict[str, Any] | None, *, model: str, inner: str = "__main__.Block.forward", name: str = "dropout", p: float = 0.5
) -> dict[str, Any]:
    """A model that evaluates and drops in it; `how` are named arguments of the functional dropout of this name."""
    rows = []
    for step in range(3):
        rows.append(
            call(
                f"{model}.forward",
                {"M": model, "p": "", "t": 0},
                tensor(8, 4),
                flags=ROOT,
                step=step,
                phase="eval",
            )
        )
        rows.append(
            call(
                inner,
                {"M": inner, "p": "b", "t": 0},
                tensor(8, 4),
                parent=3 * step + 1,
                step=step,
                phase="eval",
            )
        )
        rows.append(
            call(
                f"torch.nn.functional.{name}",
                tensor(8, 4),
                p,
                named=how or {},
                parent=3 * step + 2,
                step=step,
                phase="eval",
            )
        )
    return program(*rows, model=model)


def test_functional_dropout_goes_on_in_evaluation(tmp_path: Path) -> None:
    module = "torch.nn.Dropout.forward"
    healthy = [functional({"training": False}, model=f"__main__.{m}", inner=module) for m in ("A", "B")]
    rules = learn(RELATION, load(tmp_path, [healthy[0]], [healthy[1]]))
    forgotten = load(tmp_path, [functional(None, model="__main__.C")])
    assert "torch.nn.functional.dropout" in {
        d.function.split(" ")[0] for d in details(RELATION, rules, forgotten)
    }
    meant = load(tmp_path, [functional({"training": True}, model="__main__.C")])
    sampled = load(tmp_path, [functional({"training": True}, model="__main__.C", inner=module)])
    assert not violations(RELATION, rules, meant)
    assert not violations(RELATION, rules, sampled)
    assert not violations(RELATION, rules, load(tmp_path, [functional(None, model="__main__.C", p=0.0)])), "it drops nothing"


def attention(p: float | None, *, model: str, training: int = 0, inner: str = "__main__.Block.forward", grad: bool = False) -> dict[str, Any]:
    """A model that evaluates with attention in it."""
    rows = []
    for step in range(3):
        about = {"step": step, "phase": "eval", "grad": grad}
        rows.append(call(f"{model}.forward", {"M": model, "p": "", "t": training}, tensor(8, 4), flags=ROOT, **about))
        rows.append(call(inner, {"M": inner, "p": "b", "t": 0}, tensor(8, 4), parent=3 * step + 1, **about))
        named = {} if p is None else {"dropout_p": p}
        rows.append(call(ATTENTION, tensor(8, 4), tensor(8, 4), tensor(8, 4), named=named, parent=3 * step + 2, **about))
    return program(*rows, model=model)


def test_attention_drops_nothing_in_evaluation(tmp_path: Path) -> None:
    healthy = [functional({"training": False}, model=f"__main__.{m}") for m in ("A", "B")]
    rules = learn(RELATION, load(tmp_path, [healthy[0]], [healthy[1]]))
    (found, *_) = details(RELATION, rules, load(tmp_path, [attention(0.1, model="__main__.C")]))
    assert found.seen == "functional.scaled_dot_product_attention is given dropout_p=0.1"
    right: list[dict[str, Any]] = [
        {"p": 0.0},
        {"p": None},
        {"p": 0.1, "training": 1},
        {"p": 0.1, "grad": True},  # this part of it trains
        {"p": 0.1, "inner": "torch.nn.MultiheadAttention.forward"},
    ]
    for how in right:
        assert not violations(RELATION, rules, load(tmp_path, [attention(model="__main__.C", **how)])), how
    learned = learn(RELATION, load(tmp_path, *([attention(0.0, model=f"__main__.{m}")] for m in ("A", "B"))))
    assert "dropping" in {rule.hypothesis["mode"] for rule in learned}


@pytest.mark.parametrize("name", ["dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"])
def test_every_functional_dropout_is_recorded_and_judged(tmp_path: Path, name: str) -> None:
    healthy = [functional({"training": False}, model=f"__main__.{m}") for m in ("A", "B")]
    rules = learn(RELATION, load(tmp_path, [healthy[0]], [healthy[1]]))
    forgotten = load(tmp_path, [functional(None, model="__main__.C", name=name)])
    assert violations(RELATION, rules, forgotten)
    catalog = pytest.importorskip("proctor.instrument.patch.catalog")
    (rule,) = [r for r in rules if r.hypothesis["mode"] == "dropping"]
    whole = f"torch.nn.functional.{name}"
    assert {whole, ATTENTION} <= RELATION.needs(rule.hypothesis).functions
    assert {whole, ATTENTION} <= {p.name for p in catalog.points()}


def test_a_wrapper_is_recorded_whether_it_comes_before_the_optimizer_or_after_it() -> None:
    torch = pytest.importorskip("torch")
    from proctor.instrument.observe.state import StateTracker

    for early in (True, False):
        told: list[str] = []

        def intern(kind: Any, text: str, told: list[str] = told) -> int:
            told.append(text)
            return len(told)

        tracker = StateTracker(intern, lambda attr: True)
        model = torch.nn.Linear(2, 2)
        wrapper = torch.nn.DataParallel(model) if early else None
        tracker.add_optimizer(torch.optim.SGD(model.parameters(), 0.1), "#0")
        assert any('"root"' in text for text in told) is early
        wrapper = wrapper or torch.nn.DataParallel(model)
        tracker.add_model(wrapper)
        assert any('"root": "torch.nn.parallel.data_parallel.DataParallel"' in text for text in told)
