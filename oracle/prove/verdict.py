"""What is said of two programs, and in which words."""

from __future__ import annotations

from typing import Literal

import msgspec

Word = Literal["PROVED", "EQUAL", "CLOSE", "UNPROVED", "DIFFERENT"]
EXIT: dict[str, int] = {"PROVED": 0, "EQUAL": 0, "CLOSE": 3, "UNPROVED": 3, "DIFFERENT": 1}


class Culprit(msgspec.Struct):
    """Where two programs part.

    Attributes:
        kind: "missing collective", "doubled", "wrong scale", "wrong group", "initial values", "ranks wait", "" when only the place is known.
        module, op, place: of the operation ("file:line function"); parts of it may be "".
        phase: "forward", "backward" or "update".
        ranks: of the candidate.
        said: one sentence.
        parameter: whose gradient it is, "" when that is not known.
    """

    kind: str = ""
    module: str = ""
    op: str = ""
    place: str = ""
    phase: str = ""
    ranks: tuple[int, ...] = ()
    said: str = ""
    parameter: str = ""


class Verdict(msgspec.Struct):
    """PROVED: equal as formulas over the rationals with uninterpreted functions, at this shape. EQUAL: equal in a finite
    field at random points. CLOSE: equal in doubles, but a law that the field does not have is missing. UNPROVED: nothing
    is known. DIFFERENT: a counter-example in doubles and in the field.

    Attributes:
        verdict: the word.
        why: one sentence.
        probability: that EQUAL is wrong, at most; 0 of PROVED, but for large programs, which are tested at random points as well.
        culprit: of DIFFERENT.
        examples: of both sides' values, one sentence each.
        wrong: outputs that differ, "grad layers.0.mlp.fc1.weight of rank 1".
        outputs: how many were compared.
        opaque: operators without a meaning, and where.
        assumed: what the verdict holds under.
        ranks: of the candidate.
        operations: of all ranks of both sides.
        cuts, lemmas: of a proof, where names are and what was merged (`proofs/sweep.py`); not part of what is written.
        local: the proof is by lemmas alone (`proofs/chase.py`).
        seconds: of what took long: "reference", "candidate", "refutation", "proof".
    """

    verdict: Word
    why: str = ""
    probability: float = 0.0
    culprit: Culprit | None = None
    examples: list[str] = []
    wrong: list[str] = []
    outputs: int = 0
    opaque: list[str] = []
    assumed: list[str] = []
    ranks: int = 0
    operations: int = 0
    seconds: dict[str, float] = {}
    cuts: dict[str, str] = {}
    lemmas: dict[str, list[list[int]]] = {}
    local: bool = False

    @property
    def exit_code(self) -> int:
        """0 PROVED or EQUAL, 1 DIFFERENT, 3 nothing was proved."""
        return EXIT[self.verdict]

    def __str__(self) -> str:
        lines = [f"{self.verdict}: {self.why}"]
        if self.culprit is not None and self.culprit.said:
            lines.append(f"  where: {self.culprit.said}")
        lines += [f"  {text}" for text in self.examples[:4]]
        if len(self.wrong) > 1:
            lines.append(f"  differs: {', '.join(self.wrong[:4])}{f' and {len(self.wrong) - 4} more' if len(self.wrong) > 4 else ''}")
        lines += [f"  no meaning: {text}" for text in self.opaque[:8]]
        lines += [f"  holds for: {text}" for text in self.assumed[:8]]
        spent = ", ".join(f"{name} {value:.1f} s" for name, value in self.seconds.items())
        lines.append(f"  {self.outputs} outputs of {self.ranks} ranks, {self.operations} operations; {spent}")
        return "\n".join(lines)
