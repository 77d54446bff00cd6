"""Packs: versioned JSON files of invariants.

A pack is data from somebody else as often as not, so it is decoded by type, never evaluated; a rule of a
relation that this version does not have is skipped and counted, because one new rule must not cost the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from proctor.errors import PackError
from proctor.invariants.condition import Precondition
from proctor.invariants.files import UNREADABLE, read_file, replace_file
from proctor.invariants.invariant import Invariant, Severity, hypothesis_id
from proctor.invariants.schema import PACK_SCHEMA
from proctor.invariants.suppression import Suppression

MAX_PACK_BYTES = 256 * 1024 * 1024


def shipped() -> list[Path]:
    """Packs that come with Proctor."""
    return sorted((Path(__file__).parent / "packs").glob("*.json"))


def taught(relations: Sequence[str]) -> dict[str, Precondition]:
    """Where the laws that come with Proctor apply, by `hypothesis_id`; what ships as a warning is none.

    Args:
        relations: names of relations that this version knows.
    """
    packs = [read_pack(path, relations) for path in shipped()]
    packs.sort(key=lambda pack: len(pack.invariants))  # what torch alone has taught, in the most programs, counts
    return {hypothesis_id(rule.hypothesis): rule.precondition for pack in packs for rule in pack.invariants if rule.severity in (Severity.ERROR, Severity.CRITICAL)}


class Source(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """One run that rules were learned from."""

    id: str  # digest of its `run.json`, so that copies of a run are one
    program: str
    name: str = ""  # of its folder
    families: tuple[str, ...] = ()  # digests of `Trace.families` of its processes
    records: int = 0


class Measured(msgspec.Struct, frozen=True):
    """False alarms of a whole pack on healthy runs that it was not learned from."""

    programs: int
    runs: int
    checked: int  # rules that applied, over all runs
    failed: int


class Provenance(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where the rules come from."""

    tool: str = ""
    torch: str = ""  # versions, separated by commas
    runs: int = 0
    programs: list[str] = []
    records: int = 0
    sources: tuple[Source, ...] = ()  # by id
    libraries: dict[str, str] = {}  # libraries used by the programs: versions, "" where unknown
    command: str = ""  # what made the pack
    made: str = ""  # date, YYYY-MM-DD
    note: str = ""
    measured: Measured | None = None


class Refuted(msgspec.Struct, frozen=True, order=True, omit_defaults=True):
    """A hypothesis that healthy runs contradict with nothing that would tell when: merging brings it back nowhere."""

    hypothesis: str  # `hypothesis_id`
    families: tuple[str, ...] = ()  # `Source.families` in which it is refuted; (): all of the pack's


class Pack(msgspec.Struct, frozen=True):
    """Invariants and their provenance."""

    invariants: list[Invariant]
    provenance: Provenance = Provenance()
    skipped: list[str] = []  # one sentence a rule that was left out when reading
    requires: dict[str, str] = {}  # library: version range; where the rules fit (`invariants.fit`)
    suppressions: tuple[Suppression, ...] = ()
    refuted: tuple[Refuted, ...] = ()
    withdrawn: tuple[Invariant, ...] = ()  # rules that the packs this one was merged from contradict; never checked


class _File(msgspec.Struct):
    schema: int
    invariants: list[msgspec.Raw]
    provenance: Provenance = Provenance()
    requires: dict[str, str] = {}
    suppressions: tuple[Suppression, ...] = ()
    refuted: tuple[Refuted, ...] = ()
    withdrawn: tuple[Invariant, ...] = ()


def write_pack(
    pack: Pack,
    path: Path,
    *,
    requires: Mapping[str, str] | None = None,
    note: str | None = None,
    measured: Measured | None = None,
) -> None:
    """Write a pack: one rule a line, sorted by relation and id, so that it can be diffed.

    Args:
        pack: what to write.
        path: the file; replaced as a whole.
        requires: instead of the pack's own.
        note: instead of that of its provenance.
        measured: instead of that of its provenance.

    Raises:
        PackError: the file cannot be written.
    """
    origin = pack.provenance
    if note is not None:
        origin = msgspec.structs.replace(origin, note=note)
    if measured is not None:
        origin = msgspec.structs.replace(origin, measured=measured)
    head = {
        "provenance": origin,
        "requires": dict(pack.requires if requires is None else requires),
        "suppressions": pack.suppressions,
        "refuted": pack.refuted,
        "withdrawn": pack.withdrawn,
    }
    lines = "".join(f' "{k}":{msgspec.json.encode(v).decode()},\n' for k, v in head.items() if v)
    rules = sorted(pack.invariants, key=lambda i: (i.relation, i.id))
    body = ",\n  ".join(msgspec.json.encode(rule).decode() for rule in rules)
    text = f'{{"schema":{PACK_SCHEMA},\n{lines} "invariants":[\n  {body}\n ]}}\n'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, text.encode())
    except OSError as e:
        raise PackError(f"{path}: cannot write the pack: {e.strerror or e}") from None


def read_pack(path: Path, relations: Sequence[str] | None = None) -> Pack:
    """Read a pack.

    Args:
        path: the file.
        relations: names of relations that this version knows, to use the rules; rules of others are skipped. `None`: all, to look at them.

    Raises:
        PackError: no such file, not JSON, not a pack, a newer schema, or a rule that its relation does not understand.
    """
    try:
        blob = read_file(path, MAX_PACK_BYTES)
    except OSError as e:
        raise PackError(f"{path}: {e.strerror or e}", hint="proctor infer RUN… -o PACK") from None
    try:
        version = msgspec.json.decode(blob, type=_Version).schema
    except UNREADABLE as e:
        raise PackError(f"{path}: not a pack: {e}") from None
    if version > PACK_SCHEMA:
        raise PackError(
            f"{path}: pack schema {version}, this Proctor reads up to {PACK_SCHEMA}", hint="pip install -U proctor"
        )
    try:
        file = msgspec.json.decode(blob, type=_File)
    except UNREADABLE as e:
        raise PackError(f"{path}: not a pack: {e}") from None
    rules: list[Invariant] = []
    skipped: list[str] = []
    for i, raw in enumerate(file.invariants):
        try:
            rule = msgspec.json.decode(raw, type=Invariant)
        except UNREADABLE as e:
            where = str(e).replace("`$", f"`$.invariants[{i}]")
            raise PackError(f"{path}: {where}", hint=f"proctor pack lint {path}") from None
        if relations is not None and rule.relation not in relations:
            skipped.append(f"rule {rule.id}: unknown relation {rule.relation!r}, skipped")
            continue
        if relations is not None and (why := _not_understood(rule)):  # it is about to be used
            raise PackError(f"{path}: `$.invariants[{i}]`: {why}", hint="make the pack again")
        rules.append(rule)
    ours = {rule.id for rule in rules}  # what others wrote may not silence anybody else's rules
    hushed = tuple(s for s in file.suppressions if s.rule in ours)
    return Pack(rules, file.provenance, skipped, file.requires, hushed, file.refuted, file.withdrawn)


def _not_understood(rule: Invariant) -> str:
    """Why the relation of a rule cannot do anything with what the rule says; "" where it can, and for unknown relations."""
    from proctor.invariants.relations import registry

    relation = registry().get(rule.relation)
    if relation is None:
        return ""
    try:
        relation.say(rule.hypothesis)
        relation.needs(rule.hypothesis)
    except (LookupError, TypeError, ValueError, AttributeError) as e:
        return f"{type(e).__name__}: {e} is nothing that the relation {rule.relation!r} knows".replace("KeyError: ", "")
    return ""


class _Version(msgspec.Struct):
    schema: int
