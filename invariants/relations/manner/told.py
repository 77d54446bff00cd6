"""Manners that probes tell (`instrument/probes/manners.py`, `graphs.py`, `moments.py`, `unseen.py`, `beside.py`, `switches.py`)."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import polars as pl

from proctor.invariants.relations.manner import calls as _calls
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.calls import ENOUGH, short
from proctor.invariants.schema import MODEL_CALL, Value
from proctor.invariants.trace import Trace

AMONG: Final = " among "
_PAIRS: Final = (
    ("it has more than one value", "it has one value throughout"),
    ("it lies within 0 and 1", "most of it lies outside of 0 and 1"),
    ("it is not negative", "much of it is negative"),
    ("some of it is negative", "none of it is negative"),
    ("its rows have length 1", "its rows do not have length 1"),
    ("its rows sum to 1", "its rows do not sum to 1"),
    ("gradients flow through it", "no gradients flow through it"),
    ("it is none of the other arguments", "it is the same as another argument"),
    ("it is none of the arguments", "it is one of the arguments"),
    ("it is none of the other results", "it holds the same as another result"),
    ("a later call is given it", "no later call is given it"),
    ("it is another than in the call before", "it is the same as in the call before"),
    ("it changes", "it stays as it is"),
    ("it does not begin anew", "it begins anew"),
    ("its halves along the first dimension differ", "its halves along the first dimension are equal"),
    ("its halves along the second dimension differ", "its halves along the second dimension are equal"),
    ("it begins behind the beginning of what it is cut from", "it begins where what it is cut from begins"),
    ("it is as it was before the call", "the call changes it"),
    ("it is another after the call", "the call leaves it as it was"),
)
_OPPOSITES: Final = {**{other: word for word, other in _PAIRS}, **dict(_PAIRS)}
_STATES: Final = {"on": "off", "off": "on", "given": "left out", "left out": "given"}  # of switches of layers


def function_of(subject: str) -> str:
    """The function of `function, argument name`, of `<model>.forward of a class, result`, or of `function looked at > function`."""
    return subject.partition(",")[0].partition(_calls.BY)[0].partition(" of ")[0]


def said(trace: Trace, mode: str) -> list[dict[str, Any]]:
    """What probes said of a mode: text (the subject), `has`, `lacks` and `open` (words), `seen`, `self` (the mode of a method's module), `begun` (calls that ran when a step began), and where."""
    rows = _sightings.sightings(trace, Value.MANNER).join(_frames.metas(trace, "mode", "has", "lacks", "open", "seen", "self", "begun"), on="meta", how="left", maintain_order="left")
    rows = _sightings.sites(trace, rows.filter((pl.col("mode") == mode) & (pl.col("step") >= 0)))
    return list(rows.fill_null("").iter_rows(named=True))


def _words(trace: Trace, mode: str, wanted: Collection[str], function: str = "", *, closed: bool = False) -> pl.DataFrame:
    """One row a look and word: passed if the look has it, failed if it lacks it, null if it leaves it open. `closed`: what is not said is lacking."""
    looks, asked = said(trace, mode), _calls._by_subject(wanted)
    every: dict[str, set[str]] = {}
    for look in looks:
        every.setdefault(look["text"], set(asked.get(look["text"], ()))).update(filter(None, look["has"].split("|")))
    found = []
    for look in looks:
        has, lacks = (set(filter(None, look[side].split("|"))) for side in ("has", "lacks"))
        subject, _, variable = look["text"].partition(", ")
        found += [_calls._row(look, f"{look['text']}{_calls.OF}{word}", None, "", subject, variable) for word in filter(None, look["open"].split("|"))]
        for word in sorted(every[look["text"]]):
            if word in has or word in lacks or closed:
                seen = look["seen"] or (f"it is made of {', '.join(sorted(has))}" if closed else f"{_named(look['text'])}: {opposite(word)}{_also(has)}")
                found.append(_calls._row(look, f"{look['text']}{_calls.OF}{word}", word in has, seen, function or (look["function"] if mode == "steady" else caller_of(subject) if _calls.BY in subject else subject), variable or (word if closed or mode == "steady" else "")))
    return _calls._finish(trace, found, mode)


def _named(text: str) -> str:
    """`argument next_state of Model.energy`, of `models.Model.energy, argument next_state`; of the result of a model its class."""
    subject, _, variable = text.partition(", ")
    forward, _, kind = subject.partition(" of ")
    name = f"{kind.rpartition('.')[2]}.forward" if kind else short(forward.rpartition(_calls.BY)[2])
    return f"{variable} of {name}" if variable else name


def opposite(word: str) -> str:
    """What is so where a word is not true."""
    switch, joint, state = word.rpartition(" is ")
    return _OPPOSITES.get(word) or (f"{switch}{joint}{_STATES[state]}" if state in _STATES else f"not so: {word}")


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


def layers(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a switch of a kind of layer: passed if it is what it was, failed if it is the other."""
    found = _words(trace, "layers", wanted, MODEL_CALL)
    return pl.concat([found] * ENOUGH)  # a model has them all the time


def often(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a function and number of steps: passed if several of so many first steps call it, failed if none does, nor what comes before them."""
    looks, asked, found = said(trace, "often"), _calls._by_subject(wanted), []
    for look in looks:
        if look["text"]:
            found += [_calls._row(look, f"{look['text']}{_calls.OF}{look['has']}", True, "", look["text"])] * ENOUGH  # several steps called it
            continue
        called = set(look["begun"].split("|"))
        for function in sorted(asked.keys() - called):
            if look["has"] in asked[function]:
                found.append(_calls._row(look, f"{function}{_calls.OF}{look['has']}", False, f"{short(function)} is never called {look['has']}", function))
    return _calls._finish(trace, found, "often")


def moment(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a moment of an optimizer and look."""
    return _words(trace, "moment", wanted, _frames.UPDATE, closed=True)


def caller_of(subject: str) -> str:
    """The function that uses something, of `function looked at > function`."""
    return subject.rpartition(_calls.BY)[2].partition(",")[0].partition(" of ")[0]
