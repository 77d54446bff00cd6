"""What a plan says about the parameters and modules of a recording, and what it forgets.

Warns of rules that match nothing, parameters that two rules cut in different ways, axes that the mesh does not have.
Exit code 1 when there is a warning.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("plan", metavar="PLAN")
    parser.add_argument("recording", metavar="RECORDING", nargs="?", help="of the reference: the names and shapes that the plan is about")


def run(args: argparse.Namespace) -> int:
    """Print a table and the warnings."""
    from rich.table import Table

    from proctor.oracle.plan_toml import read_plan
    from proctor.oracle.store import Recording
    from proctor.verify import wording
    from proctor.verify.report.terminal import console

    plan = read_plan(Path(args.plan))
    params: dict[str, tuple[int, ...]] = {}
    modules: dict[str, tuple[int, ...]] = {}
    if args.recording:
        for record in Recording(Path(args.recording)).ranks().values():
            for entry in record.entries:
                if entry.kind == "param":
                    params.setdefault(entry.name, entry.shape)
                elif entry.kind == "output":
                    modules.setdefault(entry.name, entry.shape)
    found = plan.understood(params, modules)
    table = Table("", "name", "layout", "rule", box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(*(wording.clean(str(cell)) for cell in (row.kind, row.name, row.layout, row.rule)))
    out = console()
    out.print(f"mesh {plan.mesh}, {plan.mesh.world} ranks")
    if found.rows:
        out.print(table)
    for warning in found.warnings:
        out.print(f"warning: {wording.clean(warning)}")
    return 1 if found.warnings else 0
