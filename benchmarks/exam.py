"""The exam: real silent bugs, each inferred without having seen it, detected and named or not.

    python benchmarks/exam.py FOLDER [--mode full|selective|both] [--shipped] [--only SUBSTRING] [--work DIR] [--json FILE]

FOLDER holds one folder a case: `buggy.py`, `fixed.py`, `case.json`, and `example_1.py`, `example_2.py` or the names of
examples of this repository in `case.json`. A case is run twice: rules inferred from the two examples, and from `fixed.py` under another
configuration; with `--shipped` also with the packs that Proctor ships, and nothing else. It is *detected* when a
violation appears on the buggy script by the first bad iteration + 1 and none appears on the fixed one, and *named* when
a violation names one of the functions or variables that the case accepts. Cases for the oracle alone are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
TEARDOWN = "terminate called without an active exception"  # a race inside of gloo when ranks end; also without us
PROCTOR = [sys.executable, "-m", "proctor.cli"]


def run(command: list[str], timeout_s: int = 600) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, env=environment)


def record(script: Path, out: Path, arguments: list[str], select: Path | None = None) -> Path:
    """Record one script; raises when the script itself failed."""
    chosen = ["--select", str(select)] if select else []
    command = [*PROCTOR, "record", "--overwrite", "-o", str(out), *chosen, "--", sys.executable, str(script), *arguments]
    done = run(command)
    if done.returncode and TEARDOWN in done.stderr:
        done = run(command)
    if done.returncode:
        raise RuntimeError(f"{script.name} {' '.join(arguments)}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return out


def infer(runs: list[Path], pack: Path) -> int:
    done = run([*PROCTOR, "infer", "-q", *map(str, runs), "-o", str(pack)])
    if done.returncode:
        raise RuntimeError(f"infer: exit {done.returncode}\n{done.stderr[-2000:]}")
    return len(json.loads(pack.read_text())["invariants"])


def check(trace: Path, pack: Path | None) -> dict[str, Any]:
    """What `proctor check` finds with this pack; without one, with the shipped packs that fit."""
    chosen = ["-i", str(pack)] if pack else []
    done = run([*PROCTOR, "check", str(trace), *chosen, "--format", "json", "--fail-on", "never"])
    if done.returncode not in (0, 3):
        raise RuntimeError(f"check: exit {done.returncode}\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def names(violation: dict[str, Any], accepted: list[str]) -> bool:
    """Whether a violation names one of the accepted functions or variables (the dotted words of each entry)."""
    said = " ".join(str(violation.get(k) or "") for k in ("function", "variable", "module", "text", "expected", "seen"))
    said += f" {(violation.get('cause') or {}).get('function', '')}"  # the function alone, not the reason, which speaks of others too
    for entry in accepted:
        for word in re.findall(r"[A-Za-z_][\w<>*]*(?:\.[\w<>*]+)+|[a-z]+_[a-z_]+|[A-Z]\w+", entry):
            pattern = re.escape(word).replace("<i>", r"\d+").replace(r"\*", r"[\w.]*")
            if re.search(rf"(?<![A-Za-z_]){pattern}(?![A-Za-z_])", said):
                return True
    return False


def judge(case: dict[str, Any], buggy: dict[str, Any], fixed: dict[str, Any]) -> dict[str, Any]:
    latest = case["triggered_at_iteration"] + 1
    clean = {v["id"] for v in fixed["violations"]}
    new = [v for v in buggy["violations"] if v["id"] not in clean]
    timely = [v for v in new if v["step"] is not None and v["step"] <= latest]
    naming = [v for v in timely if names(v, case["acceptable_names"])]
    return {
        "detected": bool(timely) and not fixed["violations"],
        "named": bool(naming),
        "violations": len(new),
        "timely": len(timely),
        "other": [f"{v['relation']}: {v['text']} (step {v['step']})" for v in new if v not in naming],
        "false": [f"{v['relation']}: {v['text']} (step {v['step']}, seen {v['seen']})" for v in fixed["violations"]],
        "checked": fixed["checked"],
        "by": sorted({v["relation"] for v in naming}),
        "best": f"{naming[0]['text']} [{naming[0]['function']} {naming[0]['variable']}]" if naming else "",
    }


def examine(folder: Path, work: Path, modes: list[str], *, shipped: bool = False) -> list[dict[str, Any]]:
    case = json.loads((folder / "case.json").read_text())
    rows = []
    t0 = time.time()
    sources: dict[str, list[Path]] = {}
    present = [folder / f"example_{i}.py" for i in (1, 2) if (folder / f"example_{i}.py").exists()]
    present += [EXAMPLES / f"{name}.py" for name in case.get("examples", [])]
    if present:
        sources["examples"] = [record(s, work / s.stem, []) for s in present]
    sources["cross-config"] = [record(folder / "fixed.py", work / "cross", list(case.get("cross_config_args", [])))]
    traces = {"full": {s: record(folder / f"{s}.py", work / s, []) for s in ("buggy", "fixed")}}
    for source, runs in sources.items():
        pack = work / f"{source}.json"
        rules = infer(runs, pack)
        for mode in modes:
            if mode == "full":
                pair = traces["full"]
            else:
                pair = {s: record(folder / f"{s}.py", work / f"{s}-{source}", [], pack) for s in ("buggy", "fixed")}
            row = judge(case, check(pair["buggy"], pack), check(pair["fixed"], pack))
            rows.append({"id": case.get("id", folder.name), "from": source, "mode": mode, "rules": rules, **row})
    if shipped:
        row = judge(case, *(check(traces["full"][s], None) for s in ("buggy", "fixed")))
        rows.append({"id": case.get("id", folder.name), "from": "shipped", "mode": "full", "rules": 0, **row})
    print(f"  {folder.name}: {time.time() - t0:.0f} s", file=sys.stderr)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mode", choices=("full", "selective", "both"), default="both")
    parser.add_argument("--shipped", action="store_true", help="also judge with the shipped packs alone")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--work", type=Path, help="keep runs and packs here")
    parser.add_argument("--json", type=Path, help="also write the table as JSON")
    args = parser.parse_args()
    if not args.folder.is_dir():
        print(f"{args.folder}: no such folder of cases", file=sys.stderr)
        return 2
    cases = [
        f
        for f in sorted(args.folder.iterdir())
        if (f / "case.json").exists()
        and args.only in f.name
        and json.loads((f / "case.json").read_text()).get("engine") in ("invariants", "both")
    ]
    modes = ["full", "selective"] if args.mode == "both" else [args.mode]
    work = args.work or Path(tempfile.mkdtemp(prefix="proctor-exam-"))
    rows: list[dict[str, Any]] = []
    failed = 0
    for folder in cases:
        try:
            rows += examine(folder, work / folder.name, modes, shipped=args.shipped)
        except (RuntimeError, subprocess.TimeoutExpired, OSError, ValueError) as e:
            failed += 1
            print(f"{folder.name}: not examined: {e}")
    print(f"{'case':32} {'rules from':13} {'mode':10} {'detected':9} {'named':6} {'new':>4} {'false':>5}  rule")
    for r in rows:
        print(
            f"{r['id']:32} {r['from']:13} {r['mode']:10} {'yes' if r['detected'] else 'NO':9}"
            f" {'yes' if r['named'] else 'NO':6} {r['violations']:4} {len(r['false']):5}  {r['best'][:110]}"
        )
        for text in r["false"][:5]:
            print(f"{'':34}false alarm: {text[:170]}")
    good = sum(r["detected"] and r["named"] for r in rows)
    checked = sum(r["checked"] for r in rows)
    false = sum(len(r["false"]) for r in rows)
    print(f"{good}/{len(rows)} detected and named; {false} false alarms in {checked} checked rules on fixed scripts")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))
    if args.work is None:
        shutil.rmtree(work, ignore_errors=True)
    return 0 if good == len(rows) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
