"""From digests and reports to what is in the table: does a mutant count, when does it act, is it found and named."""

from __future__ import annotations

import json
import re
from itertools import zip_longest
from pathlib import Path
from typing import Any

Events = dict[int, list[list[Any]]]  # by rank: [step, kind, checksum]
SERIOUS = ("error", "critical")
_SAID = ("function", "variable", "module", "text", "expected", "seen", "advice")


def events(folder: Path) -> tuple[Events, int]:
    """The digests that a program's processes wrote, and the step at which a process operator first acted (-1: never)."""
    read = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    fired = [d["fired"] for d in read if d["fired"] >= 0]
    return {d["rank"]: d["events"] for d in read}, min(fired, default=-1)


def difference(clean: Events, mutant: Events) -> tuple[int, str] | None:
    """The first step at which the mutant computes something else, and of what kind; `None` when it never does."""
    found: list[tuple[int, str]] = []
    for rank in clean.keys() | mutant.keys():
        for ours, theirs in zip_longest(clean.get(rank, []), mutant.get(rank, [])):
            if ours is None or theirs is None or ours[1:] != theirs[1:]:
                present = [e for e in (ours, theirs) if e is not None]
                found.append((min(e[0] for e in present), present[0][1]))
                break
    return min(found, default=None)


def errors(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The violations of a report that are errors, with what a reader of the table needs of each."""
    keep = ("id", "relation", "severity", "step", "source", "tier", *_SAID)
    return [{k: v.get(k) for k in keep} for v in report["violations"] if v["severity"] in SERIOUS]


def names(violation: dict[str, Any], words: list[str], file: str, line: int) -> bool:
    """Whether a violation names the planted place: one of its words, or the line (one off at most: lines were added)."""
    place = re.match(r"(.*?):(\d+)$", violation.get("source") or "")
    if place and place[1].endswith(file) and file and abs(int(place[2]) - line) <= 1:
        return True
    said = " ".join(str(violation.get(key) or "") for key in _SAID)
    return any(re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", said) for word in words if word)


def verdict(mutant: list[dict[str, Any]], clean: list[dict[str, Any]], place: dict[str, Any], trigger: int) -> dict[str, Any]:
    """What one source of rules says of a mutant.

    found: an error that the clean program has not. named: such an error names the place. timely: such an error is of the step at
    which the mutant begins to differ, or the next, or of an earlier one.
    """
    known = {v["id"] for v in clean}
    new = [v for v in mutant if v["id"] not in known]
    naming = [v for v in new if names(v, place["words"], place["file"], place["line"])]
    timely = [v for v in new if v["step"] is not None and v["step"] <= trigger + 1]
    best = (naming or new)[:1]
    return {
        "found": bool(new), "named": bool(naming), "timely": bool(timely), "false": len(clean),
        "relations": sorted({v["relation"] for v in new}), "best": best[0]["text"] if best else "",
    }
