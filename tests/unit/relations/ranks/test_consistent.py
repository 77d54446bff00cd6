"""`consistent`: replicas agree on all ranks, tied parameters stay equal."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from helpers.runs import write_run

from proctor.infer.engine import infer
from proctor.invariants.invariant import Hypothesis, Invariant
from proctor.invariants.pack import Pack
from proctor.invariants.relations.consistent import Consistent
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import CheckResult
from proctor.verify.checker import check

RELATION = Consistent()
STEPS = 6
DDP = {"wrapper": "ddp"}


def bits(*value: object) -> int:
    return zlib.crc32(repr(value).encode())


def replica(rank: int, metas: dict[str, dict[str, Any]], *, shards: tuple[str, ...] = (), broken: str = "", at: int = 2, shared_gradients: bool = False, **info: Any) -> dict[str, Any]:
    """One rank that trains named parameters; `shards` differ between ranks, `broken` differs from step `at` on."""
    calls: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []

    def look(name: str, attr: str, step: int, fp: int, flags: int = 0) -> None:
        seq = len(calls)
        kind = name.rpartition(".")[2]
        var = {"name": name, "attr": attr, "module": "Net", "kind": kind, "model": "lib.Model"}
        meta = {"dtype": "float32", "shape": "[4,4]", "requires_grad": True, "optimizer": "#0", **metas[name]}
        states.append({"var": var, "step": step, "seq": seq, "call": seq, "edge": 1, "fp": fp, "flags": flags, "meta": meta, "norm": 1.0})

    def value(name: str, step: int) -> int:
        own = name in shards or (name == broken and step >= at)
        return bits(name, step, rank if own else 0)

    for name in metas:
        look(name, "data", -1, value(name, -1))
    for step in range(STEPS):
        calls.append({"fn": "torch.Tensor.backward", "step": step})
        for name in metas:
            look(name, "grad", step, bits(name, step) if shared_gradients else value(name, step) + 1)
        calls.append({"fn": "torch.optim.Optimizer.step", "step": step, "args": {"a": [{"O": "torch.optim.SGD", "a": {"name": "#0"}}], "k": {}}})
        for name in metas:
            look(name, "data", step, value(name, step))
    return {"rank": rank, "calls": calls, "states": states, **info}


def replicas(path: Path, metas: dict[str, dict[str, Any]], *, world: int = 2, broken: str = "", **options: Any) -> Trace:
    order = options.pop("order", range(world))
    ranks = [replica(r, metas, broken=broken if r == world - 1 else "", **options) for r in order]
    return Trace.load([write_run(path, [{"world": world, **r} for r in ranks])])


def learn(trace: Trace) -> list[Invariant]:
    return infer(trace, [RELATION], strict=True)[0]


def judge(trace: Trace, rules: list[Invariant]) -> CheckResult:
    return check(trace, [Pack(rules)], relations={"consistent": RELATION})


def test_ddp_replicas_teach_that_data_and_gradients_agree(tmp_path: Path) -> None:
    rules = learn(replicas(tmp_path / "a", {"fc.weight": DDP, "fc.bias": DDP}))
    assert {r.hypothesis["attr"] for r in rules if r.hypothesis["among"] == "all"} == {"data", "grad"}
    assert not judge(replicas(tmp_path / "b", {"emb.weight": DDP}, world=3), rules).violations


def test_diverging_replica_is_named_with_step_and_ranks(tmp_path: Path) -> None:
    rules = learn(replicas(tmp_path / "a", {"fc.weight": DDP, "fc.bias": DDP}))
    result = judge(replicas(tmp_path / "b", {"emb.weight": DDP, "fc.bias": DDP}, world=3, broken="emb.weight"), rules)
    assert {v.variable for v in result.violations} == {"emb.weight", "emb.weight.grad"}
    assert {v.step for v in result.violations} == {2}
    assert all("rank 2 (norm" in v.seen for v in result.violations)
    assert all("emb.weight" in v.expected and v.advice for v in result.violations)


def test_tensor_parallel_mark_separates_shards_from_replicas(tmp_path: Path) -> None:
    metas = {
        "ln.weight": {"attr.tensor_model_parallel": False},
        "emb.weight": {"attr.tensor_model_parallel": False},
        "up.weight": {"attr.tensor_model_parallel": True},
    }
    rules = learn(replicas(tmp_path / "a", metas, shards=("up.weight",)))
    assert rules
    assert any("attr.tensor_model_parallel is false" in r.precondition.say() for r in rules)
    assert not judge(replicas(tmp_path / "b", metas, shards=("up.weight",), world=4), rules).violations
    bad = judge(replicas(tmp_path / "c", metas, shards=("up.weight",), broken="ln.weight"), rules)
    assert {v.variable for v in bad.violations} == {"ln.weight", "ln.weight.grad"}


@pytest.mark.parametrize("other", [{"wrapper": "fsdp2", "placement": "Shard0"}, {"attr.is_expert": True, **DDP}])
def test_what_ddp_taught_does_not_judge_shards_or_experts(tmp_path: Path, other: dict[str, Any]) -> None:
    rules = learn(replicas(tmp_path / "a", {"fc.weight": DDP}))
    metas = {"fc.weight": other, "head.weight": DDP}
    assert not judge(replicas(tmp_path / "b", metas, shards=("fc.weight",)), rules).violations


def test_pipeline_stages_with_the_same_names_are_not_replicas(tmp_path: Path) -> None:
    rules = learn(replicas(tmp_path / "a", {"0.weight": {}}))
    stage = [replica(r, {"0.weight": {}}, broken="0.weight" if r else "", at=0) for r in range(2)]
    for process in stage:
        process["calls"].append({"fn": "torch.distributed.isend", "step": STEPS - 1})
    trace = Trace.load([write_run(tmp_path / "b", stage)])
    assert not judge(trace, rules).violations


def test_ranks_that_begin_equal_among_others_stay_equal(tmp_path: Path) -> None:
    """Two data-parallel replicas of two tensor-parallel shards: only equal ones are compared."""

    def grid(path: Path, broken: str = "") -> Trace:
        ranks = []
        for rank in range(4):
            process = replica(rank % 2, {"up.weight": {}, "ln.weight": {}}, shards=("up.weight",))
            if broken and rank == 3:
                process = replica(1, {"up.weight": {}, "ln.weight": {}}, shards=("up.weight",))
                for row in process["states"]:
                    if row["var"]["name"] == broken and row["step"] >= 1:
                        row["fp"] += 7
            ranks.append({**process, "rank": rank, "world": 4})
        return Trace.load([write_run(path, ranks)])

    rules = [r for r in learn(grid(tmp_path / "a")) if r.hypothesis["among"] == "twins"]
    assert rules
    assert {v.variable for v in judge(grid(tmp_path / "b", "up.weight"), rules).violations} == {"up.weight", "up.weight.grad"}


def test_values_that_differ_where_gradients_agree_are_found(tmp_path: Path) -> None:
    """Seeds that differ between ranks without a broadcast; sharded parameters have gradients of their own."""

    def drifted(path: Path, apart: bool) -> Trace:
        ranks = [replica(r, {"up.weight": {}, "ln.weight": {}}, shards=("up.weight",)) for r in range(2)]
        for row in ranks[1]["states"]:
            if apart and row["var"]["name"] == "ln.weight" and row["var"]["attr"] == "data":
                row["fp"] += 7
        return Trace.load([write_run(path, [{"world": 2, **r} for r in ranks])])

    rules = [r for r in learn(replicas(tmp_path / "a", {"fc.weight": DDP})) if r.hypothesis["mode"] == "synced"]
    assert rules
    assert not judge(drifted(tmp_path / "b", apart=False), rules).violations
    (found,) = {v.variable for v in judge(drifted(tmp_path / "c", apart=True), rules).violations}
    assert found == "ln.weight"


def test_shards_with_equal_gradients_are_no_replicas(tmp_path: Path) -> None:
    """Placements decide: of a parameter that is cut, each rank holds another part, whatever its gradient is."""
    rules = [r for r in learn(replicas(tmp_path / "a", {"fc.weight": DDP})) if r.hypothesis["mode"] == "synced"]
    assert rules
    for number, (placement, held) in enumerate((("Shard0", False), ("Replicate,Shard1", False), ("Partial", False), ("Replicate", True))):
        metas = {"up.weight": {"placement": placement}}
        broken = replicas(tmp_path / str(number), metas, broken="up.weight", at=0, shared_gradients=True)
        assert bool(judge(broken, rules).violations) is held, placement


def test_order_of_ranks_does_not_matter(tmp_path: Path) -> None:
    metas = {"fc.weight": DDP, "fc.bias": DDP}
    rules = learn(replicas(tmp_path / "a", metas))
    straight = judge(replicas(tmp_path / "b", metas, world=3, broken="fc.bias"), rules)
    shuffled = judge(replicas(tmp_path / "c", metas, world=3, broken="fc.bias", order=(2, 0, 1)), rules)
    assert [(v.id, v.variable, v.step) for v in straight.violations] == [(v.id, v.variable, v.step) for v in shuffled.violations]


def test_examples_of_two_runs_together_are_those_of_each(tmp_path: Path) -> None:
    metas = {"fc.weight": DDP}
    replicas(tmp_path / "a", metas)
    replicas(tmp_path / "b", metas, broken="fc.weight")
    hypotheses = [Hypothesis.of("consistent", mode="ranks", among="all", role="parameter", attr=a, owner="", sharding=s, model_start="equal") for a, s in (("data", "none"), ("grad", "ddp"))]
    keys = ["hyp", "step", "passed", "wrapper", "start"]

    def seen(*names: str) -> list[tuple[Any, ...]]:
        return RELATION.examples(Trace.load([tmp_path / n for n in names]), hypotheses).frame.select(keys).sort(keys).rows()

    assert sorted(seen("a") + seen("b"), key=str) == sorted(seen("a", "b"), key=str)


def test_lost_records_never_make_a_violation(tmp_path: Path) -> None:
    metas = {"fc.weight": DDP, "fc.bias": DDP}
    rules = learn(replicas(tmp_path / "a", metas))
    ranks = [replica(r, metas) for r in range(2)]
    for lost in range(len(ranks[1]["states"])):
        kept = [row for i, row in enumerate(ranks[1]["states"]) if i != lost]
        path = write_run(tmp_path / f"b{lost}", [ranks[0], {**ranks[1], "states": kept, "dropped": 1}])
        assert not judge(Trace.load([path]), rules).violations


def test_rank_whose_states_were_cut_off_is_not_behind(tmp_path: Path) -> None:
    """A killed rank's tables end at different places; values after the end of either are not known."""
    metas = {"fc.weight": DDP, "fc.bias": DDP}
    rules = learn(replicas(tmp_path / "a", metas))
    ranks = [replica(r, metas) for r in range(2)]
    for rows in range(2, len(ranks[1]["states"])):
        cut = {**ranks[1], "states": ranks[1]["states"][:rows], "finished": False}
        trace = Trace.load([write_run(tmp_path / f"b{rows}", [ranks[0], cut])])
        assert not judge(trace, rules).violations


def test_rules_about_what_a_trace_lacks_are_not_triggered(tmp_path: Path) -> None:
    rules = [*learn(replicas(tmp_path / "a", {"fc.weight": DDP})), *learn(language_model(tmp_path / "b"))]
    for name, processes in (("c", []), ("d", [{"calls": [], "states": []}]), ("e", [replica(0, {"fc.weight": {}})])):
        result = judge(Trace.load([write_run(tmp_path / name, processes)]), rules)
        assert result.not_triggered == len(rules)
        assert not any("could not be evaluated" in note for note in result.notes)


def test_one_process_says_nothing_about_ranks(tmp_path: Path) -> None:
    trace = Trace.load([write_run(tmp_path / "a", [replica(0, {"fc.weight": {}})])])
    assert not RELATION.propose(trace)


# -- tied ------------------------------------------------------------------------------------------------------------


def language_model(path: Path, *, tied: bool = True, begin_equal: bool = True, model: str = "lib.LM") -> Trace:
    states: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    slots = {"wte.weight": "torch.nn.Embedding", "lm_head.weight": "torch.nn.Linear", "ln.weight": "torch.nn.LayerNorm"}
    for step in range(-1, STEPS):
        if step >= 0:
            calls.append({"fn": "torch.optim.Optimizer.step", "step": step})
        for name, module in slots.items():
            own = name == "ln.weight" or (name == "lm_head.weight" and not tied and (step >= 0 or not begin_equal))
            var = {"model": model, "name": name, "module": module, "kind": "weight"}
            if tied and name == "lm_head.weight":
                var["alias"] = "wte.weight"
            fp = bits(name if own else "tie", step)
            states.append({"var": var, "step": step, "seq": len(calls), "call": len(calls), "fp": fp, "meta": {"shape": "[8,4]", "dtype": "float32"}})
    return Trace.load([write_run(path, [{"calls": calls, "states": states}])])


def test_broken_tie_is_found_by_role_and_by_name(tmp_path: Path) -> None:
    rules = learn(language_model(tmp_path / "a"))
    assert {r.hypothesis["by"] for r in rules} == {"role", "name"}
    assert not judge(language_model(tmp_path / "b"), rules).violations
    result = judge(language_model(tmp_path / "c", tied=False), rules)
    assert len(result.violations) == 2
    for violation in result.violations:
        assert violation.step == 0
        assert "wte.weight" in violation.seen and "lm_head.weight" in violation.seen


def test_pair_that_was_never_tied_is_found_by_name_only(tmp_path: Path) -> None:
    rules = learn(language_model(tmp_path / "a"))
    result = judge(language_model(tmp_path / "b", tied=False, begin_equal=False), rules)
    assert len(result.violations) == 1


def test_names_of_a_script_are_judged_in_its_own_family_only(tmp_path: Path) -> None:
    rules = learn(language_model(tmp_path / "a", model="__main__.LM"))
    by_name = [r for r in rules if r.hypothesis["by"] == "name"]
    assert all("the program trains" in r.precondition.say() for r in by_name)


def test_copies_of_one_role_may_part(tmp_path: Path) -> None:
    """A deep-copied encoder layer or a momentum encoder begins equal and then goes its own way."""
    states: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    for step in range(-1, STEPS):
        if step >= 0:
            calls.append({"fn": "torch.optim.Optimizer.step", "step": step})
        for layer in range(3):
            var = {"model": "lib.M", "name": f"layers.{layer}.fc.weight", "module": "torch.nn.Linear", "kind": "weight"}
            fp = 1 if step < 0 else bits(layer, step)
            states.append({"var": var, "step": step, "seq": len(calls), "call": len(calls), "fp": fp, "meta": {"shape": "[8,4]"}})
    assert not RELATION.propose(Trace.load([write_run(tmp_path / "a", [{"calls": calls, "states": states}])]))


def test_every_rule_can_be_said_and_says_what_it_needs(tmp_path: Path) -> None:
    for trace in (language_model(tmp_path / "a"), replicas(tmp_path / "b", {"fc.weight": DDP})):
        for hypothesis in RELATION.propose(trace):
            assert len(RELATION.say(hypothesis)) > 20
            assert RELATION.needs(hypothesis).states
        frame = RELATION.examples(trace, RELATION.propose(trace)).frame
        assert frame["passed"].all()
        assert frame.schema["hyp"] == pl.UInt32


def mesh_grid(path: Path, *, broken: tuple[int, ...] = (), names: tuple[str, str] = ("dp", "tp")) -> Trace:
    """Two data-parallel replicas of two tensor-parallel shards, on a mesh; `broken` ranks begin and go on otherwise."""
    metas: dict[str, dict[str, Any]] = {"up.weight": {}, "norm.weight": {}}
    ranks = []
    for rank in range(4):
        process = replica(rank, metas)
        for row in process["states"]:
            name, own = row["var"]["name"], rank in broken
            row["fp"] = bits(row["fp"], name, rank % 2 if name == "up.weight" else 0, rank if own and name == "norm.weight" else "")
        ranks.append({**process, "world": 4, "coords": {names[0]: rank // 2, names[1]: rank % 2}})
    return Trace.load([write_run(path, ranks)])


def test_replicas_along_a_mesh_axis_agree_however_they_begin(tmp_path: Path) -> None:
    rules = learn(mesh_grid(tmp_path / "a"))
    along = [r for r in rules if r.hypothesis["among"] == "dp"]
    assert {r.hypothesis["attr"] for r in along} == {"data", "grad"}
    assert all("mesh axis dp" in r.text for r in along)
    assert not judge(mesh_grid(tmp_path / "b"), rules).violations
    # A rank that was never given the initial values has no twin, so that only its place on the mesh tells.
    bad = [v for v in judge(mesh_grid(tmp_path / "c", broken=(3,)), along).violations]
    assert {v.variable for v in bad} == {"norm.weight", "norm.weight.grad"}


def test_what_is_split_along_an_axis_is_not_held_to_agree_along_it(tmp_path: Path) -> None:
    rules = learn(mesh_grid(tmp_path / "a"))
    along = [r for r in rules if r.hypothesis["among"] == "tp"]
    assert all("start is equal" in r.precondition.say() for r in along)


def test_rules_of_an_axis_do_not_speak_of_meshes_without_it(tmp_path: Path) -> None:
    rules = [r for r in learn(mesh_grid(tmp_path / "a")) if r.hypothesis["among"] == "dp"]
    result = judge(mesh_grid(tmp_path / "b", names=("pp", "tp")), rules)
    assert result.not_triggered == len(rules)


def test_ranks_that_are_averaged_now_and_then_may_differ_in_between(tmp_path: Path) -> None:
    rules = learn(replicas(tmp_path / "a", {"fc.weight": {}, "fc.bias": {}}))

    def local_sgd(path: Path, *, averages: bool) -> Trace:
        ranks = []
        for rank in range(2):
            process = replica(rank, {"fc.weight": {}}, broken="fc.weight" if rank else "", at=1)
            done = next(i for i, row in enumerate(process["states"]) if row["step"] == 4)
            row = {**process["states"][done], "step": 3, "seq": 8, "call": 0, "edge": 0, "fp": 4711, "var": {**process["states"][done]["var"], "attr": "data"}}
            if averages:
                process["states"].insert(done, row)
            ranks.append(process)
        return Trace.load([write_run(path, ranks)])

    assert judge(local_sgd(tmp_path / "b", averages=False), rules).violations
    assert not [v for v in judge(local_sgd(tmp_path / "c", averages=True), rules).violations if ".grad" not in v.variable]
