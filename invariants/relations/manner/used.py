"""Manners of functions: which operations of torch they use, in which order, and that they use no others (`instrument/probes/operations.py`).

A look is a row `{text: "__main__.train_step", has: "randn_like|add|loss_of()|add (place 2)|backward"}`; of a function that is looked at within a call of another one, or in a step,
text is `__main__.Net.forward > __main__.attend`, or `a step > __main__.train`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import islice, pairwise
from typing import Final, NamedTuple

import polars as pl

from proctor.invariants.relations.manner import calls as _calls
from proctor.invariants.relations.manner import told as _told
from proctor.invariants.trace import Trace

STEP: Final = "a step"  # in which a function was looked at, as in `instrument/probes/_looks.py`
THEN: Final = " and then "
NOTHING_ELSE: Final = "nothing else than "
_SEEN: Final = 3  # looks at a function, fewer show no manner
_FEW: Final = 6  # of the operations in the text of a rule
_NAMES: Final = 24  # of the operations in the text of a violation


_Look = dict[str, int]  # what a function used, and as which


class _Manner(NamedTuple):
    """What looks may show: what is said of one, of all looks at one function in a run; whether a look is such, None if it says nothing; and what it is instead."""

    words: Callable[[list[_Look]], list[str]]
    holds: Callable[[_Look, str], bool | None]
    seen: Callable[[_Look, str], tuple[str, str]]  # the operation, and a sentence


def uses(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a look at what a function uses, and operation that comes first in a look at it: passed if it is used."""
    return _rows(trace, wanted, "uses", _Manner(lambda looks: [name for look in looks for name in islice(look, 1)], lambda look, word: word in look, lambda look, word: (word, _lacks(look, word))))


def then(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a look, and two operations that followed each other in a look at the function: passed if the second is used behind the first. Of looks that use the first."""

    def holds(look: _Look, word: str) -> bool | None:
        first, _, second = word.partition(THEN)
        return None if first not in look else look.get(second, -1) > look[first]

    def seen(look: _Look, word: str) -> tuple[str, str]:
        first, _, last = word.partition(THEN)
        return last, f"{last} comes before {first}" if last in look else _lacks(look, last)

    return _rows(trace, wanted, "then", _Manner(lambda looks: [f"{a}{THEN}{b}" for look in looks for a, b in pairwise(look)], holds, seen))


def only(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a look at a function that uses the same in all looks: passed if it uses nothing else."""

    def words(looks: list[_Look]) -> list[str]:
        sets = {frozenset(look) for look in looks}
        return [NOTHING_ELSE + ", ".join(sorted(of)) for of in sets if len(sets) == 1]

    def holds(look: _Look, word: str) -> bool | None:
        return not _more(look, word)

    def seen(look: _Look, word: str) -> tuple[str, str]:
        more = _more(look, word)
        return more[0], f"it uses {', '.join(more[:_NAMES])}, too"

    return _rows(trace, wanted, "only", _Manner(words, holds, seen))


def shortened(word: str) -> str:
    """What a function uses alone, for a sentence."""
    names = word.removeprefix(NOTHING_ELSE).split(", ")
    return word if len(names) <= _FEW else f"{NOTHING_ELSE}{', '.join(names[:_FEW])} and {len(names) - _FEW} more"


def _more(look: _Look, word: str) -> list[str]:
    known = set(word.removeprefix(NOTHING_ELSE).split(", "))
    return [name for name in look if name not in known]


def _lacks(look: _Look, name: str) -> str:
    return f"it does not use {name}: {', '.join(islice(look, _NAMES))}"


def _rows(trace: Trace, wanted: Collection[str], mode: str, manner: _Manner) -> pl.DataFrame:
    rows, asked = _told.said(trace, "uses"), _calls._by_subject(wanted)
    looks = [{name: i for i, name in enumerate(filter(None, row["has"].split("|")))} for row in rows]
    of_subject: dict[tuple[int, str], list[_Look]] = {}
    of_function: dict[tuple[int, str], list[_Look]] = {}
    for row, look in zip(rows, looks, strict=True):
        of_subject.setdefault((row["proc"], row["text"]), []).append(look)
        of_function.setdefault((row["proc"], _function(row["text"])), []).append(look)
    every: dict[str, dict[str, None]] = {}
    for (_, subject), those in of_subject.items():
        every.setdefault(subject, dict.fromkeys(sorted(asked.get(subject, ())))).update(dict.fromkeys(manner.words(those)))
    found = []
    manners: dict[tuple[int, str, str], bool | None] = {}  # of a function and what is said of it, from wherever it is called: always, never or None
    for row, look in zip(rows, looks, strict=True):
        function = row["proc"], _function(row["text"])
        for word in every[row["text"]]:
            passed = manner.holds(look, word)
            if (*function, word) not in manners:
                said = [one for one in (manner.holds(each, word) for each in of_function[function]) if one is not None]
                manners[*function, word] = said[0] if len(said) >= _SEEN and len(set(said)) == 1 else None
            # What a function does now and then is no manner, and what was seen once or twice shows none; but a rule holds where it is kept.
            if passed is not manners[*function, word] and not (passed and word in asked.get(row["text"], ())):
                passed = None
            if passed is not None:
                name, seen = ("", "") if passed else manner.seen(look, word)
                found.append(_calls._row(row, f"{row['text']}{_calls.OF}{word}", passed, seen, _told.caller_of(row["text"]), name))
    return _calls._finish(trace, found, mode)


def _function(subject: str) -> str:
    return subject.rpartition(_calls.BY)[2]
