"""Prometheus Alertmanager, API v2: alerts are told again while they fire, and to every peer of a cluster.

An alert is its labels, so these hold what does not change while an incident lasts: never a rank or a step. Where the
severity rises, the alert with the old one ends in the same request. Alertmanager ends what nobody tells again
(`endsAt`), so an incident that is not over when the job ends is told once more with an end far ahead.
"""

from __future__ import annotations

import re
import urllib.parse
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

import msgspec

from proctor.errors import DeliveryError
from proctor.verify.notice import Action, Notice
from proctor.verify.sinks import Delivery, Secret, Sink, register
from proctor.verify.sinks._alertmanager_way import Way
from proctor.verify.sinks._http import HttpConfig, check_url, post
from proctor.verify.sinks._text import cut, facts, headline, moment
from proctor.verify.wording import clean

MOST_LABEL: Final = 1024
MOST_ANNOTATION: Final = 8_000
_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")  # 0.25 takes no other label names
_OWN: Final = frozenset({"alertname", "job", "code", "key", "severity", "tier", "component", "test"})
_LEAST_LIFE_S: Final = 300.0  # an alert that nobody tells again ends after this


class AlertmanagerConfig(HttpConfig, frozen=True, kw_only=True):
    """`type = "alertmanager"`.

    Args:
        urls: every peer of the cluster, without `/api/v2/alerts`.
        resend_s: seconds between two tellings of a firing alert.
        outlive_s: seconds that an incident goes on firing after the verifier has ended in good order.
        labels: more labels, for routing.
        username: for basic authentication, with `password`.
        password: of the user.
        token: sent as `Authorization: Bearer`.
    """

    urls: tuple[str, ...]
    resend_s: float = 60.0
    outlive_s: float = 4 * 3600.0
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    username: str = ""
    password: Secret | None = None
    token: Secret | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= len(self.urls) <= 16:
            raise ValueError("`urls` must name from 1 to 16 peers")
        for url in self.urls:
            try:
                check_url(url, self.allow_http)
            except ValueError as error:
                raise ValueError(f"an address in `urls` {error}") from None
        if not 1 <= self.resend_s <= 3600:
            raise ValueError("`resend_s` must be from 1 to 3600")
        if not 0 <= self.outlive_s <= 7 * 86400:
            raise ValueError("`outlive_s` must be from 0 to 604800")
        for name in self.labels:
            if not _NAME.fullmatch(name) or name in _OWN:
                raise ValueError(f"`labels` cannot have {clean(name, 40)!r}: a name of letters, digits and _ that is not ours")
        if bool(self.username) != (self.password is not None):
            raise ValueError("`username` needs `password_env` or `password_file`, and the other way round")
        if self.token is not None and self.username:
            raise ValueError("give a token or a user name, not both")
        authorization(self)


def authorization(config: AlertmanagerConfig) -> dict[str, str]:
    """The header that lets us in; raises `ValueError` when a secret cannot be read."""
    if config.token is not None:
        return {"Authorization": f"Bearer {config.token.read()}"}
    if config.password is not None:
        pair = f"{config.username}:{config.password.read()}".encode()
        return {"Authorization": f"Basic {b64encode(pair).decode()}"}
    return {}


@register
class Alertmanager(Sink):
    """One Alertmanager, or the peers of one cluster."""

    kind: ClassVar[str] = "alertmanager"
    Config = AlertmanagerConfig
    update_s = 10.0
    resend_resolved_s = 300.0
    keeps_alive = True

    def __init__(self, name: str, config: AlertmanagerConfig) -> None:
        super().__init__(name, config)
        self.resend_s = config.resend_s

    def send(self, delivery: Delivery) -> None:
        self._post(payload(delivery, self.settings))

    def alive(self, delivery: Delivery, interval_s: float) -> None:
        config = msgspec.structs.replace(self.settings, resend_s=max(interval_s, 1.0))
        self._post(payload(delivery, config, name="ProctorAlive"))

    def way(self) -> Callable[[str], str]:
        try:
            return Way(self.settings.urls[0], self.settings, authorization(self.settings)).told
        except ValueError as error:
            raise DeliveryError(str(error)) from None

    def _post(self, alerts: list[dict[str, Any]]) -> None:
        """To every peer; one that takes it is enough, since peers tell each other and we tell again."""
        try:
            headers = authorization(self.settings)
        except ValueError as error:
            raise DeliveryError(str(error)) from None
        content = msgspec.json.encode(alerts)
        secrets = [value.split(" ", 1)[1] for value in headers.values()]
        errors = []
        for url in self.settings.urls:
            try:
                post(url.rstrip("/") + "/api/v2/alerts", content, self.settings, headers=headers, secrets=secrets)
            except DeliveryError as error:
                errors.append(error)
        if len(errors) == len(self.settings.urls):
            raise DeliveryError(
                errors[0].message + (f" (and {len(errors) - 1} more peers)" if len(errors) > 1 else ""),
                retry=any(e.retry for e in errors),
                unsure=any(e.unsure for e in errors),
                retry_after_s=min((e.retry_after_s for e in errors if e.retry_after_s is not None), default=None),
                hint=errors[0].hint,
            )


def payload(
    delivery: Delivery, config: AlertmanagerConfig, name: str = "ProctorIncident"
) -> list[dict[str, Any]]:
    """The alert; before it the end of the one with the labels that it had until now."""
    notice, opened, last = delivery.notice, delivery.opened or delivery.notice, delivery.last
    over = notice.action is Action.RESOLVE
    shown = last if over and last is not None else notice
    life = max(_LEAST_LIFE_S, 4 * config.resend_s)
    if delivery.outlives:
        life = max(life, config.outlive_s)
    ends = delivery.at if over else delivery.at + life
    alerts = [_alert(shown, opened, config, name, ends=ends, at=delivery.at)]
    if last is not None and labels_of(last, opened, config, name) != labels_of(shown, opened, config, name):
        alerts.insert(0, _alert(last, opened, config, name, ends=delivery.at, at=delivery.at))
    return alerts


def _alert(
    notice: Notice, opened: Notice, config: AlertmanagerConfig, name: str, *, ends: float, at: float
) -> dict[str, Any]:
    alert: dict[str, Any] = {
        "labels": labels_of(notice, opened, config, name),
        "annotations": annotations_of(notice),
        # An alert that ends before it begins is rejected, and a clock may have jumped.
        "startsAt": moment(min(opened.began, at - 0.001, ends - 0.001)),
        "endsAt": moment(ends),
    }
    report = next((v for k, v in notice.links.items() if k != "runbook"), "")
    if report:
        alert["generatorURL"] = urllib.parse.quote(report, safe=":/?#[]@!$&'()*+,;=%~-._")
    return alert


def labels_of(notice: Notice, opened: Notice, config: AlertmanagerConfig, name: str) -> dict[str, str]:
    """What the alert is: of the incident as it began, and how bad it is now."""
    own = {
        "alertname": name,
        "job": opened.job,
        "code": opened.code,
        "key": opened.key,
        "component": opened.component,
        "severity": notice.severity.value,
        "tier": notice.tier.value,
        "test": "true" if notice.test else "",
    }
    return {k: cut(v, MOST_LABEL) for k, v in {**config.labels, **own}.items() if v}


def annotations_of(notice: Notice) -> dict[str, str]:
    """What people read: these may change."""
    told = {"summary": headline(notice, MOST_LABEL), "description": notice.text, "group": notice.group}
    links = {f"{k}_url": v for k, v in notice.links.items()}
    return {k: cut(v, MOST_ANNOTATION) for k, v in _named({**facts(notice), **links, **told}).items() if v}


def _named(texts: Mapping[str, str]) -> dict[str, str]:
    return {re.sub(r"[^a-zA-Z0-9_]", "_", "_" + k if not k or k[0].isdigit() else k): v for k, v in texts.items()}
