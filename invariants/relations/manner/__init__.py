"""The manner of a program: what its own functions are given, what they do with it, which calls make up a step, and what a loss is made of.

Read off calls (`calls.py`): `given`, a function is given an argument, of torch's functions by each of the program's functions that calls them; `told`, it gives them the
same switch or dimension each time; `each`, a function is called in each step; `often`, again and again (`instrument/probes/often.py`); `mode`, a layer that drops out or normalises trains, or evaluates, while the model trains;
`ranks`, the random states of ranks differ. Told by probes (`told.py`): `made`, the loss is made with an operation (`instrument/probes/graphs.py`); `holds`, what a function is
given or gives is such as in health (a share, varied, …), `leaves`, it does not write into an argument, `writes`, it does, and `steady`, a number that an object
holds stays (`instrument/probes/manners.py`); `moment`, what a moment of an optimizer is made of (`instrument/probes/moments.py`); `unseen`, an evaluation sees no sample
that was trained on (`instrument/probes/unseen.py`); `beside`, a step calls another model of the class that it trains (`instrument/probes/beside.py`); `layers`, switches of torch's layers are what they were (`instrument/probes/switches.py`); of functions (`used.py`): `uses`, a function uses an operation of torch or calls a function of the
program, `then`, another one behind it, and `only`, no other one (`instrument/probes/operations.py`).

All are habits: held within one family of programs, of the program's own runs or of all programs that teach a pack, and never shipped. What is counted is such as no seed, size, depth or batch changes, and a rule is made of
what all looks of all runs keep.

Catches a mask, a weight or a group that is no longer handed on, a term of the loss that is thrown away or detached, a collective or an update of an average that is left out,
a layer that wakes, an in-place operation that reaches its caller's tensor, a coefficient that drifts, one noise on all ranks, an evaluation that reads the training data, a model that is its own target,
a `detach`, a normalisation or a term that is left out, added, or that stands a line too late. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.condition import Precondition
from proctor.invariants.invariant import Hypothesis, Support
from proctor.invariants.relations import CALLED, Detail, Examples, Needs, Relation, register
from proctor.invariants.relations.manner import calls as _calls
from proctor.invariants.relations.manner import told as _told
from proctor.invariants.relations.manner import used as _used
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.calls import short
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace

# Each takes the subjects that rules speak of, and adds those of the trace.
_PARTS: Final[dict[str, Callable[[Trace, Collection[str]], pl.DataFrame]]] = {
    "given": _calls.given, "told": _calls.told, "each": _calls.each, "mode": _calls.mode, "ranks": _calls.ranks, "made": _told.made,
    "holds": _told.holds, "leaves": _told.leaves, "writes": _told.writes, "steady": _told.steady, "moment": _told.moment, "unseen": _told.unseen, "beside": _told.beside, "often": _told.often, "layers": _told.layers,
    "uses": _used.uses, "then": _used.then, "only": _used.only,
}  # fmt: skip
_SAYS: Final = {
    "given": "{0} is given {1}",
    "told": "{0} is told {1}",
    "each": "each step calls {0}",
    "often": "{0} is called again and again {1}",
    "mode": "{0} {1} while the model trains",
    "ranks": "ranks have different random states of {0} when a step begins",
    "made": "the loss of {0} is made of {1}",
    "holds": "{0}: {1}",
    "leaves": "{0}: {1}",
    "writes": "{0}: {1}",
    "steady": "{1} of {0} stays as it is",
    "moment": "{0} is made of {1}",
    "unseen": "{0} is evaluated on {1}",
    "beside": "a step that trains {0} calls {1}",
    "layers": "{0}: {1}",
    "uses": "{0} uses {1}",
    "then": "{0} uses {1}",
    "only": "{0} uses {1}",
}
_ADVICE: Final = {
    "given": "Compare the call with the one in the healthy version: an argument is no longer handed on.",
    "told": "Compare the call with the one in the healthy version: a switch or a dimension is another.",
    "each": "Look for the call that is left out, or that a condition now skips.",
    "often": "Look for the call that is left out, or whose condition is never true.",
    "mode": "Look for train() or eval() of the model as a whole behind what set the mode of this layer.",
    "ranks": "Look for a seed that lacks the rank: ranks that draw the same noise see less of it.",
    "made": "Look for a term or a layer that is left out, detached, computed without gradients, or whose result is not used.",
    "holds": "Look at how this is computed: a mask, a weight, a normalisation or a dimension is another.",
    "leaves": "Look for an operation in place, on the argument or a view of it.",
    "writes": "Look for an operation that gave a new tensor instead of changing this one.",
    "steady": "Look for what assigns to this number: a value of one step that overwrites the option it is computed from.",
    "unseen": "Look at which loader, or part of the data, the evaluation reads: it is the one of the training.",
    "layers": "Look at where this layer is made: a switch is left out, or another one, so that it computes something else of the same numbers.",
    "beside": "Look at which object is called: the model that trains stands in the place of its target, teacher or average.",
    "uses": "Compare the function with the healthy version: it leaves out an operation, or computes in another way.",
    "then": "Compare the function with the healthy version: it leaves out an operation, or does one before what it should follow.",
    "only": "Compare the function with the healthy version: it does something that it did not do.",
    "moment": "Look at what is done with the gradient before it goes into the moment, and with the moment before the next update.",
}
_OF_WORDS: Final = {
    "it is another than in the call before": "Two calls in a row are given one tensor: look for a variable that is overwritten too early (a state by the next one), one view or sample in the place of two, a draw that is left out.",
}
_VALUES: Final = {"made": "manner", "holds": "manner", "leaves": "manner", "writes": "manner", "steady": "manner", "moment": "manner", "unseen": "manner", "beside": "manner", "often": "manner", "layers": "manner", "uses": "manner", "then": "manner", "only": "manner", "ranks": "rng"}


@register
class Manner(Relation):
    """What a program does in all its healthy runs, it does."""

    name = "manner"
    code = "PR126"
    own: ClassVar[bool] = True
    upstream: ClassVar[int] = 2
    ahead: ClassVar[int] = 1
    reach: ClassVar[int | None] = 1

    def survey(self, trace: Trace) -> pl.DataFrame:
        found = pl.concat([make(trace, ()) for make in _PARTS.values()])
        return _habits.survey(self.name, found.with_columns(pl.col("passed").fill_null(value=False)), 1)  # of what a healthy run leaves open no rule is made

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        wanted: dict[str, set[str]] = {}
        for h in hypotheses:
            wanted.setdefault(h.text("mode"), set()).add(h.text("what"))
        frames = [_PARTS[mode](trace, what).filter(pl.col("passed").is_not_null()) for mode, what in sorted(wanted.items())]
        return _habits.examples(trace, pl.concat([*frames, pl.DataFrame(schema=_sightings.EXAMPLE)]), hypotheses)

    def keep(self, hypothesis: Hypothesis, support: Support, precondition: Precondition) -> bool:
        """Only what always held is a habit."""
        return support.excluded == 0

    def upstream_of(self, hypothesis: Hypothesis) -> int:
        return CALLED if hypothesis["mode"] in ("each", "often", "then") else self.upstream

    def needs(self, hypothesis: Hypothesis) -> Needs:
        mode, (subject, _) = hypothesis.text("mode"), _parts(hypothesis)
        functions = {_frames.UPDATE, MODEL_CALL}
        if mode in ("given", "told", "each", "often"):
            functions |= {name for name in subject.split(_calls.BY) if name not in ("", _calls.SCRIPT)}
        if mode == "mode":
            functions.add(_calls.layer_of(subject))
        if mode in ("holds", "leaves", "writes", "uses", "then", "only") and not subject.startswith(_used.STEP + _calls.BY):
            functions.add(_told.function_of(subject))
        if mode == "made":
            functions |= set(_frames.BACKWARDS)
        return Needs(frozenset(functions), values=frozenset({_VALUES[mode]}) if mode in _VALUES else frozenset())

    def details(self, hypothesis: Hypothesis) -> frozenset[tuple[str, str]]:
        return frozenset({(_parts(hypothesis)[0].split(_calls.BY)[-1], "")}) if hypothesis["mode"] == "told" else frozenset()

    def say(self, hypothesis: Hypothesis) -> str:
        mode, (subject, what) = hypothesis.text("mode"), _parts(hypothesis)
        by, _, function = subject.rpartition(_calls.BY)
        if by:
            subject = f"{function}, in {by}," if by == _used.STEP else f"{function}, called by {by},"
        elif mode in ("uses", "then", "only") and ", " in subject:
            subject += ","
        return _SAYS[mode].format(subject, what) + _habits.of_programs(hypothesis)

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        mode, (subject, what) = hypothesis.text("mode"), _parts(hypothesis)
        return Detail(
            expected=_SAYS[mode].format(short(subject.rpartition(_calls.BY)[2]), what),
            seen=example["_seen"] or "",
            function=example["_function"] or "",
            variable="" if mode in ("uses", "then", "only") else example["_variable"] or "",  # an operation is no tensor: the function says where
            module=subject.partition(_calls.BY)[0] if _calls.BY in subject and not subject.startswith((_used.STEP, _calls.SCRIPT)) else "",
            advice=_OF_WORDS.get(what, _ADVICE[mode]) if mode == "holds" else _ADVICE[mode],
        )


def _parts(hypothesis: Hypothesis) -> tuple[str, str]:
    """What a rule speaks of, and what it says of that, for a sentence."""
    subject, _, what = hypothesis.text("what").partition(_calls.OF)
    return subject, _used.shortened(what) if hypothesis["mode"] == "only" else what.partition(_told.AMONG)[0]
