"""How a collective is written in the `values` table: function, group, operation, root or peer, as one JSON text."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final, NamedTuple

_MAX_LISTED: Final = 32  # ranks of an irregular group that are listed
MAX_WORLD: Final = 1 << 20  # ranks; a file that names more is damaged


class Group(NamedTuple):
    """A process group: its name, the same on all members, and its ranks as a text."""

    name: str
    ranks: str


class Collective(NamedTuple):
    """What one rank says when it calls a collective."""

    fn: str  # without torch.distributed.
    group: Group
    op: str = ""
    root: int = -1  # source or destination in the world; -1: there is none
    peer: int = -1  # of a point-to-point call; -1: none, or any
    tag: int = 0
    caller: str = ""  # the function of the program that calls it


def text(
    fn: str, group: Group, *, op: str = "", root: int | None = None, peer: int | None = None, tag: int = 0, caller: str = ""
) -> str:
    """The text of a call, with what is set."""
    said: dict[str, Any] = {"fn": fn, "name": group.name, "ranks": group.ranks}
    said |= {k: v for k, v in (("op", op or None), ("root", root), ("peer", peer), ("tag", tag or None), ("by", caller or None)) if v is not None}
    return json.dumps(said, separators=(",", ":"))


def parse(text: str) -> Collective | None:
    """Read such a text; `None` for any other."""
    if not text.startswith('{"fn"'):
        return None
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    words = [said.get(k, "") for k in ("fn", "name", "ranks", "op", "by")]
    numbers = [said.get(k, d) for k, d in (("root", -1), ("peer", -1), ("tag", 0))]
    if not all(isinstance(w, str) for w in words) or not all(type(n) is int and abs(n) < 1 << 31 for n in numbers):
        return None
    return Collective(words[0], Group(words[1], words[2]), words[3], numbers[0], numbers[1], numbers[2], words[4])


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks as `first:last:stride` where they are regular, a list where they are few, else size and digest."""
    if len(ranks) == 1:
        return str(ranks[0])
    stride = ranks[1] - ranks[0]
    if stride > 0 and len(ranks) > 2 and ranks == tuple(range(ranks[0], ranks[-1] + 1, stride)):
        return f"{ranks[0]}:{ranks[-1]}:{stride}"
    if len(ranks) <= _MAX_LISTED:
        return ",".join(map(str, ranks))
    digest = hashlib.blake2b(",".join(map(str, ranks)).encode(), digest_size=6).hexdigest()
    return f"{len(ranks)} ranks {digest}"


def ranks_of(text: str) -> tuple[int, ...]:
    """The ranks behind such a text; empty where only size and digest are known."""
    try:
        if ":" in text:
            first, last, stride = (int(part) for part in text.split(":"))
            regular = 0 <= first <= last < 1 << 31 and stride > 0 and (last - first) // stride < MAX_WORLD
            return tuple(range(first, last + 1, stride)) if regular else ()
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        return ()
