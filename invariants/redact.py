"""Command lines as they may be kept: without the secrets that people put on them.

What is kept is read by others: `run.json`, reports, capsules, recordings. A value is left out where its option's name says that it is a secret
(`--api-key X`, `--api-key=X`, `WANDB_API_KEY=X`), also within a word that is a command itself (`bash -c "…"`), a password in an address
(`https://user:X@host`) or one of its parameters (`?token=X`), that of a header (`Authorization: Bearer X`) or in JSON (`{"api_key": "X"}`), and what looks like a key that a well-known service gives out (`hf_…`, `sk-…`, `ghp_…`), wherever it stands.
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
_WITHIN: Final = re.compile(r"(?<![\w.-])(-{0,2}[A-Za-z][\w.-]*)([= ]+)(\"[^\"]*\"|'[^']*'|[^\s;&|\"']+)")
_GIVEN_OUT: Final = re.compile(  # by Hugging Face, OpenAI and Anthropic, GitHub, GitLab, AWS, Slack, Google, npm; a signed web token
    r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"
    r"|glpat-[A-Za-z0-9_-]{16,}|A[KS]IA[0-9A-Z]{16}|xox[abeoprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{30,}|npm_[A-Za-z0-9]{30,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,})"
)
_QUERY: Final = re.compile(r"(?<=[?&])([A-Za-z][\w.-]*)=([^&\s#\"']+)")
_SIGNED: Final = frozenset({"sig", "signature", "credential"})  # parameters of an address that is given out for a while
_HEADER: Final = re.compile(r"((?:-{1,2}[\w.-]+=)?)([A-Za-z][\w-]*)(\s*:\s*)((?:(?:Basic|Bearer|Token|Digest)\s+)?)(\S.*)", re.DOTALL | re.IGNORECASE)
_HEADERS: Final = frozenset({"authorization", "proxy-authorization", "cookie", "set-cookie"})
_JSON: Final = re.compile(r"([\"'])([A-Za-z][\w.-]*)\1(\s*:\s*)([\"'])((?:(?!\4).)*)\4", re.DOTALL)
_BEARER: Final = re.compile(r"(\b[Bb]earer\s+)[A-Za-z0-9._~+/=-]{8,}")
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
            kept.append(f"{parts[1]}={HIDDEN}" if parts[2] else _without(word))
        else:
            kept.append(_without(word))
    return kept


def _without(word: str) -> str:
    """A word that is no secret as a whole, without those within it."""
    word = recorded(word)
    header = _HEADER.fullmatch(word)
    if header is not None and (header[2].lower() in _HEADERS or _is_secret(header[2])):
        return "".join(header.groups()[:4]) + HIDDEN
    if not re.search(r"\s", word):
        return word
    return _WITHIN.sub(_hidden_within, word)


def recorded(text: str) -> str:
    """What a program gave to a function, in JSON, as it may be kept: without what is a secret wherever it stands, and without values whose name says so."""
    text = _GIVEN_OUT.sub(HIDDEN, _ADDRESS.sub(rf"\1{HIDDEN}@", text))
    return _BEARER.sub(rf"\1{HIDDEN}", _JSON.sub(_hidden_in_json, _QUERY.sub(_hidden_in_query, text)))


def _hidden_within(found: re.Match[str]) -> str:
    option, between, value = found.groups()
    said = between == "=" or option.startswith("-")  # `token x` is prose, `token = x` is code, `--token x` and `TOKEN=x` are neither
    if not said or value.startswith("--") or value == HIDDEN or not _is_secret(option):
        return found[0]
    return f"{option}{between}{HIDDEN}"


def _hidden_in_query(found: re.Match[str]) -> str:
    name, value = found.groups()
    kept = value == HIDDEN or not (_is_secret(name) or _SIGNED & set(re.split(r"[-_.]+", name.lower())))
    return found[0] if kept else f"{name}={HIDDEN}"


def _hidden_in_json(found: re.Match[str]) -> str:
    quote, name, between, other, value = found.groups()
    return f"{quote}{name}{quote}{between}{other}{HIDDEN}{other}" if value and _is_secret(name) else found[0]


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
