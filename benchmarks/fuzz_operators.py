"""Every expression of the template `operator` under DTensor, and every collective of `by_hand`, once each in many placements and layouts.

    python -m benchmarks.fuzz_operators [--only operator|collective] [--stride N] > table

A campaign draws these by chance; this goes through all of them and gives each failing (expression, kind of failure) one line, with the number of settings in which it
fails. Lines are material for a reader: nothing is made small or confirmed here.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from itertools import product
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")

if TYPE_CHECKING:
    from proctor.oracle.fuzz.space import Point
    from proctor.oracle.fuzz.spec import Scenario

PLACEMENTS: tuple[tuple[int, str, str, str], ...] = (
    (2, "line", "S0", "R"), (2, "line", "S1", "R"), (2, "line", "R", "S0"), (2, "line", "S0", "S0"), (2, "line", "S0", "S1"), (2, "line", "S1", "S1"), (3, "line", "S0", "S0"),
    (3, "line", "S1", "R"), (4, "square", "S0 S1", "S0 S1"), (4, "square", "S0 S0", "R"), (4, "square", "S1 S0", "S0"), (4, "line", "S0", "S1"),
)  # fmt: skip
SHAPES: tuple[Point, ...] = ({}, {"rows": 6, "columns": 6})


def operators() -> list[Scenario]:
    """Every expression in two shapes and twelve placements."""
    from proctor.oracle.fuzz.axes import all_axes
    from proctor.oracle.fuzz.models import template_of
    from proctor.oracle.fuzz.models.operators import EXPRESSIONS
    from proctor.oracle.fuzz.space import compact
    from proctor.oracle.fuzz.spec import Scenario

    choices, axes = template_of("operator").choices, [a.choice for a in all_axes(("torch",))]
    found = []
    for expression, (world, mesh, a, b), shape in product(EXPRESSIONS, PLACEMENTS, SHAPES):
        model = compact(choices, {"expression": expression, **shape})
        setting = compact(axes, {"world": world, "wrapper": "dtensor", "dt_mesh": mesh, "dt_a": a, "dt_b": b})
        found.append(Scenario("operator", model, {"steps": 1}, setting))
    return found


def collectives() -> list[Scenario]:
    """Every call in every layout, type and shape, by sums; and every reduction of contiguous tensors."""
    from proctor.oracle.fuzz.axes import all_axes, axis_of, why_invalid
    from proctor.oracle.fuzz.facts import facts
    from proctor.oracle.fuzz.models import template_of
    from proctor.oracle.fuzz.space import compact
    from proctor.oracle.fuzz.spec import Scenario

    choices, axes = template_of("collective").choices, [a.choice for a in all_axes(("torch",))]
    values = {c.name: c.values for c in choices}
    models = [{"dtype": d, "shape": s} for d, s in product(values["dtype"], ("3", "", "0", "2, 2, 3, 2"))]
    models += [{"dtype": d, "shape": "2, 3", "reduction": r} for d, r in product(values["dtype"], values["reduction"])]
    found = []
    for model, call, layout in product(models, axis_of("hand_call").choice.values, axis_of("hand_layout").choice.values):
        if "reduction" in model and layout != "contiguous":
            continue
        setting = compact(axes, {"world": 2, "wrapper": "by_hand", "hand_call": call, "hand_layout": layout})
        scenario = Scenario("collective", compact(choices, model), {"steps": 1}, setting)
        if not why_invalid(setting, facts(scenario)):
            found.append(scenario)
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("operator", "collective"))
    parser.add_argument("--stride", type=int, default=1, help="every N-th alone")
    parser.add_argument("--offset", type=int, default=0)
    args = parser.parse_args()
    from proctor.oracle.fuzz.running.evaluate import Runner
    from proctor.oracle.fuzz.running.warm import warm_up
    from proctor.oracle.fuzz.running.worlds import Worlds

    warm_up()
    scenarios = [*(operators() if args.only != "collective" else ()), *(collectives() if args.only != "operator" else ())][args.offset :: args.stride]
    counts: defaultdict[str, int] = defaultdict(int)
    seen: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    with Worlds(timeout_s=60) as worlds:
        runner = Runner(worlds)
        for start in range(0, len(scenarios), 48):
            batch = scenarios[start : start + 48]
            for scenario, outcome in zip(batch, runner.run_all(batch), strict=True):
                counts[outcome.verdict] += 1
                if outcome.failed and outcome.symptom is not None:
                    s = outcome.symptom
                    key = (scenario.template, str(scenario.model.get("expression", "")) or str(scenario.setting.get("hand_call", "all_gather_object")), s.verdict, s.what, s.way, s.where)
                    if not seen[key]:
                        print(*key[:3], scenario.model, scenario.setting, outcome.why[:170], sep=" | ", flush=True)
                    seen[key].append(scenario.key())
    print(dict(counts))
    for key, where in sorted(seen.items(), key=lambda one: (one[0][2], -len(one[1]))):
        print(len(where), *key, sep=" | ")


if __name__ == "__main__":
    main()
