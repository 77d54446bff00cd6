"""Proctor against TrainCheck 0.2.0: the same programs, the same iterations, on this machine, in alternation.

    python benchmarks/vs_traincheck.py [--traincheck-python PATH] [--full] [--only NAME] [--json FILE]

The programs are those of `examples/`, unchanged. Each is run bare, recorded and learned from by both tools with their
default settings, in more and more iterations, until TrainCheck needs more than `--limit-s` seconds of CPU time. What is
cheap (the bare run and ours) is measured before and after TrainCheck's turn, `--rounds` times each, and the
median is taken. Losses of both recordings are compared with those of a bare run by the same interpreter. Seconds of
CPU time and of wall clock and peak memory are the kernel's, of the command with all that it waited for; memory is that
of its largest process.

TrainCheck (`pip install traincheck==0.2.0`) lives best in an environment of its own with the same torch; without it
there is nothing to compare with, and the benchmark says so and exits with 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import resource
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
PEER = "0.2.0"
SHORT, FULL = (10,), (10, 20, 40, 80, 160, 320, 640, 1280, 2560)
# name: ranks; the variable that holds the model is called `model` in each, which TrainCheck has to be told.
PROGRAMS = {"cnn_classifier": 1, "ddp_classifier": 2, "transformer_lm": 1}
STAGES = ("bare", "record", "infer", "their bare", "their record", "their infer")


@dataclass(frozen=True)
class Cost:
    """What one command took."""

    wall_s: float
    cpu_s: float
    peak_mib: float
    result: str  # the losses that the program printed
    failed: str  # why it did not finish, "" if it did


def spend(command: Sequence[str], cwd: Path, limit_s: float) -> Cost:
    """Run a command in a process group of its own.

    Args:
        command: what to run.
        cwd: where; `command.log` there gets what it says.
        limit_s: CPU time of any one process of it, so that a busy machine ends nothing early. Four times as long by
            the clock ends it, too.
    """
    log, most = cwd / "command.log", math.ceil(limit_s)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_CPU, (most, most))

    started = time.perf_counter()
    with log.open("wb") as out:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        child = subprocess.Popen(
            command, cwd=cwd, stdout=out, stderr=out, start_new_session=True, env=env, preexec_fn=limit
        )
    pid = 0
    try:
        while not pid and time.perf_counter() - started < 4 * limit_s:
            time.sleep(0.01)
            pid, status, usage = os.wait4(child.pid, os.WNOHANG)
    finally:
        if not pid:
            os.killpg(child.pid, signal.SIGKILL)
            pid, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - started
    said = log.read_text(errors="replace")
    failed = "" if not child.returncode else f"exit code {child.returncode}: {' '.join(said.split())[-200:]}"
    if child.returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        failed = f"more than {limit_s:.0f} s"
    results = re.findall(r'"losses": (\[[^\]]*\])', said)
    return Cost(
        wall, usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024, results[-1] if results else "", failed
    )


class Pair:
    """One program in so many iterations, as both tools see it."""

    def __init__(self, name: str, iterations: int, peer: str, work: Path) -> None:
        self.name, self.work, self.peer = name, work, peer
        self.source = work / "source"
        # TrainCheck writes a rewritten copy of the script beside it.
        shutil.copytree(EXAMPLES, self.source, ignore=shutil.ignore_patterns("buggy", "__pycache__", "_traincheck_*"))
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROGRAMS[name])]
        self.run = [*(launcher if PROGRAMS[name] > 1 else []), f"{name}.py", "--iters", str(iterations)]
        (self.source / "run.sh").write_text(f"exec {shlex.join([peer, *self.run])}\n")
        self.costs: dict[str, list[Cost]] = {}

    def spend(self, stage: str, command: Sequence[str], limit_s: float = 600) -> Cost:
        cost = spend(command, self.source, limit_s)
        self.costs.setdefault(stage, []).append(cost)
        return cost

    def ours(self) -> None:
        """Bare, recorded, learned: one round."""
        proctor = [sys.executable, "-m", "proctor.cli"]
        run, pack = str(self.work / "run"), str(self.work / "pack.json")
        self.spend("bare", [sys.executable, *self.run])
        self.spend("record", [*proctor, "record", "--overwrite", "-o", run, "--", sys.executable, *self.run])
        self.spend("infer", [*proctor, "infer", "-q", run, "-o", pack])

    def theirs(self, limit_s: float) -> None:
        traces, found = self.work / "traces", self.work / "invariants.json"
        tool = str(Path(self.peer).parent / "traincheck-")
        collect = [f"{tool}collect", "-p", f"{self.name}.py", "-s", "run.sh", "-a", "--models-to-track", "model"]
        self.spend("their bare", [self.peer, *self.run])
        cost = self.spend("their record", [*collect, "--output-dir", str(traces)], limit_s)
        if not cost.failed:
            self.spend("their infer", [f"{tool}infer", "-f", str(traces), "-o", str(found)], limit_s)

    def failed(self) -> str:
        failures = (f"{s}: {c.failed}" for s in STAGES for c in self.costs.get(s, ()) if c.failed)
        return next(failures, "")

    def summary(self) -> dict[str, object]:
        """Medians by stage, ratios, and sizes of the traces. Both recordings contain a bare run."""
        row: dict[str, object] = {"program": self.name, "iterations": int(self.run[-1]), "failed": self.failed()}
        for stage, costs in self.costs.items():
            values = [asdict(c) for c in costs]
            row[stage] = {k: statistics.median(v[k] for v in values) for k in ("wall_s", "cpu_s", "peak_mib")}
        for kind in ("cpu_s", "wall_s"):
            took = {s: statistics.median(getattr(c, kind) for c in costs) for s, costs in self.costs.items()}
            if len(took) == len(STAGES):
                row[f"ratio_{kind}"] = {
                    "record": took["their record"] / took["record"],
                    "infer": took["their infer"] / took["infer"],
                    "total": (took["their record"] + took["their infer"]) / (took["record"] + took["infer"]),
                }
        pairs = (("bare", "record"), ("their bare", "their record"))
        row["same_losses"] = [self.costs[a][0].result == self.costs[b][0].result for a, b in pairs if b in self.costs]
        row["records"], row["rules"] = self._sizes()
        return row

    def _sizes(self) -> tuple[list[int], list[int]]:
        from proctor.invariants.trace import Trace

        if not (self.work / "run" / "run.json").exists():
            return [0, 0], [0, 0]
        trace = Trace.load([self.work / "run"])
        logs = [f for p in ("trace_*", "proxy_log.json") for f in (self.work / "traces").glob(p)]
        pack, found = self.work / "pack.json", self.work / "invariants.json"
        rules = len(json.loads(pack.read_bytes())["invariants"]) if pack.exists() else 0
        theirs = found.read_bytes().count(b'"text_description"') if found.exists() else 0
        return [trace.calls.height + trace.states.height, sum(map(_lines, logs))], [rules, theirs]


def _lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)


HEADER = (
    f"{'program':<15} {'iter':>5} | {'bare':>6} {'record':>7} {'infer':>6} | {'record':>7} {'infer':>8} |"
    f" {'record÷':>8} {'infer÷':>7} {'total÷':>7} {'wall÷':>6} | {'MiB':>5} {'MiB':>6} | {'rows':>8} {'rows':>8} |"
    f" {'rules':>5} {'rules':>6} | same losses"
)


def _say(row: dict[str, object]) -> None:
    def cpu(stage: str, key: str = "cpu_s") -> float:
        values = row.get(stage)
        return float(values[key]) if isinstance(values, dict) else float("nan")

    ratio, wall = row.get("ratio_cpu_s") or {}, row.get("ratio_wall_s") or {}
    assert isinstance(ratio, dict) and isinstance(wall, dict)
    r, n, same = row["records"], row["rules"], row["same_losses"]
    assert isinstance(r, list) and isinstance(n, list) and isinstance(same, list)
    nan = float("nan")
    print(
        f"{row['program']:<15} {row['iterations']:>5} | {cpu('bare'):>6.1f} {cpu('record'):>7.1f} {cpu('infer'):>6.2f} |"
        f" {cpu('their record'):>7.1f} {cpu('their infer'):>8.1f} | {ratio.get('record', nan):>8.1f}"
        f" {ratio.get('infer', nan):>7.0f} {ratio.get('total', nan):>7.1f} {wall.get('total', nan):>6.1f} |"
        f" {cpu('infer', 'peak_mib'):>5.0f} {cpu('their infer', 'peak_mib'):>6.0f} | {r[0]:>8,} {r[1]:>8,} |"
        f" {n[0]:>5} {n[1]:>6} | {', '.join('yes' if s else 'NO' for s in same)}  {row['failed']}",
        flush=True,
    )


def _peer(python: str | None) -> str | None:
    """An interpreter that has TrainCheck, and None with a reason said where there is none."""
    for candidate in [python] if python else [sys.executable]:
        ask = [candidate, "-c", "import importlib.metadata as m; print(m.version('traincheck'))"]
        try:
            found = subprocess.run(ask, capture_output=True, text=True, check=False)
        except OSError as e:
            print(f"skipped: {candidate} cannot be run: {e.strerror}")
            return None
        version = found.stdout.strip()
        if found.returncode:
            print(f"skipped: {candidate} has no traincheck (pip install traincheck=={PEER}; --traincheck-python PATH)")
            return None
        if version != PEER:
            print(f"note: traincheck {version}, the figures in the documents are of {PEER}")
        return str(Path(candidate).absolute())
    return None


def compare(name: str, sizes: Sequence[int], peer: str, rounds: int, limit_s: float) -> list[dict[str, object]]:
    """Rows of one program, in growing sizes up to the first that TrainCheck does not finish."""
    rows = []
    for iterations in sizes:
        with tempfile.TemporaryDirectory(prefix="proctor-vs-") as work:
            pair = Pair(name, iterations, peer, Path(work))
            for _ in range(rounds):
                pair.ours()
            pair.theirs(limit_s)
            for _ in range(rounds):
                pair.ours()
            rows.append(pair.summary())
            _say(rows[-1])
        if rows[-1]["failed"]:
            break
    return rows


def _largest(rows: Sequence[dict[str, object]], limit_s: float) -> None:
    """Say the figures at the largest trace of all that TrainCheck finished."""
    done = [row for row in rows if not row["failed"]]
    if not done:
        print("TrainCheck finished nothing")
        return
    most = max(done, key=lambda row: row["their infer"]["cpu_s"])  # type: ignore[index]
    for kind, words in (("cpu_s", "CPU time"), ("wall_s", "wall clock")):
        ratio = most[f"ratio_{kind}"]
        assert isinstance(ratio, dict)
        print(
            f"largest trace that TrainCheck finished in {limit_s:.0f} CPU s: {most['program']}, {most['iterations']} iterations;"
            f" {words}: record {ratio['record']:.1f}×, infer {ratio['infer']:.0f}×, total {ratio['total']:.0f}×"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traincheck-python", metavar="PATH", help="interpreter that has traincheck (default: this one)")
    parser.add_argument("--full", action="store_true", help="grow until TrainCheck exceeds the limit: hours")
    parser.add_argument("--sizes", metavar="N,N", help="iterations (default: 10; with --full: 10, 20, 40, …)")
    parser.add_argument("--limit-s", type=float, default=1200, help="CPU seconds for one command of TrainCheck (default 1200)")
    parser.add_argument("--rounds", type=int, default=1, help="runs of ours before and after each of theirs")
    parser.add_argument("--only", default="", help="programs with this in their name")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that what runs is ended, too
    peer = _peer(args.traincheck_python)
    if peer is None:
        return 0
    sizes = tuple(map(int, args.sizes.split(","))) if args.sizes else FULL if args.full else SHORT
    print("CPU seconds; left ours, right TrainCheck's; ÷: theirs ÷ ours; same losses as a bare run: ours, theirs")
    print(HEADER)
    rows: list[dict[str, object]] = []
    for name in PROGRAMS:
        if args.only in name:
            rows += compare(name, sizes, peer, args.rounds, args.limit_s)
            if args.json:
                args.json.write_text(json.dumps(rows, indent=1))
    _largest(rows, args.limit_s)
    return 0


if __name__ == "__main__":
    sys.exit(main())
