"""Bad files of every kind where a command expects a good one: exit code, lines, processor seconds and memory of each.

    python benchmarks/bad_files.py [--write]

The cases are those of tests/unit/cli/test_bad_files.py; each runs in a process of its own. Exit code 1 when one of them is no exit code
2 or 3, says more than one line or a traceback, takes more than 2 s of the processor, or grows by more than 500 MiB. `--write` puts the figures into
docs/reliability.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import resource
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "unit" / "cli")]
import test_bad_files as bad
from helpers.processes import process
from helpers.runs import write_run
from helpers.system.rights import bound_to_permissions

from proctor.cli import main

MOST_S, MOST_MIB = 2.0, 500
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- bad files -->", "<!-- end of bad files -->"
_MODULES = ("polars", "proctor.verify.checker", "proctor.cli.check", "proctor.oracle.plans.plan_toml", "proctor.verify.paging.config", "proctor.infer.importers.traincheck.rules", "proctor.oracle.fuzz.sessions.session", "proctor.oracle.prove.proofs.file")


def one(role: str, kind: str, place: Path) -> tuple[int, int, float, int]:
    """Exit code, lines on stderr (-1: a traceback), seconds and MiB of one case."""
    arguments, path = bad.command(role, write_run(place / "run", [process()]), place / "bad")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    bad.BAD[kind](path)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = place / "said"
    pid = os.fork()
    if pid == 0:
        code = 101
        try:
            with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()), bound_to_permissions():
                code = main(arguments)
            said.write_text(err.getvalue())
        finally:
            os._exit(code)
    _, status, used = os.wait4(pid, 0)
    os.chdir(ROOT)  # where `proctor.toml` is read
    text = said.read_text() if said.exists() else ""
    lines = -1 if "Traceback" in text else sum(1 for line in text.splitlines() if line.strip())
    return os.waitstatus_to_exitcode(status), lines, used.ru_utime + used.ru_stime, max(0, used.ru_maxrss - before) >> 10


def run() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the figures into docs/reliability.md")
    args = parser.parse_args()
    for name in _MODULES:
        importlib.import_module(name)
    wrong, codes, slowest, largest, number = [], Counter[int](), 0.0, 0, 0
    for role, kind in bad.cases():
        with tempfile.TemporaryDirectory() as scratch:
            code, lines, seconds, mib = one(role, kind, Path(scratch))
        number += 1
        codes[code] += 1
        slowest, largest = max(slowest, seconds), max(largest, mib)
        if code not in (2, 3) or (code == 2 and lines != 1) or lines < 0 or seconds > MOST_S or mib > MOST_MIB:
            wrong.append(f"{role} {kind}: exit code {code}, {lines} lines, {seconds:.1f} s, {mib} MiB")
    said = f"{number} bad files over {len(bad.ROLES)} kinds of files: {codes[2]} with exit code 2, {codes[3]} with 3, {len(wrong)} otherwise; "
    said += f"slowest {slowest:.2f} s, memory at most +{largest} MiB."
    print("\n".join([*wrong, said]))
    if args.write:
        head, _, rest = PAGE.read_text().partition(BEGIN)
        _, _, tail = rest.partition(END)
        PAGE.write_text(f"{head}{BEGIN}\n{said}\n{END}{tail}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(run())
