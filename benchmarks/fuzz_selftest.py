"""Does a campaign find bugs that are planted into the library, and does it name the right trigger set?

    python -m benchmarks.fuzz_selftest [--rows 77] [--only NAMES]

A mutant (`benchmarks/fuzz_mutants`) patches torch in the rank, before its first task. Every mutant meets the same rows, drawn by the campaign's cover for two models (77 each, as a
pair of the campaign is to have); rows that fail without a mutant are left out, and looked up among the known findings. Found: a row fails. Trigger set right: the axes of the first failure's minimal set are the mutant's. Layer right: the
first tensor that differs is of the kind, and of the class of module, at which the bug sits.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.fuzz_mutants import MUTANTS

os.environ.setdefault("OMP_NUM_THREADS", "1")

KNOWN = Path(__file__).parents[1] / "oracle/fuzz/known/found-torch-2.13.toml"
BATCH = 8  # rows at once; the first that fails is explained
ONLY: dict[str, tuple[str, ...]] = {
    "optimizer": ("Adam", "AdamW", "RMSprop", "Adagrad"),
    "implementation": ("foreach=True",),
    "option": ("weight_decay=0.1", "momentum=0.1", "amsgrad=True"),
    "groups": ("two",),
    "precision": (),
    "ddp_hook": ("ALLREDUCE",),
    "resume": ("full", "sharded"),
    "recompute": ("non-reentrant",),
    "fsdp_policy": (),
    "wrapper": ("ddp", "fsdp2", "hsdp", "tp", "tp_fsdp2", "zero"),  # planted bugs are in these
    "disk": (),
    "disk_switch": (),
    "before": (),
    "before_world": (),
    "compile": (),
}
MODELS = (("chain", {"layers": ["mlp", "layernorm", "linear"], "frozen": "first"}), ("transformer", {}))


def rows(number: int) -> list[Any]:
    """The same scenarios for every mutant."""
    from proctor.oracle.fuzz.facts import facts
    from proctor.oracle.fuzz.search.cover import Cover
    from proctor.oracle.fuzz.spec import Scenario

    cover, rng, found = Cover(only=ONLY), random.Random(0), {}
    for template, model in MODELS:
        base = Scenario(template, dict(model), {"batch": 8})
        for _ in range(number):
            scenario = base.with_setting(cover.row(rng, facts(base)))
            found[scenario.key()] = scenario
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=77)
    parser.add_argument("--only", help="names with commas")
    args = parser.parse_args()
    from proctor.oracle.fuzz.running.warm import warm_up

    warm_up()
    scenarios = rows(args.rows)
    healthy, failing = clean(scenarios)
    print(f"{len(scenarios)} rows; without a mutant {len(healthy)} agree, {len(failing)} fail:", *failing, sep="\n  ", flush=True)
    chosen = {n: m for n, m in MUTANTS.items() if args.only is None or n in args.only.split(",")}
    found = triggers_right = layers_right = 0
    for name, mutant in chosen.items():
        finding, seconds = judged(mutant.plant, healthy)
        triggers = finding is not None and set(finding.triggers) == mutant.axes
        first = finding.outcome.first if finding is not None else None
        layer = first is not None and first.kind == mutant.kind and mutant.module in ("", first.module)
        found, triggers_right, layers_right = found + (finding is not None), triggers_right + triggers, layers_right + layer
        said = "MISSED" if finding is None else f"{finding.triggers if triggers else f'WRONG {finding.triggers}, not {sorted(mutant.axes)}'}, {finding.outcome.why[:90]}"
        print(f"{name:34} {said}{'' if layer or finding is None else f' LAYER not {mutant.kind} {mutant.module}'} ({seconds:.0f} s)", flush=True)
    print(f"found {found} of {len(chosen)}, trigger set right {triggers_right}, layer right {layers_right}")


def clean(scenarios: list[Any]) -> tuple[list[Any], list[str]]:
    """Scenarios that agree without a mutant, and what the others say: the known finding, or that it is new."""
    from proctor.oracle.fuzz.running.evaluate import Runner
    from proctor.oracle.fuzz.running.worlds import Worlds
    from proctor.oracle.fuzz.search.campaign import Campaign
    from proctor.oracle.fuzz.search.findings import read_known, shipped

    release = version("torch").partition("+")[0]
    with Worlds(timeout_s=120) as worlds:
        campaign = Campaign(Runner(worlds), 0, [*shipped(release), *read_known(KNOWN, {"torch": release})])
        pairs = list(zip(scenarios, campaign.runner.run_all(scenarios), strict=True))
        failing = []
        for scenario, outcome in pairs:
            if outcome.failed:
                by = next(iter(campaign.explain(scenario, outcome)), "not seen again")
                failing.append(f"{by if isinstance(by, str) else f'NEW {by.triggers}'}: {outcome.why[:90]} {scenario.setting}")
    return [s for s, o in pairs if o.verdict == "ok"], failing


def judged(plant: Callable[[], None], scenarios: list[Any]) -> tuple[Any, float]:
    """The finding of the first row that fails, or None; and seconds."""
    from proctor.oracle.fuzz.running.evaluate import Runner
    from proctor.oracle.fuzz.running.worlds import Worlds
    from proctor.oracle.fuzz.search.campaign import Campaign
    from proctor.oracle.fuzz.search.findings import Finding

    begun = time.monotonic()
    with Worlds(timeout_s=120, prepare=plant) as worlds:
        campaign = Campaign(Runner(worlds), 0, [])
        for i in range(0, len(scenarios), BATCH):
            part = scenarios[i : i + BATCH]
            for scenario, outcome in zip(part, campaign.runner.run_all(part), strict=True):
                for one in campaign.explain(scenario, outcome) if outcome.failed else ():
                    if isinstance(one, Finding):
                        return one, time.monotonic() - begun
    return None, time.monotonic() - begun


if __name__ == "__main__":
    main()
