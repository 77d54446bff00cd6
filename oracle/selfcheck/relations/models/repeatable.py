"""Evaluation is repeatable: the same batch gives the same results, whatever the random numbers and what ran before.

Catches dropout that stays on in evaluation (`F.dropout` without `training`), state that a forward leaves behind, generators.
A model that draws noise by itself (a VAE, a diffusion model) differs by design; that is said.
"""

from __future__ import annotations

from typing import Final

from proctor.oracle.selfcheck import ModelRelation, Unknown, register
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.parting import everything, part
from proctor.oracle.selfcheck.watching.step import Call, Outputs, short
from proctor.oracle.selfcheck.watching.values import difference

DROPS: Final = ("bernoulli", "dropout", "feature_dropout")


@register
class Repeatable(ModelRelation):
    """Evaluated three times: with the same random numbers, and with others."""

    name, claim = "repeatable", "evaluated twice, a model gives the same results"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        call.without_noise(False)
        try:
            call.evaluate()  # what is made at the first call only is there now
            one, again, other = call.evaluate(), call.evaluate(), call.evaluate(seed=1)
        except Unknown:
            raise
        except Exception as e:  # noqa: BLE001 - the program's own code
            raise Unknown(f"the model cannot be evaluated on the step's batch: {short(e)}") from None
        name, error = _worst(one, again)
        if error:
            found = part(call, call.evaluate, call.evaluate, everything)
            return self._differs(call, name, error, found, "with the same random numbers: it depends on what ran before, or on memory that is not initialised")
        name, error = _worst(one, other)
        if not error:
            return Outcome(relation=self.name, verdict="equivalent", reason=f"{len(one)} results are the same bits three times")
        found = part(call, call.evaluate, lambda: call.evaluate(seed=1), everything)
        if found is not None and not any(word in found.op for word in DROPS):
            return Outcome(
                relation=self.name, verdict="by-design", culprit=found, error=error,
                reason=f"it draws random numbers in evaluation ({found.op}); that is how models with noise of their own work",
            )  # fmt: skip
        return self._differs(call, name, error, found, "with other random numbers: it drops by chance in evaluation")

    def _differs(self, call: Call, name: str, error: float, found: Culprit | None, why: str) -> Outcome:
        return Outcome(
            relation=self.name, verdict="different", reason=f"result {name or 'of the model'} is another {why}",
            expected="the same results in evaluation", seen=f"a difference of {error:.2g} of the norm", culprit=found or call.place(), error=error,
            advice="F.dropout needs training=self.training; what a forward keeps must not change later results",
        )  # fmt: skip


def _worst(one: Outputs, other: Outputs) -> tuple[str, float]:
    worst = ("", 0.0)
    for name in one:
        if name not in other:
            return name, float("inf")
        gap, size = difference(one[name], other[name])
        if gap and (gap / size if size else float("inf")) > worst[1]:
            worst = (name, gap / size if size else float("inf"))
    return worst
