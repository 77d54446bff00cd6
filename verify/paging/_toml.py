"""A TOML file as typed structs, with errors that name key and line and never show a value that may be a secret."""

from __future__ import annotations

import difflib
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from proctor.errors import ConfigError
from proctor.invariants.files import UNREADABLE, read_file
from proctor.verify.sinks import Secret
from proctor.verify.wording import clean

T = TypeVar("T", bound=msgspec.Struct)
Key = tuple[str | int, ...]

_MOST_BYTES: Final = 1024 * 1024
_HEADER: Final = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_ASSIGNED: Final = re.compile(r"\s*(\"[^\"]*\"|'[^']*'|[A-Za-z0-9_.-]+)\s*=")
_PART: Final = re.compile(r"\"([^\"]*)\"|'([^']*)'|([A-Za-z0-9_-]+)")
_AT: Final = re.compile(r" - at `\$((?:\.|\[)[^`]*)`$")
_NAMED: Final = re.compile(r"`([^`]+)`")


class Document:
    """One file.

    Args:
        path: of it; file names in it are relative to its folder.

    Raises:
        ConfigError: it cannot be read or is not TOML.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            blob = read_file(path, _MOST_BYTES)
        except OSError as error:
            raise ConfigError(f"{clean(path)}: {error.strerror or error}", hint="docs/paging.md shows an example") from None
        try:
            self.text = blob.decode()
            self.table: dict[str, Any] = tomllib.loads(self.text)
        except UnicodeDecodeError:
            raise ConfigError(f"{clean(path)} is not UTF-8 text") from None
        except UNREADABLE as error:
            raise ConfigError(f"{clean(path)} is not TOML: {clean(error, 120)}") from None

    def error(self, key: Key, message: str, hint: str) -> ConfigError:
        """An error about one key."""
        line = self.line(key)
        where = f"{clean(self.path)}:{line}" if line else clean(self.path)
        return ConfigError(f"{where}: {clean(_dotted(key), 120)} {message}", hint=hint)

    def known(self, key: Key, table: Mapping[str, Any], names: Iterable[str]) -> None:
        """Raises `ConfigError` for a key that is none of `names`."""
        names = list(names)
        for found in table:
            if found not in names:
                hint = f"one of {', '.join(sorted(names))}"
                raise self.error((*key, found), f"is unknown{self.suggestion(found, names)}", hint)

    def suggestion(self, found: object, names: Iterable[str]) -> str:
        """`, did you mean …?` where a name is close."""
        close = difflib.get_close_matches(str(found), list(names), n=1, cutoff=0.6)
        return f"; did you mean {close[0]!r}?" if close else ""

    def decode(self, cls: type[T], key: Key, table: Any) -> T:
        """A table as a struct: secrets by `NAME_env` and `NAME_file`, nothing unknown.

        Raises:
            ConfigError: with the key, its line and the remedy.
        """
        if not isinstance(table, dict):
            raise self.error(key, "is not a table", "")
        fields = {f.encode_name: f for f in msgspec.structs.fields(cls)}
        secrets = [name for name, f in fields.items() if _is_secret(f.type)]
        plain = {name: value for name, value in table.items()}
        for name in secrets:
            self._secret(name, key, plain, literal=name in fields)
        names = [n for n in fields if n not in secrets] + [f"{s}_{end}" for s in secrets for end in ("env", "file")]
        self.known(key, {n: v for n, v in plain.items() if n not in secrets}, names)
        for name in ("ca_file",):
            if name in fields and isinstance(plain.get(name), str) and plain[name]:
                plain[name] = str(self.path.parent / plain[name])
        try:
            return msgspec.convert(plain, cls, strict=True)
        except msgspec.ValidationError as error:
            raise self._invalid(key, str(error), secrets) from None

    def _secret(self, name: str, key: Key, table: dict[str, Any], *, literal: bool) -> None:
        by_env, by_file = f"{name}_env", f"{name}_file"
        if literal and name in table:
            remedy = f'write {by_env} = "VARIABLE" or {by_file} = "path" and put the secret there'
            raise self.error((*key, name), "is a secret, which does not belong into this file", remedy)
        given = [n for n in (by_env, by_file) if n in table]
        if len(given) == 2:
            raise self.error((*key, by_file), f"and {by_env} are both given", "keep one of them")
        if given:
            value = table.pop(given[0])
            if not isinstance(value, str) or not value.strip():
                raise self.error((*key, given[0]), "must be a non-empty text", "")
            if given[0] == by_env and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,127}", value):
                # Somebody has put the secret itself here: it must not be shown, hence capitals only.
                said = "is not the name of an environment variable: capitals, digits and _ are"
                raise self.error((*key, by_env), said, "export the secret under a name and write that name here")
            table[name] = {"env": value} if given[0] == by_env else {"file": str(self.path.parent / value)}

    def _invalid(self, key: Key, said: str, secrets: Iterable[str]) -> ConfigError:
        place = _AT.search(said)
        message = said[: place.start()] if place else said
        inner = tuple(_PART.findall(place.group(1))) if place else ()
        parts = tuple("".join(p) for p in inner)
        missing = re.fullmatch(r"Object missing required field `([^`]+)`", message)
        if missing:
            name = missing.group(1)
            how = f"{name}_env or {name}_file" if name in secrets else name
            return self.error((*key, *parts), f"needs {how}", "")
        named = _NAMED.search(message) if not parts else None  # `__post_init__` names the key that it means
        own = (named.group(1),) if named and not message.startswith("Expected") else ()
        full = (*key, *parts) if parts else key
        at = (*key, *own) if own and self.line((*key, *own)) != self.line(key) else full
        line = self.line(at)
        where = f"{clean(self.path)}:{line}" if line else clean(self.path)
        text = message[:1].lower() + message[1:] if message.startswith(("Expected", "Invalid", "Object")) else message
        return ConfigError(f"{where}: {clean(_dotted(full), 120)}: {clean(text, 200)}")

    def line(self, key: Key) -> int:
        """The line on which a key is given, else that of the table around it, else 0."""
        here: Key = ()
        seen: dict[Key, int] = {}
        found: dict[Key, int] = {}
        for number, text in enumerate(self.text.splitlines(), 1):
            header = _HEADER.match(text)
            if header:
                here = _parts(header.group(2))
                if header.group(1) == "[[":
                    index = seen.get(here, -1) + 1
                    seen[here] = index
                    here = (*here, index)
                found.setdefault(here, number)
                continue
            assigned = _ASSIGNED.match(text)
            if assigned:
                found.setdefault((*here, *_parts(assigned.group(1))), number)
        for length in range(len(key), 0, -1):
            if key[:length] in found:
                return found[key[:length]]
        return 0


def _is_secret(kind: Any) -> bool:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(option is Secret for option in typing.get_args(kind))
    return kind is Secret


def _parts(dotted: str) -> Key:
    return tuple("".join(p) for p in _PART.findall(dotted))


def _dotted(key: Key) -> str:
    text = ""
    for part in key:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text
