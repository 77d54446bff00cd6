"""Record a reference and a candidate, compare them, and find the place where they part.

The reference's recording is kept under --cache (default .proctor-oracle) and used again while its command, the program's
files and the options stay the same. Where the two do not begin with the same parameters, both are recorded again with
generated ones.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli import _oracle_compare, _oracle_record
from proctor.cli._launch import words

if TYPE_CHECKING:
    from proctor.oracle.store import Recording


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--reference", metavar="CMD", required=True, help="the trusted run, on one device")
    parser.add_argument("--candidate", metavar="CMD", required=True, help="the run that is judged")
    parser.add_argument("--cache", metavar="DIR", default=".proctor-oracle", help="where recordings are kept")
    parser.add_argument("--no-localise", action="store_true", help="do not look for the module when the runs differ")
    parser.add_argument("--again", action="store_true", help="record the reference again even if it is kept")
    _oracle_record.add_recording(parser)
    _oracle_compare.add_report(parser)


def run(args: argparse.Namespace) -> int:
    """Do all of it; the exit code is that of the comparison."""
    from proctor.oracle.localise import localise
    from proctor.oracle.outcome import Compared, record_and_compare
    from proctor.oracle.plan_toml import plan_of

    commands = [words(args.reference, "--reference"), words(args.candidate, "--candidate")]
    plan = plan_of(args.plan)

    def compare(reference: Recording, candidate: Recording) -> Compared:
        return _oracle_compare.compare(reference, candidate, plan, args)

    report, comparison = record_and_compare(lambda seed: _record(args, *commands, generate=seed), compare, args.generate)
    if report.verdict.verdict == "different" and comparison is not None and not args.no_localise:
        report = localise(report, comparison, commands[1], reference_command=commands[0], timeout_s=args.timeout)
    _oracle_compare.show(report, args)
    return report.verdict.exit_code


def _record(
    args: argparse.Namespace, reference: Sequence[str], candidate: Sequence[str], *, generate: int | None
) -> tuple[Recording, Recording]:
    from proctor.oracle.store import Recording

    cache = Path(args.cache)
    there = cache / f"reference-{_key(reference, args, generate)}"
    if args.again or not _complete(there):
        _oracle_record.record(args, there, reference, overwrite=True, reference=True, generate=generate, eager=True)
    here = cache / f"candidate-{_key(candidate, args, generate)}"
    _oracle_record.record(args, here, candidate, overwrite=True, generate=generate, samples=0)
    return Recording(there), Recording(here)


def _complete(path: Path) -> bool:
    from proctor.errors import OracleError
    from proctor.oracle.store import Recording

    try:
        found = Recording(path)
        return found.info.samples > 0 and len(found.noise()) == found.info.samples and "clean" in found.runs()
    except OracleError:
        return False


def _key(command: Sequence[str], args: argparse.Namespace, generate: int | None) -> str:
    """Changes with the command, with the Python files beside the program, and with what is recorded."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (*command, str(args.steps), str(args.samples), str(generate)):
        digest.update(part.encode(errors="surrogateescape") + b"\0")
    folders = {Path(word).resolve().parent for word in command if word.endswith(".py") and Path(word).is_file()}
    for folder in sorted(folders):
        for path in sorted(folder.rglob("*.py"))[:2000]:
            status = path.stat()
            digest.update(f"{path}:{status.st_size}:{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()
