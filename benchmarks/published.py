"""Scripts after published bugs: found and named by each source of rules, and false alarms on the fixed script beside each.

    python benchmarks/published.py tests/corpus/published/SET [--work DIR] [--only A,B] [--source shipped] [--rejudge] [--write]
    python benchmarks/published.py tests/corpus/published/SET --differ    # only: does each buggy script print something else than its fixed one?

A case is judged as `benchmarks/exam.py` judges it, everything recorded. Scripts of one process run in forks of one that has imported torch; those
that start ranks of their own run under `proctor record`. Rules come from two unrelated programs, from the fixed script under other
arguments, and from the shipped packs alone. Recordings are kept in DIR; `--rejudge` learns and judges anew. `--write` puts the table into docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))
import exam
from forks import Forks

from proctor.cli import main as proctor

SOURCES = ("shipped", "others", "own")
_PAGE = Path(__file__).parent.parent / "docs" / "evaluation.md"


class Runs:
    """Recordings, made once each."""

    def __init__(self, work: Path) -> None:
        start = work / "start.py"
        start.write_text("def begin(torch):\n    torch.set_num_threads(1)\n")
        self._work = work
        self._forks = Forks(start, dict(os.environ) | {"OMP_NUM_THREADS": "1"}, timeout_s=300, memory_mib=16_384)

    def record(self, script: Path, name: str, arguments: list[str]) -> Path:
        """The run of a script; raises `RuntimeError` when it failed."""
        run, done = self._work / name, self._work / f"{name}.done"
        if done.exists():
            return run
        if "init_process_group" in script.read_text():
            exam.record(script, run, arguments)
        else:
            log = self._work / f"{name}.log"
            code = self._forks.run(str(script.resolve()), arguments, script.resolve().parent, log, {}, record=run)
            if code:
                raise RuntimeError(f"{script}: exit {code}\n{log.read_text(errors='replace')[-2000:]}")
        done.touch()
        return run

    def printed(self, script: Path) -> str:
        """What a script says its result is, without Proctor; raises `RuntimeError` when it failed or said nothing."""
        log = self._work / f"{script.parent.name}-{script.stem}.bare.log"
        if "init_process_group" in script.read_text():
            environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
            done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=600)
            code, text = done.returncode, done.stdout + done.stderr
        else:
            code = self._forks.run(str(script.resolve()), [], script.resolve().parent, log, {})
            text = log.read_text(errors="replace")
        said = [line for line in text.splitlines() if line.startswith("RESULT ")]
        if code or len(said) != 1:
            raise RuntimeError(f"{script}: exit {code}, {len(said)} results\n{text[-2000:]}")
        return said[0]

    def close(self) -> None:
        self._forks.close()


def differ(folders: list[Path], runs: Runs) -> int:
    """How many pairs do not print two different results; each is said."""
    wrong = 0
    for folder in folders:
        try:
            buggy, fixed, again = (runs.printed(folder / f"{side}.py") for side in ("buggy", "fixed", "fixed"))
        except (RuntimeError, OSError, subprocess.TimeoutExpired) as e:
            print(f"{folder.name}: {e}", flush=True)
            wrong += 1
            continue
        said = "same" if buggy == fixed else "fixed script differs from itself" if fixed != again else ""
        wrong += bool(said)
        print(f"{folder.name}: {said or 'differs'}", flush=True)
    print(f"{len(folders) - wrong} of {len(folders)} pairs print something else buggy than fixed")
    return wrong


def infer(runs: list[Path], pack: Path) -> Path:
    """The rules of these runs, learned once."""
    if not pack.exists():
        code = proctor(["infer", "-q", "--executor", "serial", *map(str, runs), "-o", str(pack)])
        if code:
            raise RuntimeError(f"infer {runs}: exit {code}")
    return pack


def check(run: Path, pack: Path | None) -> dict[str, Any]:
    """The report of `proctor check`; without a pack, by the shipped ones that fit."""
    out = run.with_suffix(".json")
    chosen = ["-i", str(pack)] if pack else []
    code = proctor(["check", str(run), *chosen, "-q", "--format", "json", "-o", str(out), "--fail-on", "never"])
    if code not in (0, 3):
        raise RuntimeError(f"check {run}: exit {code}")
    report: dict[str, Any] = json.loads(out.read_text())
    return report


def examine(folder: Path, runs: Runs, work: Path, wanted: tuple[str, ...]) -> dict[str, Any]:
    """What each of these sources of rules says of a case."""
    case = json.loads((folder / "case.json").read_text())
    pair = {side: runs.record(folder / f"{side}.py", f"{folder.name}-{side}", []) for side in ("buggy", "fixed")}
    if wanted == ("shipped",):
        return {"id": folder.name, "source": case["source"], "shipped": exam.judge(case, check(pair["buggy"], None), check(pair["fixed"], None))}
    other = [runs.record(exam.EXAMPLES / f"{name}.py", f"example-{name}", []) for name in case["examples"]]
    own = runs.record(folder / "fixed.py", f"{folder.name}-own", case["cross_config_args"])
    packs = {
        "shipped": None,
        "others": infer(other, work / f"{'-'.join(case['examples'])}.pack.json"),
        "own": infer([own], work / f"{folder.name}.pack.json"),
    }
    row: dict[str, Any] = {"id": folder.name, "source": case["source"]}
    for source in wanted:
        pack = packs[source]
        row[source] = exam.judge(case, check(pair["buggy"], pack), check(pair["fixed"], pack))
    return row


def render(rows: list[dict[str, Any]]) -> str:
    """The table in Markdown; a cell is found and named, found, or missed, and false alarms on the fixed script."""
    lines = ["| after | shipped packs | two other programs | own fixed run |", "|---|---|---|---|"]
    for row in rows:
        cells = []
        for source in SOURCES:
            said = row.get(source)
            if said is None:
                cells.append("not judged")
                continue
            word = "named" if said["named"] else "found" if said["timely"] else "late" if said["violations"] else "–"
            cells.append(word + (f", {len(said['false'])} false" if said["false"] else ""))
        lines.append(f"| {row['source']} | " + " | ".join(cells) + " |")
    total = []
    for source in SOURCES:
        judged = [row[source] for row in rows if source in row]
        found, named = (sum(bool(said[what]) for said in judged) for what in ("detected", "named"))
        false = sum(bool(said["false"]) for said in judged)
        total.append("not judged" if not judged else f"found {found}, named {named}, false alarms on {false}")
    return "\n".join([*lines, f"| **{len(rows)} bugs** | " + " | ".join(total) + " |"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, help="keep recordings here")
    parser.add_argument("--only", default="", help="cases, by commas")
    parser.add_argument("--source", choices=SOURCES, action="append", default=[], help="judge by these sources of rules alone (default: all)")
    parser.add_argument("--rejudge", action="store_true", help="learn and judge anew from the recordings that are there")
    parser.add_argument("--quiet", action="store_true", help="print the table alone, not what was said of each case")
    parser.add_argument("--differ", action="store_true", help="judge nothing; run the pairs without Proctor and compare what they print")
    parser.add_argument("--write", action="store_true", help="put the table into docs/evaluation.md")
    args = parser.parse_args()
    if not args.folder.is_dir():
        print(f"{args.folder}: no such folder of cases", file=sys.stderr)
        return 2
    work = (args.work or Path(tempfile.mkdtemp(prefix="proctor-published-"))).resolve()
    work.mkdir(parents=True, exist_ok=True)
    if args.rejudge:
        for pack in work.glob("*.pack.json"):
            pack.unlink()
    wanted = tuple(source for source in SOURCES if source in (args.source or SOURCES))
    only = set(args.only.split(",")) if args.only else set()
    runs = Runs(work)
    if args.differ:
        wrong = differ([p.parent for p in sorted(args.folder.glob("*/case.json")) if not only or p.parent.name in only], runs)
        runs.close()
        return int(bool(wrong))
    kept = work / f"rows-{args.folder.name}.json"  # what `--only` does not name stays as it was judged before
    done: dict[str, dict[str, Any]] = json.loads(kept.read_text()) if kept.exists() else {}
    for path in sorted(args.folder.glob("*/case.json")):
        if only and path.parent.name not in only:
            continue
        try:
            done[path.parent.name] = done.get(path.parent.name, {}) | examine(path.parent, runs, work, wanted)
        except (RuntimeError, OSError, ValueError) as e:
            print(f"{path.parent.name}: not examined: {e}", flush=True)
            continue
        kept.write_text(json.dumps(done, indent=1))
        if not args.quiet:
            for source in wanted:
                said = done[path.parent.name][source]
                print(f"{path.parent.name} {source}: detected {said['detected']} named {said['named']} by {said['by']} {said['best']}", flush=True)
                for text in said["other"]:
                    print(f"    says: {text}")
                for text in said["false"]:
                    print(f"    false: {text}")
    runs.close()
    kept.write_text(json.dumps(done, indent=1))
    table = render([done[name] for name in sorted(done)])
    print(table)
    if args.write:
        mark = f"<!-- published {args.folder.name} -->"
        before, _, rest = _PAGE.read_text().partition(mark)
        _, _, after = rest.partition("<!-- /published -->")
        _PAGE.write_text(f"{before}{mark}\n{table}\n<!-- /published -->{after}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
