"""Is the candidate the same computation as the reference?

Exit code 0: equivalent within rounding. 1: different. 2: bad input. 3: nothing can be said (a rank is missing, the
reference is not deterministic, the two do not begin alike).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli._parts.launch import words
from proctor.errors import OracleError

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan
    from proctor.oracle.recording.outcome import Compared
    from proctor.oracle.report import Report
    from proctor.oracle.store import Recording


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("reference", metavar="REF")
    parser.add_argument("candidate", metavar="CAND")
    parser.add_argument("--plan", metavar="PLAN", help="how the candidate is cut (default: the plan it was recorded with)")
    parser.add_argument("--command", metavar="CMD", help="the candidate's: runs again with the reference's routing where its own fell out otherwise")
    parser.add_argument("--timeout", metavar="S", type=float, default=3600.0, help="end that command if it takes longer (default 3600)")
    add_report(parser)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Declare how the outcome is shown."""
    parser.add_argument("--format", choices=("terminal", "json", "html"), default="terminal")
    parser.add_argument("--html", metavar="FILE", help="write the report for a browser as well")
    parser.add_argument("--save-plan", metavar="FILE", help="write what was mapped by content (renamed, fused, transposed parameters) as a plan, for --plan next time")
    parser.add_argument("--mode", choices=("all", "paper"), default="all", help="how tolerances are formed (default all; paper: TTrace's multiple)")
    parser.add_argument("--all", action="store_true", help="list every tensor that differs")


def run(args: argparse.Namespace) -> int:
    """Compare two recordings and show the outcome."""
    from proctor.oracle.recording.outcome import plan_for
    from proctor.oracle.recording.rerun import replay_decisions
    from proctor.oracle.store import Recording

    reference, candidate = Recording(Path(args.reference)), Recording(Path(args.candidate))
    plan = plan_for(candidate, args.plan)
    if args.command is not None:
        replay_decisions(reference, candidate, plan, words(args.command, "--command"), timeout_s=args.timeout)
    next_steps = [f"proctor oracle localise {args.reference} {args.candidate} --command …"]
    found = compare(reference, candidate, plan, args, next_steps=next_steps)
    keep(found.plan, args)
    show(found.report, args)
    return found.report.verdict.exit_code


def compare(
    reference: Recording, candidate: Recording, plan: Plan | None, args: argparse.Namespace, *, next_steps: list[str] | None = None
) -> Compared:
    """Compare as the arguments say."""
    from proctor.oracle.recording.outcome import compare_recordings

    return compare_recordings(
        reference, candidate, plan, mode=args.mode, page=args.html or "", next_steps=next_steps or (), everything=args.all
    )


def keep(plan: Plan | None, args: argparse.Namespace) -> None:
    """Write the plan of what was mapped by content, where that was asked for."""
    from proctor.oracle.plans.plan_toml import format_plan

    if args.save_plan is None:
        return
    if plan is None:
        print(f"nothing to keep in {args.save_plan}: no parameter was mapped by content", file=sys.stderr)
        return
    try:
        Path(args.save_plan).write_text(format_plan(plan), encoding="utf-8")
    except OSError as e:
        raise OracleError(f"{args.save_plan}: cannot be written: {e.strerror or e}") from None


def show(report: Report, args: argparse.Namespace) -> None:
    """Print a report, and write the page that was asked for."""
    from proctor.oracle.report import renderer

    if args.html:
        try:
            Path(args.html).write_text(renderer("html").render(report), encoding="utf-8")
        except OSError as e:
            raise OracleError(f"{args.html}: cannot be written: {e.strerror or e}") from None
    print(renderer(args.format).render(report), end="" if args.format == "json" else "\n")
