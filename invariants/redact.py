"""Command lines as they may be kept: without the secrets that people put on them.

What is kept is read by others: `run.json`, reports, capsules, recordings. A value is left out where its option's name says that it is a secret
(`--api-key X`, `--api-key=X`, `WANDB_API_KEY=X`), and a password in an address (`https://user:X@host`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

HIDDEN: Final = "[hidden]"
_ALWAYS: Final = frozenset({"password", "passwd", "passphrase", "secret", "secrets", "credential", "credentials", "apikey"})
_WHERE: Final = {  # a key of attention and a token of text are none
    "key": frozenset({"api", "access", "private", "secret", "account", "auth", "license"}),
    "token": frozenset({"auth", "api", "access", "hf", "hub", "bearer", "wandb", "github", "secret", "session"}),
}
_ELSEWHERE: Final = frozenset({"file", "path", "env", "name", "id", "type"})  # the value says where the secret is
_OPTION: Final = re.compile(r"(-{0,2}[A-Za-z][\w.-]*)(=?)(.*)", re.DOTALL)
_ADDRESS: Final = re.compile(r"(\w{1,20}://[^/\s:@]*:)[^/\s@]+@")


def without_secrets(command: Sequence[str]) -> list[str]:
    """The same words, with `HIDDEN` for each secret."""
    kept: list[str] = []
    follows = False  # the word before says that this one is a secret
    for word in command:
        if follows and not word.startswith("--"):
            kept.append(HIDDEN)
            follows = False
            continue
        parts = _OPTION.fullmatch(word)
        follows = False
        if parts is not None and _is_secret(parts[1]):
            follows = not parts[2] and not parts[3] and parts[1].startswith("-")
            kept.append(f"{parts[1]}={HIDDEN}" if parts[2] else word)
        else:
            kept.append(_ADDRESS.sub(rf"\1{HIDDEN}@", word))
    return kept


def hides(command: Sequence[str]) -> bool:
    """Whether a kept command line lacks a secret, so that it cannot be run again."""
    return any(HIDDEN in word for word in command)


def _is_secret(option: str) -> bool:
    words = [w for w in re.split(r"[-_.]+", option.lower()) if w]
    if not words or words[-1] in _ELSEWHERE:
        return False
    if _ALWAYS & set(words):
        return True
    return words == ["token"] or any(words[-1] == last and near & set(words) for last, near in _WHERE.items())
