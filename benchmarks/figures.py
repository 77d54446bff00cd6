"""`make bench`: takes the figures of `figures.toml`, one command after another, and writes them beside those that were taken before.

    python benchmarks/figures.py [WORD…] [--list] [--write] [--note TEXT]

Words choose commands: those of which a part, or the name of a figure, holds one of them. All take half an hour on two idle cores. A figure that nobody takes grows unseen: `--write` adds
what was found to `measured.json` and the table of docs/performance.md, where each stands beside its bar and the time before. The load of the machine when a command
begins is kept with its figures, and so is the speed of the machine (`yardstick`: seconds of a loop and a matrix product), since machines differ by a fifth.
Exit code 1 if a command failed, or printed nothing that a pattern finds; a missed bar is no failure of the benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LIST, KEPT, PAGE = HERE / "figures.toml", HERE / "measured.json", HERE.parent / "docs" / "performance.md"
MARKS = ("<!-- figures -->\n", "<!-- /figures -->")
OF = {"median": statistics.median, "mean": statistics.mean, "largest": max}
MOST_KEPT = 20  # takes of one figure

Taken = dict[str, Any]  # one take of a figure: value, when, commit, load, yardstick, note


def commands() -> list[dict[str, Any]]:
    """Commands with their figures, as the list has them."""
    return list(tomllib.loads(LIST.read_text())["command"])


def read(figure: dict[str, Any], printed: str) -> float | None:
    """What a figure is in what its command printed; `None` where its pattern finds nothing."""
    found = [float(text.replace(",", "")) for text in re.findall(figure["pattern"], printed, re.MULTILINE)]
    return float(OF[figure.get("of", "median")](found)) if found else None


def yardstick() -> float:
    """Seconds of CPU of work that does not change: the machine's own speed."""
    import numpy as np

    begin, total = time.process_time(), 0
    for i in range(3_000_000):
        total += i & 7
    square = np.ones((400, 400), dtype=np.float32)
    for _ in range(40):
        square = square @ square / 400
    return time.process_time() - begin


def wanted(command: dict[str, Any], words: list[str]) -> bool:
    said = " ".join([*command["run"], *(figure["name"] for figure in command["figure"])])
    return not words or any(word in said for word in words)


def table(kept: dict[str, list[Taken]]) -> str:
    """The table of docs/performance.md: each figure as it was taken last."""
    lines = ["| figure | bar | last | when, at | machine | before | command |", "|---|---|---|---|---|---|---|"]
    for command in commands():
        for figure in command["figure"]:
            taken = kept.get(figure["name"], [])
            if not taken:
                lines.append(f"| {figure['name']} | {_bar(figure)} | not taken | | | | `{' '.join(command['run'])}` |")
                continue
            last, before = taken[-1], ", ".join(f"{t['value']:g} ({t['when'][:10]})" for t in taken[-2:-5:-1])
            value = f"{last['value']:g} {figure['unit']}"
            missed = "bar" in figure and last["value"] > figure["bar"]
            lines.append(
                f"| {figure['name']} | {_bar(figure)} | {f'**{value}: missed**' if missed else value} | {last['when'][:10]}, {last['commit']} | load {last['load']:g}, {last['yardstick']:.2f} s"
                f"{', ' + last['note'] if last['note'] else ''} | {before} | `{' '.join(command['run'])}` |"
            )
    return "\n".join(lines) + "\n"


def _bar(figure: dict[str, Any]) -> str:
    return f"{figure['bar']:g}" if "bar" in figure else ""


def write(kept: dict[str, list[Taken]]) -> None:
    KEPT.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    text = PAGE.read_text()
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    PAGE.write_text(text[:begin] + table(kept) + text[end:])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="WORD")
    parser.add_argument("--list", action="store_true", help="name the commands and run none")
    parser.add_argument("--write", action="store_true", help="into measured.json and docs/performance.md, command by command")
    parser.add_argument("--note", default="", help="about this machine or moment, kept with the figures")
    args = parser.parse_args()
    chosen = [command for command in commands() if wanted(command, args.words)]
    if not chosen:
        print(f"{' '.join(args.words)}: no command of {LIST.name} has this in it; --list names them", file=sys.stderr)
        return 2
    failed = 0
    commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=HERE, capture_output=True, text=True, check=False).stdout.strip()
    for command in chosen:
        print(f"\n== {' '.join(command['run'])} (about {command['minutes']} min)", flush=True)
        if args.list:
            print("\n".join(f"{figure['name']} ({figure['unit']})" for figure in command["figure"]))
            continue
        load, speed = os.getloadavg()[0], yardstick()
        done = subprocess.run([sys.executable, str(HERE / command["run"][0]), *command["run"][1:]], stdout=subprocess.PIPE, text=True, check=False, cwd=HERE.parent)
        print(done.stdout, flush=True)
        values = {figure["name"]: read(figure, done.stdout) for figure in command["figure"]}
        failed += done.returncode != 0 or None in values.values()
        for figure in command["figure"]:
            value = values[figure["name"]]
            said = "not found in what was printed" if value is None else f"{value:g} {figure['unit']}" + (f", bar {figure['bar']:g}" if "bar" in figure else "")
            print(f"{figure['name']}: {said}", flush=True)
        if args.write:
            kept: dict[str, list[Taken]] = json.loads(KEPT.read_text()) if KEPT.exists() else {}
            moment = {"when": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M"), "commit": commit, "load": round(load, 1), "yardstick": round(speed, 3), "note": args.note}
            for name, value in values.items():
                if value is not None:
                    kept[name] = [*kept.get(name, []), {"value": value, **moment}][-MOST_KEPT:]
            write(kept)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
