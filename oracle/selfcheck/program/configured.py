"""Changes of a library's own configuration that must not matter: the program runs again with each, and must compute the same.

Adapters (`selfcheck/adapters`) say which there are. Reference and candidate are recorded and compared as by `proctor oracle run`.
"""

from __future__ import annotations

from proctor.oracle.selfcheck import NotApplicable
from proctor.oracle.selfcheck.adapters import VARIABLE
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.program import Program, ProgramRelation, register
from proctor.oracle.selfcheck.program.vary import compared


@register
class Configured(ProgramRelation):
    """Records with and without the change, compares, localises."""

    name, claim = "configured", "configurations of a library that mean the same compute the same"

    def check(self, program: Program) -> list[Outcome]:
        """See the class."""
        axes = sorted({axis for facts in program.first.facts for axis in facts.axes})
        if not axes:
            raise NotApplicable("no configuration of a known library was made that could be changed (transformers, accelerate, lightning, deepspeed)")
        found = []
        for number, axis in enumerate(axes):
            commands = [list(program.command), ["env", f"{VARIABLE}={axis.library}:{axis.name}", *program.command]]
            found.append(compared(self, axis.said, program.out / f"configured-{number}", commands, program.timeout_s))
        return found
