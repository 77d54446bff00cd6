"""Manners that probes tell (`instrument/probes/manners.py`, `graphs.py`, `moments.py`, `unseen.py`, `beside.py`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import polars as pl

from proctor.invariants.relations.manner import calls as _calls
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import MODEL_CALL, Value
from proctor.invariants.trace import Trace

AMONG: Final = " among "
BACKWARDS: Final = frozenset({"torch.Tensor.backward", "torch.autograd.backward"})


def function_of(subject: str) -> str:
    """The function of `function, argument name`, of `<model>.forward of a class, result`, or of `function looked at > function`."""
    return subject.partition(",")[0].partition(_calls.BY)[0].partition(" of ")[0]


def said(trace: Trace, mode: str) -> list[dict[str, Any]]:
    """What probes said of a mode: text (the subject), `has` and `lacks` (words), `seen`, `self` (the mode of a method's module), `begun` (calls that ran when a step began), and where."""
    rows = _sightings.sightings(trace, Value.MANNER).join(_frames.metas(trace, "mode", "has", "lacks", "seen", "self", "begun"), on="meta", how="left", maintain_order="left")
    rows = _sightings.sites(trace, rows.filter((pl.col("mode") == mode) & (pl.col("step") >= 0)))
    return list(rows.fill_null("").iter_rows(named=True))


def _words(trace: Trace, mode: str, wanted: Collection[str], function: str = "", *, closed: bool = False) -> pl.DataFrame:
    """One row a look and word: passed if the look has it, failed if it lacks it. `closed`: what is not said is lacking."""
    looks, asked = said(trace, mode), _calls._by_subject(wanted)
    every: dict[str, set[str]] = {}
    for look in looks:
        every.setdefault(look["text"], set(asked.get(look["text"], ()))).update(filter(None, look["has"].split("|")))
    found = []
    for look in looks:
        has, lacks = (set(filter(None, look[side].split("|"))) for side in ("has", "lacks"))
        subject, _, variable = look["text"].partition(", ")
        for word in sorted(every[look["text"]]):
            if word in has or word in lacks or closed:
                seen = look["seen"] or (f"it is made of {', '.join(sorted(has))}" if closed else f"not true here: {word}{_also(has)}")
                found.append(_calls._row(look, f"{look['text']}{_calls.OF}{word}", word in has, seen, function or (look["function"] if mode == "steady" else caller_of(subject) if _calls.BY in subject else subject), variable or (word if closed or mode == "steady" else "")))
    return _calls._finish(trace, found, mode)


def _also(has: set[str]) -> str:
    """What is true of it instead, for the text of a violation."""
    return f" (what is true: {'; '.join(sorted(has))})" if has else ""


def made(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row an operation and look at the graph of a loss.

    A rule keeps all operations of the loss that it comes from: a loss with one that is not among them is of another model or option, and breaks no rule.
    """
    looks, asked, found = said(trace, "made"), _calls._by_subject(wanted), []
    made_of = [frozenset(filter(None, look["has"].split("|"))) for look in looks]
    every: dict[str, set[str]] = {}
    for look, has in zip(looks, made_of, strict=True):
        every.setdefault(look["text"], set(asked.get(look["text"], ()))).update(f"{word}{AMONG}{', '.join(sorted(has))}" for word in has)
    for look, has in zip(looks, made_of, strict=True):
        for word in sorted(every[look["text"]]):
            operation, _, known = word.partition(AMONG)
            if operation in has or has <= set(known.split(", ")):
                seen = f"it is made of {', '.join(sorted(has))}"
                found.append(_calls._row(look, f"{look['text']}{_calls.OF}{word}", operation in has, seen, "torch.Tensor.backward", operation))
    return _calls._finish(trace, found, "made")


def holds(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a word and look at what a function is given or gives."""
    return _words(trace, "holds", wanted)


def leaves(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row an argument and look: passed if the call did not change it."""
    return _words(trace, "leaves", wanted)


def writes(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row an argument and look: passed if the call changed it."""
    return _words(trace, "writes", wanted)


def steady(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a number of an object, and one more for each time that it changed."""
    return _words(trace, "steady", wanted)


def unseen(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a batch of an evaluation: passed if no sample of it was trained on, failed if all were."""
    return _words(trace, "unseen", wanted, MODEL_CALL)


def beside(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a step and class of a model that trains: passed if another of the class ran without training."""
    return _words(trace, "beside", wanted, MODEL_CALL)


def moment(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a moment of an optimizer and look."""
    return _words(trace, "moment", wanted, _frames.UPDATE, closed=True)


def caller_of(subject: str) -> str:
    """The function that uses something, of `function looked at > function`."""
    return subject.rpartition(_calls.BY)[2].partition(",")[0].partition(" of ")[0]
