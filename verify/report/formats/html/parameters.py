"""The parameter map: the module tree, with what diverged, broke or stood still opened up and the rest folded away.

`html/__init__.py` calls `parameter_map` once a report. In: the tensors of the trace, and what the violations say of them. Out: rows for the template, a
module or a tensor each, with a strip of cells along the steps.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from proctor.invariants.invariant import Severity
from proctor.invariants.trace import Trace
from proctor.invariants.verdict import Violation
from proctor.verify.report.formats.html.tensors import (
    BROKEN,
    CHANGED,
    COLUMNS,
    DIFFERS,
    Tensor,
    Tensors,
    tensors,
)
from proctor.verify.wording import clean, count, ranges

MAX_ROWS: Final = 120  # of the map
MAX_QUIET: Final = 24  # rows for parts in which all tensors fared alike
_FOLDED: Final = "\0"  # label of several children in one row: no name in a trace has it
_DEEP: Final = 7  # levels that are indented
WIDTH: Final = 360.0
_ATTRIBUTE: Final = {"data": "the value", "grad": "the gradient"}
_NAMED: Final = 4  # besides what is drawn of a tensor: a violated rule names it
_KIND: Final = {CHANGED: "changed", DIFFERS: "apart", BROKEN: "broken", _NAMED: "named"}


@dataclass(frozen=True)
class Strip:
    """A run of columns that look alike."""

    x: float
    width: float
    kind: str
    tip: str


@dataclass(frozen=True)
class Row:
    """One line: a module, a tensor, or several tensors of a module folded into one."""

    depth: int
    label: str
    about: str
    level: str  # bad, warn, quiet
    notes: list[str]
    first: int | None
    strips: list[Strip]
    opened: bool = False  # its children follow
    earliest: bool = False  # what happened first, where not all began at once


@dataclass(frozen=True)
class ParameterMap:
    """Rows in the order in which the model registers its modules, and what it says in one sentence."""

    rows: list[Row]
    width: float
    hidden: int
    summary: str
    apart: dict[str, Tensor] = field(default_factory=dict)  # by violation: the tensor it names, where replicas differ


@dataclass
class _Node:
    label: str
    children: dict[str, _Node] = field(default_factory=dict)
    tensor: Tensor | None = None
    owner: str = ""

    def leaves(self) -> Iterator[Tensor]:
        """Depth first, without recursion: names come from others and may be deep."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            if node.tensor is not None:
                yield node.tensor
            waiting += reversed(node.children.values())


def parameter_map(
    trace: Trace | None, violations: Sequence[Violation], *, ranks_judged: bool = False
) -> ParameterMap | None:
    """Lay out the map; `None` when no parameter was tracked.

    Args:
        trace: what was recorded.
        violations: what a check found.
        ranks_judged: replicas that differ are known to be wrong, also where no violation says so.
    """
    if trace is None:
        return None
    seen = tensors(trace)
    if not seen.found:
        return None
    broken = _broken_rules(seen, violations)
    roots: dict[str, _Node] = {}
    for tensor in seen.found.values():
        _insert(roots.setdefault(tensor.model, _Node(tensor.model)), tensor)
    maker = _Maker(seen, broken, ranks_judged or any(v.relation == "consistent" for v in violations))
    rows: list[Row] = []
    for root in roots.values():
        rows += maker.rows(root, MAX_QUIET // len(roots))
    starts = {r.first for r in rows if r.first is not None}
    if len(starts) > 1:
        rows = [replace(r, earliest=r.first == min(starts)) for r in rows]
    apart = {v.id: t for t in seen.found.values() if t.differs is not None for v in broken.get(id(t), ())}
    return ParameterMap(rows[:MAX_ROWS], WIDTH, max(0, len(rows) - MAX_ROWS), _summary(seen, maker), apart)


def _broken_rules(seen: Tensors, violations: Sequence[Violation]) -> Mapping[int, list[Violation]]:
    """Violations by the tensor (its id) that they name."""
    by_name: dict[str, list[Tensor]] = defaultdict(list)
    for (_, name), tensor in seen.found.items():
        by_name[name].append(tensor)
    found: dict[int, list[Violation]] = defaultdict(list)
    for violation in violations:
        name = violation.variable.partition(" ")[0].rstrip(",")
        for tensor in by_name.get(violation.variable, by_name.get(name, ())):
            found[id(tensor)].append(violation)
            for step, _ in violation.places:
                if step is not None and 0 <= step < seen.steps:
                    at = step // seen.per_column
                    tensor.cells[at] = max(_NAMED, tensor.cells.get(at, 0))
    return found


def _insert(root: _Node, tensor: Tensor) -> None:
    node = root
    *modules, last = tensor.name.split(".")
    for part in modules[:64]:
        node = node.children.setdefault(part, _Node(part))
    node.owner = tensor.owner
    leaf = node.children.setdefault(f"{last}/" if last in node.children else last, _Node(last))
    leaf.tensor = tensor


@dataclass
class _Maker:
    seen: Tensors
    broken: Mapping[int, list[Violation]]
    ranks_judged: bool  # a rule about replicas is among the violated ones

    def level(self, tensor: Tensor) -> str:
        severities = [v.severity.level for v in self.broken.get(id(tensor), ())]
        if any(s >= Severity.ERROR.level for s in severities) or (tensor.differs is not None and self.ranks_judged):
            return "bad"
        return "warn" if severities or tensor.differs is not None or tensor.broken is not None or tensor.still else "quiet"

    def first(self, tensor: Tensor) -> int | None:
        steps = [tensor.differs, tensor.broken, *(v.step for v in self.broken.get(id(tensor), ()))]
        return min((s for s in steps if s is not None), default=None)

    def rows(self, root: _Node, allowed: int) -> list[Row]:
        """Rows of one model: every level where tensors fared differently, else as many levels as `allowed` rows show."""
        made: list[Row] = []
        waiting = [(root, 0, allowed)]
        while waiting:
            node, depth, left = waiting.pop()
            node = _straight(node) if depth else node
            leaves = list(node.leaves())
            alike = len({self._fate(t) for t in leaves}) == 1
            opened = node.tensor is None and node.label != _FOLDED and (not alike or len(node.children) <= left)
            made.append(self._row(node, depth, leaves, opened=opened))
            if opened:
                children = list(node.children.values()) if alike else self._grouped(node)
                share = left // (len(children) if alike else 2 * len(children))
                waiting += [(child, depth + 1, share) for child in reversed(children)]
        return made

    def _fate(self, tensor: Tensor) -> tuple[object, ...]:
        named = tuple(v.id for v in self.broken.get(id(tensor), ())) if tensor.differs is None else ()
        return (tensor.differs, *tensor.minority, tensor.broken, tensor.broken_in, tensor.still, named)

    def _grouped(self, node: _Node) -> list[_Node]:
        """Children, quiet neighbours folded into one."""
        out: list[_Node] = []
        for child in node.children.values():
            if len(node.children) <= 3 or any(self.level(t) != "quiet" for t in child.leaves()):
                out.append(child)
            elif out and out[-1].label == _FOLDED:
                out[-1].children[str(len(out[-1].children))] = child
            else:
                out.append(_Node(_FOLDED, {"0": child}))
        return [next(iter(n.children.values())) if n.label == _FOLDED and len(n.children) == 1 else n for n in out]

    def _row(self, node: _Node, depth: int, leaves: list[Tensor], *, opened: bool = False) -> Row:
        levels = [self.level(t) for t in leaves]
        level = next((x for x in ("bad", "warn") if x in levels), "quiet")
        tensor = node.tensor
        if tensor is not None:
            about = f"{tensor.role if tensor.role != 'parameter' else ''} {tensor.shape or 'scalar'}".strip()
            notes = self._notes([tensor])
        else:
            about = " · ".join(x for x in (clean(node.owner.rpartition(".")[2], 40), count(len(leaves), "tensor")) if x)
            hit = sum(x != "quiet" for x in levels)
            notes = ([f"{hit} of {len(leaves)}"] if hit and depth else []) if opened else self._notes(leaves)
        return Row(
            depth=min(depth, _DEEP),
            label=_folded(node) if node.label == _FOLDED else clean(node.label.removeprefix("__main__."), 80) or "(model)",
            about=about,
            level=level,
            notes=notes,
            first=min((s for s in map(self.first, leaves) if s is not None), default=None),
            strips=self._strips(leaves),
            opened=opened,
        )

    def _notes(self, leaves: Sequence[Tensor]) -> list[str]:
        """What happened to tensors that fared alike."""
        tensor = leaves[0]
        rules = {v.id: v for t in leaves for v in self.broken.get(id(t), ())}
        first = min((s for s in map(self.first, leaves) if s is not None), default=None)
        notes = [f"violates {v.code}{_since(v.step, first)}" for v in rules.values()]
        if tensor.differs is not None:
            verb = "differs" if len(tensor.minority) == 1 else "differ"
            notes.append(f"{_ranks(tensor.minority)} {verb}{_since(tensor.differs, first)}")
        if tensor.broken is not None:
            what = _ATTRIBUTE.get(tensor.broken_in, f"the optimizer's {clean(tensor.broken_in, 40)}")
            notes.append(f"NaN or infinity in {what}{_since(tensor.broken, first)}, {_ranks(tensor.broken_ranks)}")
        if tensor.still:
            notes.append("has a gradient and never changed" if len(leaves) == 1 else "have gradients and never changed")
        return notes

    def _strips(self, leaves: Sequence[Tensor]) -> list[Strip]:
        worst: dict[int, int] = {}
        for tensor in leaves:
            for column, kind in tensor.cells.items():
                worst[column] = max(kind, worst.get(column, 0))
        columns = -(-self.seen.steps // self.seen.per_column)
        cell = WIDTH / max(1, min(columns, COLUMNS))
        out: list[Strip] = []
        start: int | None = None
        for column in range(columns + 1):
            if start is not None and worst.get(column) != worst.get(start):
                steps = (start * self.seen.per_column, min(column * self.seen.per_column, self.seen.steps) - 1)
                drawn = _KIND[worst[start]]
                out.append(Strip(start * cell, (column - start) * cell, drawn, f"steps {steps[0]}–{steps[1]}: {_WORDS[drawn]}"))
                start = None
            if start is None and column in worst:
                start = column
        return out


_WORDS: Final = {"changed": "updated", "apart": "replicas differ", "broken": "NaN or infinity", "named": "violates a rule"}


def _straight(node: _Node) -> _Node:
    """A module whose only content is one child, in one row with it: `tok.weight`."""
    label = node.label
    while node.tensor is None and node.label != _FOLDED and len(node.children) == 1:
        node = next(iter(node.children.values()))
        label = f"{label}.{node.label}"
    return _Node(label, node.children, node.tensor, node.owner) if label != node.label else node


def _folded(node: _Node) -> str:
    labels = [clean(child.label, 40) for child in node.children.values()]
    return ", ".join(labels) if len(labels) <= 3 else f"{labels[0]} … {labels[-1]}"


def sides(tensor: Tensor) -> str:
    """Which ranks hold another value than most, or which ones differ where there is no majority."""
    if tensor.majority:
        return f"{_ranks(tensor.minority)} against the others"
    return f"ranks {' and '.join(map(str, tensor.minority))}" if len(tensor.minority) == 2 else _ranks(tensor.minority)


def _since(step: int | None, first: int | None) -> str:
    """Unless the column before says so."""
    if step is None or step == first:
        return ""
    return f" from step {step}" if step >= 0 else " before the first step"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks, 8)}"


def _summary(seen: Tensors, maker: _Maker) -> str:
    """What the map shows, for a reader who looks at nothing else."""
    found = list(seen.found.values())
    total = count(len(found), "tensor")
    said = []
    apart = [t for t in found if t.differs is not None]
    if apart:
        first = min(apart, key=lambda t: t.differs or 0)
        together = [t for t in apart if t.differs == first.differs]
        who = f"{clean(first.name, 80)}" if len(together) == 1 else f"{len(together)} of {total} at once"
        more = "" if len(apart) == len(together) else f"; {len(apart)} of {total} in the end"
        said.append(f"replicas differ from step {first.differs}, {sides(first)} ({who}{more})")
    broken = [t for t in found if t.broken is not None]
    if broken:
        first = min(broken, key=lambda t: t.broken or 0)
        said.append(f"first NaN or infinity in {clean(first.name, 80)}")
    still = sum(t.still for t in found)
    if still:
        said.append(f"{still} of {total} have a gradient and never changed")
    named = sum(id(t) in maker.broken for t in found)
    if named and not apart:
        said.append(f"{count(named, 'tensor')} named by a violated rule")
    if not said:
        compared = "; replicas are equal on all ranks" if seen.replicas else ""
        return f"{total}: nothing diverged, nothing turned non-finite{compared}"
    text = "; ".join(said)
    return text[0].upper() + text[1:]
