"""What two runs have in common before they compute anything: command, environment, versions, ranks, code, first parameters, data."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import polars as pl

from proctor.invariants.files import UNREADABLE, read_file
from proctor.invariants.redact import without_secrets
from proctor.invariants.trace import Run
from proctor.verify.compare import Difference, Section

_MOST: Final = 40  # differences of a section that are listed
_BYTES: Final = 16 << 20
_OPTION: Final = re.compile(r"(--?[A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


def sections_of(first: Run, second: Run) -> list[Section]:
    """All sections, in the order in which a run comes by them."""
    infos = first.info, second.info
    facts = _processes(first), _processes(second)
    return [
        _between("arguments", *(arguments(_words(info.get("command"))) for info in infos)),
        _between("environment", *(_environment(info) for info in infos)),
        _between("versions", *(_versions(said) for said in facts)),
        _between("ranks", *(_ranks(run) for run in (first, second))),
        _between("code", *(_definitions(run) for run in (first, second)), missing="the records say nothing of the program's functions"),
        _between("parameters at start", _start(first), _start(second), missing="no state of a parameter was recorded"),
        _data(first, second),
        _between("random states at start", _generators(first), _generators(second), missing="no state of a generator was recorded"),
    ]


def _between(name: str, first: Mapping[str, str], second: Mapping[str, str], *, missing: str = "") -> Section:
    names = [*first, *(key for key in second if key not in first)]
    found = [Difference(key, first.get(key, ""), second.get(key, "")) for key in names if first.get(key) != second.get(key)]
    note = missing if not first and not second else ""
    if note == "" and missing and bool(first) != bool(second):
        return Section(name, 0, [], f"of one run only: {missing} of the {'first' if not first else 'second'}")
    if len(found) > _MOST:
        note = f"{len(found) - _MOST} more"
    return Section(name, len(names), found[:_MOST], note)


def _words(said: Any) -> list[str]:
    return without_secrets([str(word)[:4000] for word in said[:1000]]) if isinstance(said, list) else []


def arguments(command: Sequence[str]) -> dict[str, str]:
    """Options with their values, and other words by their number; a word that is repeated is numbered, too.

    `python train.py --lr 0.1 --fast` is {"word 1": "python", "word 2": "train.py", "--lr": "0.1", "--fast": "set"}.
    """
    found: dict[str, str] = {}
    words, at, place = list(command), 0, 0
    while at < len(words):
        option = _OPTION.fullmatch(words[at])
        if option is None:
            place += 1
            found[f"word {place}"] = words[at]
        else:
            name, value = option.group(1), option.group(2)
            if value is None and at + 1 < len(words) and _OPTION.fullmatch(words[at + 1]) is None:
                at += 1
                value = words[at]
            again = sum(key == name or key.startswith(f"{name} (") for key in found)
            found[name if not again else f"{name} ({again + 1})"] = "set" if value is None else value
        at += 1
    return found


def _environment(info: Mapping[str, Any]) -> dict[str, str]:
    said = info.get("environment")
    plain = {f"${k}": without_secrets([f"{k}={v}"])[0].partition("=")[2] for k, v in said.items()} if isinstance(said, dict) else {}
    return {**{key: str(info[key]) for key in ("host", "cwd") if key in info}, **plain}


def _processes(run: Run) -> list[tuple[int, dict[str, Any]]]:
    """Rank and `process.json` of each process; those that cannot be read are left out."""
    found = []
    for process in run.processes:
        try:
            said = json.loads(read_file(run.path / "procs" / Path(process.folder).name / "process.json", _BYTES))
        except (OSError, *UNREADABLE):
            continue
        if isinstance(said, dict):
            found.append((process.rank, said))
    return found


def _versions(processes: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, str]:
    """By package; a rank that has another one than the first says so."""
    found: dict[str, str] = {}
    for rank, said in processes:
        mine = {key: str(said[key]) for key in ("python", "torch") if isinstance(said.get(key), str)}
        for key in ("libraries", "packages"):
            more = said.get(key)
            mine |= {str(k): str(v) for k, v in more.items() if v} if isinstance(more, dict) else {}
        for name, version in sorted(mine.items()):
            if found.setdefault(name, version) != version:
                found[f"{name} on rank {rank}"] = version
    return found


def _ranks(run: Run) -> dict[str, str]:
    found = {"ranks": str(len({p.rank for p in run.processes})), "world": str(max((p.world for p in run.processes), default=0))}
    for process in run.processes:
        if process.coords:
            found[f"place of rank {process.rank}"] = ", ".join(f"{axis}={at}" for axis, at in sorted(process.coords.items()))
    return found


def _definitions(run: Run) -> dict[str, str]:
    """What functions and classes of the program are, shortened: enough to see that one is another."""
    found: dict[str, str] = {}
    for process in run.processes:
        for name, text in process.definitions.items():
            found.setdefault(name, text)
    return {name: text if len(text) <= 24 else f"{text[:10]}…{text[-10:]}" for name, text in sorted(found.items())}


def _start(run: Run) -> dict[str, str]:
    """The first value of each parameter and buffer, by rank where there are several."""
    states = run.states
    if not states.height:
        return {}
    wanted = states.filter(pl.col("role").is_in(["parameter", "buffer"]) & (pl.col("attr") == "data") & (pl.col("step") <= 0))
    rows = wanted.group_by("rank", "name", maintain_order=True).first()
    several = len({p.rank for p in run.processes}) > 1
    shape = rows["shape"] if "shape" in rows.columns else pl.Series([""] * rows.height)
    return {
        f"{name}{f' on rank {rank}' if several else ''}": f"norm {norm:.8g}, shape {of or '?'}, {fp:016x}"
        for name, rank, norm, of, fp in zip(rows["name"], rows["rank"], rows["norm"], shape, rows["fp"], strict=True)
    }


def _generators(run: Run) -> dict[str, str]:
    rows = run.values.filter(pl.col("kind") == "rng")
    first = rows.group_by("rank", "place", "item", maintain_order=True).first()
    return {
        f"{place}{f' of worker {item}' if item >= 0 else ''} on rank {rank}": f"{fp:016x}"
        for place, item, rank, fp in zip(first["place"], first["item"], first["rank"], first["fp"], strict=True)
    }


def _batches(run: Run) -> dict[int, list[int]]:
    """Fingerprints of what the model was given, by rank, in order."""
    rows = run.values.filter((pl.col("kind") == "batch") & (pl.col("phase") == "train") & (pl.col("fp") != 0))
    return {int(rank[0]): part["fp"].to_list() for rank, part in rows.group_by("rank", maintain_order=True)}


def _data(first: Run, second: Run) -> Section:
    """The order of the data, by what the model was given while it trained."""
    ours, theirs = _batches(first), _batches(second)
    name = "data order"
    if not ours or not theirs:
        which = "neither run" if not ours and not theirs else "the first run" if not ours else "the second run"
        return Section(name, 0, [], f"{which} has fingerprints of batches (record them without --select)")
    found = []
    for rank in sorted(ours.keys() & theirs.keys()):
        a, b = ours[rank], theirs[rank]
        common = min(len(a), len(b))
        at = next((i for i in range(common) if a[i] != b[i]), None)
        if at is None:
            continue
        same = sum((Counter(a[:common]) & Counter(b[:common])).values())
        how = "the same in another order" if same == common else f"{same} of {common} are also in the other run"
        found.append(Difference(f"batch {at} of rank {rank}", f"{a[at]:016x}", f"{b[at]:016x} ({how})"))
    return Section(name, sum(map(len, ours.values())), found[:_MOST])
