"""A comparison on a terminal: the outcome, then what differs beforehand, then where numbers part."""

from __future__ import annotations

from typing import Final

from proctor.verify.compare import Comparison
from proctor.verify.wording import clean

_WIDTH: Final = 22
_LONG: Final = 90  # characters of a value that are shown


def render(found: Comparison) -> str:
    """The comparison as plain text."""
    lines = [f"PROCTOR COMPARE  {clean(found.said)}", f"  first   {clean(found.first)}", f"  second  {clean(found.second)}", ""]
    for section in found.sections:
        number = len(section.differences)
        said = f"{number} of {section.compared} differ" if number else f"the same ({section.compared})" if section.compared else "not compared"
        lines.append(f"{section.name:{_WIDTH}}  {said}{f'; {section.note}' if section.note else ''}")
        for one in section.differences:
            lines += [f"    {clean(one.name)}", f"        first   {_short(one.first)}", f"        second  {_short(one.second)}"]
    lines.append("")
    if found.parted is None:
        lines.append(f"no value differs: {found.values} values of {found.steps} steps were compared" if found.values else "no value was compared")
    else:
        at = f"step {found.parted.step}" if found.parted.step >= 0 else "the time before the first step"
        lines.append(f"FIRST APART  {at}: {found.apart} value{'s' if found.apart > 1 else ''} of it differ{'' if found.apart > 1 else 's'}")
        for value in found.partings[:10]:
            where = f"  ({clean(value.where)})" if value.where else ""
            lines.append(f"    rank {value.rank}: {value.kind} {clean(value.name)}{where}")
            lines += [f"        first   {_short(value.first)}", f"        second  {_short(value.second)}"]
        if found.apart > 10:
            lines.append(f"    and {found.apart - 10} more")
    lines += [f"note: {clean(note)}" for note in found.notes]
    return "\n".join(lines) + "\n"


def _short(text: str) -> str:
    text = clean(text) or "not there"
    return text if len(text) <= _LONG else text[: _LONG - 1] + "…"
