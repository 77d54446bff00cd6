"""What strangers' healthy programs said of the rules of a pack: the file that a campaign writes, and how a pack takes it in.

    {"corpus": "wild, first half, 2026-11", "rules": {"616c6954c894": {"tested": 412, "failed": 0, "retracted": 0, "programs": 96}}}

A rule goes by its id, so that one whose precondition has changed since has no record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import PackError
from proctor.invariants import relations
from proctor.invariants.files import UNREADABLE, read_file
from proctor.invariants.invariant import Invariant, Record
from proctor.invariants.pack import Pack

_MAX_BYTES: Final = 64 << 20


class Records(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Records by id of the rule."""

    rules: dict[str, Record]
    corpus: str = ""


def read_records(path: Path) -> Records:
    """Read what a campaign has written.

    Raises:
        PackError: there is no such file, or it is another.
    """
    try:
        records = msgspec.json.decode(read_file(path, _MAX_BYTES), type=Records)
    except OSError as e:
        raise PackError(f"{path}: {e.strerror or e}") from None
    except UNREADABLE as e:
        raise PackError(f"{path}: not a file of records: {e}") from None
    for rule, record in records.rules.items():
        wrong = min(record.failed, record.retracted, record.programs) < 0 or max(record.failed, record.retracted) > record.tested
        if wrong:
            raise PackError(f"{path}: $.rules.{rule}: of {record.tested} runs, {record.failed} failed and {record.retracted} were taken back")
    return records


def with_records(pack: Pack, records: Records) -> tuple[Pack, int]:
    """The pack with the records of its rules in place of those that it had, and how many rules have one now."""
    known = relations.registry()
    rules: list[Invariant] = []
    for rule in pack.invariants:
        record = records.rules.get(rule.id)
        if record is not None:
            rule = msgspec.structs.replace(rule, record=msgspec.structs.replace(record, corpus=record.corpus or records.corpus))
            relation = known.get(rule.relation)
            rule = rule if relation is None else msgspec.structs.replace(rule, tier=relation.tier(rule))
        rules.append(rule)
    return msgspec.structs.replace(pack, invariants=rules), sum(r.record is not None for r in rules)
