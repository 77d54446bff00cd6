"""Run twice from the same seeds, a program computes the same bits.

Generators are seeded from outside before the program starts; a program that seeds itself overrides that. Catches orders of sets and of files, seeds
from the clock, generators that nobody seeds, operations without an order.
"""

from __future__ import annotations

from proctor.oracle.selfcheck import Unknown
from proctor.oracle.selfcheck.facts import DIGESTS, CheckConfig, Line
from proctor.oracle.selfcheck.launch import launch, lines, unwatched, why_nothing
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.program import Program, ProgramRelation, register

_WORDS = {
    "parameter": "initial parameter", "input": "batch", "result": "result of", "gradient": "gradient of", "update": "parameter after an update:",
}  # fmt: skip


@register
class Determinism(ProgramRelation):
    """Two more runs."""

    name, claim = "determinism", "run twice from the same seeds, the program computes the same bits"

    def check(self, program: Program) -> list[Outcome]:
        """See the class."""
        found = []
        for number in (0, 1):
            run = launch(program.command, program.out / f"again-{number}", CheckConfig("", step=program.step, digest=True, seed=0), timeout_s=program.timeout_s)
            ranks = {path.parent.name: lines(path, Line) for path in sorted(run.folder.glob(f"rank*/{DIGESTS}"))}
            if unwatched(run) or not any(ranks.values()):
                raise Unknown(why_nothing(run))
            found.append(ranks)
        one, other = found
        if one.keys() != other.keys():
            raise Unknown(f"{len(one)} ranks trained in one run, {len(other)} in the other")
        count = 0
        for rank in one:
            for a, b in zip(one[rank], other[rank], strict=False):
                count += 1
                if (a.digest, a.kind, a.name) != (b.digest, b.kind, b.name):
                    return [self._differs(a, rank)]
        return [Outcome(relation=self.name, claim=self.claim, subject="the program", verdict="equivalent", reason=f"{count} tensors of {program.step + 1} updates are the same bits twice")]

    def _differs(self, line: Line, rank: str) -> Outcome:
        what = f"{_WORDS[line.kind]} {line.name}"
        hint = {
            "parameter": "the model is initialised, or built, otherwise each time", "input": "data are read, ordered or changed otherwise each time",
        }.get(line.kind, "an operation has no fixed order, or draws from a generator that nobody seeds")  # fmt: skip
        return Outcome(
            relation=self.name, claim=self.claim, subject="the program", verdict="different",
            reason=f"the first thing that differs is the {what}, in update {line.step} on {rank}: {hint}", expected="the same bits", seen="others",
            culprit=Culprit(line.name.partition(" ")[0], "", line.source), step=line.step,
            advice="look for sets and os.listdir that are iterated, hash(), time(), uuid, queues that several workers fill, and generators of one's own (an environment's, too)",
        )  # fmt: skip
