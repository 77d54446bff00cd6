"""Which packs is a run judged by: those that were named, or the shipped ones that fit it?

A pack says what it requires: a range of torch versions, and libraries that the program uses.

A requirement is a name and comma-separated comparisons of release numbers, as in `torch>=2.6,<3` (PEP 440 without
its pre- and post-releases: those of a version count as that version).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.errors import UsageError
from proctor.invariants import relations
from proctor.invariants.files import UNREADABLE, read_file
from proctor.invariants.pack import Pack, read_pack, shipped
from proctor.invariants.trace import Trace

_REQUIREMENT: Final = re.compile(r"\s*([A-Za-z_][\w.-]*)\s*((?:(?:>=|<=|==|!=|>|<)\s*\d+(?:\.\d+)*\s*,?\s*)*)\s*")
_COMPARISON: Final = re.compile(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)")
_MAX_INFO_BYTES: Final = 1 << 20
_REASONS: Final = 3  # why packs do not fit, that one line lists
# Names before the first dot of a recorded function that are no library.
_OURS: Final = frozenset({"", "torch", "__main__", "builtins", "proctor"})


def load_packs(paths: Sequence[Path], trace: Trace | None = None) -> tuple[list[Pack], list[str]]:
    """Read packs, the shipped ones that fit a run when none is named; also gives their names.

    Args:
        paths: as the user named them.
        trace: of the run; without one all shipped packs are read.

    Raises:
        UsageError: none is named, and none is shipped or none of these fits.
        PackError: a pack cannot be read.
    """
    known = list(relations.registry())
    if paths:
        return [read_pack(path, known) for path in paths], [str(path) for path in paths]
    hint = "proctor infer RUN… -o PACK"
    if not shipped():
        raise UsageError("no rules to check against: name a pack with -i (this installation ships none)", hint=hint)
    versions = None if trace is None else used(trace)
    packs, names, reasons = [], [], []
    for path in shipped():
        pack = read_pack(path, known)
        reason = "" if versions is None else misfit(pack.requires, versions)
        if reason:
            reasons.append(f"{path.stem}: {reason}")
        else:
            packs.append(pack)
            names.append(str(path))
    if not packs:
        more = f"; and {len(reasons) - _REASONS} more" if len(reasons) > _REASONS else ""
        raise UsageError(f"no shipped pack fits this run, name one with -i ({'; '.join(reasons[:_REASONS])}{more})", hint=hint)
    return packs, names


def parse_requirement(text: str) -> tuple[str, str]:
    """Name and version range of a requirement.

    Raises:
        ValueError: it is none.
    """
    match = _REQUIREMENT.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is no requirement: expected a name and versions, as in torch>=2.6,<3")
    return match[1], ",".join("".join(pair) for pair in _COMPARISON.findall(match[2]))


def within(version: str, wanted: str) -> bool:
    """Whether a version (`2.6.0+cpu`) is in a range (`>=2.6,<3`); what is no version is in none but the empty one."""
    comparisons = _COMPARISON.findall(wanted)
    if not comparisons:
        return True
    match = re.match(r"\d+(?:\.\d+)*", version)
    return match is not None and all(_holds(_release(match[0]), op, _release(number)) for op, number in comparisons)


def misfit(requires: Mapping[str, str], versions: Mapping[str, frozenset[str]]) -> str:
    """Why a pack does not fit, in words; "" when it does.

    Args:
        requires: of the pack.
        versions: of what the run uses, by name; an empty set where the version is not known.
    """
    for name, wanted in sorted(requires.items()):
        used = versions.get(name)
        if used is None:
            return f"the run does not use {name}"
        wrong = sorted(v for v in used if not within(v, wanted))
        if wrong:
            return f"it is for {name} {wanted}, the run used {', '.join(wrong)}"
    return ""


def used(trace: Trace) -> dict[str, frozenset[str]]:
    """Libraries that a run used and their versions: torch, and those whose functions it called."""
    told = [_recorded(Path(process.folder) / "process.json") for process in trace.processes]
    return _versions(("torch", *called(trace.functions)), told)


def said(info: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """As `used`, of what one process says of itself (`process.json`)."""
    try:
        return _versions(("torch",), [_by_name(msgspec.convert(info, _Info))])
    except msgspec.ValidationError:
        return _versions(("torch",), [])


def _versions(names: Iterable[str], told: Iterable[Mapping[str, str]]) -> dict[str, frozenset[str]]:
    versions: dict[str, set[str]] = {name: set() for name in names}
    for one in told:
        for name, version in one.items():
            versions.setdefault(name, set()).add(version)
    return {name: frozenset(v - {""}) for name, v in versions.items()}


def called(functions: Iterable[str]) -> set[str]:
    """Libraries that recorded functions belong to."""
    return {name.partition(".")[0] for name in functions if "." in name and not name.startswith("<")} - _OURS


class _Info(msgspec.Struct):
    torch: str = ""
    libraries: dict[str, str] = {}


def _recorded(path: Path) -> dict[str, str]:
    """Versions that a process wrote down; none where it did not."""
    try:
        info = msgspec.json.decode(read_file(path, _MAX_INFO_BYTES), type=_Info)
    except (OSError, *UNREADABLE):
        return {}  # reading the trace has said so already
    return _by_name(info)


def _by_name(info: _Info) -> dict[str, str]:
    return {**info.libraries, "torch": info.torch}


def _release(text: str) -> tuple[int, ...]:
    numbers = [int(n) for n in text.split(".")]
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _holds(version: tuple[int, ...], op: str, wanted: tuple[int, ...]) -> bool:
    match op:
        case ">=":
            return version >= wanted
        case "<=":
            return version <= wanted
        case ">":
            return version > wanted
        case "<":
            return version < wanted
        case "==":
            return version == wanted
        case _:
            return version != wanted
