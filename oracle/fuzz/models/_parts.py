"""Parts that any model may have: a frozen layer, a layer that nothing uses, a parameter of no dimension, a buffer.

Source: D3 (frozen layers, §III-D); the others are ours.
"""

from __future__ import annotations

from typing import Final

from proctor.oracle.fuzz.space import Choice, Point

CHOICES: Final = (
    Choice("frozen", ("no", "first", "last", "alternate"), rare=0.2),
    Choice("unused", (False, True), rare=0.12),
    Choice("scalar", (False, True), rare=0.06),
    Choice("vector", (False, True), rare=0.2),
)

_FROZEN: Final = {
    "first": "next(net.parameters()).requires_grad_(False)",
    "last": "[*net.parameters()][-1].requires_grad_(False)",
    "alternate": "[p.requires_grad_(False) for p in [*net.parameters()][1::2]]",
}


def init_lines(point: Point, width: int) -> list[str]:
    """Lines of `__init__`."""
    lines = []
    if point["unused"]:
        lines.append(f"        self.unused = nn.Linear({width}, {width})")
    if point["scalar"]:
        lines.append("        self.scalar = nn.Parameter(torch.tensor(1.0))")
    if point["vector"]:
        lines.append(f"        self.vector = nn.Parameter(torch.ones({width}))")
    return lines


def forward_lines(point: Point, name: str = "x") -> list[str]:
    """Lines of `forward` before anything else is done with the features."""
    lines = []
    if point["scalar"]:
        lines.append(f"        {name} = {name} * self.scalar")
    if point["vector"]:
        lines.append(f"        {name} = {name} + self.vector")
    return lines


def after_lines(point: Point) -> tuple[str, ...]:
    """Lines that freeze."""
    return (_FROZEN[str(point["frozen"])],) if point["frozen"] != "no" else ()


def bare(point: Point) -> bool:
    """Whether a model has none of the parts that lie beside its layers."""
    return not (point["unused"] or point["scalar"] or point["vector"])


def traits(point: Point) -> frozenset[str]:
    """What of it is there."""
    names = {name for name in ("unused", "scalar", "vector") if point[name]}
    return frozenset(names | ({"frozen"} if point["frozen"] != "no" else set()))
