from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
import pytest

from proctor.infer.preconditions import Outcome, Why, infer_preconditions
from proctor.invariants.condition import Condition, Kind
from proctor.invariants.relations import Examples

Row = Mapping[str, str | bool | None]


def examples(
    passing: Sequence[Row], failing: Sequence[Row] = (), *, scope: tuple[str, ...] = (), times: int = 4
) -> Examples:
    rows = [{"passed": True, **row} for row in passing] * times + [
        {"passed": False, **row} for row in failing
    ]
    frame = pl.DataFrame(rows, infer_schema_length=None).with_columns(
        pl.lit(0, dtype=pl.UInt32).alias("hyp"), pl.lit(0, dtype=pl.UInt16).alias("proc")
    )
    names = dict.fromkeys(key.rstrip("~") for row in [*passing, *failing] for key in row)
    return Examples(frame, tuple(names), scope)


def outcome(*args: Sequence[Row], **options: object) -> Outcome:
    (found,) = infer_preconditions(examples(*args, **options)).values()  # type: ignore[arg-type]
    return found


def say(*args: Sequence[Row], **options: object) -> str:
    found = outcome(*args, **options)
    return found.precondition.say() if found.precondition else str(found.why)


def test_what_never_failed_holds_always() -> None:
    assert say([{"phase": "train"}, {"phase": "eval"}]) == "always"


def test_bloom_precondition_of_the_paper() -> None:
    """Figure 4: consistent across tensor-parallel ranks for what is not partitioned; is_cuda is irrelevant."""
    good = {
        "tp_rank": None,
        "tp_rank~": False,
        "partitioned": "false",
        "partitioned~": True,
        "is_cuda": "true",
    }
    partitioned = {**good, "partitioned": "true"}
    same_rank = {**good, "tp_rank": "0", "tp_rank~": True}
    assert say([good], [partitioned, same_rank]) == "tp_rank differs and partitioned is false"


def test_two_scenarios_become_a_disjunction() -> None:
    """Section 3.6: across data-parallel workers, and for the LayerNorms of tensor-parallel workers."""
    dp = [{"axis": "dp", "owner": o} for o in ("Linear", "LayerNorm", "Embedding")]
    tp = [{"axis": "tp", "owner": o} for o in ("Linear", "LayerNorm", "Embedding")]
    found = say([*dp, tp[1]], [tp[0], tp[2]])
    assert found == "axis is dp; or owner is LayerNorm"


def test_conditions_shared_by_all_stay_in_each_alternative() -> None:
    """Figure 5: cond1 && (cond3 || cond4)."""
    good = [{"phase": "train", "axis": "dp", "ln": "no"}, {"phase": "train", "axis": "tp", "ln": "yes"}]
    bad = [{"phase": "train", "axis": "tp", "ln": "no"}, *({**row, "phase": "eval"} for row in good)]
    assert say(good, bad) == "phase is train and axis is dp; or phase is train and ln is yes"


def test_earlier_fields_are_preferred_when_they_do_the_same() -> None:
    good, bad = {"role": "norm", "name": "ln_1"}, {"role": "linear", "name": "fc_1"}
    assert say([good], [bad]) == "role is norm"
    assert say([dict(reversed(good.items()))], [bad]) == "name is ln_1"


def test_agreement_is_preferred_to_the_value_that_is_agreed_on() -> None:
    good, bad = {"group": "0", "group~": True}, {"group": None, "group~": False}
    assert say([good], [bad]) == "group is the same"


def test_a_condition_that_later_ones_make_superfluous_is_pruned() -> None:
    """Greedy takes `a`, which excludes most; `b` and `c` are needed anyway, and exclude all that `a` does."""
    violates = {"a": {1, 2, 3, 4}, "b": {1, 2, 5}, "c": {3, 4, 6}}
    bad = [{name: "no" if n in which else "yes" for name, which in violates.items()} for n in range(1, 7)]
    assert say([{"a": "yes", "b": "yes", "c": "yes"}], bad) == "b is yes and c is yes"


def test_an_alternative_that_later_ones_make_superfluous_is_pruned() -> None:
    meets = {"a": {1, 2, 3, 4}, "b": {1, 2, 5}, "c": {3, 4, 6}}
    good = [{name: "yes" if n in which else "no" for name, which in meets.items()} for n in range(1, 7)]
    assert say(good, [{"a": "no", "b": "no", "c": "no"}]) == "b is yes; or c is yes"


def test_existence_when_values_differ_and_failing_examples_have_none() -> None:
    good = [{"dtype": f"float{n}"} for n in (16, 32, 64)]
    assert say(good, [{"dtype": None}]) == "dtype is known"


def test_not_set_is_a_condition() -> None:
    found = outcome([{"autocast": None}], [{"autocast": "bf16"}]).precondition
    assert found is not None
    assert found.any_of == ((Condition("autocast", Kind.CONSTANT, None),),)
    assert found.absent() == ["autocast"]


def test_not_set_of_several_records_does_not_mean_that_they_differ() -> None:
    good, differs = {"shard": None, "shard~": True}, {"shard": None, "shard~": False}
    found = outcome([good], [{"shard": "0", "shard~": True}, differs])
    assert found.precondition is not None
    frame = examples([good], [differs]).frame
    assert frame.filter(found.precondition.holds(frozenset(frame.columns)))["passed"].to_list() == [True] * 4


def test_same_circumstances_that_pass_and_fail_cannot_be_separated() -> None:
    assert outcome([{"phase": "train"}], [{"phase": "train"}]).why is Why.CONTRADICTED


def test_a_few_contradicted_examples_are_left_uncovered() -> None:
    odd = {"phase": "warmup"}
    found = infer_preconditions(
        Examples(
            pl.concat(
                [examples([{"phase": "train"}], times=99).frame, examples([odd], [odd], times=1).frame]
            ),
            ("phase",),
        )
    )[0]
    assert found.precondition is not None and found.precondition.say() == "phase is train"
    assert (found.passed, found.excluded) == (99, 1)


def test_nothing_separates_noise() -> None:
    good = [{f"f{i}": str((n * (i + 3)) % 7) for i in range(3)} for n in range(0, 40, 2)]
    bad = [{f"f{i}": str((n * (i + 5)) % 7) for i in range(3)} for n in range(1, 41, 2)]
    assert outcome(good, bad).precondition is None


def test_an_alternative_with_too_few_examples_is_refused() -> None:
    rare = {"axis": "tp", "owner": "LayerNorm"}
    bad = [{"axis": "tp", "owner": "Linear"}]
    common = {"axis": "dp", "owner": "Linear"}
    assert outcome([common, rare], bad, times=2).precondition is None
    assert say([common, rare], bad, times=3) == "axis is dp; or owner is LayerNorm"


def test_rare_uncovered_examples_do_not_cost_the_rule() -> None:
    bad = [{"axis": "tp", "owner": "Linear"}]
    many = examples([{"axis": "dp", "owner": "Linear"}], bad, times=100)
    one = examples([{"axis": "tp", "owner": "LayerNorm"}], times=1)
    (found,) = infer_preconditions(Examples(pl.concat([many.frame, one.frame]), many.fields)).values()
    assert found.precondition is not None and found.precondition.say() == "axis is dp"
    assert found.passed == 100


def test_scope_is_kept_while_evidence_agrees_and_vanishes_when_it_does_not() -> None:
    hf, plain = {"phase": "train", "framework": "hf"}, {"phase": "train", "framework": "none"}
    assert say([hf], scope=("framework",)) == "framework is hf"
    assert say([hf, plain], scope=("framework",)) == "always"
    bad = [{"phase": "eval", "framework": "hf"}]
    assert say([hf], bad, scope=("framework",)) == "phase is train and framework is hf"
    assert say([hf, plain], bad, scope=("framework",)) == "phase is train"


def test_scope_separates_only_where_nothing_else_does() -> None:
    good, bad = {"framework": "hf", "phase": "train"}, {"framework": "none", "phase": "eval"}
    assert say([good], [bad], scope=("framework",)) == "phase is train and framework is hf"
    assert say([good], [{**bad, "phase": "train"}], scope=("framework",)) == "framework is hf"


def test_scope_of_an_alternative_is_its_own() -> None:
    good = [
        {"axis": "dp", "owner": "Linear", "fw": "hf"},
        {"axis": "tp", "owner": "LayerNorm", "fw": "megatron"},
    ]
    bad = [{"axis": "tp", "owner": "Linear", "fw": f} for f in ("hf", "megatron")]
    assert (
        say(good, bad, scope=("fw",)) == "axis is dp and fw is hf; or owner is LayerNorm and fw is megatron"
    )


def test_two_fields_that_go_together_value_by_value() -> None:
    good = [{"a": a, "b": b} for a in "012" for b in "012" if a == b]
    bad = [{"a": a, "b": b} for a in "012" for b in "012" if a != b]
    found = say(good, bad)
    assert found == "a is 0 and b is 0; or a is 1 and b is 1; or a is 2 and b is 2"


def test_more_alternatives_than_a_reader_can_hold_are_no_precondition() -> None:
    good = [{"a": a, "b": a} for a in "0123456"]
    bad = [{"a": a, "b": b} for a in "0123456" for b in "0123456" if a != b]
    assert outcome(good, bad).why is Why.SUPERFICIAL


def test_undecided_examples_are_no_evidence() -> None:
    frame = examples([{"phase": "train"}], [{"phase": "eval"}]).frame
    undecided = frame.with_columns(
        pl.lit(None, dtype=pl.Boolean).alias("passed"), pl.lit("init").alias("phase")
    )
    found = infer_preconditions(Examples(pl.concat([frame, undecided]), ("phase",)))[0]
    assert (found.passed, found.excluded) == (4, 1)
    assert infer_preconditions(Examples(undecided, ("phase",))) == {}


def test_hypotheses_are_judged_apart() -> None:
    one = examples([{"phase": "train"}], [{"phase": "eval"}]).frame
    two = examples([{"phase": "eval"}], [{"phase": "train"}]).frame.with_columns(
        pl.lit(7, dtype=pl.UInt32).alias("hyp")
    )
    three = examples([{"phase": "eval"}]).frame.with_columns(pl.lit(9, dtype=pl.UInt32).alias("hyp"))
    found = infer_preconditions(Examples(pl.concat([three, two, one]), ("phase",)))
    said = {hyp: o.precondition.say() for hyp, o in found.items() if o.precondition}
    assert said == {0: "phase is train", 7: "phase is eval", 9: "always"}


def test_processes_are_those_of_passing_examples_that_meet_the_precondition() -> None:
    frame = examples([{"phase": "train"}], [{"phase": "eval"}]).frame
    frame = frame.with_columns(pl.Series("proc", [3, 1, 3, 1, 8], dtype=pl.UInt16))
    assert infer_preconditions(Examples(frame, ("phase",)))[0].procs == (1, 3)


@pytest.mark.parametrize(("n_pass", "why"), [(0, Why.NEVER), (2, Why.RARE)])
def test_too_little_evidence(n_pass: int, why: Why) -> None:
    frame = examples([{"phase": "train"}] * n_pass, [{"phase": "eval"}], times=1).frame
    assert infer_preconditions(Examples(frame, ("phase",)), min_support=3)[0].why is why


@pytest.mark.parametrize("dtype", [pl.String, pl.Categorical, pl.Enum(["eval", "train"])])
def test_coded_columns_are_as_good_as_text(dtype: pl.DataType) -> None:
    frame = examples([{"phase": "train"}], [{"phase": "eval"}]).frame.with_columns(
        pl.col("phase").cast(dtype)
    )
    found = infer_preconditions(Examples(frame, ("phase",)))[0].precondition
    assert found is not None and found.say() == "phase is train"


def test_a_frame_without_fields_or_rows() -> None:
    frame = examples([{"phase": "train"}]).frame
    assert infer_preconditions(Examples(frame.clear(), ("phase", "gone"), ("gone",))) == {}
    found = infer_preconditions(Examples(frame, ("gone",), ("gone",)))[0].precondition
    assert found is not None and found.unconditional


def test_fields_of_many_values_fit_into_words() -> None:
    """Thirty fields of a hundred values need four words of 64 bits."""
    good = [{f"f{i}": str((n + i) % 97) for i in range(30)} | {"phase": "train"} for n in range(97)]
    bad = [{**row, "phase": "eval"} for row in good]
    assert say(good, bad) == "phase is train"
