"""Any webhook: CloudEvents 1.0, structured JSON, with the notice as data.

A receiver drops a repeated event by `source` and `id`, and merges events of one incident by `subject`, the dedup key.
Events stay below 64 KiB, which every intermediary must forward (CloudEvents 1.0 §Size limits).
"""

from __future__ import annotations

import urllib.parse
from typing import Any, ClassVar, Final

import msgspec

from proctor.errors import DeliveryError
from proctor.verify.notice import Notice
from proctor.verify.sinks import Delivery, Secret, Sink, register
from proctor.verify.sinks._http import HttpConfig, check_url, post
from proctor.verify.sinks._text import cut, moment

MOST_BODY: Final = 64 * 1024  # bytes
_TYPE: Final = "proctor.incident"


class CloudEventsConfig(HttpConfig, frozen=True, kw_only=True):
    """`type = "cloudevents"`.

    Args:
        url: where events are posted.
        webhook_url: the same as a secret, for addresses that hold a token.
        token: sent as `Authorization: Bearer`.
    """

    url: str = ""
    webhook_url: Secret | None = None
    token: Secret | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if bool(self.url) == (self.webhook_url is not None):
            raise ValueError("give one of `url`, `webhook_url_env` and `webhook_url_file`")
        address(self)
        if self.token is not None:
            self.token.read()


def address(config: CloudEventsConfig) -> str:
    """Where to post; raises `ValueError` when that cannot be used."""
    where = "`url`" if config.webhook_url is None else f"the address in the {config.webhook_url.place}"
    url = config.url if config.webhook_url is None else config.webhook_url.read()
    try:
        return check_url(url, config.allow_http)
    except ValueError as error:
        raise ValueError(f"{where} {error}") from None


@register
class CloudEvents(Sink):
    """One webhook."""

    kind: ClassVar[str] = "cloudevents"
    Config = CloudEventsConfig
    acknowledges = True

    def send(self, delivery: Delivery) -> None:
        config: CloudEventsConfig = self.settings
        try:
            url = address(config)
            token = "" if config.token is None else config.token.read()
        except ValueError as error:
            raise DeliveryError(str(error)) from None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        content = encode(payload(delivery))
        kind = "application/cloudevents+json; charset=utf-8"
        post(url, content, config, content_type=kind, headers=headers, secrets=[token])


def payload(delivery: Delivery) -> dict[str, Any]:
    """One event."""
    notice = delivery.notice
    return {
        "specversion": "1.0",
        "id": delivery.event_id,
        "source": "/proctor/" + urllib.parse.quote(notice.job or "job", safe=""),
        "type": f"{_TYPE}.{notice.action.value}",
        "subject": notice.key,
        "time": moment(notice.at),
        "datacontenttype": "application/json",
        "data": notice,
    }


def encode(event: dict[str, Any]) -> bytes:
    """JSON of at most 64 KiB: details are shortened, then left out."""
    notice: Notice = event["data"]
    for text, details in ((8_000, 400), (4_000, 100), (1_000, 0)):
        content = msgspec.json.encode(event)
        if len(content) <= MOST_BODY:
            return content
        shorter = {k: cut(v, details) for k, v in notice.details.items() if details}
        event = {**event, "data": msgspec.structs.replace(notice, text=cut(notice.text, text), details=shorter, links={})}
    return msgspec.json.encode(event)
