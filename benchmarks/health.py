"""Held-out health: rules learned from half of the examples must be quiet on the other half and on other settings.

    python benchmarks/health.py [--rounds 2] [--seed 0] [--work DIR] [--growth]

Each round takes a random half of `examples/`, records it with two seeds each, infers one pack, and checks the other
half, and the learned half under another seed, size and learning rate. Prints false alarms by relation and setting;
`--growth` infers from 1, 2, 4, … programs in turn and shows that a pack does not become noisier with more.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from evaluation import SIZES
from exam import check, infer, record

EXAMPLES = Path(__file__).parent.parent / "examples"
NOT_PIPELINES = {"demo.py"}


def size_option(script: Path) -> list[str]:
    """Another size, by the first size option that the script has."""
    text = script.read_text()
    return next(([option, value] for option, value in SIZES if f'"{option}"' in text), [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path)
    parser.add_argument("--iters", default="24")
    parser.add_argument("--growth", action="store_true")
    args = parser.parse_args()
    work = args.work or Path(tempfile.mkdtemp(prefix="proctor-health-"))
    scripts = sorted(p for p in EXAMPLES.glob("*.py") if p.name not in NOT_PIPELINES)
    settings = {
        "seed0": [], "seed1": ["--seed", "1"], "seed2": ["--seed", "2"],
        "size": ["--seed", "3"], "lr": ["--seed", "4", "--lr", "0.002"],
    }
    runs: dict[tuple[str, str], Path] = {}

    def recorded(script: Path, setting: str) -> Path:
        key = (script.stem, setting)
        if key not in runs:
            out = work / f"{script.stem}-{setting}"
            extra = size_option(script) if setting == "size" else []
            if not (out / "run.json").exists():
                record(script, out, ["--iters", args.iters, *settings[setting], *extra])
            runs[key] = out
        return runs[key]

    rng = random.Random(args.seed)
    total: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0])
    by_relation: collections.Counter[str] = collections.Counter()
    for round_number in range(args.rounds):
        shuffled = scripts[:]
        rng.shuffle(shuffled)
        learned, held_out = shuffled[: len(shuffled) // 2], shuffled[len(shuffled) // 2 :]
        sizes = [1, 2, 4, len(learned)] if args.growth else [len(learned)]
        for n in sizes:
            pack = work / f"pack-{round_number}-{n}.json"
            rules = infer([recorded(s, k) for s in learned[:n] for k in ("seed0", "seed1")], pack)
            tries = [(s, "seed0", "other program") for s in held_out]
            tries += [(s, k, f"other {k}") for s in learned[:n] for k in ("seed2", "size", "lr")]
            checked = false = 0
            for script, setting, kind in tries:
                result = check(recorded(script, setting), pack)
                checked += result["checked"]
                false += len(result["violations"])
                if n == len(learned):
                    total[kind][0] += len(result["violations"])
                    total[kind][1] += result["checked"]
                    for v in result["violations"]:
                        by_relation[v["relation"]] += 1
                        print(f"  {script.stem} ({setting}): {v['relation']}: {v['text']} | seen {v['seen']} | {v['when']}"[:330])
            print(f"round {round_number}: {n} programs, {rules} rules: {false} false of {checked} checked "
                  f"({100 * false / max(checked, 1):.2f} %)", flush=True)
    print(f"\n{'setting':20} {'false':>6} {'checked':>8}")
    for kind, (false, checked) in sorted(total.items()):
        print(f"{kind:20} {false:6} {checked:8}  {100 * false / max(checked, 1):.2f} %")
    print("by relation:", json.dumps(dict(by_relation)))
    everything = sum(f for f, _ in total.values()), sum(c for _, c in total.values())
    print(f"all: {everything[0]} false of {everything[1]} checked ({100 * everything[0] / max(everything[1], 1):.2f} %)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
