"""Which regular expressions of a plan may be used: those whose time is bounded, whatever the name that they are held against.

Python's matcher tries every way in which a text can be shared among the parts of an expression. A choice within a repeat that the next character
does not settle takes exponential time (`(a+)+b`, `(a|ab)*c`); choices that follow each other multiply (`.*.*.*.*x`). So: within a
repeat the next character must settle every choice, and the product of the other choices is bounded. This is found from the
expression alone, which some harmless ones do not pass either; they can be written otherwise. A back reference is refused.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

_MOST_WAYS: Final = 200**3  # three repeats that are not settled, over a name of 200 characters
_LENGTH: Final = 200
_parse: Final = importlib.import_module("re._parser")
_REPEATS: Final = frozenset({"MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"})
_NOTHING: Final = frozenset({"AT", "ASSERT", "ASSERT_NOT", "FAILURE"})  # match no character
_COMMON: Final = frozenset({*map(chr, range(32, 127)), "\n", "é", "数"})

Tree = Sequence[tuple[Any, Any]]  # what `re._parser` gives: operations with their arguments
Characters = frozenset[str]


def unbounded(pattern: str) -> str:
    """Why matching may take for ever, in words; "" where it cannot.

    Args:
        pattern: that `re.compile` takes.
    """
    tree = _parse.parse(pattern)
    both = {c for text in pattern for c in (text, *text.upper(), *text.lower())}
    look = _Look(_COMMON | both | set(_literals(tree)))
    try:
        look.sequence(tree, frozenset(), within=False)
    except _EndlessError as why:
        return str(why)
    return f"its parts can share a text in {look.ways:,} ways" if look.ways > _MOST_WAYS else ""


class _EndlessError(Exception):
    """Why a pattern is refused."""


@dataclass(frozen=True)
class _Part:
    """Characters that a part may begin with, and whether it may match nothing."""

    first: Characters
    empty: bool


@dataclass
class _Look:
    """Goes through an expression from its end, since what follows a choice may settle it."""

    alphabet: Characters | set[str]
    ways: int = 1

    def sequence(self, tree: Tree, after: Characters, *, within: bool) -> _Part:
        """A sequence that is followed by one of the characters `after`; `within` a repeat its choices must be settled."""
        first, empty = after, True
        for op, given in reversed(tree):
            part = self._part(str(op), given, first, within=within)
            first = part.first | first if part.empty else part.first
            empty &= part.empty
        return _Part(first, empty)

    def _part(self, name: str, given: Any, after: Characters, *, within: bool) -> _Part:
        if name in _NOTHING:
            if name.startswith("ASSERT"):
                self.sequence(given[1], after, within=within)
            return _Part(frozenset(), True)
        if name == "SUBPATTERN":
            return self.sequence(given[3], after, within=within)
        if name == "ATOMIC_GROUP":
            return self.sequence(given, after, within=within)
        if name == "BRANCH":
            looks = [_Look(self.alphabet) for _ in given[1]]
            parts = [look.sequence(branch, after, within=within) for look, branch in zip(looks, given[1], strict=True)]
            self.ways *= sum(look.ways for look in looks)  # one after the other
            return self._branch(parts, within=within)
        if name in _REPEATS:
            least, most, body = given
            return self._repeat(least, most, body, after, within=within)
        if name.startswith("GROUPREF"):
            raise _EndlessError("it refers to a group")
        return _Part(self._characters(name, given), False)

    def _branch(self, parts: list[_Part], *, within: bool) -> _Part:
        pairs = [(one, other) for i, one in enumerate(parts) for other in parts[i + 1 :]]
        if any(one.first & other.first or (one.empty and other.empty) for one, other in pairs):
            self._choice(1, "alternatives that begin alike", within=within)
        return _Part(frozenset().union(*(p.first for p in parts)), any(p.empty for p in parts))

    def _repeat(self, least: int, most: int, body: Tree, after: Characters, *, within: bool) -> _Part:
        again = most > 1
        alone = _Look(self.alphabet).sequence(body, frozenset(), within=False)  # what it begins with does not depend on what follows
        if again and alone.empty:
            raise _EndlessError("it repeats what may be empty")
        self.sequence(body, after | alone.first if again else after, within=within or again)
        if least != most and alone.first & after:
            self._choice(min(int(most), _LENGTH) if again else 2, "a repeat or an option within a repeat", within=within)
        return _Part(alone.first, least == 0 or alone.empty)

    def _choice(self, ways: int, what: str, *, within: bool) -> None:
        if within:
            raise _EndlessError(f"{what}, which the next character does not settle")
        self.ways *= ways

    def _characters(self, name: str, given: Any) -> Characters:
        """That one character may be; both cases, as a flag may say so."""
        if name == "LITERAL":
            found = {chr(given)}
        elif name == "NOT_LITERAL":
            found = set(self.alphabet) - {chr(given)}
        elif name == "IN":
            found = self._of_class(given)
        else:
            found = set(self.alphabet)
        return frozenset({*found, *(c for one in found for c in (*one.upper(), *one.lower()))})

    def _of_class(self, items: Sequence[tuple[Any, Any]]) -> set[str]:
        found: set[str] = set()
        negated = False
        for op, given in items:
            if str(op) == "NEGATE":
                negated = True
            elif str(op) == "LITERAL":
                found.add(chr(given))
            elif str(op) == "RANGE":
                found |= {c for c in self.alphabet if given[0] <= ord(c) <= given[1]}
            else:
                found |= {c for c in self.alphabet if _in_category(str(given), c)}
        return set(self.alphabet) - found if negated else found


def _in_category(category: str, character: str) -> bool:
    matches = {"DIGIT": r"\d", "SPACE": r"\s", "WORD": r"\w"}[category.rpartition("_")[2]]
    return bool(re.match(matches, character)) is ("NOT" not in category)


def _literals(tree: Any) -> Iterator[str]:
    """Characters that an expression names, also by an escape."""
    for op, given in tree:
        if str(op) in ("LITERAL", "NOT_LITERAL"):
            yield chr(given)
        elif str(op) == "RANGE":
            yield from map(chr, given)
        elif str(op) == "IN":
            yield from _literals(given)
        elif str(op) == "BRANCH":
            for branch in given[1]:
                yield from _literals(branch)
        elif str(op) in _REPEATS:
            yield from _literals(given[2])
        elif str(op) == "SUBPATTERN":
            yield from _literals(given[3])
        elif str(op) in ("ASSERT", "ASSERT_NOT"):
            yield from _literals(given[1])
        elif str(op) == "ATOMIC_GROUP":
            yield from _literals(given)
