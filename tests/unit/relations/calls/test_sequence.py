"""`sequence`: what belongs to a training step occurs in it, in order; gradients are cleared between updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.loops import ROOT, STEP, ZERO_GRAD, call, details, holds, learn, load, loop, violations
from helpers.runs import write_run

from proctor.invariants.relations import registry
from proctor.invariants.relations.sequence import CallSequence
from proctor.invariants.trace import Trace

RELATION = CallSequence()
DDP = "torch.nn.parallel.DistributedDataParallel"
CLIP = "torch.nn.utils.clip_grad_norm_"
EPOCH = "torch.utils.data.DistributedSampler.set_epoch"
ITER = "torch.utils.data.DistributedSampler.__iter__"
SCHEDULER = "torch.optim.lr_scheduler.LRScheduler.step"


def modes(trace_or_rules) -> set[tuple[str, str, str]]:
    return {(h.text("mode"), h.text("a"), h.text("b")) for h in trace_or_rules}


def test_forgotten_zero_grad_is_found_on_the_gradient_and_named(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.Other")]))
    bad = load(tmp_path, [loop(body=("forward", "backward", "step"), model="__main__.Third")])
    (detail,) = [d for d in details(RELATION, rules, bad) if d.variable]
    assert detail.function == ZERO_GRAD
    assert detail.variable == "fc.weight grad"
    assert "accumulates" in detail.seen


def test_clearing_by_other_means_is_clearing(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()]))
    other = loop(body=("forward", "backward", "step"))
    for row in list(other["states"])[2:]:  # p.grad = None by hand, seen when backward begins
        other["states"].append({**row, "edge": 0, "flags": 1, "fp": 0})
    other["states"].sort(key=lambda row: (row.get("seq", 0), row.get("edge", 1)))
    trace = load(tmp_path, [other])
    assert not violations(RELATION, rules, trace)
    assert holds(RELATION, rules, trace)


def test_gradient_that_no_backward_wrote_is_replaced_and_not_accumulated(tmp_path: Path) -> None:
    masters = loop(body=("forward", "backward", "step"))
    for row in masters["states"]:
        row["edge"] = 0
    assert not CallSequence().examples(load(tmp_path, [masters]), learn_cleared(tmp_path)).frame.height


def learn_cleared(tmp_path: Path):
    return [h for h in RELATION.propose(load(tmp_path, [loop()])) if h["mode"] == "cleared"]


def test_zeroing_that_no_boundary_sees_leaves_the_verdict_open(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()]))
    hidden = load(tmp_path, [loop(body=("torch.Tensor.zero_", "forward", "backward", "step"))])
    assert not violations(RELATION, rules, hidden)


def test_steps_that_were_not_recorded_leave_the_verdict_open(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()]))
    sampled = loop(body=("forward", "backward", "step"))
    for row in [*sampled["calls"], *sampled["states"]]:
        row["step"] = row["step"] * 10 if row["step"] > 0 else row["step"]
    assert not violations(RELATION, rules, load(tmp_path, [sampled]))


def test_bypassed_wrapper_is_a_step_without_its_forward(tmp_path: Path) -> None:
    made = [call(f"{DDP}.__init__")]
    body = ("zero_grad", f"{DDP}.forward", "forward", "backward", "step")
    healthy = load(tmp_path, [loop(body=body, extra=made)], [loop(body=body, extra=made, model="__main__.B")])
    rules = learn(RELATION, healthy)
    skip = {1: [f"{DDP}.forward"], 3: [f"{DDP}.forward"]}
    bad = load(tmp_path, [loop(body=body, extra=made, skip=skip, model="__main__.C")])
    (detail,) = details(RELATION, rules, bad)
    assert detail.function == f"{DDP}.forward"
    assert "not called in step 1" in detail.seen


def test_what_the_run_does_not_use_is_not_missing(tmp_path: Path) -> None:
    made = [call(f"{DDP}.__init__")]
    body = ("zero_grad", f"{DDP}.forward", "forward", "backward", "step")
    rules = learn(
        RELATION,
        load(tmp_path, [loop(body=body, extra=made)], [loop(body=body, extra=made, model="__main__.B")]),
    )
    assert not violations(RELATION, rules, load(tmp_path, [loop(model="__main__.C")]))


def test_update_that_never_happens_is_found(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.B")]))
    bad = load(tmp_path, [loop(body=("zero_grad", "forward", "backward"), model="__main__.C")])
    assert [d.function for d in details(RELATION, rules, bad)] == [STEP]


def test_order_is_learned_and_checked(tmp_path: Path) -> None:
    body = ("zero_grad", "forward", "backward", CLIP, "step")
    rules = learn(RELATION, load(tmp_path, [loop(body=body)]))
    assert ("lead", CLIP, STEP) in modes(r.hypothesis for r in rules)
    late = load(tmp_path, [loop(body=("zero_grad", "forward", "backward", "step", CLIP))])
    assert f"in a training step, {CLIP} comes before {STEP}" in violations(RELATION, rules, late)


def test_clipping_what_backward_has_not_made_yet_is_found_though_the_gradients_are_used(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop(body=("zero_grad", "forward", "backward", CLIP, "step"))]))
    early = load(tmp_path, [loop(body=("zero_grad", "forward", CLIP, "backward", "step"))])
    assert f"in a training step, torch.Tensor.backward comes before {CLIP}" in violations(RELATION, rules, early)


def test_habits_of_a_program_stay_in_its_family(tmp_path: Path) -> None:
    body = ("zero_grad", "forward", "backward", "step", SCHEDULER)
    made = [call(SCHEDULER)]
    rules = learn(
        RELATION,
        load(tmp_path, [loop(body=body, extra=made)], [loop(body=body, extra=made, model="__main__.B")]),
    )
    per_epoch = loop(
        body=body, extra=made, skip={step: [SCHEDULER] for step in range(1, 6)}, model="__main__.C"
    )
    assert not violations(RELATION, rules, load(tmp_path, [per_epoch]))
    same = loop(body=body, extra=made, skip={step: [SCHEDULER] for step in range(1, 6)})
    assert violations(RELATION, rules, load(tmp_path, [same]))


def test_periodic_calls_are_no_rule(tmp_path: Path) -> None:
    body = ("zero_grad", "forward", "backward", "step", SCHEDULER)
    trace = load(tmp_path, [loop(body=body, skip={step: [SCHEDULER] for step in (0, 1, 3, 4)})])
    assert not any(h["mode"] == "cover" and h["a"] == SCHEDULER for h in RELATION.propose(trace))


def test_another_kind_of_loop_is_not_judged(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.B")]))
    closure = loop(body=("step", "zero_grad", "forward", "backward"), model="__main__.C")
    for row in closure["calls"]:
        if row["fn"] == STEP:
            row["args"]["a"].append({"f": "__main__.closure"})
    assert not violations(RELATION, rules, load(tmp_path, [closure]))


@pytest.mark.parametrize("part", ["zero_grad", "forward", "step", "backward"])
def test_lost_records_prove_nothing(tmp_path: Path, part: str) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.B")]))
    lossy = loop(skip={2: [part]}, dropped=3)
    assert not violations(RELATION, rules, load(tmp_path, [lossy]))


def test_steps_at_the_edge_of_what_was_recorded_are_not_judged(tmp_path: Path) -> None:
    """Of every second step the act that begins it is missing, and of those between there is nothing else."""
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.B")]))
    gan = loop(12, body=("zero_grad", "forward", "backward", "zero_grad", "backward", "step"))["calls"]
    begins = [i for i, row in enumerate(gan) if i == 0 or row["step"] != gan[i - 1]["step"]]
    kept = [row for i, row in enumerate(gan) if (row["step"] % 2 == 0) != (i in begins[1:])]
    rows = [{**row, "seq": i + 1} for i, row in enumerate(kept)]
    trace = load(tmp_path, [{"calls": rows, "states": []}])
    assert not violations(RELATION, rules, trace)
    assert holds(RELATION, rules, trace)


def test_order_of_ranks_and_split_by_process_change_nothing(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.B")]))
    good, bad = loop(rank=0), loop(rank=1, body=("forward", "backward", "step"))
    together, turned = load(tmp_path, [good, bad]), load(tmp_path, [bad, good])
    alone = load(tmp_path, [{**bad, "world": 2}])
    texts = [set(violations(RELATION, rules, t)) for t in (together, turned, alone)]
    assert texts[0] == texts[1] == texts[2] != set()


def epochs(*, renewed: bool, model: str = "__main__.Net", shuffle: bool = True, evaluates: bool = False) -> dict[str, Any]:
    sampler = {"O": "torch.utils.data.distributed.DistributedSampler", "a": {"shuffle": shuffle}}
    process = loop(2, model=model)
    for epoch in range(5):
        if renewed:
            process["calls"].append(call(EPOCH, sampler, epoch, step=2 + epoch))
        for how in ({}, {"phase": "eval", "grad": False})[: 1 + evaluates]:
            process["calls"].append(call(ITER, sampler, step=2 + epoch))
            process["calls"].append(call(f"{model}.forward", {"M": model, "p": "", "t": 1}, step=2 + epoch, flags=ROOT, **how))
    return process


def test_epoch_that_is_never_set(tmp_path: Path) -> None:
    rules = learn(
        RELATION, load(tmp_path, [epochs(renewed=True)], [epochs(renewed=True, model="__main__.B")])
    )
    (detail,) = details(RELATION, rules, load(tmp_path, [epochs(renewed=False, model="__main__.C")]))
    assert detail.function == EPOCH
    ordered = load(tmp_path, [epochs(renewed=False, model="__main__.C", shuffle=False)])
    assert not violations(RELATION, rules, load(tmp_path, [epochs(renewed=True, model="__main__.C", evaluates=True)])), "its order says nothing"
    assert not violations(RELATION, rules, ordered)


def test_needs_and_sentences_name_the_functions(tmp_path: Path) -> None:
    for hypothesis in RELATION.propose(load(tmp_path, [loop()])):
        assert RELATION.needs(hypothesis).functions
        assert RELATION.say(hypothesis)
    assert not RELATION.propose(load(tmp_path, [{"calls": [], "states": []}]))


SCALER = "torch.amp.GradScaler"


def test_clipping_of_scaled_gradients_is_found_in_any_program(tmp_path: Path) -> None:
    body = ("zero_grad", "forward", f"{SCALER}.scale", "backward", f"{SCALER}.unscale_", CLIP, "step")
    rules = learn(RELATION, load(tmp_path, [loop(body=body)]))
    without = tuple(b for b in body if b != f"{SCALER}.unscale_")
    other = load(tmp_path, [loop(body=without, model="__main__.Other")])
    assert any(d.function == f"{SCALER}.unscale_" for d in details(RELATION, rules, other))
    plain = tuple(b for b in without if not b.startswith(SCALER))
    assert not violations(RELATION, rules, load(tmp_path, [loop(body=plain, model="__main__.Other")]))


def test_clipping_after_the_update_is_found_in_any_program(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop(body=("zero_grad", "forward", "backward", CLIP, "step"))]))
    late = load(
        tmp_path, [loop(body=("zero_grad", "forward", "backward", "step", CLIP), model="__main__.Other")]
    )
    assert any(CLIP in d.function for d in details(RELATION, rules, late))


def test_schedule_after_the_clearing_belongs_to_the_update_before(tmp_path: Path) -> None:
    rules = learn(
        RELATION, load(tmp_path, [loop(body=("zero_grad", "forward", "backward", "step", SCHEDULER))])
    )
    early = load(
        tmp_path, [loop(body=("zero_grad", "forward", "backward", SCHEDULER, "step"), model="__main__.B")]
    )
    assert any("before" in d.expected for d in details(RELATION, rules, early))
    at_end = load(
        tmp_path, [loop(body=("zero_grad", SCHEDULER, "forward", "backward", "step"), model="__main__.C")]
    )
    assert not any("before" in d.expected for d in details(RELATION, rules, at_end))


def test_schedule_that_counts_backward_passes_moves_on_before_the_update_of_several(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop(body=("zero_grad", "forward", "backward", "step", SCHEDULER))]))
    assert all("torch.Tensor.backward" in RELATION.needs(rule.hypothesis).functions for rule in rules if rule.hypothesis["mode"] == "lead" and rule.hypothesis["b"] == SCHEDULER)
    passes = ("forward", "backward", SCHEDULER, "forward", "backward")
    each = load(tmp_path, [loop(body=(*passes, "step", "zero_grad", SCHEDULER), model="__main__.B")])
    assert not any("before" in d.expected for d in details(RELATION, rules, each))
    late = load(tmp_path, [loop(body=("forward", "backward", "forward", "backward", SCHEDULER, "step", "zero_grad"), model="__main__.C")])
    assert any("before" in d.expected for d in details(RELATION, rules, late))


def test_attack_on_an_input_is_a_step_without_an_update(tmp_path: Path) -> None:
    rules = learn(RELATION, load(tmp_path, [loop()], [loop(model="__main__.Other")]))
    skipped = loop(model="__main__.Third", skip={2: ["step"]})
    assert violations(RELATION, rules, load(tmp_path, [skipped]))
    for row in skipped["calls"]:
        if row["fn"].endswith(".forward") and row["step"] == 2:
            row["args"]["a"][1] = {**row["args"]["a"][1], "g": 1}
    assert not violations(RELATION, rules, load(tmp_path, [skipped]))


def _learning(tmp_path: Path, name: str, ends: str) -> Trace:
    """Eight updates within calls of `Agent.learn`; the seventh's call `returns`, is `open` when the process is killed, or is `missing`."""
    rows: list[dict[str, Any]] = []
    seq = 0
    for step in range(8):
        seq += 1
        learn_at = seq
        lost = ends != "returns" and step >= 6
        if not lost:
            rows.append(call("agent.Agent.learn", step=step, seq=learn_at))
        for fn in (ZERO_GRAD, "torch.Tensor.backward", STEP):
            seq += 1
            parent = 0 if lost and ends == "missing" else learn_at
            rows.append(call(fn, *([] if fn == "torch.Tensor.backward" else [{"O": "torch.optim.Adam", "v": "#0", "a": {}}]), step=step, seq=seq, parent=parent))
    return Trace.load([write_run(tmp_path / name, [{"calls": rows, "finished": ends == "returns"}])])


@pytest.mark.parametrize("relation", ["sequence", "manner"])
def test_a_call_that_had_not_returned_when_the_process_was_killed_is_not_missing(tmp_path: Path, relation: str) -> None:
    kind = registry()[relation]
    for name in ("a", "b"):
        _learning(tmp_path, name, "returns")
    rules = learn(kind, Trace.load([tmp_path / "a", tmp_path / "b"]))
    assert any("agent.Agent.learn" in rule.text for rule in rules)
    assert not violations(kind, rules, _learning(tmp_path, "killed", "open"))
    assert any("agent.Agent.learn" in text for text in violations(kind, rules, _learning(tmp_path, "gone", "missing")))
