"""Parameters that modules of several stages share: an embedding that is the head. Each rank that has such a module holds one of its own.

They begin alike and get the same gradient, the sum over all stages, so they stay alike under any optimizer that looks at one parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from proctor.oracle.parallel.buckets import Pending


class Tied(NamedTuple):
    """One parameter.

    Args:
        name: the first one that the model has for it.
        parameter: that all ranks have before the others' are dropped.
        ranks: along the axis of the stages, that go on holding it.
    """

    name: str
    parameter: torch.nn.Parameter
    ranks: tuple[int, ...]

    def pending(self, at: int, axis: str) -> Pending:
        """Its reduction; a rank that does not hold it takes part, for it is a sum over all stages."""
        if at in self.ranks:
            return Pending(self.name, self.parameter, (axis,), "sum")
        stand_in = torch.nn.Parameter(torch.zeros((), dtype=self.parameter.dtype).expand(self.parameter.shape))
        return Pending(self.name, stand_in, (axis,), "sum", held=False)


def tied_of(model: torch.nn.Module, ranks: Mapping[str, int | None]) -> list[Tied]:
    """Parameters that modules of several ranks have, in the order of the model; `ranks` says by name who has one."""
    found: dict[int, tuple[str, torch.nn.Parameter, set[int]]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if (rank := ranks.get(name)) is not None:
            found.setdefault(id(parameter), (name, parameter, set()))[2].add(rank)
    return [Tied(name, parameter, tuple(sorted(at))) for name, parameter, at in found.values() if len(at) > 1 and parameter.requires_grad]
