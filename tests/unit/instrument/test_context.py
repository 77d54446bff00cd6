"""Step counting: from what training programs do, whatever their style."""

from __future__ import annotations

from proctor.instrument.context import KEPT_BASES, ContextTable, StepClock

A, B = 1, 2


def steps_of(clock: StepClock, acts: list[tuple[str, object]]) -> list[int]:
    """The step in which each act happens."""
    seen = []
    for name, argument in acts:
        if name == "zero":
            clock.zero_grad(argument)  # type: ignore[arg-type]
        elif name == "forward":
            clock.forward(bool(argument))
        elif name == "backward":
            clock.backward()
        elif name == "created":
            clock.optimizer_created(argument)  # type: ignore[arg-type]
        elif name == "update":
            clock.update_begins(argument)  # type: ignore[arg-type]
            clock.update_ends(argument)  # type: ignore[arg-type]
        seen.append(clock.step)
    return seen


def test_usual_loop_counts_one_step_an_update() -> None:
    loop = [("zero", A), ("forward", True), ("backward", None), ("update", A)]
    assert steps_of(StepClock(), loop * 3) == [0] * 4 + [1] * 4 + [2] * 4


def test_zero_grad_after_the_update_begins_the_next_step() -> None:
    loop = [("forward", True), ("backward", None), ("update", A), ("zero", A)]
    assert steps_of(StepClock(), loop * 2) == [0, 0, 0, 1, 1, 1, 1, 2]


def test_missing_zero_grad_still_counts() -> None:
    loop = [("forward", True), ("backward", None), ("update", A)]
    assert steps_of(StepClock(), loop * 3) == [0] * 3 + [1] * 3 + [2] * 3


def test_accumulation_is_microbatches_of_one_step() -> None:
    clock = StepClock()
    acts = [("zero", A), ("forward", True), ("backward", None), ("forward", True), ("backward", None)]
    assert steps_of(clock, acts) == [0] * 5
    assert clock.micro == 1
    assert steps_of(clock, [("update", A), ("zero", A)]) == [0, 1]
    assert clock.micro == 0


def test_alternating_optimizers_are_one_step() -> None:
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    loop = [("zero", A), ("backward", None), ("update", A), ("zero", B), ("forward", True), ("backward", None), ("update", B)]
    assert steps_of(clock, loop * 3) == [0] * 7 + [1] * 7 + [2] * 7


def test_an_optimizer_that_never_updates_is_forgotten() -> None:
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    loop = [("forward", True), ("backward", None), ("update", A)]
    assert steps_of(clock, loop * 5)[-1] == 4


def test_skipped_update_ends_its_step() -> None:
    clock = StepClock()
    loop = [("zero", A), ("forward", True), ("backward", None)]
    assert steps_of(clock, loop * 3) == [0] * 3 + [1] * 3 + [2] * 3


def test_evaluation_belongs_to_the_step_before_it() -> None:
    clock = StepClock()
    steps_of(clock, [("zero", A), ("forward", True), ("backward", None), ("update", A)])
    assert steps_of(clock, [("forward", False), ("forward", False)]) == [0, 0]
    assert clock.phase == "eval"
    clock.zero_grad(A)
    assert (clock.step, clock.phase) == (1, "train")


def test_inference_before_training_is_no_step() -> None:
    clock = StepClock()
    assert steps_of(clock, [("forward", False)]) == [-1]
    assert clock.phase == "init"


def test_a_long_run_keeps_only_recent_contexts() -> None:
    clock = StepClock()
    table = ContextTable(clock)
    for _ in range(5000):
        clock.zero_grad(A)
        clock.update_begins(A)
        clock.update_ends(A)
        table.resolve(table.base(), True, "", "")
        table.resolve(table.base(), False, "", "")
    rows = table.take_rows()
    assert len(rows) == 10_000 and len({r[0] for r in rows}) == 10_000
    assert len(table._bases) <= KEPT_BASES and len(table._index) <= 2 * KEPT_BASES
    assert rows[-1][1] == 4999


def test_contexts_are_interned_and_carry_the_user_s_meta() -> None:
    clock = StepClock()
    table = ContextTable(clock)
    first = table.resolve(table.base(), True, "", "")
    assert table.resolve(table.base(), True, "", "") == first
    clock.zero_grad(A)
    table.meta["stage"] = "warmup"
    second = table.resolve(table.base(), False, "bfloat16", "bfloat16")
    rows = table.take_rows()
    assert [r[0] for r in rows] == [first, second]
    assert rows[1][1:] == (0, 0, "train", False, "bfloat16", "bfloat16", False, '{"stage": "warmup"}')
    assert table.take_rows() == []


def test_an_optimizer_of_a_later_phase_merges_no_steps() -> None:
    def loop(optimizer: int) -> list[tuple[str, object]]:
        return [("forward", True), ("zero", optimizer), ("backward", None), ("update", optimizer)]

    clock = StepClock()
    clock.optimizer_created(A)
    assert steps_of(clock, loop(A) * 2) == [0] * 4 + [1] * 4
    assert steps_of(clock, [("created", B), *loop(B) * 3]) == [1] + [2] * 4 + [3] * 4 + [4] * 4


def test_an_optimizer_that_joins_later_shares_the_step() -> None:
    both = [("forward", True), ("backward", None), ("update", A), ("update", B)]
    clock = StepClock()
    clock.optimizer_created(A)
    steps_of(clock, both[:3] * 2)
    assert steps_of(clock, [("created", B), *both * 2]) == [1] + [2] * 4 + [3] * 4
