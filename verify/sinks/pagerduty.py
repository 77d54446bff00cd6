"""PagerDuty, Events API v2: trigger, acknowledge and resolve by dedup key; change events for planned restarts.

Limits (developer.pagerduty.com, Events API v2): summary 1,024 characters, dedup_key 255, body 512 KB; 202 is accepted,
429 and 5xx are to be sent again, 400 never. A repeated trigger of an open alert is merged and notifies nobody.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Final

import msgspec

from proctor.errors import DeliveryError
from proctor.verify.notice import Action, Notice
from proctor.verify.sinks import Delivery, Reach, Secret, Sink, register
from proctor.verify.sinks._http import HttpConfig, check_url, post
from proctor.verify.sinks._text import body, cut, headline, moment, shorten

MOST_SUMMARY: Final = 1024
MOST_KEY: Final = 255
MOST_BODY: Final = 512_000  # bytes
_KEY: Final = re.compile(r"[A-Za-z0-9]{32}")


class PagerDutyConfig(HttpConfig, frozen=True, kw_only=True):
    """`type = "pagerduty"`.

    Args:
        routing_key: integration key of the service, 32 characters.
        url: of the Events API; `https://events.eu.pagerduty.com` in the EU.
    """

    routing_key: Secret
    url: str = "https://events.pagerduty.com"
    tier: Reach = "page"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.url, self.allow_http)
        key_of(self.routing_key)


def key_of(secret: Secret) -> str:
    """The routing key; raises `ValueError` when it cannot be one."""
    key = secret.read()
    if not _KEY.fullmatch(key):
        raise ValueError(f"the routing key in the {secret.place} is not one: 32 letters and digits are expected")
    return key


@register
class PagerDuty(Sink):
    """One service's events."""

    kind: ClassVar[str] = "pagerduty"
    Config = PagerDutyConfig
    acknowledges = True

    def send(self, delivery: Delivery) -> None:
        self._post("/v2/enqueue", payload(delivery.notice))

    def change(self, summary: str, at: float, source: str) -> None:
        told = {"summary": cut(summary, MOST_SUMMARY), "timestamp": moment(at), "source": source or "proctor"}
        self._post("/v2/change/enqueue", {"payload": told})

    def _post(self, path: str, event: dict[str, Any]) -> None:
        try:
            key = key_of(self.settings.routing_key)
        except ValueError as error:
            raise DeliveryError(str(error)) from None
        content = msgspec.json.encode({"routing_key": key, **event})
        post(self.settings.url.rstrip("/") + path, content, self.settings, secrets=[key])


def payload(notice: Notice) -> dict[str, Any]:
    """An event without its routing key."""
    event: dict[str, Any] = {"event_action": notice.action.value, "dedup_key": shorten(notice.key, MOST_KEY)}
    if notice.action is not Action.TRIGGER:
        return event
    event["payload"] = {
        "summary": headline(notice, MOST_SUMMARY),
        "source": notice.source or notice.job or "proctor",
        "severity": notice.severity.value,
        "timestamp": moment(notice.began),
        "component": notice.component,
        "group": notice.group,
        "class": notice.code,
        "custom_details": details(notice),
    }
    event["client"] = "Proctor"
    event["links"] = [{"href": link, "text": name} for name, link in notice.links.items()]
    if len(msgspec.json.encode(event)) > MOST_BODY - 1024:  # the key and the braces around it
        event["payload"]["custom_details"] = {"text": body(notice, 20_000)}
    return event


def details(notice: Notice) -> dict[str, str]:
    """What the alert's page shows below its summary."""
    step = {} if notice.step is None else {"first step": str(notice.step)}
    return {"text": notice.text, "job": notice.job, "tier": notice.tier.value, **step, **notice.details}
