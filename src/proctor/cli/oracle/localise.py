"""Which module is wrong: run the candidate again with every module fed what the reference's module got.

Errors then cannot pass from one module to the next, so what still differs is wrong by itself, in its forward or in its
backward direction. The candidate's command is asked for, since a recording is data and its command is not run.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from proctor.cli._parts.launch import words
from proctor.cli.oracle import compare as comparing


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("reference", metavar="REF")
    parser.add_argument("candidate", metavar="CAND")
    parser.add_argument("--plan", metavar="PLAN", help="how the candidate is cut (default: the plan it was recorded with)")
    parser.add_argument("--budget", metavar="S", type=float, default=300.0, help="end the search after so many CPU seconds of what it runs, and say so (default 300)")
    parser.add_argument("--timeout", metavar="S", type=float, default=3600.0, help="end a command that takes longer (default 3600)")
    comparing.add_report(parser)
    parser.add_argument("--command", metavar="CMD", required=True, help="the candidate's command, which is run again")
    parser.add_argument("--reference-command", metavar="CMD", help="the reference's: runs again to name the operation inside the module")


def run(args: argparse.Namespace) -> int:
    """Compare, and localise where the runs differ."""
    from proctor.oracle.localising.localise import localise
    from proctor.oracle.recording.outcome import plan_for
    from proctor.oracle.recording.rerun import replay_decisions
    from proctor.oracle.store import Recording

    command = words(args.command, "--command")
    trusted = words(args.reference_command, "--reference-command") if args.reference_command else None
    reference, candidate = Recording(Path(args.reference)), Recording(Path(args.candidate))
    plan = plan_for(candidate, args.plan)
    replay_decisions(reference, candidate, plan, command, timeout_s=args.timeout)
    report, comparison, _ = comparing.compare(reference, candidate, plan, args)
    if report.verdict.verdict == "different" and comparison is not None:
        report = localise(report, comparison, command, reference_command=trusted, timeout_s=args.timeout, budget_s=args.budget)
    comparing.show(report, args)
    return report.verdict.exit_code
