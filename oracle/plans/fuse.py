"""One parameter that is several of the reference's: their rows one behind the other, or in turn by groups, or its transpose.

    [[fuse]]
    from = 'decoder\\.layers\\.(\\d+)\\.self_attention\\.linear_qkv\\.(weight|bias)'
    to = ['model.layers.\\1.self_attn.q_proj.\\2', 'model.layers.\\1.self_attn.k_proj.\\2', 'model.layers.\\1.self_attn.v_proj.\\2']
    groups = 4                     # of heads, in the whole model; 0: each rank has its rows of the first, then of the second, …
    transpose = true               # rows of the reference are columns here
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import OracleError
from proctor.oracle.plans.names import compiled, template

Array = npt.NDArray[Any]


class FuseRule(msgspec.Struct, frozen=True):
    """See the module.

    Args:
        pattern: regex on the whole name of a parameter of the candidate.
        to: names in the reference, in the order of their rows.
        groups: in which they take turns, of the whole; 0 for none.
        transpose: it is the transpose of what it is made of.
    """

    pattern: str
    to: tuple[str, ...]
    groups: int = 0
    transpose: bool = False

    def checked(self) -> FuseRule:
        """Itself.

        Raises:
            OracleError: it cannot be meant.
        """
        for to in self.to:
            template(self.pattern, to)
        if not self.to or self.groups < 0:
            raise OracleError(f"fuse {self.pattern[:80]!r}: to names at least one parameter, groups is 0 or more")
        return self

    def names(self, name: str) -> tuple[str, ...]:
        """What a parameter is made of; () where the rule is not about it."""
        match = compiled(self.pattern).fullmatch(name)
        return tuple(match.expand(to) for to in self.to) if match is not None else ()

    def split(self, values: Array, rows: Sequence[int]) -> list[Array] | None:
        """The parts of a tensor, or of a rank's share of it; `None` where they do not come out even.

        Args:
            values: as the candidate holds them.
            rows: of the reference's parameters.
        """
        values = values.T if self.transpose else values
        if not values.ndim or not sum(rows):
            return None
        have, whole = values.shape[0], sum(rows)
        groups = self.groups * have // whole if self.groups else 1
        if have > whole or any(r * have % whole for r in rows) or groups < 1 or have % groups:
            return None
        sizes = [r * have // whole for r in rows]
        if any(s % groups for s in sizes):
            return None
        turns = values.reshape(groups, have // groups, *values.shape[1:])
        ends = np.cumsum([s // groups for s in sizes])[:-1]
        return [np.ascontiguousarray(p.reshape(s, *values.shape[1:])) for p, s in zip(np.split(turns, ends, axis=1), sizes, strict=True)]


def generalised(rules: Mapping[str, FuseRule]) -> list[FuseRule]:
    """Rules of single names put together where they differ in numbers only, which are the same on both sides.

    Args:
        rules: by name; patterns are ignored.
    """
    out: dict[FuseRule, None] = {}
    for name, rule in rules.items():
        out[_general(name, rule)] = None
    return list(out)


def _general(name: str, rule: FuseRule) -> FuseRule:
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", name)
    if any(re.findall(r"(?<=\.)\d+(?=\.)", to) != numbers for to in rule.to):
        return msgspec.structs.replace(rule, pattern=re.escape(name), to=tuple(t.replace("\\", r"\\") for t in rule.to))
    pattern = r"(\d+)".join(map(re.escape, re.split(r"(?<=\.)\d+(?=\.)", name)))
    made = []
    for to in rule.to:
        parts = re.split(r"(?<=\.)\d+(?=\.)", to)
        made.append("".join(part + (f"\\{i + 1}" if i + 1 < len(parts) else "") for i, part in enumerate(parts)))
    return msgspec.structs.replace(rule, pattern=pattern, to=tuple(made))
