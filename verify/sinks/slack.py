"""Slack incoming webhook: one message when an incident begins or gets worse, one when it is over.

Limits: one message a second and hook (429 with Retry-After beyond), header 150 characters, section 3,000, ten fields of
2,000, about 13,000 in all blocks. A webhook cannot change what it posted, so updates are not sent.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

from proctor.errors import DeliveryError
from proctor.invariants.invariant import Severity
from proctor.verify.notice import Action, Notice
from proctor.verify.sinks import Delivery, Secret, Sink, register
from proctor.verify.sinks._http import HttpConfig, check_url, post
from proctor.verify.sinks._text import cut, facts, headline, moment

MOST_HEADER: Final = 150
MOST_SECTION: Final = 3_000
MOST_FIELDS: Final = 10
MOST_FIELD: Final = 400  # 2,000 is Slack's limit; ten of these stay below that of the message
_COLOURS: Final = {
    Severity.INFO: "#439fe0",
    Severity.WARNING: "#daa038",
    Severity.ERROR: "#d1444a",
    Severity.CRITICAL: "#a30200",
}
_OVER: Final = "#2eb886"


class SlackConfig(HttpConfig, frozen=True, kw_only=True):
    """`type = "slack"`.

    Args:
        webhook_url: address of the hook, which is a secret: who has it can post.
    """

    webhook_url: Secret

    def __post_init__(self) -> None:
        super().__post_init__()
        url_of(self.webhook_url, self.allow_http)


def url_of(secret: Secret, allow_http: bool) -> str:
    """The address; raises `ValueError`, without it, when it cannot be used."""
    url = secret.read()
    try:
        return check_url(url, allow_http)
    except ValueError as error:
        raise ValueError(f"the address in the {secret.place} {error}") from None


@register
class Slack(Sink):
    """One channel."""

    kind: ClassVar[str] = "slack"
    Config = SlackConfig
    interval_s = 1.05
    merges = False
    update_s = 3600.0

    def send(self, delivery: Delivery) -> None:
        try:
            url = url_of(self.settings.webhook_url, self.settings.allow_http)
        except ValueError as error:
            raise DeliveryError(str(error)) from None
        post(url, msgspec.json.encode(payload(delivery.notice)), self.settings)


def payload(notice: Notice) -> dict[str, Any]:
    """A message with a coloured bar."""
    over = notice.action is Action.RESOLVE
    word = "Resolved: " if over else f"{notice.severity.value.capitalize()}: "
    title = cut(word + headline(notice, 1024), 1024)
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": {"type": "plain_text", "text": cut(title, MOST_HEADER), "emoji": False}}
    ]
    if notice.text and not over:
        blocks.append({"type": "section", "text": _marked(escape(notice.text, MOST_SECTION))})
    shown = list(facts(notice).items())[: 3 if over else MOST_FIELDS]
    blocks.append(
        {"type": "section", "fields": [_marked(f"*{escape(k, 60)}*\n{escape(v, MOST_FIELD)}") for k, v in shown]}
    )
    links = [f"<{link}|{escape(name, 60)}>" for name, link in notice.links.items() if len(link) < 600][:4]
    if links:
        blocks.append({"type": "section", "text": _marked(" · ".join(links))})
    context = f"{escape(notice.key, 260)} · {moment(notice.at)}"
    blocks.append({"type": "context", "elements": [_marked(context)]})
    colour = _OVER if over else _COLOURS[notice.severity]
    return {"text": escape(title, 1024), "attachments": [{"color": colour, "blocks": blocks}]}


def escape(text: str, limit: int) -> str:
    """Text in which nothing is a mention, a link or an entity, within `limit` characters after escaping."""
    safe = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    if len(safe) <= limit:
        return safe
    short = safe[: limit - 1]
    tail = short.rfind("&", max(0, limit - 6))
    if tail >= 0 and ";" not in short[tail:]:
        short = short[:tail]  # half an entity
    return short + "…"


def _marked(text: str) -> dict[str, Any]:
    return {"type": "mrkdwn", "text": text, "verbatim": True}
