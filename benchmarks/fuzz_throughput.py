"""How long does a (model, input) pair take over at least 77 settings (D3 on PyTorch: 373 s on eight GPUs)?

    python benchmarks/fuzz_throughput.py [--pairs 3] [--settings 80]

Settings that raise or that torch refuses are left out, and compiled models, whose compilation takes ten times what is measured here. Settings are drawn by the campaign's own cover for one program each (optimizer SGD or Adam), so that references are few, as in the paper. The first
round of each pair warms its worlds and is not counted. Wall time depends on what else runs; processor seconds of all ranks together are given
beside it. Models are small (widths of 4 to 8, a batch of 12) where the paper's have tables of up to 1,000 x 1,000 and a batch of 2,400: the figures are
not of equal work.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

SMALL = (("chain", {"layers": ["linear", "layernorm", "linear"], "skip": "all"}), ("transformer", {}), ("dlrm", {"tables": 2, "weighted": 1}), ("convolutional", {"kernel": 3}))


def processor_s() -> float:
    """Processor time of this process and of all ranks that ended."""
    return sum(u.ru_utime + u.ru_stime for u in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def settings_for(traits: frozenset[str], number: int, seed: int) -> list[dict[str, Any]]:
    """Different settings of more than one rank, two programs."""
    from proctor.oracle.fuzz.axes import why_invalid
    from proctor.oracle.fuzz.search.cover import Cover

    only = {"optimizer": ("SGD", "Adam"), "option": (), "groups": (), "clip": (), "precision": (), "zero_grad": (), "scheduler": (), "ddp_hook": ("ALLREDUCE",), "compile": ()}
    cover, rng = Cover(only=only), random.Random(seed)
    found: dict[str, dict[str, Any]] = {}
    while len(found) < number:
        row = cover.row(rng, traits)
        if row.get("wrapper") and not why_invalid(row, traits):
            found.setdefault(str(sorted(row.items())), row)
    return list(found.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--settings", type=int, default=80)
    args = parser.parse_args()
    from proctor.oracle.fuzz.facts import facts
    from proctor.oracle.fuzz.running.evaluate import Runner
    from proctor.oracle.fuzz.running.warm import warm_up
    from proctor.oracle.fuzz.running.worlds import Worlds
    from proctor.oracle.fuzz.spec import Scenario

    warm_up()
    for number in range(args.pairs):
        template, model = SMALL[number % len(SMALL)]
        base = Scenario(template, dict(model), {"batch": 12, "seed": number})
        scenarios = [base.with_setting(s) for s in settings_for(facts(base), args.settings * 3 // 2, number)]
        before = processor_s()
        with Worlds(timeout_s=120) as worlds:
            runner = Runner(worlds)
            # The same once before, for imports and caches; what raises is left out, since a fresh world is another cost.
            scenarios = [s for s, o in zip(scenarios, runner.run_all(scenarios), strict=True) if o.verdict in ("ok", "different")][: args.settings]
            runner.run_all(scenarios)
            middle, begun = _ranks_s(worlds), time.monotonic()
            own = processor_s()
            outcomes = runner.run_all(scenarios)
            wall = time.monotonic() - begun
            cpu = _ranks_s(worlds) - middle + processor_s() - own
        counts = {v: sum(o.verdict == v for o in outcomes) for v in sorted({o.verdict for o in outcomes})}
        for why in sorted({o.why[:200] for o in outcomes if o.failed}):
            print(f"  {why}", flush=True)
        print(f"{template}: {len(scenarios)} settings, {wall:.2f} s wall, {cpu:.2f} s processor, {1000 * cpu / sum(s.world for s in scenarios):.0f} ms a rank (cold: {processor_s() - before:.1f} s in all), {counts}", flush=True)


def _ranks_s(worlds: Any) -> float:
    """Processor time so far of ranks that live."""
    total = 0
    for world in worlds._worlds.values():
        for pid in world.pids:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
    return total / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
