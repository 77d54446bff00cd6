"""Every value of every axis of Keras by itself, and every layer, on two replicas: a line for each that is not "ok", for a reader.

    PROCTOR_KERAS_PYTHON=keras-env/bin/python python -m benchmarks.fuzz_keras [--world 2] [--only WORD]
"""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Iterator

from proctor.oracle.fuzz.axes import all_axes, why_invalid
from proctor.oracle.fuzz.keras import catalogue, models
from proctor.oracle.fuzz.keras.client import Server
from proctor.oracle.fuzz.keras.runner import KerasRunner
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario

BASES: tuple[Point, ...] = ({}, {"keras_save": "keras"}, {"keras_optimizer": "Adam"}, {"keras_call": "run"})


def scenarios(world: int) -> Iterator[Scenario]:
    """One axis away from `MirroredStrategy` alone, or one layer; what needs another axis has it."""
    plain: Point = {"world": world, "wrapper": "mirrored"}
    for axis in (a for a in all_axes() if a.library == "keras"):
        options = catalogue.current().options() if axis.name == "keras_option" else axis.choice.values[1:]
        for value in options:
            owners = [{"keras_optimizer": o} for o in catalogue.current().classes() if axis.name == "keras_option"]
            setting = next((s for base in (*BASES, *owners) if not why_invalid(s := {**plain, **base, axis.name: value}, frozenset({"keras"}))), None)
            if setting is not None:
                yield Scenario("keras_chain", {}, {}, setting)
    for template, known in (("keras_chain", models.VECTORS), ("keras_sequence", models.SEQUENCES), ("keras_image", models.IMAGES)):
        yield from (Scenario(template, {"layers": [layer]}, {}, plain) for layer in known)
    for more in ({"words": "masked"}, *({"attention": a} for a in ("self", "causal", "grouped"))):
        yield Scenario("keras_sequence", {"layers": ["dense"], **more}, {}, plain)
    for more in ({}, {"shared": True}, {"regularized": True}, {"frozen": "first"}):
        yield Scenario("keras_tables", more, {}, plain)


def main() -> None:
    """Run them all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--only", default="", help="scenarios whose JSON has this word")
    args = parser.parse_args()
    counted: Counter[str] = Counter()
    with Server(os.environ["PROCTOR_KERAS_PYTHON"], 300.0) as server:
        catalogue.use(server.catalogue())
        runner = KerasRunner(server)
        begun = time.monotonic()
        for scenario in scenarios(args.world):
            what = {**scenario.model, **{k: v for k, v in scenario.setting.items() if k not in ("world", "wrapper")}}
            if args.only not in f"{scenario.template} {what}":
                continue
            outcome = runner.run(scenario)
            counted[outcome.verdict] += 1
            if outcome.verdict != "ok":
                print(f"{outcome.verdict}: {scenario.template} {what}: {outcome.why[:300]}", flush=True)
        print(f"{sum(counted.values())} settings in {time.monotonic() - begun:.0f} s: {dict(counted.most_common())}")


if __name__ == "__main__":
    main()
