"""Makes the packs that Proctor ships, `invariants/packs/*.json`, from healthy programs: ours, and public ones of the first half of the wild corpus.

    python benchmarks/make_packs.py --checkouts FOLDER [--work DIR] [--only torch] [--folds 4] [--number 4]
    python benchmarks/make_packs.py --checkouts FOLDER --work DIR --recorded --only torch     # of what an earlier call has recorded

FOLDER holds checkouts (`owner+name`) of projects of `benchmarks/wild/projects`; of each project of the first half that is there, the first programs
that run here are taken. One pack an area: torch (one process), distributed (several ranks), and libraries that are
installed. A rule is shipped when it says something about a stranger's program: it is no habit of the learned programs
(`Standing`), names no function of an example and nothing that a library keeps to itself,
asks for no example's model, holds in every run, is seen in several programs, and failed on no held-out run of the
cross-validation inside `infer`. A library's pack says how the library is used (`relations/usage`), and leaves to the torch
pack, which is asked of the same programs and made of many more, what holds without the library. The figure of false alarms in a pack is measured again from outside: the programs are
split into folds, the pack is made without a fold and checked on it; a project is in one fold. A pack of which nothing could be held out does not ship.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from evaluation import ROOT, Bench, programs
from exam import PROCTOR, run
from pack_members import OWN, PUBLIC, Member, own, public

from benchmarks.wild.chances import chances
from proctor.invariants.condition import FAMILY, Kind
from proctor.invariants.invariant import Invariant, Severity, Standing
from proctor.invariants.pack import Measured, Pack, read_pack, write_pack
from proctor.invariants.private import libraries_of, private_name
from proctor.invariants.record import read_records, with_records
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

OUT = ROOT / "invariants" / "packs"
TORCH = ">=2.6,<3"
# Those that a run is known to use, by an integration: each before the libraries that it is built on.
LIBRARIES = {
    "deepspeed": ">=0.15", "diffusers": ">=0.30", "peft": ">=0.15", "transformers": ">=4.40", "accelerate": ">=0.30", "lightning": ">=2.2",
}  # fmt: skip
MIN_PROGRAMS = {"torch": 3} | dict.fromkeys(("distributed", *LIBRARIES), 2)
INFER_S = 3600
WHOLE = frozenset({"transformers", "accelerate", "lightning"})  # libraries whose packs say what the torch pack says, too: they are older
UNMEASURED = frozenset({"lightning", "transformers"})  # they ship from before packs had to have a figure, until they are made again


def speaks_to_strangers(rule: Invariant, fewest: int, libraries: Collection[str]) -> bool:
    """Whether a rule can apply, and is vetted, outside of the programs that it was learned from."""
    own = any("__main__" in str(value) for _, value in rule.hypothesis.params)
    conditions = [c for clause in rule.precondition.any_of for c in clause]
    tied = any("__main__" in (c.value or "") or (c.field == FAMILY and c.kind is Kind.CONSTANT and c.value) for c in conditions)
    failed = rule.false_alarm is not None and rule.false_alarm.failed > 0
    private = bool(private_name(rule.hypothesis, rule.precondition, libraries))  # changes with a version or an option
    habit = standing(rule) is Standing.HABIT
    precision = rule.relation == "output"  # the dtype or range that most programs happen to compute in
    # A law is not made true by many programs that keep it; one shows that the rule speaks of something.
    enough = 1 if standing(rule) is Standing.LAW else fewest
    return not own and not tied and not failed and not private and not habit and not precision and rule.support.programs >= enough


def standing(rule: Invariant) -> Standing:
    relation = registry().get(rule.relation)
    return Standing.HABIT if relation is None else relation.standing_of(rule.hypothesis)


def as_shipped(rule: Invariant) -> Invariant:
    """The rule as strangers get it: what a right program may do on purpose is a warning at most, and no page."""
    level = rule.severity if standing(rule) is not Standing.CHOICE else min(rule.severity, Severity.WARNING, key=lambda s: s.level)
    told = msgspec.structs.replace(rule, severity=level)
    relation = registry().get(rule.relation)
    return told if relation is None else msgspec.structs.replace(told, tier=relation.tier(told))


def learn(work: Path, name: str, members: Sequence[Member], fewest: int) -> Pack:
    """The rules of some programs, all settings of each, that may be shipped."""
    out = work / f"shipped-{name}.json"
    out.unlink(missing_ok=True)
    runs = [str(path) for m in members for setting, path in m.runs.items() if setting in (*OWN, *PUBLIC)]
    families = ["--relations", "usage"] if name.partition("-")[0] in LIBRARIES.keys() - WHOLE else []
    done = run([*PROCTOR, "infer", "-q", "--alone", "--executor", "serial", *families, *runs, "-o", str(out)], timeout_s=INFER_S)
    if done.returncode:
        raise RuntimeError(f"infer {name}: exit {done.returncode}\n{done.stderr[-2000:]}")
    pack = read_pack(out)
    libraries = libraries_of(pack.provenance.libraries)
    kept = [as_shipped(rule) for rule in pack.invariants if speaks_to_strangers(rule, fewest, libraries)]
    return msgspec.structs.replace(pack, invariants=kept)


def held_out(work: Path, name: str, members: Sequence[Member], folds: int, fewest: int) -> Measured:
    """False alarms of packs made without a fold of the programs, on that fold."""
    groups = list(dict.fromkeys(m.project or m.name for m in members))
    programs_seen = runs = checked = failed = 0
    could: collections.Counter[str] = collections.Counter()
    broken: collections.Counter[str] = collections.Counter()
    folds = min(folds, len(groups))
    for fold in range(folds):
        out = [m for m in members if groups.index(m.project or m.name) % folds == fold]
        rest = [m for m in members if m not in out]
        if not rest:
            continue
        pack = learn(work, f"{name}-fold{fold}", rest, min(fewest, len(rest)))
        for member in out:
            programs_seen += 1
            for setting, path in member.runs.items():
                trace = Trace.load([path])
                result = check(trace, [pack])
                runs += 1
                could.update(chances(trace))
                modes = {rule.id: rule.hypothesis.text("mode") for rule in pack.invariants if rule.relation == "course"}
                broken.update({modes[v.id] for v in result.violations if v.id in modes})
                checked += result.checked
                failed += len(result.violations)
                for v in result.violations:
                    print(f"  {name} without it: {member.name} ({setting}): {v.severity} {v.relation}: {v.text} | {v.seen}"[:300], flush=True)
    print(f"  {name}: laws of a step, runs that had something to fail on and failures: " + ", ".join(f"{m} {broken[m]} of {n}" for m, n in sorted(could.items())), flush=True)
    return Measured(programs=programs_seen, runs=runs, checked=checked, failed=failed)


def families(rules: Iterable[Invariant]) -> str:
    counts: dict[str, int] = {}
    for rule in rules:
        counts[rule.relation] = counts.get(rule.relation, 0) + 1
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", type=Path, required=True, help="folder of checkouts of public programs")
    parser.add_argument("--work", type=Path, help="recordings are kept here, and used again")
    parser.add_argument("--only", default="", help="areas whose name contains this")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--number", type=int, default=4, help="public programs of one project, at most")
    parser.add_argument("--settings", type=int, default=len(OWN), help="settings of each of our programs, at most")
    parser.add_argument("--programs", default="", help="our programs whose names contain one of these, separated by commas (default: all)")
    parser.add_argument("--recorded", action="store_true", help="record nothing: use the recordings that are there")
    parser.add_argument("--record-only", action="store_true", help="record, and make no pack")
    parser.add_argument("--record", type=Path, help="what healthy programs of strangers said of each rule (docs/paging.md)")
    args = parser.parse_args()
    if not args.checkouts.is_dir():
        print(f"{args.checkouts}: no such folder of checkouts of public programs", file=sys.stderr)
        return 2
    records = read_records(args.record) if args.record else None
    work = (args.work or Path(tempfile.mkdtemp(prefix="proctor-packs-"))).resolve()
    record = not args.recorded
    everything = public(work / "public", args.checkouts.resolve(), args.number, LIBRARIES, record=record)
    everything += own(Bench(work, args.iters, ""), [p for p in programs("") if any(word in p.name for word in args.programs.split(","))], args.settings, LIBRARIES, record=record)
    areas: dict[str, list[Member]] = {}
    for member in everything:
        areas.setdefault(member.area, []).append(member)
    for name, members in sorted(areas.items()):
        if args.only not in name or args.record_only:
            continue
        fewest = MIN_PROGRAMS[name]
        if len(members) < fewest:
            print(f"{name}: only {len(members)} programs, no pack")
            continue
        measured = held_out(work, name, members, args.folds, fewest)
        pack = learn(work, name, members, fewest)
        if records is not None:
            pack, _ = with_records(pack, records)
        requires = {"torch": TORCH} | ({name: LIBRARIES[name]} if name in LIBRARIES else {})
        origin = msgspec.structs.replace(
            pack.provenance,
            command="python benchmarks/make_packs.py",
            made=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        strangers = {m.project for m in members if m.project}
        note = f"healthy programs: {sum(not m.project for m in members)} of the project, {args.iters} steps, several seeds and sizes"
        if strangers:
            note += f"; {sum(bool(m.project) for m in members)} public ones of {len(strangers)} projects"
        write_pack(msgspec.structs.replace(pack, provenance=origin), OUT / f"{name}.json", requires=requires, measured=measured, note=note)
        print(f"{name}: {len(pack.invariants)} rules ({families(pack.invariants)}) from {len(members)} programs; "
              f"held out: {measured.failed} false of {measured.checked} checked in {measured.runs} runs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
