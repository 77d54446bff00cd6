"""Write a run's curves and incidents to TensorBoard, Weights & Biases or MLflow.

Curves come from the records; incidents from the last `proctor check` of this run, or from a file that
`proctor check --format json` printed.

exit code: 0 everything was written, 2 bad usage or input, or a tool did not take it
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.invariants.verdict import CheckResult


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("run_dir", metavar="RUN", help="directory that `proctor record` wrote")
    parser.add_argument(
        "--to", metavar="TARGET", action="append", required=True,
        help="tensorboard:DIR, wandb:[ENTITY/]PROJECT or mlflow:URI; may be repeated",
    )
    parser.add_argument("--name", help="how the run is called there (default: name of RUN)")
    parser.add_argument("--result", metavar="FILE", help="result of `proctor check --format json` (default: RUN/check.json)")


def run(args: argparse.Namespace) -> int:
    """Write to every target; one that fails does not keep the others from being written."""
    from proctor.errors import ProctorError
    from proctor.invariants.trace import open_run
    from proctor.verify.series import curves
    from proctor.verify.writers import open_writer, parse
    from proctor.verify.writers._guarded import Guarded
    from proctor.verify.writers._run import write_run

    targets = [parse(text) for text in args.to]
    folder = Path(args.run_dir)
    found = curves(open_run(folder).trace)
    result = _result(folder, args.result)
    name = args.name or folder.resolve().name
    failed = 0
    for target in targets:
        try:
            writer = Guarded(target.kind, open_writer(target, name), _say)
        except ProctorError as error:
            if len(targets) == 1:
                raise
            _say(str(error))
            failed += 1
            continue
        points = write_run(writer, found, result.incidents if result is not None else [])
        writer.close()
        failed += bool(writer.trouble)
        if not writer.trouble:
            incidents = len(result.incidents) if result is not None else 0
            _say(f"{target.kind}: {points:,} points of {len(found)} curves, {incidents} incidents")
    return UsageError.exit_code if failed else 0


def _result(folder: Path, named: str | None) -> CheckResult | None:
    """The check result to show.

    Raises:
        UsageError: a file was named that holds none.
    """
    from proctor.verify.report.formats import json_ as jsonout

    saved = jsonout.read(Path(named) if named else folder / "check.json")
    if saved is not None:
        return saved[0]
    if named:
        raise UsageError(f"{named} holds no check result", hint="proctor check RUN --format json > FILE")
    _say("this run has no check result, so only its curves are written")
    return None


def _say(text: str) -> None:
    print(f"proctor: {text}", file=sys.stderr)
