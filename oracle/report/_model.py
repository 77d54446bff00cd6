"""The model as a tree: of each module the worst error over tolerance of what it computes, passes back, and of its parameters, its children included.

A reader folds open the branch that is red. Modules that one side alone has stand in the same tree: what the candidate lacks is `missing`, what the
reference does not have is `unmapped`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from proctor.oracle.judging.verdicts import FAILING, ReplicaConflict, TensorVerdict
from proctor.oracle.report._depth import SERIES
from proctor.oracle.report._wording import count, module, multiple, short_kind

COLUMNS: Final = ("forward", "backward", "gradient", "state")
HEADS: Final = ("forward", "backward", "gradients", "state")
MAX_NODES: Final = 4000
MAX_OPEN: Final = 2  # wrong modules beside each other that are shown open
MAX_TENSORS: Final = 60  # of one module
_NUMBER: Final = re.compile(r"(\d+)")
_ONE_SIDE: Final = frozenset({"missing", "unmapped"})


@dataclass
class Cell:
    """The worst of one column: `tone` is its colour, `text` what stands in it."""

    tone: str = "none"
    text: str = ""
    tip: str = ""
    weight: float = -1.0

    def take(self, t: TensorVerdict) -> None:
        tone, weight = _tone(t)
        if weight > self.weight:
            self.tone, self.weight = tone, weight
            self.text = t.verdict if tone in ("lost", "blind") else "=" if tone == "equal" else multiple(t.ratio).replace(" ", "\u2009")
            self.tip = f"{t.name} {short_kind(t)}"


@dataclass
class Node:
    """A module."""

    name: str  # the last part of its path
    path: str
    cls: str = ""
    source: str = ""
    cells: dict[str, Cell] = field(default_factory=lambda: {column: Cell() for column in COLUMNS})
    tensors: list[TensorVerdict] = field(default_factory=list)
    conflicts: list[ReplicaConflict] = field(default_factory=list)
    children: dict[str, Node] = field(default_factory=dict)
    wrong: int = 0  # tensors, its children's included
    number: int = 0  # all of them

    @property
    def ordered(self) -> list[Node]:
        """Children, `layers.2` before `layers.10`."""
        return sorted(self.children.values(), key=lambda n: _natural(n.name))

    @property
    def one_side(self) -> str:
        """`candidate` or `reference` where the other side has nothing of this module."""
        words = {t.verdict for t in self._all()}
        if not words or not words <= _ONE_SIDE:
            return ""
        return "reference" if words == {"missing"} else "candidate" if words == {"unmapped"} else ""

    def _all(self) -> Iterator[TensorVerdict]:
        yield from self.tensors
        for child in self.children.values():
            yield from child._all()


def tree(tensors: Sequence[TensorVerdict], conflicts: Sequence[ReplicaConflict] = ()) -> Node | None:
    """The root, the model itself; None where nothing belongs to a module, or it has more than `MAX_NODES`."""
    root, made = Node("", ""), 0
    for t in tensors:
        column = SERIES.get(t.kind, "")
        if column not in COLUMNS:
            continue
        branch = _down(root, module(t))
        for node in branch:
            node.cells[column].take(t)
            node.number += 1
            node.wrong += t.verdict in FAILING
            made += node.number == 1
        branch[-1].tensors.append(t)
        if t.cls and column in ("forward", "backward"):
            branch[-1].cls, branch[-1].source = branch[-1].cls or t.cls, branch[-1].source or t.source
    for conflict in conflicts:
        _down(root, module(conflict))[-1].conflicts.append(conflict)
    return root if root.number and made <= MAX_NODES else None


def opened(node: Node, first: int = 0) -> bool:
    """Whether a branch is shown open: something in it is wrong, and it is the first or second such one of its parent's.

    Args:
        first: how many wrong ones come before it.
    """
    return node.path == "" or (bool(node.wrong or node.conflicts) and first < MAX_OPEN)


def said(node: Node) -> str:
    """`3 of 40 tensors wrong`, `40 tensors`."""
    return f"{node.wrong:,} of {count(node.number, 'tensor')} wrong" if node.wrong else count(node.number, "tensor")


def _down(root: Node, path: str) -> list[Node]:
    """The nodes from the root to a module."""
    found, at = [root], ""
    for part in path.split(".") if path else ():
        at = f"{at}.{part}" if at else part
        found.append(found[-1].children.setdefault(part, Node(part, at)))
    return found


def _natural(name: str) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in _NUMBER.split(name) if part]


def _tone(t: TensorVerdict) -> tuple[str, float]:
    """Colour and weight: what is lost or not finite first, then by error over tolerance."""
    if t.verdict in ("missing", "shape", "unmapped"):
        return "lost", 1e30 if t.verdict in FAILING else 0.05
    if t.verdict in FAILING:
        ratio = t.ratio if math.isfinite(t.ratio) else 1e29
        return ("worst" if ratio > 10 else "bad"), max(ratio, 1.0)
    if t.verdict == "no-power":
        return "blind", 0.04
    if t.abs_err == 0:
        return "equal", 0.0
    return ("near" if t.verdict == "warn" else "some" if t.ratio > 0.1 else "little"), min(t.ratio, 1.0)
