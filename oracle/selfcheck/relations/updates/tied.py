"""Parameters that the model says are tied are one parameter.

The model's own `tie_weights` must change nothing when it is called again; and an embedding and a projection that begin with equal values are one tensor,
not two copies. Catches ties that a resize, a load or a deep copy broke.
"""

from __future__ import annotations

from torch import nn

from proctor.oracle.selfcheck import NotApplicable, Unknown, UpdateRelation, register
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.step import Update, short, written_at


@register
class Tied(UpdateRelation):
    """Calls `tie_weights` once more."""

    name, claim = "tied", "weights that the model ties are one parameter"

    def check(self, update: Update) -> Outcome:
        """See the class."""
        found = [(root, path, module) for root in update.models for path, module in root.named_modules() if callable(getattr(module, "tie_weights", None))]
        if not found:
            raise NotApplicable("no module has a method tie_weights")
        for root, path, module in found:
            before = _shared(root)
            try:
                module.tie_weights()
            except Exception as e:  # noqa: BLE001 - the program's own code
                raise Unknown(f"tie_weights fails: {short(e)}") from None
            lost = [pair for pair in _shared(root) if pair not in before]
            if lost:
                one, other = lost[0]
                return Outcome(
                    relation=self.name, verdict="different", reason=f"{one} and {other} are two parameters, although {type(module).__name__}.tie_weights makes them one",
                    expected="one parameter: each update moves both", seen="two parameters, which part with the first update",
                    culprit=Culprit(path or other, type(module).__name__, _line(module)),
                    advice="call tie_weights after whatever replaces one of them (a resize, a load, a copy), before the optimizer is made",
                )  # fmt: skip
        return Outcome(relation=self.name, verdict="equivalent", reason="tie_weights changes nothing")


def _shared(root: nn.Module) -> set[tuple[str, str]]:
    """Pairs of names of one parameter."""
    first: dict[int, str] = {}
    pairs = set()
    for name, parameter in root.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(parameter), name)
        if other != name:
            pairs.add((other, name))
    return pairs


def _line(module: nn.Module) -> str:
    code = getattr(getattr(type(module), "tie_weights", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else written_at(module)



