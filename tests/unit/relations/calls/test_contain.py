"""`contain`: a call contains a call, or the change of state that it is for."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import write_run

from proctor.infer.engine import infer
from proctor.invariants.invariant import Hypothesis, Invariant
from proctor.invariants.pack import Pack
from proctor.invariants.relations.contain import EventContain
from proctor.invariants.schema import StateFlag
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import CheckResult
from proctor.verify.checker import check

RELATION = EventContain()
UPDATE = "torch.optim.Optimizer.step"


def bits(*value: object) -> int:
    return zlib.crc32(repr(value).encode())


def learn(*traces: Trace) -> list[Invariant]:
    (trace,) = traces
    return infer(trace, [RELATION], strict=True)[0]


def judge(trace: Trace, rules: list[Invariant]) -> CheckResult:
    return check(trace, [Pack(rules)], relations={"contain": RELATION})


# -- calls -----------------------------------------------------------------------------------------------------------


def tree(calls: list[dict[str, Any]], step: int, nested: Any, parent: int = 0, **context: Any) -> None:
    """Append calls from nested tuples: (name, child, child, …); a dict among the children gives the arguments."""
    name, *children = (nested,) if isinstance(nested, str) else nested
    args = next((c for c in children if isinstance(c, dict)), {"a": [], "k": {}})
    calls.append({"fn": name, "step": step, "parent": parent, "args": args, **context})
    seq = len(calls)
    for child in children:
        if not isinstance(child, dict):
            tree(calls, step, child, seq, **context)


def run(path: Path, body: Any, steps: int = 5, program: str = "train.py", **info: Any) -> Trace:
    """`body(step)` gives the calls of a step as nested tuples."""
    calls: list[dict[str, Any]] = []
    for step in range(steps):
        tree(calls, step, body(step))
    return Trace.load([write_run(path, [{"calls": calls, **info}], program=program)])


def engine(step: int, skip: bool = False) -> Any:
    update = () if skip else (("lib.Engine._clip", "torch.distributed.all_reduce"), UPDATE)
    return ("lib.Engine.train_batch", ("__main__.Net.forward", ("torch.nn.Linear.forward", "torch.nn.functional.linear")), *update)


def pairs(trace: Trace) -> set[tuple[str, str]]:
    return {(h.text("parent"), h.text("child")) for h in RELATION.propose(trace) if h["kind"] == "call"}


def test_what_a_nearer_function_explains_is_left_to_it(tmp_path: Path) -> None:
    found = pairs(run(tmp_path / "a", engine))
    assert ("lib.Engine.train_batch", UPDATE) in found
    assert ("lib.Engine.train_batch", "lib.Engine._clip") in found
    assert ("lib.Engine._clip", "torch.distributed.all_reduce") in found
    assert ("lib.Engine.train_batch", "torch.distributed.all_reduce") not in found


def test_what_a_model_is_made_of_is_no_rule(tmp_path: Path) -> None:
    assert not any(child.startswith("torch.nn.") for _, child in pairs(run(tmp_path / "a", engine)))


def test_skipped_update_names_the_function_and_its_caller(tmp_path: Path) -> None:
    rules = learn(run(tmp_path / "a", engine))
    assert not judge(run(tmp_path / "b", engine), rules).violations
    result = judge(run(tmp_path / "c", lambda s: engine(s, skip=s == 3)), rules)
    named = {(v.function, v.module, v.step) for v in result.violations}
    assert (UPDATE, "lib.Engine.train_batch", 3) in named
    assert all("lib.Engine.train_batch" in v.seen for v in result.violations)


def test_library_rules_are_general_and_script_rules_are_of_one_family(tmp_path: Path) -> None:
    rules = learn(run(tmp_path / "a", engine))
    bound = {r.hypothesis.text("child"): (r.hypothesis["family"], r.hypothesis["layout"]) for r in rules}
    assert bound[UPDATE] == ("", "one rank")
    assert bound["__main__.Net.forward"] == ("train.py", "one rank")


def test_scripts_that_share_a_class_name_are_not_judged_by_each_other(tmp_path: Path) -> None:
    def body(step: int) -> Any:
        return ("__main__.Encoder.forward", "__main__.pool")

    for name in ("a", "b"):
        run(tmp_path / name, body, program=f"{name}.py")
    rules = learn(Trace.load([tmp_path / "a", tmp_path / "b"]))
    assert rules
    other = run(tmp_path / "c", lambda step: ("__main__.Encoder.forward", "__main__.attend"), program="c.py")
    assert not judge(other, rules).violations
    assert judge(run(tmp_path / "d", lambda step: "__main__.Encoder.forward", program="a.py"), rules).violations


def test_a_flag_of_the_argument_separates(tmp_path: Path) -> None:
    def body(step: int) -> Any:
        training = step % 2 == 0
        args = {"a": [{"M": "lib.Net", "p": "", "t": int(training)}], "k": {}}
        return ("lib.Net.forward", args, *(["lib.noise"] if training else []))

    rules = learn(run(tmp_path / "a", body, steps=10))
    (noise,) = [r for r in rules if r.hypothesis["child"] == "lib.noise"]
    assert "training is true" in noise.precondition.say()


def test_what_happens_now_and_then_is_no_rule(tmp_path: Path) -> None:
    def body(step: int) -> Any:
        return ("lib.Trainer.step", "lib.Trainer.forward", *(["lib.Trainer.log"] if step % 3 == 0 else []))

    rules = learn(run(tmp_path / "a", body, steps=12))
    assert {r.hypothesis["child"] for r in rules} == {"lib.Trainer.forward"}


def test_calls_that_raised_prove_nothing(tmp_path: Path) -> None:
    rules = learn(run(tmp_path / "a", engine))
    calls: list[dict[str, Any]] = [{"fn": "lib.Engine.train_batch", "step": 0, "flags": 1}]
    trace = Trace.load([write_run(tmp_path / "b", [{"calls": calls}])])
    assert not judge(trace, rules).violations


@pytest.mark.parametrize("doubt", [{"dropped": 3}, {"notes": [f"{UPDATE} is called too often; no longer observed"]}])
def test_absence_where_records_may_be_missing_is_unknown(tmp_path: Path, doubt: dict[str, Any]) -> None:
    rules = [r for r in learn(run(tmp_path / "a", engine)) if r.hypothesis["child"] == UPDATE]
    assert rules
    assert judge(run(tmp_path / "b", lambda s: engine(s, skip=True)), rules).violations
    assert not judge(run(tmp_path / "c", lambda s: engine(s, skip=True), **doubt), rules).violations


def test_a_call_across_steps_that_were_not_sampled_is_unknown(tmp_path: Path) -> None:
    def epochs(path: Path, steps: tuple[int, ...]) -> Trace:
        calls: list[dict[str, Any]] = []
        for epoch, step in enumerate(steps):
            evaluates = len(steps) == 5 or epoch != 1  # what ran in an unsampled step left no record
            tree(calls, step, ("lib.run_epoch", "lib.batch", *(["lib.evaluate"] if evaluates else [])), dur=1_500_000)
        return Trace.load([write_run(path, [{"calls": calls}])])

    rules = [r for r in learn(epochs(tmp_path / "a", (0, 1, 2, 3, 4))) if r.hypothesis["child"] == "lib.evaluate"]
    assert rules
    assert not judge(epochs(tmp_path / "b", (0, 10, 20, 30)), rules).violations


def test_rules_about_what_a_trace_lacks_are_not_triggered(tmp_path: Path, rules: list[Invariant]) -> None:
    everything = [*rules, *learn(run(tmp_path / "a", engine))]
    for trace in (
        run(tmp_path / "b", lambda step: "other.function"),
        Trace.load([write_run(tmp_path / "c", [{"calls": [], "states": []}])]),
        Trace.load([write_run(tmp_path / "d", [])]),
    ):
        result = judge(trace, everything)
        assert result.not_triggered == len(everything)
        assert not any("could not be evaluated" in note for note in result.notes)
        assert not RELATION.propose(trace) or trace.calls.height


def test_ranks_apart_give_the_examples_of_ranks_together(tmp_path: Path) -> None:
    calls: list[list[dict[str, Any]]] = [[], []]
    for step in range(4):
        for rank in range(2):
            tree(calls[rank], step, engine(step, skip=rank == 1))
    write_run(tmp_path / "both", [{"calls": c, "world": 2} for c in calls])
    for rank in range(2):
        write_run(tmp_path / str(rank), [{"calls": calls[rank], "world": 2, "rank": rank}])
    hypotheses = [Hypothesis.of("contain", kind="call", parent="lib.Engine.train_batch", child=UPDATE, family="", layout="several ranks")]

    def seen(*names: str) -> list[tuple[Any, ...]]:
        frame = RELATION.examples(Trace.load([tmp_path / n for n in names]), hypotheses).frame
        return sorted(frame.select("step", "passed", "seq", "first").rows())

    assert seen("both") == sorted(seen("0") + seen("1")) == seen("1", "0")


# -- changes ---------------------------------------------------------------------------------------------------------

NET = {"stem.conv.weight": "torch.nn.Conv2d", "stem.bn.weight": "torch.nn.BatchNorm2d", "fc.weight": "torch.nn.Linear"}


def training(
    frozen: tuple[str, ...] = (),
    still: tuple[str, ...] = (),
    zero: tuple[str, ...] = (),
    detached: tuple[str, ...] = (),
    unused: tuple[str, ...] = (),
    cancelled: tuple[str, ...] = (),
    orphan: bool = False,
    copied: bool = False,
    update: bool = True,
    steps: int = 6,
    dtype: str = "float32",
    **info: Any,
) -> dict[str, Any]:
    """A process that trains `NET` with one optimizer; the arguments say what is wrong or unusual with it."""
    calls: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    names = list(NET)

    def look(name: str, attr: str, step: int, fp: int, edge: int = 1, flags: int = 0, model: str = "lib.Net", held: bool = not orphan) -> None:
        position = "first" if name == names[0] else "last" if name == names[-1] else "middle"
        var = {"model": model, "name": name, "attr": attr, "module": NET.get(name, ""), "kind": "weight", "position": position}
        meta = {"dtype": dtype, "shape": "[4,4]", "ndim": 2, "requires_grad": name not in frozen, "optimizer": "#0" if held and name not in frozen else None}
        states.append({"var": var, "step": step, "seq": len(calls), "call": len(calls) if step >= 0 else 0, "edge": edge, "fp": fp, "flags": flags, "meta": meta, "norm": 1.0})

    me = {"a": [{"O": "torch.optim.Adam", "a": {"name": "#0"}}], "k": {}}
    for name in NET:
        look(name, "data", -1, bits(name))
        look(name, "grad", -1, 0, flags=int(StateFlag.NONE))
    if orphan:
        look("optimizer#0.0", "data", -1, 5, model="", held=True)
    for step in range(steps):
        calls.append({"fn": "torch.optim.Optimizer.zero_grad", "step": step, "args": me})
        for name in NET:
            if step and name not in (*frozen, *detached) and not orphan:
                look(name, "grad", step, 0, flags=int(StateFlag.NONE))
        for name, module in NET.items():
            path = name.removesuffix(".weight")
            if path not in unused:
                calls.append({"fn": f"{module}.forward", "step": step, "args": {"a": [{"M": module, "p": path, "t": 1}], "k": {}}})
        calls.append({"fn": "torch.Tensor.backward", "step": step})
        for name in NET:
            if name not in (*frozen, *detached):
                look(name, "grad", step, bits(name, step, "g"), flags=int(StateFlag.ZERO) if name in zero else 0)
        if update:
            calls.append({"fn": UPDATE, "step": step, "args": me})
        for name in cancelled:
            look(name, "grad", step, 0, edge=0, flags=int(StateFlag.NONE))
        for name in NET:
            if update and name not in (*frozen, *still, *zero, *detached, *cancelled) and not (orphan and not copied):
                look(name, "data", step, bits(name, step), edge=0 if copied else 1)
    return {"calls": calls, "states": states, **info}


def trained(path: Path, **options: Any) -> Trace:
    return Trace.load([write_run(path, [training(**options)])])


def broken(trace: Trace, rules: list[Invariant]) -> set[tuple[str, str]]:
    """(who, variable) of the violated change rules."""
    by_id = {r.id: r.hypothesis for r in rules}
    return {(f"{by_id[v.id]['parent']} {by_id[v.id]['attr']} {by_id[v.id]['who']}", v.variable) for v in judge(trace, rules).violations}


def in_any_program(found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Without rules that hold in one family only."""
    return {(who, name) for who, name in found if not who.endswith(" each")}


@pytest.fixture
def rules(tmp_path: Path) -> list[Invariant]:
    found = learn(trained(tmp_path / "healthy"))
    assert {(h["parent"], h["who"]) for h in (r.hypothesis for r in found)} >= {(UPDATE, "trainable"), ("<step>", "output")}
    return found


def test_healthy_training_breaks_nothing(tmp_path: Path, rules: list[Invariant]) -> None:
    assert not broken(trained(tmp_path / "b", steps=9), rules)


def test_frozen_head_with_only_norms_in_training_is_found(tmp_path: Path, rules: list[Invariant]) -> None:
    found = broken(trained(tmp_path / "b", frozen=("stem.conv.weight", "fc.weight")), rules)
    assert found == {("<step> data output", "fc.weight")}


@pytest.mark.parametrize("frozen", [("stem.conv.weight",), ("stem.conv.weight", "stem.bn.weight"), ("fc.weight",)])
def test_other_ways_to_freeze_are_healthy(tmp_path: Path, rules: list[Invariant], frozen: tuple[str, ...]) -> None:
    """A trained head on a frozen backbone, and a backbone that learns under a frozen head."""
    assert not broken(trained(tmp_path / "b", frozen=frozen), rules)


def test_parameter_that_the_update_leaves_alone_is_found(tmp_path: Path, rules: list[Invariant]) -> None:
    found = broken(trained(tmp_path / "b", still=("stem.conv.weight",)), rules)
    assert (f"{UPDATE} data trainable", "stem.conv.weight") in found


def test_gradient_that_is_taken_away_before_the_update_changes_nothing(tmp_path: Path, rules: list[Invariant]) -> None:
    """Self-supervised training holds its last layer still in the first epoch."""
    found = in_any_program(broken(trained(tmp_path / "b", cancelled=("stem.bn.weight",)), rules))
    assert not found


def test_rate_of_zero_may_leave_all(tmp_path: Path, rules: list[Invariant]) -> None:
    """Warm-up begins at zero: the rate is told by the row that the update leaves."""
    process = training(still=tuple(NET))
    for step in range(6):
        for name, module in NET.items():
            seq = next(i for i, c in enumerate(process["calls"], 1) if c["fn"] == UPDATE and c["step"] == step)
            row = next(r for r in process["states"] if r["var"]["name"] == name)
            process["states"].append({**row, "step": step, "seq": seq, "call": seq, "meta": {**row["meta"], "lr_zero": True}})
            assert module
    assert not broken(Trace.load([write_run(tmp_path / "b", [process])]), rules)


def test_gradients_of_an_expert_that_is_not_routed_stay_cleared(tmp_path: Path, rules: list[Invariant]) -> None:
    process = training(unused=("stem.bn",))
    for step in (2, 3):
        process["states"] = [
            r for r in process["states"]
            if not (r["var"]["name"] == "stem.bn.weight" and r["step"] == step and (r["var"]["attr"], r["flags"]) != ("grad", int(StateFlag.NONE)))
        ]  # fmt: skip
    process["states"] = [
        r for r in process["states"]
        if not (r["var"]["name"] == "stem.bn.weight" and r["step"] in (3, 4) and r["flags"] == int(StateFlag.NONE))
    ]  # fmt: skip
    assert not in_any_program(broken(Trace.load([write_run(tmp_path / "b", [process])]), rules))


def test_zero_gradient_may_leave_a_parameter(tmp_path: Path, rules: list[Invariant]) -> None:
    assert not broken(trained(tmp_path / "b", zero=("stem.conv.weight",)), rules)


def test_detached_layer_gets_no_gradient(tmp_path: Path, rules: list[Invariant]) -> None:
    assert ("<step> grad input", "stem.conv.weight.grad") in broken(trained(tmp_path / "b", detached=("stem.conv.weight",)), rules)


def test_layer_beside_the_loss_needs_no_gradient(tmp_path: Path, rules: list[Invariant]) -> None:
    """A pooler runs and its output goes nowhere; every later layer may be like that."""
    assert not in_any_program(broken(trained(tmp_path / "b", detached=("stem.bn.weight",)), rules))


def test_layer_that_did_not_run_needs_no_gradient(tmp_path: Path, rules: list[Invariant]) -> None:
    found = broken(trained(tmp_path / "b", detached=("stem.conv.weight",), unused=("stem.conv",)), rules)
    assert not in_any_program(found)


def test_parameter_that_always_had_a_gradient_has_one_in_its_family(tmp_path: Path, rules: list[Invariant]) -> None:
    own = ("<step> grad each", "stem.bn.weight.grad")
    assert own in broken(trained(tmp_path / "b", detached=("stem.bn.weight",)), rules)
    beside = learn(trained(tmp_path / "c", detached=("stem.bn.weight",)))
    assert not broken(trained(tmp_path / "d", detached=("stem.bn.weight",)), beside)


@pytest.mark.parametrize(("loose", "found"), [(("fc.weight",), True), (("stem.bn.weight",), True), (("stem.conv.weight", "stem.bn.weight"), False)])
def test_hole_in_what_an_optimizer_holds_is_found_and_a_head_alone_is_not(
    tmp_path: Path, rules: list[Invariant], loose: tuple[str, ...], found: bool
) -> None:
    process = training(still=loose)
    for row in process["states"]:
        if row["var"]["name"] in loose:
            row["meta"] = {**row["meta"], "optimizer": None}
    broke = broken(Trace.load([write_run(tmp_path / "b", [process])]), rules)
    assert (("<step> data held", loose[-1]) in broke) == found


def test_what_is_frozen_in_the_middle_needs_no_gradient(tmp_path: Path, rules: list[Invariant]) -> None:
    process = training()
    late = [r for r in process["states"] if r["var"]["name"] == "stem.conv.weight" and r["step"] >= 3]
    for row in late:
        row["meta"] = {**row["meta"], "requires_grad": False}
        if row["var"]["attr"] == "grad":
            row["flags"] = int(StateFlag.NONE)
    assert not broken(Trace.load([write_run(tmp_path / "b", [process])]), rules)


def checkpoints(path: Path, keys: tuple[str, ...], caller: str = "lib.Engine.save") -> Trace:
    process = training()
    state = {"D": {k: {"T": "float32", "s": [4, 4], "d": "cpu"} for k in keys}, "n": len(keys)}
    for step in range(4):
        at = len(process["calls"])
        process["calls"].append({"fn": caller, "step": 5})
        process["calls"].append({"fn": "torch.save", "step": 5, "parent": at + 1, "args": {"a": [{"D": {"net": state, "n": {"y": step}}, "n": 2}, f"{step}.pt"], "k": {}}})
    return Trace.load([write_run(path, [process])])


def test_checkpoint_that_lacks_a_parameter_is_found(tmp_path: Path) -> None:
    rules = learn(checkpoints(tmp_path / "a", tuple(f"module.{n}" for n in NET)))
    found = broken(checkpoints(tmp_path / "b", tuple(NET)[1:]), rules)
    assert found == {("torch.save data saved", "stem.conv.weight")}
    assert not broken(checkpoints(tmp_path / "c", tuple(NET)[1:], caller="lib.Adapters.save"), rules)
    assert not broken(checkpoints(tmp_path / "d", ("exp_avg", "exp_avg_sq")), rules)


def test_optimizer_of_other_tensors_is_found_and_masters_are_not(tmp_path: Path, rules: list[Invariant]) -> None:
    stale = {who for who, _ in broken(trained(tmp_path / "b", orphan=True), rules)}
    assert "<step> data trainable" in stale
    assert not broken(trained(tmp_path / "c", orphan=True, copied=True), rules) - {("torch.optim.Optimizer.zero_grad grad trainable", "stem.conv.weight.grad")}


def test_rank_that_never_updates_is_found(tmp_path: Path, rules: list[Invariant]) -> None:
    assert ("<step> data trainable", "stem.conv.weight") in broken(trained(tmp_path / "b", update=False), rules)


def test_every_rule_can_be_said_and_says_what_it_needs(tmp_path: Path) -> None:
    for trace in (trained(tmp_path / "a"), run(tmp_path / "b", engine)):
        for hypothesis in RELATION.propose(trace):
            assert len(RELATION.say(hypothesis)) > 20
            assert RELATION.needs(hypothesis).functions
