"""Is the candidate the same formula as the reference, for all data? One training step of unchanged commands.

Both commands are run once, and the operations of one step of every rank are recorded: forward, backward, reduction of gradients,
clipping, update. A wrong program is refuted by arithmetic in doubles and in a finite field, with the operation where it begins.
Exit code 0: EQUAL or PROVED; 1: DIFFERENT; 3: CLOSE or UNPROVED; 2: a command cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.cli._parts.launch import words
from proctor.errors import OracleError, UsageError

if TYPE_CHECKING:
    from proctor.oracle.plans.mesh import Mesh
    from proctor.oracle.plans.plan import Plan
    from proctor.oracle.prove.cache import Cache
    from proctor.oracle.prove.lanes.spread import Spread
    from proctor.oracle.prove.tape import Tape
    from proctor.oracle.prove.verdict import Verdict


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("--reference", metavar="CMD", help="the trusted run, on one device")
    parser.add_argument("--candidate", metavar="CMD", help="the run that is judged")
    parser.add_argument("--check", metavar="FILE", help="verify a proof that --save wrote, without running anything")
    parser.add_argument("--save", metavar="FILE", help="write the proof, where there is one")
    parser.add_argument("--proof", metavar="S", type=float, default=120.0, help="seconds of CPU that a proof may take; 0 refutes or tests at random points only (default 120)")
    parser.add_argument("--plan", metavar="PLAN", help="how parameters are cut (TOML); found by content without one. With a command of one device after --: is this plan right for it, before any run?")
    parser.add_argument("--many", action="store_true", help="with a command after --: run a few ranks of each kind and judge all together, for large meshes; the proof is that of a small mesh, two ranks along each axis")
    parser.add_argument("--small", metavar="CMD", help="with --many: the same program with fewer layers and a smaller width, to be proved in its place")
    parser.add_argument("--jobs", metavar="N", type=int, default=1, help="with a command after --: ranks that are recorded at once (default 1)")
    parser.add_argument("--dask", metavar="ADDRESS", help="with a command after --: record ranks, and with --many judge, on a dask cluster that has the same files (pip install 'proctor[dask]')")
    parser.add_argument("--timeout", metavar="S", type=float, default=600.0, help="end a command that takes longer (default 600)")
    parser.add_argument("command", metavar="CMD", nargs="*", help="after --plan PLAN --: the run on one device that the plan is for")
    parser.add_argument("--cache", metavar="DIR", help="where verdicts are kept by the content of the recorded steps (default $XDG_CACHE_HOME/proctor/prove)")
    parser.add_argument("--no-cache", action="store_true", help="judge anew, and keep nothing")
    parser.add_argument("--json", metavar="FILE", help="write the verdict as JSON, - for standard output")


def run(args: argparse.Namespace) -> int:
    """Do all of it."""
    from proctor.oracle.plans.plan_toml import plan_of
    from proctor.oracle.prove.cache import Cache, usual
    from proctor.oracle.prove.command import tapes_of
    from proctor.oracle.prove.lanes.spread import forking, on_dask
    from proctor.oracle.prove.leaves import align
    from proctor.oracle.prove.proofs.file import check, save
    from proctor.oracle.prove.prover import decide

    if args.timeout <= 0 or args.proof < 0 or args.jobs < 1:
        raise UsageError("--timeout must be more than 0, --proof at least 0, --jobs at least 1")
    cache = None if args.no_cache else Cache(Path(args.cache) if args.cache else usual())
    if args.cache and (args.no_cache or (Path(args.cache).exists() and not Path(args.cache).is_dir())):
        raise UsageError(f"--cache {args.cache}: {'goes without --no-cache' if args.no_cache else 'is no folder'}")
    if args.check:
        return _show(check(Path(args.check)), args.json)
    if args.command:
        if not args.plan or args.reference or args.candidate:
            raise UsageError("a command after -- goes with --plan alone", hint="proctor oracle prove --plan plan.toml -- python train.py")
    elif args.many:
        raise UsageError("--many goes with --plan and a command after --", hint="proctor oracle prove --plan plan.toml --many -- python train.py")
    elif not args.reference or not args.candidate:
        raise UsageError("--reference and --candidate are needed", hint='proctor oracle prove --reference "python train.py" --candidate "torchrun … train.py"')
    if args.small and not args.many:
        raise UsageError("--small goes with --many")
    if not args.command and (args.dask or args.jobs > 1):
        raise UsageError(f"--{'dask' if args.dask else 'jobs'} goes with a command after --", hint="the ranks of --candidate start by themselves")
    plan, seconds = plan_of(args.plan), {}
    sides: list[list[Tape]] = []
    commands = [args.command] * 2 if args.command else [words(args.reference, "--reference"), words(args.candidate, "--candidate")]
    if args.command and (plan is None or not plan.mesh.axes):
        raise UsageError(f"{args.plan}: the plan has no mesh, so it says nothing of ranks")
    if args.many:
        assert plan is not None
        with on_dask(args.dask) if args.dask else contextlib.nullcontext(forking(args.jobs)) as spread:
            verdict = _many(args, plan, cache, spread)
        _say(cache)
        return _show(verdict, args.json, args.save, "with --many no proof is kept")
    for name, command in zip(("reference", "candidate"), commands):
        began = time.monotonic()
        if args.command and sides:
            assert plan is not None
            with on_dask(args.dask) if args.dask else contextlib.nullcontext(forking(args.jobs)) as spread:
                sides.append(_by_plan(args, command, plan.mesh, spread))
        else:
            sides.append(tapes_of(command, timeout_s=args.timeout))
        seconds[name] = time.monotonic() - began
    if len(sides[0]) != 1:
        raise OracleError(f"the reference has {len(sides[0])} ranks", hint="it must run on one device")
    verdict = decide(sides[0][0], sides[1], plan, proof_s=args.proof, cache=cache)
    _say(cache)
    verdict.seconds = {**seconds, **verdict.seconds}
    if args.save and verdict.verdict == "PROVED":
        save(Path(args.save), verdict, sides[0][0], sides[1], align(sides[0][0], sides[1], plan))
    return _show(verdict, args.json, args.save if verdict.verdict != "PROVED" else None)


def _by_plan(args: argparse.Namespace, command: Sequence[str], mesh: Mesh, spread: Spread) -> list[Tape]:
    """All ranks of a plan on a mesh."""
    from proctor.oracle.prove.command import tapes_by_plan

    calls = [functools.partial(tapes_by_plan, command, Path(args.plan), mesh, [rank], timeout_s=args.timeout) for rank in range(mesh.world)]
    return [tape for tapes in spread(calls) for tape in tapes]


def _many(args: argparse.Namespace, plan: Plan, cache: Cache | None, spread: Spread) -> Verdict:
    """A plan on a large mesh: few ranks are run, and the proof is that of the plan on a small mesh."""
    from proctor.oracle.prove import lanes
    from proctor.oracle.prove.command import tapes_by_plan, tapes_of

    began = time.monotonic()
    alone = tapes_of(args.command, timeout_s=args.timeout)[0]
    recorded_s = time.monotonic() - began
    other = words(args.small, "--small") if args.small else None

    def small() -> lanes.Reduced:
        mesh = lanes.lesser(plan.mesh)
        reference = tapes_of(other, timeout_s=args.timeout)[0] if other else alone
        return lanes.Reduced(reference, _by_plan(args, other or args.command, mesh, spread), plan.on(mesh))

    record = functools.partial(tapes_by_plan, args.command, Path(args.plan), plan.mesh, timeout_s=args.timeout)
    with lanes.proving(spread, small, args.proof, cache) as ahead:
        verdict = lanes.decide(alone, record, plan, spread, small=small, proof_s=args.proof, cache=cache, ahead=ahead)
    verdict.seconds = {"reference": recorded_s, **verdict.seconds}
    return verdict


def _say(cache: Cache | None) -> None:
    """What was wrong with entries of the cache."""
    from proctor.verify import wording

    for said in cache.said if cache is not None else []:
        print(f"proctor: {wording.clean(said)}", file=sys.stderr)


def _show(verdict: Verdict, json: str | None, unsaved: str | None = None, why: str = "only what is PROVED has a proof to keep") -> int:
    import msgspec

    from proctor.verify import wording

    if unsaved:
        print(f"proctor: {unsaved} is not written: {why}", file=sys.stderr)

    if json:
        text = msgspec.json.format(msgspec.json.encode(msgspec.structs.replace(verdict, cuts={}, lemmas={})))
        if json == "-":
            print(text.decode())
            return verdict.exit_code
        Path(json).write_bytes(text)
    for line in str(verdict).splitlines():
        print(wording.clean(line))
    return verdict.exit_code
