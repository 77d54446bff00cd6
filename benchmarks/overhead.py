"""Cost of recording a training step: bare, full, and selective with 100 of the program's own invariants.

    python benchmarks/overhead.py [--steps 200] [--rounds 3] [--only NAME] [--rules 100] [--json FILE]

Recording is switched on and off every few steps inside one process (`workloads.py`), and a figure is the median over
adjacent pairs of blocks of (seconds per step on) ÷ (off), in CPU time of the whole process, writer thread included; wall
clock beside it. Shared machines change speed by half within seconds, so separate runs cannot be compared. (Off
means paused: every tap stands and passes through, at about 25 ns a call: `benchmarks/tap.py`.)
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import proctor

HERE = Path(__file__).parent
PROCTOR = [sys.executable, "-m", "proctor.cli"]
WARM_UP = 4  # blocks


def blocks_of(command: list[str]) -> list[tuple[bool, float, float]]:
    """(on, wall, cpu) seconds a step, one entry a block."""
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=900
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")
    line = next(text for text in done.stdout.splitlines() if text.startswith("TIMES "))
    times: list[tuple[bool, float, float]] = json.loads(line.removeprefix("TIMES "))[WARM_UP:]
    return times


def paired(blocks: list[tuple[bool, float, float]], column: int) -> list[float]:
    """Each recorded block ÷ the mean of the paused blocks before and after it."""
    return [
        blocks[i][column] / ((blocks[i - 1][column] + blocks[i + 1][column]) / 2)
        for i in range(1, len(blocks) - 1)
        if blocks[i][0] and not blocks[i - 1][0] and not blocks[i + 1][0]
    ]


def sample_pack(pack: Path, out: Path, rules: int) -> int:
    data = json.loads(pack.read_text())
    random.Random(0).shuffle(data["invariants"])
    data["invariants"] = data["invariants"][:rules]
    out.write_text(json.dumps(data))
    return len(data["invariants"])


def measure(name: str, steps: int, rounds: int, rules: int, work: Path) -> dict[str, object]:
    size = max(steps // 40, 2)
    program = [sys.executable, str(HERE / "workloads.py"), name]
    full, chosen = work / f"{name}-full", work / f"{name}-selective"
    record = [*PROCTOR, "record", "--overwrite", "-o"]
    blocks_of([*record, str(full), "--", *program, "40", "1000"])
    pack, few = work / f"{name}.json", work / f"{name}-{rules}.json"
    subprocess.run([*PROCTOR, "infer", "-q", str(full), "-o", str(pack)], check=True, capture_output=True)
    used = sample_pack(pack, few, rules)
    row: dict[str, object] = {"workload": name, "rules": used}
    bare = [b for _ in range(rounds) for b in blocks_of([*program, str(steps), str(size)])]
    row["bare_ms"] = 1e3 * statistics.median(b[2] for b in bare)
    for mode, command in (
        ("full", [*record, str(full), "--", *program, str(steps), str(size)]),
        ("selective", [*record, str(chosen), "--select", str(few), "--", *program, str(steps), str(size)]),
    ):
        cpu, wall = [], []
        for _ in range(rounds):
            blocks = blocks_of(command)
            cpu += paired(blocks, 2)
            wall += paired(blocks, 1)
        row[f"{mode}_cpu"], row[f"{mode}_wall"] = statistics.median(cpu), statistics.median(wall)
        recorded = sum(b[0] for b in blocks) * size
        run = proctor.open_run(str(full if mode == "full" else chosen))
        rows = run.trace.calls.height + run.trace.states.height
        sizes = sum(f.stat().st_size for f in (run.path / "procs").rglob("*.arrow"))
        row[f"{mode}_records_per_step"] = rows / (recorded + WARM_UP * size / 2)
        row[f"{mode}_bytes_per_record"] = sizes / max(rows, 1)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rules", type=int, default=100)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    print(f"{'workload':12} {'bare ms':>8} {'full':>7} {'(wall)':>7} {'select':>7} {'(wall)':>7} "
          f"{'rec/step':>9} {'B/rec':>6} {'rec/step':>9} {'B/rec':>6} {'rules':>6}")
    with tempfile.TemporaryDirectory(prefix="proctor-bench-") as work:
        for name, factor in (("mnist", 1), ("gcn", 3), ("transformer", 1), ("solver", 2), ("acting", 3)):
            if args.only not in name:
                continue
            r = measure(name, args.steps * factor, args.rounds, args.rules, Path(work))
            rows.append(r)
            print(f"{name:12} {r['bare_ms']:8.1f} {r['full_cpu']:6.2f}x {r['full_wall']:6.2f}x {r['selective_cpu']:6.2f}x "
                  f"{r['selective_wall']:6.2f}x {r['full_records_per_step']:9.0f} {r['full_bytes_per_record']:6.1f} "
                  f"{r['selective_records_per_step']:9.0f} {r['selective_bytes_per_record']:6.1f} {r['rules']:6}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
