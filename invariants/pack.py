"""Packs: versioned JSON files of invariants.

A pack is data from somebody else as often as not, so it is decoded by type, never evaluated; a rule of a
relation that this version does not have is skipped and counted, because one new rule must not cost the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from proctor.errors import PackError
from proctor.invariants.invariant import Invariant
from proctor.invariants.schema import PACK_SCHEMA

MAX_PACK_BYTES = 256 * 1024 * 1024


class Provenance(msgspec.Struct, frozen=True):
    """Where the rules come from."""

    tool: str = ""
    torch: str = ""
    runs: int = 0
    programs: list[str] = []
    records: int = 0


class Pack(msgspec.Struct, frozen=True):
    """Invariants and their provenance."""

    invariants: list[Invariant]
    provenance: Provenance = Provenance()
    skipped: list[str] = []  # one sentence a rule that was left out when reading


class _File(msgspec.Struct):
    schema: int
    invariants: list[msgspec.Raw]
    provenance: Provenance = Provenance()


def write_pack(pack: Pack, path: Path) -> None:
    """Write a pack: one rule a line, sorted by id, so that it can be diffed.

    Raises:
        PackError: the file cannot be written.
    """
    rules = sorted(pack.invariants, key=lambda i: (i.relation, i.id))
    head = msgspec.json.encode(pack.provenance).decode()
    body = ",\n  ".join(msgspec.json.encode(rule).decode() for rule in rules)
    text = f'{{"schema":{PACK_SCHEMA},\n "provenance":{head},\n "invariants":[\n  {body}\n ]}}\n'
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as e:
        raise PackError(f"{path}: cannot write the pack: {e.strerror or e}") from None


def read_pack(path: Path, relations: Sequence[str] | None = None) -> Pack:
    """Read a pack.

    Args:
        path: the file.
        relations: names of relations that this version knows; rules of others are skipped. `None`: all.

    Raises:
        PackError: no such file, not JSON, not a pack, or a newer schema.
    """
    try:
        if path.stat().st_size > MAX_PACK_BYTES:
            raise PackError(f"{path}: larger than {MAX_PACK_BYTES >> 20} MiB, not a pack")
        blob = path.read_bytes()
    except OSError as e:
        raise PackError(f"{path}: {e.strerror or e}", hint="proctor infer RUN… -o PACK") from None
    try:
        version = msgspec.json.decode(blob, type=_Version).schema
    except msgspec.MsgspecError as e:
        raise PackError(f"{path}: not a pack: {e}") from None
    if version > PACK_SCHEMA:
        raise PackError(
            f"{path}: pack schema {version}, this Proctor reads up to {PACK_SCHEMA}", hint="pip install -U proctor"
        )
    try:
        file = msgspec.json.decode(blob, type=_File)
    except msgspec.MsgspecError as e:
        raise PackError(f"{path}: not a pack: {e}") from None
    rules: list[Invariant] = []
    skipped: list[str] = []
    for i, raw in enumerate(file.invariants):
        try:
            rule = msgspec.json.decode(raw, type=Invariant)
        except msgspec.MsgspecError as e:
            where = str(e).replace("`$", f"`$.invariants[{i}]")
            raise PackError(f"{path}: {where}", hint=f"proctor pack lint {path}") from None
        if relations is not None and rule.relation not in relations:
            skipped.append(f"rule {rule.id}: unknown relation {rule.relation!r}, skipped")
            continue
        rules.append(rule)
    return Pack(rules, file.provenance, skipped)


class _Version(msgspec.Struct):
    schema: int
