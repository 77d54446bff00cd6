"""`fresh`: randomness that repeats, batches that repeat, buffers that stand still or drift apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.loops import call, details, learn, load, loop, violations

from proctor.invariants.relations import Needs
from proctor.invariants.relations.fresh import Fresh
from proctor.invariants.trace import Trace

RELATION = Fresh()
ITER, NEXT = "torch.utils.data.DataLoader.__iter__", "torch.utils.data.DataLoader.__next__"
SYNC = "torch.nn.parallel.DistributedDataParallel._pre_forward"
FLOATS = {"dtype": "float32", "shape": "[8,4]"}


def value(kind: str, place: str, fp: int, step: int, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "place": place, "fp": fp, "step": step, "meta": FLOATS, **more}


def with_values(*values: dict[str, Any], steps: int = 6, **more: Any) -> dict[str, Any]:
    return {**loop(steps, **more), "values": list(values)}


def states(place: str, fps: Sequence[int], **more: Any) -> list[dict[str, Any]]:
    return [value("rng", place, fp, step, seq=4 * step + 2, **more) for step, fp in enumerate(fps)]


def test_a_generator_state_that_comes_back(tmp_path: Path) -> None:
    healthy = with_values(*states("step torch", range(10, 16)))
    rules = learn(RELATION, load(tmp_path, [healthy]))
    assert not violations(
        RELATION, rules, load(tmp_path, [with_values(*states("step torch", [1, 1, 2, 3, 3, 4]))])
    )
    bad = violations(
        RELATION, rules, load(tmp_path, [with_values(*states("step torch", [1, 2, 3, 1, 2, 3]))])
    )
    (rows,) = bad.values()
    assert [row["step"] for row in rows] == [3, 4, 5]


def test_a_generator_that_stands_still_is_no_repetition_unless_the_forward_draws(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [with_values(*states("forward torch", range(6)))]))
    still = states("forward torch", [7] * 6)
    assert not violations(RELATION, rules, load(tmp_path, [with_values(*still)]))
    drawn = [value("rng", "forward end torch", 8, step, seq=4 * step + 2) for step in (3, 4)]
    assert not violations(RELATION, rules, load(tmp_path, [with_values(*still, drawn[0])])), "nothing drew from it before"
    (detail,) = details(RELATION, rules, load(tmp_path, [with_values(*still, *drawn)]))
    assert "step 3" in detail.seen


def test_a_second_model_may_begin_with_the_old_seed(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [with_values(*states("forward torch", range(6)))]))
    process = with_values(*states("forward torch", [1, 2, 3, 1, 2, 3]))
    process["calls"].insert(12, call("torch.optim.Optimizer.__init__", step=2))
    for row in process["values"][3:]:
        row["seq"] += 1
    assert not violations(RELATION, rules, load(tmp_path, [process]))


def test_workers_with_copies_of_one_generator(tmp_path: Path) -> None:
    def epochs(*fps: tuple[int, int]) -> dict[str, Any]:
        rows = [
            value("rng", "worker dataset.rng", fp, step, seq=4 * step + 1, item=item)
            for step, pair in enumerate(fps)
            for item, fp in enumerate(pair)
        ]
        return with_values(*rows)

    rules = learn(RELATION, load(tmp_path, [epochs((1, 2), (3, 4))]))
    assert not violations(RELATION, rules, load(tmp_path, [epochs((5, 6), (7, 8))]))
    assert "dataset.rng" in details(RELATION, rules, load(tmp_path, [epochs((1, 1))]))[0].seen
    assert details(RELATION, rules, load(tmp_path, [epochs((1, 2), (1, 2))]))


def test_an_order_that_repeats(tmp_path: Path) -> None:
    def epochs(*fps: int) -> dict[str, Any]:
        return with_values(
            *(value("rng", "epoch DistributedSampler", fp, step, item=0) for step, fp in enumerate(fps))
        )

    rules = learn(RELATION, load(tmp_path, [epochs(1, 2, 3, 4)]))
    assert not violations(RELATION, rules, load(tmp_path, [epochs(5, 6)]))
    (detail,) = details(RELATION, rules, load(tmp_path, [epochs(5, 5)]))
    assert detail.function.endswith("set_epoch")


def seeding(*steps: int, seeds: Sequence[int] = ()) -> dict[str, Any]:
    process = loop(6)
    head = call("torch.manual_seed", 3, step=-1, phase="init")
    process["calls"].insert(0, head)
    for n, step in enumerate(steps):
        row = call("torch.manual_seed", seeds[n] if seeds else 3, step=step)
        process["calls"].insert(1 + 4 * step + n + 1, row)
    return process


def test_a_seed_that_is_set_again_in_the_loop(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [seeding()]))
    assert not violations(RELATION, rules, load(tmp_path, [seeding(1, 2, 3, seeds=[11, 12, 13])]))
    (detail,) = details(RELATION, rules, load(tmp_path, [seeding(1, 2)]))
    assert (detail.function, detail.seen) == ("torch.manual_seed", "torch.manual_seed(3) again")


def test_a_seed_for_an_evaluation_is_none_for_the_training(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [seeding()]))
    process = seeding(1, 2)
    for step in (1, 2):
        at = max(
            i
            for i, row in enumerate(process["calls"])
            if row["fn"] == "torch.manual_seed" and row["step"] == step
        )
        process["calls"].insert(at + 1, call("__main__.Net.forward", step=step, phase="eval", flags=2))
    assert not violations(RELATION, rules, load(tmp_path, [process]))


def test_a_seed_that_is_undone_before_the_model_is_called_is_of_the_data(tmp_path: Path) -> None:
    """A dataset that makes each sample from its number, and puts the generator back."""
    rules = learn(RELATION, load(tmp_path, [seeding()]))
    for behind, told in ((1, False), (3, True)):  # at once, and behind the model
        process = seeding(1, 2)
        for step in (2, 1):
            at = next(i for i, row in enumerate(process["calls"]) if row["fn"] == "torch.manual_seed" and row["step"] == step)
            process["calls"].insert(at + behind, call("torch.set_rng_state", step=step))
        assert bool(violations(RELATION, rules, load(tmp_path, [process]))) is told


def test_draws_that_repeat(tmp_path: Path) -> None:
    def drawn(fps: Sequence[int], **more: Any) -> dict[str, Any]:
        process = loop(6)
        for step in range(6):
            process["calls"].append(call("torch.randn", step=step))
        rows = [value("draw", "shared", fp, step, seq=25 + step, **more) for step, fp in enumerate(fps)]
        return {**process, "values": rows}

    rules = learn(RELATION, load(tmp_path, [drawn(range(6))]))
    assert violations(RELATION, rules, load(tmp_path, [drawn([1, 2, 3, 2, 5, 6])]))
    for quiet in (
        {"recompute": True},
        {"phase": "eval"},
        {"flags": 8},
        {"meta": {"dtype": "int64", "shape": "[16]"}},
    ):
        assert not violations(RELATION, rules, load(tmp_path, [drawn([1, 1, 1, 1, 1, 1], **quiet)]))


def test_weights_that_are_filled_alike(tmp_path: Path) -> None:
    def filled(*fps: int) -> dict[str, Any]:
        process = loop(4, extra=[call("torch.Tensor.normal_") for _ in fps])
        rows = [value("draw", "fill", fp, -1, seq=i + 1, phase="init") for i, fp in enumerate(fps)]
        return {**process, "values": rows}

    rules = learn(RELATION, load(tmp_path, [filled(1, 2, 3, 4)]))
    assert not violations(RELATION, rules, load(tmp_path, [filled(5, 6)]))
    assert not violations(
        RELATION, rules, load(tmp_path, [filled(5, 6, 5, 6)])
    )  # a second model with the first's seed
    assert violations(RELATION, rules, load(tmp_path, [filled(5, 5, 5)]))


def loaded(fps: Sequence[int], epoch_at: Sequence[int] = (0,)) -> dict[str, Any]:
    calls, values = [], []
    for step, fp in enumerate(fps):
        if step in epoch_at:
            calls.append(call(ITER, step=step))
        calls += [call(NEXT, step=step), call("__main__.Net.forward", step=step, flags=2)]
        values.append(value("batch", "0", fp, step, seq=len(calls)))
        calls.append(call("torch.optim.Optimizer.step", step=step))
    return {"calls": calls, "values": values, "states": loop(len(fps))["states"][:2]}


def test_a_batch_that_comes_twice_in_a_row(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loaded(range(6))]))
    assert violations(RELATION, rules, load(tmp_path, [loaded([1, 1, 2, 2])]))
    assert not violations(RELATION, rules, load(tmp_path, [loaded([1, 2, 1, 2], epoch_at=(0, 2))]))


def test_a_batch_without_a_loader_may_stay(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loaded(range(6))]))
    process = loaded([1] * 6)
    for row in process["calls"]:
        row["fn"] = "__main__.pick" if row["fn"] in (ITER, NEXT) else row["fn"]
    assert not violations(RELATION, rules, load(tmp_path, [process]))


def replica(rank: int, fps: Sequence[int], weights: int = 7) -> dict[str, Any]:
    process = loaded(fps)
    var = {"model": "Net", "name": "fc.weight", "attr": "data", "module": "torch.nn.Linear", "kind": "weight"}
    meta = {"dtype": "float32", "shape": "[2,2]", "wrapper": "ddp"}
    return {
        **process,
        "rank": rank,
        "world": 2,
        "states": [{"var": var, "meta": meta, "step": -1, "phase": "init", "fp": weights}],
    }


def test_ranks_with_one_model_and_one_batch(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [replica(0, range(6)), replica(1, range(10, 16))]))
    same = [replica(0, range(6)), replica(1, range(6))]
    found = details(RELATION, rules, load(tmp_path, same))
    assert [d.expected for d in found] == ["different batches on ranks 0, 1"]
    assert details(RELATION, rules, load(tmp_path, same[::-1])) == found
    # Shards of one model rightly see one batch.
    assert not violations(RELATION, rules, load(tmp_path, [replica(0, range(6), 1), replica(1, range(6), 2)]))


def buffered(
    fps: Sequence[int], *, training: int = 1, module: str = "__main__.Bank", rank: int = 0, world: int = 1
) -> dict[str, Any]:
    process = loop(len(fps), skip={})
    var = {
        "model": "__main__.Net",
        "name": "bank.mean",
        "attr": "data",
        "role": "buffer",
        "module": module,
        "kind": "mean",
    }
    rows = [{"var": var, "step": -1, "phase": "init", "fp": 99}]
    last = 99
    calls: list[dict[str, Any]] = []
    for step, fp in enumerate(fps):
        calls.append(call(SYNC, step=step))
        calls.append(call(f"{module}.forward", {"M": module, "p": "bank", "t": training}, step=step))
        calls.append(call("torch.optim.Optimizer.step", step=step))
        if fp != last:
            rows.append(
                {"var": var, "step": step, "seq": len(calls), "call": len(calls), "edge": 0, "fp": fp}
            )
        last = fp
    return {"calls": calls, "states": [*process["states"][:2], *rows], "rank": rank, "world": world}


def test_a_statistic_that_stands_still(tmp_path: Path) -> None:
    rules = [
        r for r in learn(RELATION, load(tmp_path, [buffered(range(6))])) if r.hypothesis["mode"] == "moves"
    ]
    (detail,) = details(RELATION, rules, load(tmp_path, [buffered([5] * 6)]))
    assert detail.variable == "bank.mean"
    assert not violations(RELATION, rules, load(tmp_path, [buffered([99] * 6, training=0)]))


def test_what_an_evaluation_makes_anew_of_parameters_may_be_the_same_in_the_next_step(tmp_path: Path) -> None:
    rules = [r for r in learn(RELATION, load(tmp_path, [buffered(range(6))])) if r.hypothesis["mode"] == "moves"]
    rests = buffered([0, 1, 2, 2, 4, 4])
    assert {d.seen for d in details(RELATION, rules, load(tmp_path, [rests]))} == {"the value of the step before"}
    evaluated = {**rests, "states": [{**row, "phase": "eval"} if row.get("fp") in (2, 4) and row["step"] >= 2 else row for row in rests["states"]]}
    assert not violations(RELATION, rules, load(tmp_path, [evaluated]))


def test_a_constant_that_is_written_to(tmp_path: Path) -> None:
    rules = [
        r for r in learn(RELATION, load(tmp_path, [buffered([99] * 6)])) if r.hypothesis["mode"] == "still"
    ]
    assert violations(RELATION, rules, load(tmp_path, [buffered([99, 99, 5, 5, 5, 5])]))


def test_statistics_that_are_not_broadcast(tmp_path: Path) -> None:
    module = "torch.nn.BatchNorm1d"
    together = [buffered(range(6), module=module, rank=r, world=2) for r in (0, 1)]
    rules = learn(RELATION, load(tmp_path, together))
    apart = [buffered(range(10 * r, 10 * r + 6), module=module, rank=r, world=2) for r in (0, 1)]
    bad = {
        text for text in violations(RELATION, rules, load(tmp_path, apart)) if "equal on all ranks" in text
    }
    assert len(bad) == 1


def traces(tmp_path: Path) -> tuple[Trace, Trace]:
    good = with_values(*states("forward torch", range(6)), *states("step torch", range(6)))
    bad = with_values(*states("forward torch", [1, 2, 1, 2, 1, 2]), *states("step torch", [1, 2, 1, 2, 1, 2]))
    return load(tmp_path, [good]), load(tmp_path, [bad])


def test_fewer_records_never_make_a_violation(tmp_path: Path) -> None:
    good, _ = traces(tmp_path)
    rules = learn(RELATION, good)
    for gone in range(12):
        process = with_values(*states("forward torch", range(6)), *states("step torch", range(6)))
        del process["values"][gone]
        assert not violations(RELATION, rules, load(tmp_path, [process]))


def test_runs_do_not_see_each_other(tmp_path: Path) -> None:
    good, bad = traces(tmp_path)
    rules = learn(RELATION, good)
    process = with_values(*states("forward torch", range(6)), *states("step torch", range(6)))
    assert not violations(RELATION, rules, load(tmp_path, [process], [process]))
    assert violations(RELATION, rules, bad)


def test_an_empty_trace_and_one_of_the_first_schema_propose_nothing(tmp_path: Path) -> None:
    assert RELATION.propose(load(tmp_path, [{"calls": [], "states": []}])) == []


@pytest.mark.parametrize(
    "mode", ["forward", "step", "load", "epoch", "workers", "batch", "ranks", "synchronised"]
)
def test_every_rule_says_what_it_needs(mode: str, tmp_path: Path) -> None:
    from proctor.invariants.invariant import Hypothesis

    needs = RELATION.needs(Hypothesis.of("fresh", mode=mode, what="torch"))
    assert isinstance(needs, Needs) and needs.functions and (needs.values or needs.states)
    assert RELATION.say(Hypothesis.of("fresh", mode=mode, what="torch"))
