"""What do signals alone catch? Spike, trend and anomaly detectors on loss, accuracy and gradient norm.

    python benchmarks/baselines.py FOLDER [--only SUBSTRING] [--json FILE] [--write]

These are the baselines of TrainCheck (§5.1), over the same folder of published bugs as `benchmarks/exam.py` (one folder a case:
`buggy.py`, `fixed.py`, `case.json`), those for the oracle included. Each script runs unchanged; a start-up hook writes down three
signals of its first rank: each loss on which `backward` is called, the norm of all gradients when an optimizer steps, and accuracies
that the script prints. Settings are the paper's, the same for every case: spike threshold 75, trend tolerance 3, two neighbours
for the local outlier factor, contamination 0.1 for the isolation forest, z-score 3; all else is the default of scikit-learn.

A case is *caught* as the paper counts: the detector raises an alarm on the buggy script and none on the fixed one; it is caught *in
time* when that alarm comes by the first bad iteration + 1. An alarm on a fixed script is a *false alarm*.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

DOCS = Path(__file__).resolve().parent.parent / "docs" / "evaluation.md"
SPIKE = 75.0  # TrainCheck §5.1
PATIENCE = 3  # steps without a better value; §5.1 calls it the tolerance
Z = 3.0
NEIGHBOURS = 2
CONTAMINATION = 0.1
ENOUGH = 5  # values that a detector needs before it says anything of a series
ACCURACY = re.compile(r"\bacc(?:uracy)?\b\D{0,3}(\d*\.\d+|\d+)")

# Runs in the program's own process, before it. Only public functions of torch; the program's numbers stay as they are.
HOOK = '''
import atexit, json, os, sys
def _arm():
    import torch
    losses, norms = [], []
    backward = torch.Tensor.backward
    def watched(self, *args, **kwargs):
        if self.numel() == 1:
            losses.append(float(self.detach()))
        return backward(self, *args, **kwargs)
    torch.Tensor.backward = watched
    def before(optimizer, args, kwargs):
        grads = [p.grad.detach() for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        total = sum(float(g.double().pow(2).sum()) for g in grads if not g.is_sparse)
        norms.append(total ** 0.5)
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    register_optimizer_step_pre_hook(before)
    def leave():
        rank = os.environ.get("RANK", "")
        if not rank and torch.distributed.is_available() and torch.distributed.is_initialized():
            rank = torch.distributed.get_rank()
        if losses or norms:
            name = os.path.join(os.environ["SIGNALS"], f"{int(rank or 0):03d}-{os.getpid()}.json")
            with open(name, "w") as file:
                json.dump({"loss": losses, "gradient norm": norms}, file)
    atexit.register(leave)
    destroy = torch.distributed.destroy_process_group
    def destroyed(*args, **kwargs):  # the rank is known before the group goes
        if not args and not kwargs:
            os.environ.setdefault("RANK", str(torch.distributed.get_rank()))
        return destroy(*args, **kwargs)
    torch.distributed.destroy_process_group = destroyed
_arm()
'''


def signals(script: Path, timeout_s: float = 600) -> dict[str, np.ndarray[Any, Any]]:
    """The signals of one script: name → values over its iterations, of its first rank.

    Raises:
        RuntimeError: the script failed, or none of its processes trained.
    """
    with tempfile.TemporaryDirectory(prefix="proctor-signals-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join(p for p in (folder, os.environ.get("PYTHONPATH", "")) if p)
        environment = {**os.environ, "PYTHONPATH": path, "SIGNALS": folder, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=timeout_s, env=environment
        )
        if done.returncode:
            raise RuntimeError(f"{script}: exit {done.returncode}\n{done.stderr[-1000:]}")
        files = sorted(Path(folder).glob("*.json"))
        if not files:
            raise RuntimeError(f"{script}: no process called backward or stepped an optimizer")
        found: dict[str, list[float]] = json.loads(files[0].read_text())
        found["accuracy"] = [float(value) for value in ACCURACY.findall(done.stdout)]
        return {name: np.asarray(values, dtype=np.float64) for name, values in found.items() if values}


def spike(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Iterations at which the value is beyond the threshold, or is no number."""
    return np.flatnonzero(~np.isfinite(values) | (np.abs(values) > SPIKE))


def trend(values: np.ndarray[Any, Any], *, rises: bool) -> np.ndarray[Any, Any]:
    """Iterations at which the best value is more than `PATIENCE` iterations old."""
    series = -values if rises else values
    best, since, alarms = np.inf, 0, []
    for i, value in enumerate(series):
        if value < best:
            best, since = value, 0
        else:
            since += 1
        if since > PATIENCE:
            alarms.append(i)
    return np.asarray(alarms, dtype=np.int64)


def z_score(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    spread = values.std()
    return np.flatnonzero(np.abs(values - values.mean()) > Z * spread) if spread > 0 else np.empty(0, np.int64)


def local_outlier(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    from sklearn.neighbors import LocalOutlierFactor  # late: a second of import

    return np.flatnonzero(LocalOutlierFactor(n_neighbors=NEIGHBOURS).fit_predict(values[:, None]) < 0)


def isolation(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    from sklearn.ensemble import IsolationForest

    forest = IsolationForest(contamination=CONTAMINATION, random_state=0)
    return np.flatnonzero(forest.fit_predict(values[:, None]) < 0)


DETECTORS: dict[str, Callable[[str, np.ndarray[Any, Any]], np.ndarray[Any, Any]]] = {
    "spike": lambda name, values: spike(values),
    "trend": lambda name, values: (
        trend(values, rises=name == "accuracy") if name != "gradient norm" else np.empty(0, np.int64)
    ),
    "z-score": lambda name, values: z_score(values),
    "local outlier factor": lambda name, values: local_outlier(values),
    "isolation forest": lambda name, values: isolation(values),
}


def alarms(detector: str, series: dict[str, np.ndarray[Any, Any]]) -> list[tuple[int, str]]:
    """Where a detector alarms: (iteration, signal), the earliest first. Values that are no numbers alarm as a spike alone."""
    found = []
    for name, values in series.items():
        judged = values if detector == "spike" else values[np.isfinite(values)]
        if len(judged) >= ENOUGH:
            found += [(int(i), name) for i in DETECTORS[detector](name, judged)]
    return sorted(found)


def examine(folder: Path) -> dict[str, Any]:
    """One case: for each detector whether it alarms on the buggy and the fixed script, and whether in time."""
    case = json.loads((folder / "case.json").read_text())
    buggy, fixed = signals(folder / "buggy.py"), signals(folder / "fixed.py")
    row: dict[str, Any] = {"id": folder.name, "signals": sorted(buggy), "detectors": {}}
    for detector in DETECTORS:
        on_buggy, on_fixed = alarms(detector, buggy), alarms(detector, fixed)
        caught = bool(on_buggy) and not on_fixed
        row["detectors"][detector] = {
            "caught": caught,
            "in time": caught and on_buggy[0][0] <= case["triggered_at_iteration"] + 1,
            "alarms": len(on_buggy),
            "false": len(on_fixed),
            "first": on_buggy[0] if on_buggy else None,
        }
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| detector | caught | in time | alarms on buggy scripts | fixed scripts with a false alarm |", "|---|---|---|---|---|"]
    total = len(rows)
    for detector in DETECTORS:
        of = [row["detectors"][detector] for row in rows]
        lines.append(
            f"| {detector} | {sum(o['caught'] for o in of)} of {total} | {sum(o['in time'] for o in of)} of {total}"
            f" | {sum(o['alarms'] for o in of)} | {sum(o['false'] > 0 for o in of)} of {total} |"
        )
    return "\n".join(lines)


def write(text: str) -> None:
    """Put the table between its marks in `docs/evaluation.md`."""
    begin, end = "<!-- baselines -->\n", "<!-- /baselines -->"
    page = DOCS.read_text()
    head, rest = page.split(begin, 1)
    DOCS.write_text(f"{head}{begin}{text}\n{end}{rest.split(end, 1)[1]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", type=Path, help="also write the rows as JSON")
    parser.add_argument("--write", action="store_true", help="put the table into docs/evaluation.md")
    args = parser.parse_args()
    if not args.folder.is_dir():
        print(f"{args.folder}: no such folder of cases", file=sys.stderr)
        return 2
    rows, failed = [], 0
    for folder in sorted(args.folder.iterdir()):
        if not (folder / "case.json").exists() or args.only not in folder.name:
            continue
        try:
            rows.append(examine(folder))
        except (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError) as error:
            failed += 1
            print(f"{folder.name}: not examined: {error}")
            continue
        caught = [name for name, of in rows[-1]["detectors"].items() if of["caught"]]
        print(f"{folder.name:32} {', '.join(rows[-1]['signals']):38} caught by: {', '.join(caught) or 'none'}", flush=True)
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.write:
        write(table(rows))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
