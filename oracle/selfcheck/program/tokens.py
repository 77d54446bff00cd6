"""Ranks of one job: an item of the loss weighs the same on every rank.

Ranks average their gradients, so each counts with its own mean; where they have unlike numbers of tokens, a token of a rank with few of them weighs more.
Read off the first run: what each rank told of its losses.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from proctor.oracle.selfcheck import NotApplicable
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.program import Program, ProgramRelation, register

EVEN: Final = 1e-3


@register
class Tokens(ProgramRelation):
    """Compares the weights of items over the ranks."""

    name, claim = "tokens", "an item of the loss weighs the same on every rank"

    def check(self, program: Program) -> list[Outcome]:
        """See the class."""
        facts = [f for f in program.first.facts if f.items]
        if len({f.rank for f in facts}) < 2:
            raise NotApplicable("one rank trains, or its losses are none of torch's")
        lines: dict[str, dict[int, list[tuple[float, int, int]]]] = defaultdict(lambda: defaultdict(list))
        for fact in facts:
            for line, reduction, items, ignored, weight in fact.items:
                lines[line][fact.rank].append((weight / max(1, items) if reduction == "mean" else weight, items, ignored))
        for line, ranks in lines.items():
            weights = [w for found in ranks.values() for w, _, _ in found]
            if min(weights) <= 0 or max(weights) / min(weights) < 1 + EVEN or not any(i for found in ranks.values() for _, _, i in found):
                continue
            counts = ", ".join(f"rank {rank}: {sum(n for _, n, _ in found)}" for rank, found in sorted(ranks.items())[:4])
            ratio = max(weights) / min(weights)
            return [Outcome(
                relation=self.name, claim=self.claim, subject="the program", verdict="different", reason=f"a token of one rank weighs {ratio:.3g} × one of another: each rank averages over its own ({counts})",
                expected="every token weighs the same", seen=f"weights from {min(weights):.3g} to {max(weights):.3g}", culprit=Culprit("", "loss", line), error=ratio - 1,
                advice="divide the sum of the losses by the number of tokens of all ranks, times the number of ranks",
            )]  # fmt: skip
        return [Outcome(relation=self.name, claim=self.claim, subject="the program", verdict="equivalent", reason=f"items weigh the same on {len({f.rank for f in facts})} ranks")]
