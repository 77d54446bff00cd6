"""Is the oracle right about strange programs: those of `benchmarks/strange/`, right and wrong ones?

    python benchmarks/oracle_strange.py [OUT] [--only REGEX] [--no-localise] [--jobs N] [--results FILE [--resume]] [--write]

Each case is recorded on one rank as the reference, and as often as it has words on several. Right ones are to be `equivalent`
(`inconclusive` counts apart), wrong ones `different`, with a culprit that the case accepts, `side:module`. CPU seconds are those of the
reference, the candidate, the comparison and localising; ranks are forks of a process that has torch loaded, so imports are not in them.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from oracle_warm import Warm, WarmRecorder

from proctor.errors import ProctorError
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.verdicts import Verdict, failing
from proctor.oracle.store import Recording

MODELS = ("llama", "gpt2", "bert", "t5", "mixtral", "vit")
HEAVY = ("accelerate", "peft", "transformers.trainer", *(f"transformers.models.{m}.modeling_{m}" for m in MODELS))  # loaded once
PROGRAMS = Path(__file__).resolve().parent / "strange"
DOCS = Path(__file__).resolve().parents[1] / "docs" / "oracle.md"
BEGIN, END = "<!-- strange -->", "<!-- /strange -->"


def cases(warm: Warm, out: Path) -> list[tuple[Path, str, dict[str, Any]]]:
    """Script, name and what it says of each case."""
    found = []
    for script in sorted(PROGRAMS.glob("*.py")):
        if script.name == "common.py":
            continue
        log = out / f"{script.stem}.list"
        code = warm.run([str(script), "--list"], 1, None, log)
        said = log.read_text().strip().splitlines() or [""]
        if code:
            print(f"{script.name}: left out: {said[-1][:120]}", file=sys.stderr)
            continue
        found += [(script, name, case) for name, case in json.loads(said[-1]).items()]
    return found


def judge(reference: Recording, folder: Path, warm: Warm, command: Sequence[str], case: Mapping[str, Any], localised: bool) -> Verdict:
    """Record a candidate, compare it, and look for the culprit."""
    import proctor.oracle.localising.localise as module
    from proctor.oracle.report import Report

    world = case["world"]
    WarmRecorder(warm, world, folder, command, samples=0, steps=case["steps"]).record()
    comparison = Comparison(reference, Recording(folder))
    found = comparison.run()
    if found.verdict != "different" or not localised:
        return found

    class Again(WarmRecorder):
        @classmethod
        def again(cls, recording: Recording, command: Sequence[str], **more: Any) -> Any:
            made = super().again(recording, command, **more)
            made.warm, made.ranks = warm, world
            return made

    module.Recorder = Again  # type: ignore[misc]
    return module.localise(Report(found), comparison, comparison.candidate.info.command).verdict


def accepts(wanted: str, said: str) -> bool:
    """Whether a case accepts what a report blames, `side:module`; a tensor alone is no culprit."""
    return ":" in said and re.fullmatch(wanted, said) is not None


def names(found: Verdict) -> list[str]:
    """What a report blames, what a reader sees first."""
    said = [f"{found.culprit.direction}:{found.culprit.module}"] if found.culprit is not None else []
    said += [found.first.name] if found.first is not None else []
    return said + [r.name for r in found.replicas[:1]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="regular expression on `case word`")
    parser.add_argument("--no-localise", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--results", type=Path, help="a line of JSON a run is added to it; figures are those of the last run of each program in it")
    parser.add_argument("--resume", action="store_true", help="do not run again what has a line in --results")
    parser.add_argument("--write", action="store_true", help="put the figures into docs/oracle.md")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="proctor-strange-"))
    out.mkdir(parents=True, exist_ok=True)
    warm, rows = Warm(args.jobs, [m for m in HEAVY if (not args.only or "libraries" in args.only) and importlib.util.find_spec(m.partition(".")[0])]), []

    known = {tuple(json.loads(line)[:3]) for line in args.results.read_text().splitlines()} if args.resume and args.results and args.results.exists() else set()

    def one(job: tuple[Path, str, dict[str, Any]]) -> None:
        script, name, case = job
        words = [(w, True) for w in case["right"]] + [(w, False) for w in case["wrong"]]
        words = [(w, right) for w, right in words if re.search(args.only, f"{script.stem} {name} {w}")]
        words = [(w, right) for w, right in words if (script.stem, name, w) not in known]
        if not words:
            return
        home = out / f"reference-{script.stem}-{name}"
        try:
            WarmRecorder(warm, 1, home, [str(script), name, case["reference"]], samples=4, steps=case["steps"], eager=True).record()
            reference = Recording(home)
        except (ProctorError, OSError) as e:
            print(f"FAILED {script.stem} {name}: reference: {e}", flush=True)
            rows.append((script.stem, name, "reference", False, "failed", [], False, 0.0))
            return
        for word, right in words:
            began, own = time.monotonic(), time.thread_time()
            folder = out / f"candidate-{script.stem}-{name}-{word}"
            found: Verdict | None = None
            try:
                found = judge(reference, folder, warm, [str(script), name, word], case, not args.no_localise)
                verdict, why, blamed = found.verdict, found.reason, names(found)
            except (ProctorError, OSError, ValueError, KeyError, IndexError, AssertionError, TypeError) as e:
                verdict, why, blamed = "failed", f"{type(e).__name__}: {e}"[:300], []
                if not isinstance(e, ProctorError):
                    import traceback

                    traceback.print_exc()
            wanted = case["wrong"].get(word, "")
            culprit = right or any(accepts(wanted, b) for b in blamed[:1])
            good = verdict == ("equivalent" if right else "different")
            cpu_s = warm.cpu_s[home] + warm.cpu_s[folder] + time.thread_time() - own
            rows.append((script.stem, name, word, right, verdict, blamed, culprit, cpu_s))
            if args.results is not None:
                with args.results.open("a") as kept:
                    kept.write(json.dumps(rows[-1]) + "\n")
            mark = "ok   " if good and culprit else "NAME " if good else "FALSE" if right else "MISS "
            print(f"{mark} {script.stem} {name} {word or '-'}: {verdict} {blamed[:3]} {time.monotonic() - began:.1f} s, {cpu_s:.1f} CPU s  {'' if good and not args.verbose else why}", flush=True)
            if found is not None and (args.verbose or (right and not good)):
                for t in [t for t in found.tensors if failing(t)][:6]:
                    print(f"      {t.verdict} step {t.step} {t.kind} {t.name} {t.slot} x{t.ratio:.3g} rel {t.rel_err:.2g} [{t.layout}] {t.note}")
                for r in found.replicas[:3]:
                    print(f"      replica step {r.step} {r.kind} {r.name} x{r.ratio:.3g} {r.note}")
                if found.culprit is not None:
                    print(f"      culprit {found.culprit.module} {found.culprit.direction} {found.culprit.text}")
                if args.verbose:
                    for text in (*found.unchecked[:8], *found.notes[:8]):
                        print(f"      - {text}")
            if args.out is None:
                shutil.rmtree(folder, ignore_errors=True)
        if args.out is None:
            shutil.rmtree(home, ignore_errors=True)

    try:
        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(one, cases(warm, out)))
    finally:
        warm.close()
        if args.out is None:
            shutil.rmtree(out, ignore_errors=True)
    if args.results is not None:
        rows = list({tuple(r[:3]): r for r in (*map(json.loads, args.results.read_text().splitlines()), *rows)}.values())
    text, good = report(sorted(rows, key=lambda r: tuple(r[:3])))
    print(text)
    if args.write:
        write(text)
    return 0 if good else 1


def report(rows: Sequence[Sequence[Any]]) -> tuple[str, bool]:
    """The figures as a table with what they come to, and whether all is as it should be."""
    lines = ["| programs | right | false alarms | not decided | wrong | found | culprit right |", "|---|---|---|---|---|---|---|"]
    for script in [*sorted({r[0] for r in rows}), ""]:
        here = [r for r in rows if not script or r[0] == script]
        right, wrong = [r for r in here if r[3]], [r for r in here if not r[3]]
        alarms, found = [r for r in right if r[4] == "different"], [r for r in wrong if r[4] == "different"]
        unsure = sum(r[4] not in ("equivalent", "different") for r in right)
        named = sum(bool(r[6]) for r in found)
        lines.append(f"| {script or 'all'} | {len(right)} | {len(alarms)} | {unsure} | {len(wrong)} | {len(found)} | {named} |")
    shares = f"{len(alarms) / max(1, len(right)):.1%} false alarms, {len(found) / max(1, len(wrong)):.1%} found, culprit right in {named / max(1, len(found)):.1%} of those found"
    spent = sorted(r[7] for r in rows if r[7]) or [0.0]
    cost = f"median {spent[len(spent) // 2]:.1f}, worst {spent[-1]:.1f}, {sum(s > 60 for s in spent)} over 60"
    lines += ["", f"{shares}. CPU seconds of a comparison with all its runs and localising, without imports: {cost}."]
    odd = [r for r in rows if r[4] != ("equivalent" if r[3] else "different") or not r[6]]
    lines += ["", "Not as it should be:" if odd else "All is as it should be.", *([""] if odd else [])]
    lines += [f"* {r[0]} {r[1]} {r[2] or '-'}: {r[4]}{f', culprit `{r[5][0]}`' if r[5] else ''}" for r in odd]
    return "\n".join(lines), not odd


def write(text: str) -> None:
    """Put the figures between the markers of docs/oracle.md."""
    page = DOCS.read_text()
    DOCS.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{text}\n{END}", page, flags=re.DOTALL))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
