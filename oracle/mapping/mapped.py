"""A candidate's recording with the names, and the parameters, of the reference: fused ones split, transposed ones turned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import OracleError
from proctor.oracle.judging.verdicts import Verdict, conclude
from proctor.oracle.mapping.found import Found, find
from proctor.oracle.merging.align import BUFFERS, PARAMETERS
from proctor.oracle.merging.decoding import View
from proctor.oracle.plans.fuse import FuseRule, generalised
from proctor.oracle.plans.plan import Plan, RenameRule
from proctor.oracle.store import RankRecord, Recording
from proctor.oracle.tensors import Entry, key_of

Array = npt.NDArray[Any]


class Mapped(Recording):
    """A candidate as the reference calls things.

    Args:
        recording: of the candidate.
        found: names.
        rows: of the reference's parameters.
    """

    def __init__(self, recording: Recording, found: Found, rows: Mapping[str, int]) -> None:
        self.path, self.info = recording.path, recording.info
        self.found, self._rows = found, rows

    def judged(self, verdict: Verdict) -> Verdict:
        """A verdict with what was found; of a parameter that may be one of several in the reference nobody can say that these are missing."""
        notes, unchecked = (*self.said(), *verdict.notes), (*self.found.unclear, *verdict.unchecked)
        lacking = [t for t in verdict.tensors if t.verdict == "missing" and t.kind in PARAMETERS and t.name in self.found.options]
        if verdict.verdict != "different" or not lacking:
            return msgspec.structs.replace(verdict, notes=notes, unchecked=unchecked)
        gone = {id(t) for t in lacking}
        tensors = [msgspec.structs.replace(t, verdict="unmapped", note="which parameter of the candidate it is, is not known") if id(t) in gone else t for t in verdict.tensors]
        again = conclude(tensors, verdict.replicas, unchecked=unchecked, notes=notes)
        return msgspec.structs.replace(again, steps=verdict.steps, reason=f"{again.reason}; {len({t.name for t in lacking})} parameters of the reference could not be told from each other")

    def said(self) -> list[str]:
        """What was found, for a reader."""
        found = self.found
        fused = [f"{name} = {', '.join(rule.names(name) or rule.to)}{', transposed' if rule.transpose else ''}{f' in {rule.groups} groups' if rule.groups else ''}" for name, rule in found.fused.items()]
        out = [f"mapped by content: {len(found.renames)} parameters have other names, {len(found.fused)} are fused or transposed (--save-plan FILE keeps the mapping)"] if found.renames else []
        return [*out, *fused[:4], *([f"… and {len(fused) - 4} more like these"] if len(fused) > 4 else [])]

    def ranks(self, run: str = "clean") -> dict[int, RankRecord]:
        """As of `Recording`."""
        return {rank: _view(record, self.found, self._rows) for rank, record in super().ranks(run).items()}

    def own(self, values: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, Any]]:
        """What ranks are given, under the names of the candidate: parts of what is fused there are put together.

        Args:
            values: by rank, then as `key_of` calls them with names of the reference; tensors of torch where something may be fused.
        """
        return {rank: self._own(record, values.get(rank, {})) for rank, record in super().ranks().items()}

    def _own(self, record: RankRecord, values: Mapping[str, Any]) -> dict[str, Any]:
        owners, out = _owners(self.found), dict[str, Any]()
        for e in record.entries:
            slot, call = ("", 0) if e.kind == "main_grad" else (e.slot, e.call + record.dry.get(e.step, 0))
            names, rule, last = _called(e, self.found, owners)
            held = [values.get(key_of(e.step, e.kind, n, slot, call)) for n in names]
            if not held or any(h is None for h in held):
                continue
            rows = [self._rows.get(f"{n}.weight" if last else n, 0) for n in names]
            if (whole := _joined(held, rule, rows, last=last) if rule is not None else held[0]) is not None:
                out[key_of(e.step, e.kind, e.name, slot, call)] = whole
        return out

    def own_names(self, module: str) -> dict[str, bool]:
        """What ranks call a module of the reference, and whether it is a part of that only."""
        owners, out = _owners(self.found), dict[str, bool]()
        for record in super().ranks().values():
            for e in record.entries:
                if e.kind in ("input", "output") and module in (names := _called(e, self.found, owners)[0]):
                    out[e.name] = len(names) > 1
        return out


def mapped(reference: Recording, candidate: Recording, plan: Plan | None) -> tuple[Recording, Plan | None]:
    """The candidate under the reference's names, where its own are other ones, and the plan that says how; as it is where nothing is to be done.

    Args:
        reference: trusted.
        candidate: judged.
        plan: that was given; what it renames or fuses is not looked for.
    """
    try:
        theirs, mine = reference.ranks(reference.trusted), candidate.ranks()
    except OracleError:
        return candidate, None  # whoever compares them says why
    known = {e.name: record.array(e) for record in theirs.values() for e in record.entries if e.kind == "param" and e.step == 0}
    own = {e.name for record in mine.values() for e in record.entries if e.kind == "param" and e.step == 0}
    if own <= known.keys():
        return candidate, None
    rows = {name: len(values) if values.ndim else 1 for name, values in known.items()}
    if plan is not None and (plan.fuses or plan.renames):
        said = Found(fused={name: rule for name in own for rule in plan.fuses if rule.names(name)})
        return (Mapped(candidate, said, rows) if said.fused else candidate), None
    found = find(known, mine)
    if not (found.fused or found.renames or found.options):
        return candidate, None
    return Mapped(candidate, found, rows), kept(found, plan) if found.fused or found.renames else None


def kept(found: Found, plan: Plan | None = None) -> Plan:
    """A plan that says what was found, to be given next time."""
    made = Plan() if plan is None else Plan.from_json(plan.to_json())
    single = {name: FuseRule(name, (to,)) for name, to in found.renames.items()}
    for rule in generalised(found.fused):
        made.fuses.append(rule)
    for rules, kind in ((single, "param"), ({n: FuseRule(n, (to,)) for n, to in found.modules.items()}, "activation")):
        for rule in generalised(rules):
            if rule.pattern != re.escape(rule.to[0]):
                made.add(RenameRule(rule.pattern, rule.to[0], kind=kind))
    return made


def _owners(found: Found) -> dict[str, FuseRule]:
    return {name.rpartition(".")[0]: rule for name, rule in found.fused.items() if name.endswith(".weight")}


def _joined(parts: list[Any], rule: FuseRule, rows: Sequence[int], *, last: bool) -> Any:
    """The inverse of `_split`; `None` where the parts do not make up one tensor."""
    import torch

    turned = [p.movedim(-1, 0) if last else p for p in parts]
    have, whole = sum(len(p) for p in turned), sum(rows)
    groups = rule.groups * have // whole if rule.groups and whole else 1
    if groups < 1 or any(len(p) % groups or p.shape[1:] != turned[0].shape[1:] for p in turned):
        return None
    joined = torch.cat([p.reshape(groups, -1, *p.shape[1:]) for p in turned], 1).reshape(have, *turned[0].shape[1:])
    joined = joined.T if rule.transpose and joined.ndim > 1 else joined
    return (joined.movedim(0, -1) if last else joined).contiguous()


def _view(record: RankRecord, found: Found, rows: Mapping[str, int]) -> View:
    view = View(record, [], record.info)
    shapes = {e.name: e.shape for e in record.entries if e.kind == "param"}
    view.dry, owners = record.dry, _owners(found)
    for e in record.entries:
        view.entries += _renamed(view, e, found, rows, shapes, owners)
    view.evaluations = [x for e in record.evaluations for x in _renamed(view, e, found, rows, shapes, owners)]
    names = {name: rule.names(name) or rule.to for name, rule in found.fused.items()}

    def expand(listed: Sequence[str]) -> list[str]:
        return [n for p in listed for n in names.get(p, (found.renames.get(p, p),))]

    view.info = msgspec.structs.replace(
        record.info,
        draws=[msgspec.structs.replace(d, module=_module(found, d.module)) for d in record.info.draws],
        groups=[msgspec.structs.replace(g, params=expand(g.params)) for g in record.info.groups],
        clips=[msgspec.structs.replace(c, params=expand(c.params)) for c in record.info.clips],
    )
    view.evaluation_draws = [msgspec.structs.replace(d, module=_module(found, d.module)) for d in record.evaluation_draws]
    return view


def _called(e: Entry, found: Found, owners: Mapping[str, FuseRule]) -> tuple[tuple[str, ...], FuseRule | None, bool]:
    """What the reference calls a tensor: its names, the rule by which its values are split among them (`None`: each has all of it), along the last dimension or the first."""
    if e.kind in PARAMETERS or e.kind in BUFFERS:
        rule = found.fused.get(e.name)
        if rule is not None:
            return rule.names(e.name) or rule.to, rule, False
        if e.name in found.renames:
            return (found.renames[e.name],), None, False
        owner, _, leaf = e.name.rpartition(".")
        return (".".join(filter(None, [_module(found, owner), leaf])),), None, False
    rule = owners.get(e.name)
    if rule is None:
        return (_module(found, e.name),), None, False
    to = tuple(n.rpartition(".")[0] for n in (rule.names(f"{e.name}.weight") or rule.to))
    if len(to) == 1 or e.kind == "input":
        return to, None, False
    if e.kind not in ("output", "grad_output") or len(e.shape) < 2:
        return (), None, False
    return to, msgspec.structs.replace(rule, transpose=False), True


def _renamed(
    view: View, e: Entry, found: Found, rows: Mapping[str, int], shapes: Mapping[str, Sequence[int]], owners: Mapping[str, FuseRule]
) -> list[Entry]:
    names, rule, last = _called(e, found, owners)
    if rule is None:
        return [msgspec.structs.replace(e, name=n) for n in names]
    if not last:
        return _split(view, e, rule, names, rows, whole=e.shape == shapes.get(e.name), last=False)
    parts = _split(view, e, rule, tuple(f"{n}.weight" for n in names), rows, whole=True, last=True)
    return [msgspec.structs.replace(p, name=n) for p, n in zip(parts, names, strict=False)]


def _split(view: View, e: Entry, rule: FuseRule, to: Sequence[str], rows: Mapping[str, int], *, whole: bool, last: bool) -> list[Entry]:
    """A tensor as the reference's several ones; a number that an optimizer keeps of it is that of each."""
    if not whole:
        return [msgspec.structs.replace(e, name=n) for n in to] if not e.shape else []
    values = view.array(e)
    sizes = [rows.get(n, 0) for n in to]
    turned = np.moveaxis(values, -1, 0) if last else values
    own = rule if len(e.shape) > 1 else msgspec.structs.replace(rule, transpose=False)
    parts = own.split(turned, sizes)
    if parts is None:
        return []
    out = []
    for n, part in zip(to, parts, strict=True):
        made = np.ascontiguousarray(np.moveaxis(part, 0, -1)) if last else part
        tensor = f"{n}-of-{e.tensor}"
        view.made[tensor] = made
        out.append(msgspec.structs.replace(e, name=n, shape=tuple(made.shape), tensor=tensor, placement=None))
    return out


def _module(found: Found, path: str) -> str:
    """What the reference calls a module: its own name there, or that of the nearest around it that has one."""
    head, tail = path, ""
    while head:
        if head in found.modules:
            return ".".join(filter(None, [found.modules[head], tail]))
        head, _, end = head.rpartition(".")
        tail = f"{end}.{tail}".rstrip(".")
    return path
