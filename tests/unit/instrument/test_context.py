"""Step counting: from what training programs do, whatever their style."""

from __future__ import annotations

from proctor.instrument.steps.clock import KEPT_BASES, ContextTable, StepClock

A, B = 1, 2


def steps_of(clock: StepClock, acts: list[tuple[str, object]]) -> list[int]:
    """The step in which each act happens."""
    seen = []
    for name, argument in acts:
        if name == "zero":
            clock.zero_grad(argument)  # type: ignore[arg-type]
        elif name == "forward":
            clock.forward(bool(argument))
        elif name == "attack":
            clock.forward(True, probing=True)
        elif name == "backward":
            clock.backward()
        elif name == "fetch":
            clock.fetched()
        elif name == "created":
            clock.optimizer_created(argument)  # type: ignore[arg-type]
        elif name == "update":
            clock.update_begins(argument)  # type: ignore[arg-type]
            clock.update_ends(argument)  # type: ignore[arg-type]
        elif name == "skip":
            clock.update_ends(argument)  # type: ignore[arg-type]
        seen.append(clock.step)
    return seen


F, BACK = ("forward", True), ("backward", None)


def use(key: int) -> list[tuple[str, object]]:
    """Clear, compute and update."""
    return [("zero", key), F, BACK, ("update", key)]


def updates_of(clock: StepClock, acts: list[tuple[str, object]]) -> list[int]:
    """The step of each update; those of forwards and backwards before it must be the same."""
    seen, found = steps_of(clock, acts), []
    since: list[int] = []
    for (name, _), step in zip(acts, seen, strict=True):
        if name in ("forward", "backward"):
            since.append(step)
        elif name == "update":
            assert set(since) <= {step}, f"{acts[: len(seen)]}: computed in {since}, updated in {step}"
            found.append(step)
            since = []
    return found


def test_usual_loop_counts_one_step_an_update_and_a_clearing_follows_one() -> None:
    loop = [("zero", A), F, BACK, ("update", A)]
    assert steps_of(StepClock(), loop * 3) == [-1, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2]


def test_a_loop_that_clears_at_its_end_has_no_step_more_than_updates() -> None:
    loop = [F, BACK, ("update", A), ("zero", A)]
    assert steps_of(StepClock(), loop * 2) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_missing_zero_grad_still_counts() -> None:
    assert steps_of(StepClock(), [F, BACK, ("update", A)] * 3) == [0] * 3 + [1] * 3 + [2] * 3


def test_accumulation_is_microbatches_of_one_step() -> None:
    clock = StepClock()
    assert steps_of(clock, [("zero", A), F, BACK, F, BACK]) == [-1, 0, 0, 0, 0]
    assert clock.micro == 1
    assert steps_of(clock, [("update", A), ("zero", A), F]) == [0, 0, 1]
    assert clock.micro == 0


def test_alternating_optimizers_are_one_step() -> None:
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    assert updates_of(clock, [*use(A), *use(B)] * 3) == [0, 0, 1, 1, 2, 2]


def test_alternating_optimizers_that_clear_at_the_end_are_one_step_once_they_are_known() -> None:
    clock = StepClock()
    loop = [F, BACK, ("update", A), ("zero", A), F, BACK, ("update", B), ("zero", B)]
    assert updates_of(clock, loop * 6)[-6:] == [n for step in (5, 6, 7) for n in (step, step)]


def test_a_batch_tells_where_a_round_begins() -> None:
    """A critic at each batch, a generator at every third; neither is cleared by its own optimizer."""
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    one: list[tuple[str, object]] = [("fetch", None), ("zero", None), F, BACK, ("update", A)]
    acts = [*one, ("zero", None), F, BACK, ("update", B), *one, *one] * 3
    assert updates_of(clock, acts) == [0, 0, 1, 2, 3, 3, 4, 5, 6, 6, 7, 8]


def test_a_batch_that_is_used_twice_merges_no_steps_for_long() -> None:
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    steps_of(clock, [("fetch", None), *use(A), F, BACK, ("update", A), *use(B)])  # here nobody can know
    assert updates_of(clock, [("fetch", None), *use(A), F, BACK, ("update", A), *use(B)] * 3) == [2, 3, 3, 4, 5, 5, 6, 7, 7]


def test_where_the_past_does_not_tell_who_is_next_no_two_steps_are_merged() -> None:
    """A discriminator several times, then a generator several times, cleared as modules: after two of one, either may come."""
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    one, other = ([("zero", None), F, BACK, ("update", key)] for key in (A, B))
    updates_of(clock, (one * 4 + other * 4) * 4)


def test_rounds_without_a_loader_are_learned() -> None:
    """Soft actor-critic: the loss is computed before the clearing, the actor moves every second time."""
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    one = [F, ("zero", A), BACK, ("update", A)]
    acts = [*one, F, ("zero", B), BACK, ("update", B), *one]
    assert updates_of(clock, acts * 8)[-6:] == [n for step in (14, 16) for n in (step, step, step + 1)]  # one was cut in two before


def test_an_optimizer_that_never_updates_merges_no_steps() -> None:
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    assert updates_of(clock, [F, BACK, ("update", A)] * 200) == list(range(200))


def test_a_wrapped_optimizer_has_its_part_in_the_round() -> None:
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    for step in range(3):
        assert steps_of(clock, [F, BACK]) == [step, step]
        clock.update_begins(A)
        clock.update_ends(A, (B,))


def test_dropped_gradients_end_their_step() -> None:
    """The update was skipped: the other ranks, which did not skip it, count a step as well."""
    loop = [("zero", A), F, BACK]
    assert steps_of(StepClock(), loop * 3) == [-1, 0, 0, 0, 1, 1, 1, 2, 2]


def test_a_scaler_that_skips_an_update_ends_the_step() -> None:
    clock = StepClock()
    assert steps_of(clock, [F, BACK, ("skip", A), ("forward", False), F, BACK, ("update", A)]) == [0] * 4 + [1] * 3


def test_gradients_that_are_cleared_between_backward_and_update_are_of_one_step() -> None:
    assert steps_of(StepClock(), [F, BACK, ("zero", A), ("update", A)] * 2) == [0] * 4 + [1] * 4


def test_gradients_of_one_of_two_optimizers_are_no_dropped_step() -> None:
    clock = StepClock()
    clock.optimizer_created(A)
    clock.optimizer_created(B)
    loop = [("zero", A), F, BACK, ("zero", B), BACK, ("update", A), ("update", B)]
    assert updates_of(clock, loop * 3) == [0, 0, 1, 1, 2, 2]


def test_a_backward_that_attacks_the_input_is_no_step() -> None:
    loop = [("attack", None), BACK, ("zero", A), F, BACK, ("update", A)]
    clock = StepClock()
    assert updates_of(clock, loop * 3) == [0, 1, 2]


def test_a_backward_for_which_parameters_are_moved_by_hand_is_no_step() -> None:
    clock = StepClock()
    steps_of(clock, [F, BACK])
    clock.zero_grad(A, lambda: True)
    assert steps_of(clock, [F, BACK, ("update", A), F]) == [0, 0, 0, 1]


def test_evaluation_belongs_to_the_step_before_it() -> None:
    clock = StepClock()
    steps_of(clock, [*use(A), ("zero", A)])
    assert steps_of(clock, [("forward", False), ("forward", False)]) == [0, 0]
    assert clock.phase == "eval"
    clock.zero_grad(A)
    assert (clock.step, clock.phase) == (0, "train")
    clock.forward(True)
    assert (clock.step, clock.phase) == (1, "train")


def test_inference_before_training_is_no_step() -> None:
    clock = StepClock()
    assert steps_of(clock, [("zero", A), ("forward", False)]) == [-1, -1]
    assert clock.phase == "init"


def test_an_optimizer_is_at_rest_until_something_is_trained() -> None:
    clock = StepClock()
    clock.optimizer_created(A)
    assert clock.at_rest(A)
    steps_of(clock, [F])
    assert not clock.at_rest(A)
    steps_of(clock, [BACK, ("update", A)])
    assert clock.at_rest(A) and not clock.at_rest(B)


def test_a_long_run_keeps_only_recent_contexts() -> None:
    clock = StepClock()
    table = ContextTable(clock)
    for _ in range(5000):
        clock.backward()
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
    clock.backward()
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
