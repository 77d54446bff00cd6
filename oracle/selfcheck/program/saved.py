"""What the program itself saves: read off the first run, which goes on for a while after the checks where the program's files say that it saves."""

from __future__ import annotations

from proctor.oracle.selfcheck import NotApplicable, Unknown
from proctor.oracle.selfcheck.facts import SAVED, WAITS
from proctor.oracle.selfcheck.launch import lines
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.program import Program, ProgramRelation, register

_ORDER = {"different": 0, "equivalent": 1, "inconclusive": 2, "by-design": 3, "not-applicable": 4}


@register
class Saved(ProgramRelation):
    """Takes the save that says most."""

    name, claim = "saved", "a checkpoint that holds a part of what training goes on from holds all of it"

    def check(self, program: Program) -> list[Outcome]:
        """See the class."""
        ranks = sorted(program.first.folder.glob("rank*"))
        found = [o for rank in ranks for o in lines(rank / SAVED, Outcome)]
        if found:
            return [min(found, key=lambda o: _ORDER[o.verdict])]
        if any((rank / WAITS).is_file() for rank in ranks):
            raise Unknown("it saved nothing in the time that it was watched (--to-the-end waits for it)")
        raise NotApplicable("it saved nothing by torch.save while it was watched")
