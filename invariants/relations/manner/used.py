"""Manners of functions: which operations of torch they use, in which order, and that they use no others (`instrument/probes/operations.py`).

A look is a row `{text: "__main__.train_step", has: "randn_like|add|loss_of()|add (place 2)|backward"}`; of a function that is looked at within a call of another one, or in a step,
text is `__main__.Net.forward > __main__.attend`, or `a step > __main__.train`; of one that trains for several updates it is `__main__.train, up to its first update`. `self` is the mode of a method's module: what is true in one of them alone is said with
the mode.
"""

from __future__ import annotations

import re
from collections import Counter
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
_SEEN: Final = 2  # looks at a function, fewer show no manner; of one that an outer loop calls few times there are no more in a short run, and rules need other runs beside
_OF_MODE: Final = 3  # looks at a method in each mode of its module
_FEW: Final = 6  # of the operations in the text of a rule
_NAMES: Final = 6  # of the operations that are new, in the text of a violation
_BESIDE: Final = 8  # of those that are used, for evidence
_WHILE: Final = {"trains": " while it trains", "evaluates": " while it is evaluated"}


class _Look(dict[str, int]):
    """What a function used, and as which."""

    def __init__(self, has: str, begun: str) -> None:
        super().__init__({name: i for i, name in enumerate(filter(None, has.split("|")))})
        self.begun = frozenset(filter(None, begun.split("|")))  # calls that ran when the step began


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
        return None if first not in look or _untold(look, second) else look.get(second, -1) > look[first]

    def seen(look: _Look, word: str) -> tuple[str, str]:
        first, _, last = word.partition(THEN)
        return last, f"{_plain(last)} comes before {_plain(first)}, and not behind it as in healthy runs" if last in look else _lacks(look, last, first)

    return _rows(trace, wanted, "then", _Manner(lambda looks: [f"{a}{THEN}{b}" for look in looks for a, b in pairwise(look)], holds, seen))


_TURNS: Final = ("permute", "transpose", "movedim")
_TURNED: Final = re.compile(rf"({'|'.join(_TURNS)})\([-\d]")  # with the dimensions that change places


def only(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a look at a function that uses the same in all looks: passed if it uses nothing else.

    A step may begin within a call, of which its function is not told then; begun elsewhere, as by a line before that call, the step has it.
    """

    def words(looks: list[_Look]) -> list[str]:
        sets = {frozenset(look) for look in looks}
        return [NOTHING_ELSE + ", ".join(sorted(of.union(*(look.begun for look in looks)))) for of in sets if len(sets) == 1]

    def holds(look: _Look, word: str) -> bool | None:
        return not _more(look, word)

    def seen(look: _Look, word: str) -> tuple[str, str]:
        more = _more(look, word)
        return more[0], f"it uses {', '.join(map(_plain, more[:_NAMES]))}{f' and {len(more) - _NAMES} more' if len(more) > _NAMES else ''}, too"

    return _rows(trace, wanted, "only", _Manner(words, holds, seen))


def shortened(word: str) -> str:
    """What a function uses alone, for a sentence."""
    word, mode = _parted(word)
    word = word if word != NOTHING_ELSE else "no operation"
    names = word.removeprefix(NOTHING_ELSE).split(", ")
    return (word if len(names) <= _FEW else f"{NOTHING_ELSE}{', '.join(names[:_FEW])} and {len(names) - _FEW} more") + _WHILE.get(mode, "")


def _parted(word: str) -> tuple[str, str]:
    """What is said, and of which mode of the module; "" of any."""
    return next(((word.removesuffix(said), mode) for mode, said in _WHILE.items() if word.endswith(said)), (word, ""))


def _more(look: _Look, word: str) -> list[str]:
    known = set(word.removeprefix(NOTHING_ELSE).split(", "))
    # Rules of a time when no dimensions were told speak of none.
    silent = {name.partition("(")[0] for name in known if name in _TURNS} - {name.partition("(")[0] for name in known if _TURNED.match(name)}
    return [name for name in look if name not in known and not (_TURNED.match(name) and name.partition("(")[0] in silent)]


def _untold(look: _Look, name: str) -> bool:
    """Whether a look, of an older record, has the operation and says nothing of its dimensions."""
    return bool(_TURNED.match(name)) and name.partition("(")[0] in look and not any(map(_TURNED.match, look))


def _lacks(look: _Look, name: str, behind: str = "") -> str:
    """What is missing, and where it was; in brackets, as evidence, what the function uses."""
    where = f", which comes right behind {_plain(behind)} in healthy runs" if behind else ", which healthy runs begin with"
    used = Counter(one.partition(" (place ")[0].removesuffix("()") for one in look if not _TURNED.match(one))
    told = [_plain(name) if times == 1 else f"{_plain(name)} {times} times" for name, times in islice(used.items(), _BESIDE)]
    more = f" and {len(used) - _BESIDE} more" if len(used) > _BESIDE else ""
    return f"it does not {'call' if name.endswith('()') else 'use'} {_plain(name)}{where} (it uses {', '.join(told) or 'nothing at all'}{more})"


def _left_out(look: _Look, failed: Collection[str]) -> str:
    """Uses that a look lacks, by what fails in it: those of the same operation behind one that is left out have other places, and their order tells nothing."""
    pairs = [_parted(word)[0].partition(THEN) for word in failed]
    lacks = dict.fromkeys(last for first, _, last in pairs if last and last not in look)
    told = [_plain(name) for name in islice(lacks, _BESIDE)]
    return f"it lacks {', '.join(told)}{f' and {len(lacks) - _BESIDE} more' if len(lacks) > _BESIDE else ''} of healthy runs, and what follows may have other places: " if lacks else ""


def _plain(name: str) -> str:
    """An operation as a reader calls it: that of a pair of brackets has a name that nobody writes."""
    return name.replace("__getitem__", "an index").replace("__setitem__", "an assignment by index")


def _rows(trace: Trace, wanted: Collection[str], kind: str, manner: _Manner) -> pl.DataFrame:
    rows, asked = _told.said(trace, "uses"), _calls._by_subject(wanted)
    looks = [_Look(row["has"], row["begun"]) for row in rows]
    of_subject: dict[tuple[int, str], list[tuple[_Look, str]]] = {}
    of_function: dict[tuple[int, str], list[tuple[_Look, str]]] = {}
    for row, look in zip(rows, looks, strict=True):
        of_subject.setdefault((row["proc"], row["text"]), []).append((look, row["self"]))
        of_function.setdefault((row["proc"], _function(row["text"])), []).append((look, row["self"]))

    def holds(look: _Look, mode: str, word: str) -> bool | None:
        base, of = _parted(word)
        return manner.holds(look, base) if of in ("", mode) else None

    manners: dict[tuple[int, str, str], bool | None] = {}  # of a function and what is said of it, from wherever it is called: always, never or None

    def always(proc: int, function: str, word: str) -> bool | None:
        key = proc, function, word
        if key not in manners:
            said = [one for one in (holds(look, mode, word) for look, mode in of_function[proc, function]) if one is not None]
            manners[key] = said[0] if len(said) >= _SEEN and len(set(said)) == 1 else None
        return manners[key]

    every: dict[str, dict[str, None]] = {}
    for (proc, subject), those in of_subject.items():
        words = every.setdefault(subject, dict.fromkeys(sorted(asked.get(subject, ()))))
        words.update(dict.fromkeys(manner.words([look for look, _ in those])))
        modes = Counter(mode for _, mode in of_function[proc, _function(subject)])
        for mode, said in _WHILE.items() if all(modes[mode] >= _OF_MODE for mode in _WHILE) else ():
            of_mode = manner.words([look for look, its in those if its == mode])
            words.update(dict.fromkeys(f"{word}{said}" for word in of_mode if always(proc, _function(subject), word) is None))
    found = []
    for row, look in zip(rows, looks, strict=True):
        for word in every[row["text"]]:
            passed = holds(look, row["self"], word)
            # What a function does now and then is no manner, and what was seen once or twice shows none; but a rule holds where it is kept.
            if passed is not always(row["proc"], _function(row["text"]), word) and not (passed and word in asked.get(row["text"], ())):
                passed = None
            if passed is not None:
                base, mode = _parted(word)
                name, seen = ("", "") if passed else manner.seen(look, base)
                if kind == "then" and name in look:
                    failed = [other for other in sorted(asked.get(row["text"], ())) if holds(look, row["self"], other) is False]
                    seen = _left_out(look, failed) + seen
                seen = f"{_WHILE[mode].strip()}, {seen}" if seen and mode else seen
                found.append(_calls._row(row, f"{row['text']}{_calls.OF}{word}", passed, seen, _told.caller_of(row["text"]), name))
    return _calls._finish(trace, found, kind)


def _function(subject: str) -> str:
    return subject.rpartition(_calls.BY)[2]
