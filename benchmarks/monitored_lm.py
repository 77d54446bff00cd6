"""A small language model that one of several monitors looks at; what `vs_msprobe.py` runs.

    python monitored_lm.py HOW BUG STEPS

HOW: `none` (bare, or under `proctor watch`), `monitor` (msprobe's TrainerMon, all modules), `sampled` (one block of four), `dump` (msprobe's
PrecisionDebugger, statistics of modules). BUG: `none` or one of `BUGS`, from step 60 on where it begins late.
Prints `RESULT {"ms": …, "loss": …}`: CPU milliseconds of a step of the training thread, the median behind the first 200, or behind half of fewer.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from workloads import Lm

BUGS = ("zero_grad_left_out", "head_not_in_optimizer", "update_twice", "block_frozen_late", "not_finite")
LATE = 60
ALERTS = {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}, {"rule_name": "AnomalyNan", "args": {"threshold": 1e10}}], "dump": False}


def attach(how: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> object | None:
    """The peer's monitor as its manual says; what a step has to call, if anything."""
    here = Path.cwd()
    if how in ("monitor", "sampled"):
        from msprobe.pytorch import TrainerMon

        os.environ["MONITOR_OUTPUT_DIR"] = str(here / "monitor")
        modules = {"targets": {"blocks.0": {}}} if how == "sampled" else {"targets": {}, "all_xy": True}
        config = {
            **modules, "format": "csv", "ops": ["norm", "mean", "max", "min"], "xy_distribution": True, "wg_distribution": True, "mv_distribution": True,
            "param_distribution": True, "alert": ALERTS, "step_interval": 1, "ndigits": 6,
        }  # fmt: skip
        (here / "monitor.json").write_text(json.dumps(config))
        TrainerMon(str(here / "monitor.json"), params_have_main_grad=False).set_monitor(model, grad_acc_steps=1, optimizer=optimizer)
    if how == "dump":
        from msprobe.pytorch import PrecisionDebugger

        kept = {"scope": [], "list": [], "data_mode": ["all"], "summary_mode": "statistics"}
        config = {"task": "statistics", "dump_path": str(here / "dump"), "rank": [], "step": [], "level": "L0", "statistics": kept}
        (here / "dump.json").write_text(json.dumps(config))
        return PrecisionDebugger(config_path=str(here / "dump.json"))
    return None


def main() -> None:
    how, bug, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = Lm(256, 128, 4)
    trained = [p for name, p in model.named_parameters() if bug != "head_not_in_optimizer" or not name.startswith("head")]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    debugger = attach(how, model, optimizer)
    ids, times, loss = torch.randint(0, 256, (64 * 1024,)), [], torch.zeros(())
    for step in range(steps):
        begin = time.thread_time()
        if debugger is not None:
            debugger.start(model)  # type: ignore[attr-defined]
        if bug == "block_frozen_late" and step == LATE:
            for p in model.blocks[1].parameters():
                p.requires_grad_(False)
        at = torch.randint(0, len(ids) - 65, (8,))
        x, y = (torch.stack([ids[i + k : i + k + 64] for i in at]) for k in (0, 1))
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        if bug == "not_finite" and step == LATE:
            loss = loss * float("inf")
        if bug != "zero_grad_left_out":
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if bug == "update_twice":
            optimizer.step()
        if debugger is not None:
            debugger.stop()  # type: ignore[attr-defined]
            debugger.step()  # type: ignore[attr-defined]
        times.append(time.thread_time() - begin)
    print("RESULT", json.dumps({"ms": 1e3 * statistics.median(times[min(200, steps // 2) :]), "loss": repr(loss.item())}))


if __name__ == "__main__":
    main()
