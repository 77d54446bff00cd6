"""Text that a receiver takes: printable, within its limits, with the name of the incident kept whole or hashed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from proctor.verify.notice import Action, Notice
from proctor.verify.wording import clean

# Control characters but newline and tab, bidirectional overrides, and halves of surrogate pairs.
_UNSAFE: Final = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_WEB: Final = re.compile(r"https?://[^\s<>\"|]{1,2000}")
_HASH_CHARS: Final = 32

# What is kept of a notice; the outbox and the largest payload follow from it.
MOST_TITLE: Final = 1_000
MOST_TEXT: Final = 12_000
MOST_DETAIL: Final = 2_000
MOST_DETAILS: Final = 24
MOST_LINKS: Final = 8


def cut(text: str, limit: int) -> str:
    """At most `limit` characters, with an ellipsis where the rest was."""
    return text if len(text) <= limit else text[: max(0, limit - 1)] + "…"[:limit]


def plain(text: str, limit: int) -> str:
    """Lines of printable text, at most `limit` characters."""
    return cut(_UNSAFE.sub("", text).strip(), limit)


def shorten(key: str, limit: int = 255) -> str:
    """A key within `limit` bytes; a longer one ends with its SHA-256, so that two keys stay two."""
    raw = key.encode("utf-8", "backslashreplace")
    if len(raw) <= limit:
        return raw.decode()
    tail = hashlib.sha256(raw).hexdigest()[:_HASH_CHARS]
    return raw[: limit - _HASH_CHARS - 1].decode(errors="ignore") + ":" + tail


def moment(seconds: float) -> str:
    """RFC 3339 in UTC with milliseconds."""
    try:
        when = datetime.fromtimestamp(seconds, UTC)
    except (OverflowError, OSError, ValueError):
        when = datetime.fromtimestamp(0, UTC)
    return when.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def headline(notice: Notice, limit: int) -> str:
    """The title in one line, marked when it is a test."""
    mark = "[TEST] " if notice.test else ""
    return cut(mark + (clean(notice.title).strip() or "incident"), limit)


def tidy(notice: Notice) -> Notice:
    """A notice of bounded size whose texts every receiver can encode, and whose links can be opened."""
    return msgspec.structs.replace(
        notice,
        key=shorten(clean(notice.key)),
        title=clean(notice.title, MOST_TITLE),
        text=plain(notice.text, MOST_TEXT),
        job=clean(notice.job, 200),
        source=clean(notice.source, 250),
        code=clean(notice.code, 40),
        component=clean(notice.component, 250),
        group=clean(notice.group, 250),
        details=_bounded(notice.details, MOST_DETAILS, MOST_DETAIL),
        links={k: v for k, v in _bounded(notice.links, MOST_LINKS, 2_000).items() if _WEB.fullmatch(v)},
    )


def _bounded(texts: Mapping[str, str], most: int, limit: int) -> dict[str, str]:
    return {clean(k, 60): plain(v, limit) for k, v in list(texts.items())[:most]}


def facts(notice: Notice) -> dict[str, str]:
    """What a short message shows besides title and text, in order; empty ones are left out."""
    shown = {
        "job": notice.job,
        "severity": notice.severity.value,
        "tier": notice.tier.value,
        "rule": notice.code,
        "first step": "" if notice.step is None else str(notice.step),
        "component": notice.component,
        "group": notice.group,
        "began": moment(notice.began),
        **notice.details,
    }
    return {name: value for name, value in shown.items() if value}


def body(notice: Notice, limit: int) -> str:
    """The whole notice as plain text."""
    parts = [headline(notice, MOST_TITLE), notice.text]
    parts.append("\n".join(f"{name}: {value}" for name, value in facts(notice).items()))
    parts.append("\n".join(f"{name}: {link}" for name, link in notice.links.items()))
    if notice.action is Action.RESOLVE:
        parts.insert(0, f"It is over ({moment(notice.at)}).")
    return cut("\n\n".join(part for part in parts if part), limit)
