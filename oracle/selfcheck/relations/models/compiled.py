"""The compiled model computes what the eager one does.

`aot_eager`: dynamo's graph and autograd's partition of it, without generated kernels, which is where programs break: graphs that keep a Python number
of the first call, side effects that are traced away. A program that compiles is compared with itself without.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from proctor.oracle.selfcheck import ModelRelation, Unknown, register
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.watching.gaps import gap
from proctor.oracle.selfcheck.watching.step import Call, short
from proctor.oracle.selfcheck.watching.undropped import undropped
from proctor.oracle.selfcheck.watching.values import same_bits


@register
class Compiled(ModelRelation):
    """Two calls: a graph that keeps what the first one had shows in the second."""

    name, claim = "compile", "the compiled model computes what the eager one does"
    timeout_s: ClassVar[float] = 600.0
    safe: ClassVar[bool] = False  # what dynamo keeps of a process cannot be taken back

    def check(self, call: Call) -> Outcome:
        """See the class."""
        module = call.module
        with undropped(module):
            try:
                torch._dynamo.reset()
                compiled = torch.compile(module, backend="aot_eager")
                other = [call.derive(call=compiled) for _ in range(2)]
            except Exception as e:  # noqa: BLE001 - the compiler
                raise Unknown(f"the compiler fails: {short(e)}") from None
            with torch.compiler.set_stance("force_eager"):
                one = [call.derive() for _ in range(2)]
                if any(not same_bits(one[0][1][n], one[1][1][n]) for n in one[0][1] if n in one[1][1]):
                    raise Unknown("two eager steps with the same random numbers differ (relation repeatable)")
                for at in (0, 1):
                    for kind, a, b in (("result", one[at][0], other[at][0]), ("gradient of", one[at][1], other[at][1])):
                        place = 0 if kind == "result" else 1
                        worst = gap(a, b, lambda place=place: call.noise(lambda: call.derive()[place]))  # type: ignore[misc]
                        if worst.ratio > 1.0:
                            return Outcome(
                                relation=self.name, verdict="different", reason=f"{kind} {worst.name} of the compiled model differs by {worst.error:.2g} of its norm",
                                expected="the eager model's", seen=f"{worst.ratio:.0f} × what rounding does, in call {at + 1}",
                                culprit=call.place(worst.name.rpartition(".")[0] if place else ""), error=worst.error, tolerance=worst.tolerance,
                                advice="look for Python numbers and side effects in forward, and for custom autograd functions",
                            )  # fmt: skip
        return Outcome(relation=self.name, verdict="equivalent", reason=f"{len(one[0][0])} results and {len(one[0][1])} gradients agree")
