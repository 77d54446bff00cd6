"""Which rows are drawn: what forbids them is found by an index that must not change the answer, and what takes long is worth less."""

from __future__ import annotations

import random

from proctor.oracle.fuzz.axes import all_axes, all_rules, axis_of, whole, why_invalid
from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.models import all_templates
from proctor.oracle.fuzz.search.cover import Cover
from proctor.oracle.fuzz.space import Point, drawn
from proctor.oracle.fuzz.spec import INPUT, Scenario


def some_setting(rng: random.Random) -> Point:
    """Values of a few axes, whether they fit or not."""
    found: Point = {}
    for axis in rng.sample(all_axes(("torch",)), rng.randint(0, 8)):
        value = axis.choice.draw(rng)
        if value != axis.choice.neutral:
            found[axis.name] = value
    return found


def test_the_index_of_rules_finds_what_all_rules_find() -> None:
    rng = random.Random(3)
    invalid = 0
    for template in all_templates("torch"):
        traits = facts(Scenario(template.name, drawn(template.choices, rng), drawn(INPUT, rng)))
        for _ in range(150):
            setting = some_setting(rng)
            given = whole(setting)
            by_rule = any(r.effect == "invalid" and r.matches(given, traits) for r in all_rules())
            by_itself = any(axis_of(name).invalid(value, given, traits) for name, value in setting.items())
            assert bool(why_invalid(setting, traits)) == (by_rule or by_itself), setting
            invalid += by_rule or by_itself
    assert 200 < invalid < 150 * len(all_templates("torch")) - 200  # both answers were asked for


def test_every_cost_is_of_a_value_that_there_is() -> None:
    costs = {(a.name, value): cost for a in all_axes() for value, cost in a.costs.items()}
    assert {name for name, _ in costs} >= {"disk", "compile", "before"} and min(costs.values()) > 0
    assert all(value in {str(v) for v in axis_of(name).choice.values} for name, value in costs)
    assert axis_of("disk").cost("save") > axis_of("disk").cost("no") == 0.0


def test_rows_that_take_long_are_drawn_less_often() -> None:
    traits = facts(Scenario("chain", {"layers": ["linear", "layernorm"]}, {"batch": 8}))

    def on_disk(cover: Cover) -> int:
        rng = random.Random(1)
        return sum("disk" in cover.row(rng, traits) for _ in range(120))

    as_dear, free = Cover(), Cover()
    free.cost = lambda point: 1.0  # type: ignore[method-assign]
    assert 0 < on_disk(as_dear) < on_disk(free)


def test_a_program_whose_gradients_outlast_a_step_does_not_begin_anew() -> None:
    """An optimizer that has the matrices alone never clears the gradients of vectors, and no checkpoint holds them: a campaign told two such settings as inconsistent."""
    traits = facts(Scenario("chain", {"layers": ["linear", "layernorm"]}, {"batch": 8}))
    lasting = {"form": "clear the optimizer between", "groups": "matrices"}
    assert not why_invalid({**lasting, "resume": "asked"}, traits) and not why_invalid(lasting, traits)
    for axis in ("resume", "disk"):
        for value in axis_of(axis).choice.values:
            if value in ("no", "asked"):
                continue
            assert "holds no gradients" in why_invalid({**lasting, axis: value}, traits), (axis, value)
            for plain in ({"form": lasting["form"]}, {"groups": lasting["groups"]}):
                assert not why_invalid({**plain, axis: value}, traits), (plain, axis, value)
