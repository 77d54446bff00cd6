"""The oracle's exam: real silent bugs of parallel training beside a trusted single-device run.

    python benchmarks/oracle_exam.py [FOLDER] [--only SUBSTRING] [--work DIR] [--json FILE]

FOLDER (default ../shared/bugs) holds one folder a case: `reference.py`, `fixed.py`, `buggy.py` and `case.json`. Every
comparison is made twice: with nothing but the two recordings, and with a plan made of the case's `oracle` section. A
case passes when the fixed script is `equivalent`, the buggy one is `different`, and the first wrong tensor, the first
replicas that differ, the localised culprit, or a note names what the case accepts. *margin* is the error of the first
wrong tensor over its tolerance, *worst* the largest ratio on the fixed script.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from exam import PROCTOR, names, run

from proctor.oracle.plans.plan import Plan

BUGS = Path(__file__).resolve().parent.parent.parent / "shared" / "bugs"
VERDICTS = (0, 1, 3)


def record(script: Path, out: Path) -> None:
    """Record one script; raises when that failed."""
    if (out / "oracle.json").is_file() and not (out / "incomplete").exists():
        return
    done = run([*PROCTOR, "oracle", "record", "--overwrite", "-o", str(out), "--", sys.executable, str(script)])
    if done.returncode:
        (out / "incomplete").touch()
        raise RuntimeError(f"{script.name}: exit {done.returncode}\n{done.stderr[-1500:]}")


def compare(reference: Path, candidate: Path, plan: Path | None) -> dict[str, Any]:
    chosen = ["--plan", str(plan)] if plan else []
    return _report([*PROCTOR, "oracle", "compare", str(reference), str(candidate), *chosen, "--format", "json"])


def localise(reference: Path, candidate: Path, plan: Path | None, script: Path) -> dict[str, Any]:
    chosen = ["--plan", str(plan)] if plan else []
    command = shlex.join([sys.executable, str(script)])
    return _report(
        [*PROCTOR, "oracle", "localise", str(reference), str(candidate), *chosen, "--format", "json", "--command", command]
    )


def _report(command: list[str]) -> dict[str, Any]:
    done = run(command)
    if done.returncode not in VERDICTS or not done.stdout:
        raise RuntimeError(f"{command[-4:]}: exit {done.returncode}\n{done.stderr[-1500:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def plan_of(section: Mapping[str, Any], notes: Mapping[str, Any]) -> Plan:
    """A plan from the `oracle` section of a case.

    Args:
        section: `mesh_axes_slow_to_fast`, `params` and `activations`.
        notes: `name_prefix_by_rank`, where names lack a prefix on some ranks.
    """
    plan = Plan(dict(section["mesh_axes_slow_to_fast"]))
    for param in section["params"]:
        if "pattern" in param:
            axis = {} if param["axis"] is None else {param["axis"]: param["dim"]}
            plan.shard(param["pattern"], **axis) if axis else plan.replicate(param["pattern"])
    for activation in section["activations"]:
        modules = activation["module"]
        if " " in modules or not activation["dims"]:
            continue  # prose
        dims = {dim: axes for dim, axes in activation["dims"].items() if axes}
        pattern = "|".join(re.escape(m).replace("<i>", r"\d+").replace(r"\(module\.\)", r"(module\.)?") for m in modules.split("|"))
        plan.activation(pattern, output=dims)
    for rank, prefix in notes.get("name_prefix_by_rank", {}).items():
        plan.rename(r"(.+)", prefix + r"\1", where=dict(plan.mesh.coords(int(rank))))
    return plan


def named(report: Mapping[str, Any], accepted: list[str]) -> str:
    """What names an accepted function or tensor: `first`, `replicas`, `culprit`, `note`, or "" for nothing."""
    said: list[tuple[str, dict[str, Any]]] = []
    if report["first"]:
        first = report["first"]
        said.append(("first", {"variable": first["name"], "module": first["class"], "text": first["note"]}))
        # What is only in the gradient of a module's output names the module, what is in a parameter's names the parameter.
        said.append(("first", {"variable": f"{first['name']} {first['kind']}", "function": f"{first['class']}.forward"}))
    said += [("replicas", {"variable": r["name"], "text": r["note"]}) for r in report["replicas"][:1]]
    if report["culprit"]:
        culprit = report["culprit"]
        said.append(("culprit", {"variable": culprit["module"], "text": culprit["text"]}))
    said += [("note", {"text": text}) for text in report["notes"] + report["unchecked"][:3]]
    for by, violation in said:
        text = " ".join(map(str, violation.values()))
        if names(violation, accepted) or any(" " in a and a in text for a in accepted):
            return by
    return ""


def examine(folder: Path, work: Path) -> list[dict[str, Any]]:
    case = json.loads((folder / "case.json").read_text())
    began = time.time()
    for side in ("reference", "fixed", "buggy"):
        record(folder / f"{side}.py", work / side)
    recorded = time.time() - began
    plan = work / "plan.json"
    plan.write_bytes(plan_of(case["oracle"], case.get("oracle_notes") or {}).to_json())
    rows = []
    for how, chosen in (("found", None), ("plan", plan)):
        began = time.time()
        fixed = compare(work / "reference", work / "fixed", chosen)
        buggy = compare(work / "reference", work / "buggy", chosen)
        by = named(buggy, case["acceptable_names"])
        if buggy["verdict"] == "different" and not by:
            buggy = localise(work / "reference", work / "buggy", chosen, folder / "buggy.py")
            by = named(buggy, case["acceptable_names"])
        judged = [t["ratio"] or 0.0 for t in fixed["tensors"] if t["verdict"] in ("ok", "warn")]
        first = buggy["first"] or (buggy["replicas"] or [None])[0]
        wrong = [t for t in fixed["tensors"] if t["verdict"] in ("bad", "missing", "shape", "nonfinite")]
        rows.append(
            {
                "id": case.get("id", folder.name),
                "how": how,
                "fixed": fixed["verdict"],
                "buggy": buggy["verdict"],
                "named": by,
                "first": f"{first['kind']} {first['name']}" if first else "",
                "culprit": (buggy["culprit"] or {}).get("module", ""),
                "margin": (first["ratio"] if first["ratio"] is not None else float("inf")) if first else 0.0,
                "worst": max(judged, default=0.0),
                "checked": fixed["checked"],
                "unchecked": len(fixed["unchecked"]),
                "wrong": [f"{t['verdict']} {t['kind']} {t['name']} {t['ratio']} {t['note']}" for t in wrong[:5]],
                "reason": fixed["reason"],
                "record_s": round(recorded, 1),
                "compare_s": round(time.time() - began, 1),
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=BUGS)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--work", type=Path, help="keep recordings here and use those that are there")
    parser.add_argument("--json", type=Path, help="also write the table as JSON")
    args = parser.parse_args()
    if not args.folder.is_dir():
        print(f"{args.folder}: no such folder of cases", file=sys.stderr)
        return 2
    cases = [f for f in sorted(args.folder.iterdir()) if args.only in f.name and _is_case(f)]
    work = args.work or Path(tempfile.mkdtemp(prefix="proctor-oracle-exam-"))
    rows: list[dict[str, Any]] = []
    failed = 0
    for folder in cases:
        try:
            rows += examine(folder, work / folder.name)
        except (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError) as e:
            failed += 1
            print(f"{folder.name}: not examined: {e}")
        print(f"  {folder.name}", file=sys.stderr)
    print(f"{'case':30} {'places':6} {'fixed':12} {'buggy':12} {'named by':9} {'margin':>8} {'worst':>6} {'tensors':>7} {'s':>5}  first")
    for r in rows:
        seconds = r["record_s"] + r["compare_s"]
        print(
            f"{r['id']:30} {r['how']:6} {r['fixed']:12} {r['buggy']:12} {r['named'] or 'NO':9} {r['margin']:8.2g} {r['worst']:6.2f}"
            f" {r['checked']:7} {seconds:5.0f}  {r['first']}{' → ' + r['culprit'] if r['culprit'] else ''}"
        )
        for text in r["wrong"] if r["fixed"] == "different" else [r["reason"]] if r["fixed"] != "equivalent" else []:
            print(f"{'':31}false alarm: {text[:170]}")
    good = sum(r["fixed"] == "equivalent" and r["buggy"] == "different" and bool(r["named"]) for r in rows)
    print(f"{good}/{len(rows)} equivalent when fixed, different when buggy, and named")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.work is None:
        shutil.rmtree(work, ignore_errors=True)
    return 0 if good == len(rows) and not failed else 1


def _is_case(folder: Path) -> bool:
    if not (folder / "case.json").is_file() or not (folder / "reference.py").is_file():
        return False
    return json.loads((folder / "case.json").read_text()).get("engine") in ("oracle", "both")


if __name__ == "__main__":
    sys.exit(main())
