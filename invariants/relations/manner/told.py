"""Manners that probes tell (`instrument/probes/manners.py`, `graphs.py`, `moments.py`, `unseen.py`, `beside.py`, `operations.py`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice, pairwise
from typing import Any, Final

import polars as pl

from proctor.invariants.relations.manner import calls as _calls
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import MODEL_CALL, Value
from proctor.invariants.trace import Trace

AMONG: Final = " among "
THEN: Final = " and then "
_SEEN: Final = 3  # looks at a function, fewer show no manner
_NAMES: Final = 24  # of the operations in the text of a violation
BACKWARDS: Final = frozenset({"torch.Tensor.backward", "torch.autograd.backward"})


def function_of(subject: str) -> str:
    """The function of `function, argument name`, of `<model>.forward of a class, result`, or of `function looked at > function`."""
    return subject.partition(",")[0].partition(_calls.BY)[0].partition(" of ")[0]


def _rows(trace: Trace, mode: str) -> list[dict[str, Any]]:
    """What probes said of a mode: text (the subject), `has` and `lacks` (words), `seen`, and where."""
    rows = _sightings.sightings(trace, Value.MANNER).join(_frames.metas(trace, "mode", "has", "lacks", "seen"), on="meta", how="left", maintain_order="left")
    rows = _sightings.sites(trace, rows.filter((pl.col("mode") == mode) & (pl.col("step") >= 0)))
    return list(rows.fill_null("").iter_rows(named=True))


def _words(trace: Trace, mode: str, wanted: Collection[str], function: str = "", *, closed: bool = False) -> pl.DataFrame:
    """One row a look and word: passed if the look has it, failed if it lacks it. `closed`: what is not said is lacking."""
    looks, asked = _rows(trace, mode), _calls._by_subject(wanted)
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
    return f", but {'; '.join(sorted(has))}" if has else ""


def made(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row an operation and look at the graph of a loss.

    A rule keeps all operations of the loss that it comes from: a loss with one that is not among them is of another model or option, and breaks no rule.
    """
    looks, asked, found = _rows(trace, "made"), _calls._by_subject(wanted), []
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


def uses(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a look at what a function uses, and operation that comes first in a look at it: passed if it is used."""
    return _used(trace, wanted, "uses", lambda names: names[:1], lambda names, word: word in names)


def then(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a look, and two operations that followed each other in a look at the function: passed if the second is used behind the first. Of looks that use the first."""

    def holds(names: dict[str, int], word: str) -> bool | None:
        first, _, second = word.partition(THEN)
        return None if first not in names else names.get(second, -1) > names[first]

    return _used(trace, wanted, "then", lambda names: [f"{a}{THEN}{b}" for a, b in pairwise(names)], holds)


def _used(trace: Trace, wanted: Collection[str], mode: str, words: Callable[[list[str]], list[str]], holds: Callable[[dict[str, int], str], bool | None]) -> pl.DataFrame:
    looks, asked = _rows(trace, "uses"), _calls._by_subject(wanted)
    every: dict[str, dict[str, None]] = {}
    used = [{name: i for i, name in enumerate(filter(None, look["has"].split("|")))} for look in looks]
    of_function: dict[tuple[int, str], list[dict[str, int]]] = {}
    for look, names in zip(looks, used, strict=True):
        every.setdefault(look["text"], dict.fromkeys(sorted(asked.get(look["text"], ())))).update(dict.fromkeys(words(list(names))))
        of_function.setdefault((look["proc"], _function(look["text"])), []).append(names)
    found = []
    manners: dict[tuple[int, str, str], bool | None] = {}  # of a function and what is said of it, from wherever it is called: always, never or None
    for look, names in zip(looks, used, strict=True):
        function = look["proc"], _function(look["text"])
        for word in every[look["text"]]:
            passed = holds(names, word)
            if (*function, word) not in manners:
                said = [one for one in (holds(each, word) for each in of_function[function]) if one is not None]
                manners[*function, word] = said[0] if len(said) >= _SEEN and len(set(said)) == 1 else None
            # What a function does now and then is no manner, and what was seen once or twice shows none; but a rule holds where it is kept.
            if passed is not manners[*function, word] and not (passed and word in asked.get(look["text"], ())):
                passed = None
            if passed is not None:
                last = word.rpartition(THEN)[2]
                seen = f"{last} comes before {word.partition(THEN)[0]}" if last in names else f"it does not use {last}: {', '.join(islice(names, _NAMES))}"
                found.append(_calls._row(look, f"{look['text']}{_calls.OF}{word}", passed, seen, caller_of(look["text"]), last))
    return _calls._finish(trace, found, mode)


def _function(subject: str) -> str:
    return subject.rpartition(_calls.BY)[2]


def caller_of(subject: str) -> str:
    """The function that uses something, of `function looked at > function`."""
    return _function(subject).partition(" of ")[0]
