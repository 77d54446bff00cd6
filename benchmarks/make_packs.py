"""Makes the packs that Proctor ships, `invariants/packs/*.json`, from the healthy programs of this repository.

    python benchmarks/make_packs.py [--work DIR] [--only torch] [--folds 4]
    python benchmarks/make_packs.py --work DIR --recorded --only torch     # of what an earlier call has recorded; areas side by side

One pack an area: torch (one process), distributed (several ranks), transformers, accelerate, lightning (those that are
installed). A rule is shipped when it says something about a stranger's program: it is no habit of the learned programs
(`Standing`), names no function of an example and nothing that a library keeps to itself,
asks for no example's model, holds in every run, is seen in several programs, and failed on no held-out run of the
cross-validation inside `infer`. The figure of false alarms in a pack is measured again from outside: the programs are
split into folds, the pack is made without a fold and checked on it.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parent))
from evaluation import ROOT, Bench, Program, programs

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
LIBRARIES = {"transformers": ">=4.40", "accelerate": ">=0.30", "lightning": ">=2.2"}
SETTINGS = ("seed0", "seed1", "size", "lr", "batch")  # that rules are learned from
MIN_PROGRAMS = {"torch": 3, "distributed": 2, "transformers": 2, "accelerate": 2, "lightning": 2}


def area(program: Program, bench: Bench) -> str:
    text = program.script.read_text()
    if program.script.parent.name == "libraries":
        return next((name for name in LIBRARIES if f"import {name}" in text or f"from {name}" in text), "torch")
    ranks = list((bench.recording(program, "seed0") / "procs").iterdir())
    return "distributed" if len(ranks) > 1 else "torch"


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


def learn(bench: Bench, name: str, members: Sequence[Program], fewest: int) -> Pack:
    """The rules of some programs, all settings of each, that may be shipped."""
    pack = read_pack(bench.infer(f"shipped-{name}", members, SETTINGS, options=["--alone"]))
    libraries = libraries_of(pack.provenance.libraries)
    kept = [as_shipped(rule) for rule in pack.invariants if speaks_to_strangers(rule, fewest, libraries)]
    return msgspec.structs.replace(pack, invariants=kept)


def held_out(bench: Bench, name: str, members: Sequence[Program], folds: int, fewest: int) -> Measured:
    """False alarms of packs made without a fold of the programs, on that fold."""
    programs_seen = runs = checked = failed = 0
    folds = min(folds, len(members))
    for fold in range(folds):
        out = members[fold::folds]
        rest = [p for p in members if p not in out]
        if not rest:
            continue
        pack = learn(bench, f"{name}-fold{fold}", rest, min(fewest, len(rest)))
        for program in out:
            programs_seen += 1
            for setting in bench.settings(program):
                result = check(Trace.load([bench.recording(program, setting)]), [pack])
                runs += 1
                checked += result.checked
                failed += len(result.violations)
                for v in result.violations:
                    print(f"  {name} without it: {program.name} ({setting}): {v.relation}: {v.text} | {v.seen}"[:300])
    return Measured(programs=programs_seen, runs=runs, checked=checked, failed=failed)


def families(rules: Iterable[Invariant]) -> str:
    counts: dict[str, int] = {}
    for rule in rules:
        counts[rule.relation] = counts.get(rule.relation, 0) + 1
    return ", ".join(f"{name} {n}" for name, n in sorted(counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, help="recordings are kept here, and used again")
    parser.add_argument("--only", default="", help="areas whose name contains this")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--iters", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--recorded", action="store_true", help="record nothing: use the recordings that are there")
    parser.add_argument("--record", type=Path, help="what healthy programs of strangers said of each rule (docs/paging.md)")
    args = parser.parse_args()
    records = read_records(args.record) if args.record else None
    bench = Bench(args.work or Path(tempfile.mkdtemp(prefix="proctor-packs-")), args.iters, "")
    everything = programs("")
    with ThreadPoolExecutor(args.jobs) as pool:
        if not args.recorded:
            list(pool.map(lambda pair: bench.record(*pair), [(p, s) for p in everything for s in p.settings()]))
    areas: dict[str, list[Program]] = {}
    for program in everything:
        if bench.there(program, "seed0"):
            areas.setdefault(area(program, bench), []).append(program)
    for name, members in sorted(areas.items()):
        if args.only not in name:
            continue
        fewest = MIN_PROGRAMS[name]
        if len(members) < fewest:
            print(f"{name}: only {len(members)} programs, no pack")
            continue
        measured = held_out(bench, name, members, args.folds, fewest)
        pack = learn(bench, name, members, fewest)
        if records is not None:
            pack, _ = with_records(pack, records)
        requires = {"torch": TORCH} | ({name: LIBRARIES[name]} if name in LIBRARIES else {})
        origin = msgspec.structs.replace(
            pack.provenance,
            command="python benchmarks/make_packs.py",
            made=datetime.datetime.now(datetime.UTC).date().isoformat(),
        )
        write_pack(
            msgspec.structs.replace(pack, provenance=origin), OUT / f"{name}.json", requires=requires, measured=measured,
            note=f"healthy programs of the project, {args.iters} steps, several seeds and sizes",
        )
        print(f"{name}: {len(pack.invariants)} rules ({families(pack.invariants)}) from {len(members)} programs; "
              f"held out: {measured.failed} false of {measured.checked} checked in {measured.runs} runs", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
