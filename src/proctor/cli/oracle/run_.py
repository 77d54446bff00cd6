"""Record a reference and a candidate, compare them, and find the place where they part.

The reference's recording is kept under --cache (default .proctor-oracle) and used again while its command, the program's
files and the options stay the same. Where the two do not begin with the same parameters, both are recorded again with
generated ones. With --generate-inputs runs that agree are recorded once more on generated data, which hide nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proctor import __version__
from proctor.cli._parts.launch import words
from proctor.cli.oracle import compare as comparing
from proctor.cli.oracle import record as recording
from proctor.errors import OracleError, UsageError

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan
    from proctor.oracle.recording.outcome import Compared
    from proctor.oracle.report import Proof
    from proctor.oracle.store import Recording


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--reference", metavar="CMD", required=True, help="the trusted run, on one device")
    parser.add_argument("--candidate", metavar="CMD", required=True, help="the run that is judged")
    parser.add_argument("--cache", metavar="DIR", default=".proctor-oracle", help="where recordings are kept")
    parser.add_argument("--no-localise", action="store_true", help="do not look for the module when the runs differ")
    parser.add_argument("--budget", metavar="S", type=float, default=300.0, help="end the search for the module after so many CPU seconds of what it runs, and say so (default 300)")
    parser.add_argument("--again", action="store_true", help="record the reference again even if it is kept")
    parser.add_argument(
        "--generate-inputs", metavar="SEED", type=int, nargs="?", const=0,
        help="compare on generated inputs as well, where the runs agree on the program's own: for data in which errors do not show",
    )
    parser.add_argument("--generate-gradients", action="store_true", help="with it: generated gradients of the model's output, instead of the loss's")
    parser.add_argument("--prove", metavar="S", type=float, nargs="?", const=120.0, help="judge both commands for all data as well, as `oracle prove` does, in so many CPU seconds for the proof (default 120)")
    recording.add_recording(parser, dropout=("keep", "replay", "draw"))
    comparing.add_report(parser)


def run(args: argparse.Namespace) -> int:
    """Do all of it; the exit code is that of the comparison."""
    from proctor.oracle.localising.localise import localise
    from proctor.oracle.plans.plan_toml import plan_of
    from proctor.oracle.recording.outcome import looked_again, record_and_compare
    from proctor.oracle.recording.rerun import replay_decisions

    if args.generate_inputs is not None and args.keep_inputs:
        raise UsageError("--generate-inputs and --keep-inputs exclude each other")
    if args.prove is not None and args.prove < 0:
        raise UsageError("--prove must be at least 0")
    if args.generate_gradients and args.generate_inputs is None:
        raise UsageError("--generate-gradients goes with --generate-inputs")
    if args.generate_inputs is not None and args.statistics:
        raise UsageError("--generate-inputs needs whole tensors: leave out --statistics")
    commands = [words(args.reference, "--reference"), words(args.candidate, "--candidate")]
    plan = plan_of(args.plan)

    def compare(reference: Recording, candidate: Recording) -> Compared:
        replay_decisions(reference, candidate, plan, commands[1], timeout_s=args.timeout)
        return comparing.compare(reference, candidate, plan, args)

    found = record_and_compare(lambda seed: _record(args, *commands, generate=seed), compare, args.generate)
    found = looked_again(
        found, lambda step: compare(*_record(args, *commands, generate=found.comparison.candidate.info.generate if found.comparison else None, whole=step))
    )
    if args.generate_inputs is not None and found.report.verdict.verdict != "different":
        found = _on_generated_inputs(args, commands, found, compare)
    report, comparison = found.report, found.comparison
    if report.verdict.verdict == "different" and comparison is not None and not args.no_localise:
        report = localise(report, comparison, commands[1], reference_command=commands[0], timeout_s=args.timeout, budget_s=args.budget)
    comparing.keep(found.plan, args)
    if args.prove is not None:
        report = dataclasses.replace(report, proof=_proof(commands, plan, args))
    comparing.show(report, args)
    return report.exit_code


def _proof(commands: Sequence[Sequence[str]], plan: Plan | None, args: argparse.Namespace) -> Proof:
    """What is said for all data; a program that cannot be judged so does not stop the comparison."""
    from proctor.oracle.prove.command import tapes_of
    from proctor.oracle.prove.prover import decide
    from proctor.oracle.report import Proof

    try:
        reference, candidate = (tapes_of(command, timeout_s=args.timeout) for command in commands)
        if len(reference) != 1:
            raise OracleError(f"the reference has {len(reference)} ranks", hint="it must run on one device")
        found = decide(reference[0], candidate, plan, proof_s=args.prove)
    except OracleError as error:
        return Proof("UNPROVED", f"the commands cannot be judged for all data: {error.message}")
    return Proof(found.verdict, found.why, found.culprit.said if found.culprit is not None else "", (*(f"operators without a meaning: {text}" for text in found.opaque), *found.assumed))


def _on_generated_inputs(
    args: argparse.Namespace, commands: Sequence[Sequence[str]], own: Compared, compare: Callable[[Recording, Recording], Compared]
) -> Compared:
    """Record both again with generated data, which are cut as the program's own are seen to be, and compare.

    Args:
        own: the comparison on the program's own data; it stands where nothing was mapped.
        compare: two recordings.
    """
    import msgspec

    from proctor.oracle.recording.inputs import generate_inputs
    from proctor.oracle.store import Recording

    comparison = own.comparison
    if comparison is None or next(comparison.shards(), None) is None:
        return own
    reference, candidate = comparison.reference.recording.path, comparison.candidate.path
    folder = candidate.with_name(f"{candidate.name}-inputs")
    shutil.rmtree(folder, ignore_errors=True)
    notes = generate_inputs(comparison, args.generate_inputs, folder, gradients=args.generate_gradients)
    there, here = reference.with_name(f"{reference.name}-generated"), candidate.with_name(f"{candidate.name}-generated")
    seed = comparison.candidate.info.generate
    try:
        recording.record(args, there, commands[0], overwrite=True, generate=seed, reference=True, eager=True, given=folder / "reference")
        recording.record(args, here, commands[1], overwrite=True, generate=seed, samples=0, given=folder / "candidate", beside=Recording(there))
    except OracleError as e:
        raise OracleError(f"on generated inputs: {e.message}", hint=e.hint or "the program may need its own data: leave out --generate-inputs") from None
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    found, before = compare(Recording(there), Recording(here)), own.report.verdict
    said = (f"on the program's own data the runs are {before.verdict}: {before.reason}", *notes, *found.report.verdict.notes)
    verdict = msgspec.structs.replace(found.report.verdict, notes=said)
    return found._replace(report=dataclasses.replace(found.report, verdict=verdict))


def _record(
    args: argparse.Namespace, reference: Sequence[str], candidate: Sequence[str], *, generate: int | None, whole: int = 0
) -> tuple[Recording, Recording]:
    from proctor.oracle.store import Recording

    cache = Path(args.cache)
    there = cache / f"reference-{_key(reference, args, generate, whole)}"
    if args.again or not _complete(there):
        recording.record(args, there, reference, overwrite=True, reference=True, generate=generate, eager=True, whole=whole)
    here = cache / f"candidate-{_key(candidate, args, generate, whole)}"
    recording.record(args, here, candidate, overwrite=True, generate=generate, samples=0, whole=whole, beside=Recording(there))
    return Recording(there), Recording(here)


def _complete(path: Path) -> bool:
    from proctor.errors import OracleError
    from proctor.oracle.store import Recording

    try:
        found = Recording(path)
        return found.info.samples > 0 and len(found.noise()) == found.info.samples and "clean" in found.runs()
    except OracleError:
        return False


def _key(command: Sequence[str], args: argparse.Namespace, generate: int | None, whole: int = 0) -> str:
    """Changes with the command, with the Python files beside the program, with what is recorded, and with our version."""
    digest = hashlib.blake2b(digest_size=8)
    for part in (*command, str(args.steps), str(args.samples), str(generate), str(whole), str(args.evaluations), str(args.until_evaluation), str(args.forward), str(args.statistics), args.dropout, __version__):
        digest.update(part.encode(errors="surrogateescape") + b"\0")
    folders = {Path(word).resolve().parent for word in command if word.endswith(".py") and Path(word).is_file()}
    for folder in sorted(folders):
        for path in sorted(folder.rglob("*.py"))[:2000]:
            status = path.stat()
            digest.update(f"{path}:{status.st_size}:{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()
