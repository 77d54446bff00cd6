"""n microbatches make the update that one large batch would make: all their samples weigh the same.

What a sample weighs is the gradient of what was differentiated with respect to the mean loss, over the items that it averages. Microbatches
are backward passes from one place of the program within an update. Catches a loss that is not divided by their number, one that is divided twice,
and means over uneven numbers of tokens.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from proctor.oracle.selfcheck import NotApplicable, Unknown, UpdateRelation, register
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.step import Criterion, Update

EVEN: Final = 1e-3  # relative difference of weights that is still the same weight


@register
class Accumulation(UpdateRelation):
    """Compares the weights of samples over the backward passes of an update."""

    name, claim = "accumulation", "n microbatches make the update of one large batch"

    def check(self, update: Update) -> Outcome:
        """See the class."""
        passes: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for number, backward in enumerate(update.backwards):
            passes[backward.stack].append(number)
        numbers = max(passes.values(), key=len, default=[])
        if len(numbers) < 2:
            raise NotApplicable("one backward pass an update: it accumulates nothing")
        lines: dict[tuple[str, str], list[Criterion]] = defaultdict(list)
        for criterion in update.criteria:
            if criterion.backward in numbers and criterion.weight is not None:
                lines[criterion.line, criterion.function].append(criterion)
        used = [c for c in lines.values() if {x.backward for x in c} == set(numbers)]
        if not used:
            raise Unknown("its loss is none of torch's loss functions, or they do not reach every microbatch: what a sample weighs is not known")
        for criteria in used:
            found = self._judge(criteria, len(numbers), update.backwards[numbers[0]].stack)
            if found is not None:
                return found
        if not any(_known(criteria, len(numbers)) for criteria in used):
            raise Unknown(f"items of {len(numbers)} microbatches weigh the same, but their means count {used[0][0].weight:.3g} each, not 1/{len(numbers)}: whether that was divided by their number is not known")
        return Outcome(relation=self.name, verdict="equivalent", reason=f"{len(numbers)} microbatches: their samples weigh what those of one batch do")

    def _judge(self, criteria: Sequence[Criterion], number: int, stack: tuple[str, ...]) -> Outcome | None:
        weights = [c.weight or 0.0 for c in criteria]
        mean = criteria[0].reduction == "mean"
        where = Culprit("", criteria[0].function, criteria[0].line)
        once = len(criteria) == number
        if mean and once and all(abs(w - 1.0) < EVEN for w in weights):
            return Outcome(
                relation=self.name, verdict="different", reason=f"each of {number} microbatches counts with its whole mean: the update's gradient is {number} × that of one large batch (gradient scale {number})",
                expected=f"each mean counts 1/{number}", seen="each counts 1",
                culprit=_counted(criteria[0], stack), error=number - 1.0, advice=f"divide the loss by {number} before backward",
            )  # fmt: skip
        if mean and once and all(abs(w * number * number - 1.0) < EVEN for w in weights):
            return Outcome(
                relation=self.name, verdict="different", reason=f"each of {number} microbatches counts 1/{number * number}: the update's gradient is 1/{number} of that of one large batch",
                expected=f"each mean counts 1/{number}", seen=f"each counts 1/{number * number}", culprit=where, error=1.0 - 1.0 / number, advice="the loss is divided twice by the number of microbatches",
            )  # fmt: skip
        each = [w / max(1, c.items) if mean else w for w, c in zip(weights, criteria, strict=True)]
        low, high = min(each), max(each)
        if low <= 0 or high / low < 1.0 + EVEN:
            return None
        tokens = any(c.ignored for c in criteria)
        items = ", ".join(str(c.items) for c in criteria[:8])
        return Outcome(
            relation=self.name, verdict="different" if tokens or not mean else "by-design",
            reason=f"items of one microbatch weigh {high / low:.3g} × those of another: each counts with its own mean, over {items} items" + ("" if tokens or not mean else "; the batches themselves are of several sizes"),
            expected="every item that is not ignored weighs the same, as in one large batch", seen=f"weights from {low:.3g} to {high:.3g}",
            culprit=where, error=high / low - 1.0, advice="sum the losses and divide by the number of items of all microbatches",
        )  # fmt: skip


def _known(criteria: Sequence[Criterion], number: int) -> bool:
    """Whether equal weights say that a loss was divided: sums, means that count 1/n, and means that are equal since batches are."""
    if criteria[0].reduction != "mean":
        return True
    return abs(sum(c.weight or 0.0 for c in criteria) - len(criteria) / number) < EVEN


def _counted(criterion: Criterion, stack: Sequence[str]) -> Culprit:
    """The backward pass; where a library makes that, the program's own loss."""
    places = [("backward", line) for line in stack[:1]] + [(criterion.function, criterion.line)] + [("backward", line) for line in stack[1:]]
    name, line = next(((n, x) for n, x in places if x and "site-packages" not in x), places[0])
    return Culprit("", name, line)
