"""The mutation matrix: which planted silent bugs do rules of three sources find and name?

    python -m benchmarks.mutants FOLDER --work DIR [--sample N] [--seed S] [--programs A,B] [--operators A,B] [--rejudge] [--write]

FOLDER holds the checkouts (`<owner>+<name>`) of the repositories in `programs.toml`, or with `--wild HALF` of those of the wild corpus. Everything made lies in DIR, one JSON file a mutant;
a second call goes on where the first ended. `--rejudge` judges the kept recordings anew, after a change of rules.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from .programs import HERE, Warm, corpus, read
from .registry import load
from .runner import Matrix
from .table import render

_PAGE = HERE.parent.parent / "docs" / "evaluation.md"
_BEGIN, _END = "<!-- mutants -->", "<!-- /mutants -->"


def main() -> int:
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--manifest", type=Path, default=HERE / "programs.toml")
    parser.add_argument("--wild", choices=("first", "second"), help="the programs of this half of the wild corpus, instead")
    parser.add_argument("--steps", type=int, default=0, help="updates after which a wild program ends, where it would end sooner")
    parser.add_argument("--number", type=int, help="programs at most that are ready, in the order of the manifest, of a corpus in turn")
    parser.add_argument("--sample", type=int, default=80, help="mutants to run, spread over operators")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--programs", default="", help="only these, by name")
    parser.add_argument("--operators", default="", help="only these, by name")
    parser.add_argument("--timeout-s", type=float, default=180)
    parser.add_argument("--memory-mib", type=int, default=16384)
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="begin no mutant after so many seconds")
    parser.add_argument("--rejudge", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the table into docs/evaluation.md")
    parser.add_argument("--list", action="store_true", help="list the operators and end")
    args = parser.parse_args()
    operators = load()
    if args.list:
        for operator in operators.values():
            print(f"{operator.name:34} {operator.kind:8} {operator.sentence}")
        return 0
    if not args.folder.is_dir():
        print(f"{args.folder}: no such folder of checkouts", file=sys.stderr)
        return 2
    known = corpus(args.wild, args.steps, args.folder) if args.wild else read(args.manifest)
    programs = [p for p in known if not args.programs or p.name in args.programs.split(",")]
    chosen = {n: o for n, o in operators.items() if not args.operators or n in args.operators.split(",")}
    warm = Warm(args.folder, timeout_s=args.timeout_s, memory_mib=args.memory_mib)
    until = time.monotonic() + args.budget_s
    try:
        matrix = Matrix(programs, chosen, args.folder, args.work.resolve(), warm, rejudge=args.rejudge)
        results = matrix.run(args.sample, args.seed, until, args.number)
    finally:
        warm.close()
    text = render(results)
    print(text)
    (args.work / "matrix.json").write_text(json.dumps(results, indent=1))
    (args.work / "matrix.md").write_text(text + "\n")
    if args.write:
        page = _PAGE.read_text()
        before, rest = page.split(_BEGIN)
        _PAGE.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{rest.split(_END)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
