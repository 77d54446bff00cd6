"""What has to be recorded so that some packs can be checked, remembered from one command to the next.

To decode packs and ask each rule takes a third of a second, most of it for imports, and the answer changes with the packs and with Proctor alone.
So it lies in `$XDG_CACHE_HOME/proctor`, as JSON, under a digest of the packs' bytes and of the files that answer. A file there that is
not what it should be, or cannot be written, is as none.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

import proctor
from proctor.invariants.files import read_file, replace_file

_MAX_PACK: Final = 256 << 20
_MAX_KEPT: Final = 1 << 22
_FORM: Final = 1  # of the file; another one is not read


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    form: int
    key: str
    functions: list[str]
    states: list[str]
    values: list[str]


def needs_of(packs: Sequence[Path]) -> dict[str, Any]:
    """What to record so that these packs can be checked: arguments of `RecordConfig`.

    Raises:
        PackError: a pack cannot be read.
    """
    return known(packs) or _asked(packs)


def known(packs: Sequence[Path]) -> dict[str, Any] | None:
    """The same where it is remembered, and so each of these packs is sound; else None."""
    key = _key(packs)
    if not key:
        return None
    try:
        kept = msgspec.json.decode(read_file(_place(key), _MAX_KEPT), type=_Kept)
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    if kept.form != _FORM or kept.key != key:
        return None
    return {"functions": frozenset(kept.functions), "states": frozenset(kept.states), "values": frozenset(kept.values)}


def _asked(packs: Sequence[Path]) -> dict[str, Any]:
    from proctor.invariants.pack import read_pack
    from proctor.invariants.relations import Needs, registry

    key = _key(packs)  # of the bytes before they are read: what changes meanwhile has another one
    relations = registry()
    needs = Needs()
    skipped = False
    for path in packs:
        pack = read_pack(path, list(relations))
        skipped |= bool(pack.skipped)  # said again each time
        for rule in pack.invariants:
            needs |= relations[rule.relation].needs(rule.hypothesis)
    kept = _Kept(_FORM, key, sorted(needs.functions), sorted(needs.states), sorted(needs.values))
    if key and not skipped and key == _key(packs):
        with contextlib.suppress(OSError):
            _place(key).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            replace_file(_place(key), msgspec.json.encode(kept), mode=0o600)
    return {"functions": needs.functions, "states": needs.states, "values": needs.values}


def _key(packs: Sequence[Path]) -> str:
    """Of the packs' bytes, and of our files that say what a rule needs; "" where one cannot be read."""
    digest = hashlib.sha256(f"{_FORM} {proctor.__version__}".encode())
    try:
        for path in packs:
            content = read_file(path, _MAX_PACK)
            digest.update(len(content).to_bytes(8, "little") + content)
        rules = Path(proctor.invariants.__path__[0])
        for source in sorted([*rules.glob("*.py"), *rules.glob("relations/**/*.py")]):
            status = source.stat()
            digest.update(f"{source.relative_to(rules)} {status.st_size} {status.st_mtime_ns}\n".encode())
    except (OSError, ValueError):
        return ""
    return digest.hexdigest()


def _place(key: str) -> Path:
    home = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(home) if home.startswith("/") else Path("~/.cache").expanduser()
    return base / "proctor" / f"needs-{key[:32]}.json"
