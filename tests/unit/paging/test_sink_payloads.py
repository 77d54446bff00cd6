"""Every payload stays within its receiver's limits, whatever a trace put into a notice."""

from __future__ import annotations

import base64
import email
import email.policy
import json
import re
import string
from typing import Any

import msgspec
import pytest
from helpers.live.pages import START, notice
from hypothesis import given, settings
from hypothesis import strategies as st

from proctor.invariants.invariant import Severity, Tier
from proctor.verify.notice import Action, Notice
from proctor.verify.sinks import Delivery, alertmanager, cloudevents, pagerduty, registry, slack, smtp
from proctor.verify.sinks._text import shorten, tidy

ANY = st.text(st.characters() | st.sampled_from("\x00\r\n\u202e\ud800<>&@!|*`"), max_size=60)
LONG = st.builds(lambda text, times: text * times, ANY, st.integers(0, 400))
TIMES = st.floats(0, 4e9) | st.sampled_from([START])
NOTICES = st.builds(
    Notice,
    action=st.sampled_from(Action),
    key=st.builds(lambda a, b: "k" + a * b, ANY, st.integers(1, 40)),
    tier=st.sampled_from(Tier),
    severity=st.sampled_from(Severity),
    title=LONG,
    text=LONG,
    job=LONG,
    source=LONG,
    code=ANY,
    component=LONG,
    group=ANY,
    step=st.none() | st.integers(0, 10**9),
    began=TIMES,
    at=TIMES,
    details=st.dictionaries(ANY, LONG, max_size=40),
    links=st.dictionaries(ANY, ANY | st.sampled_from(["https://x.org/a?b=%20#c", "javascript:alert(1)"]), max_size=12),
    test=st.booleans(),
)
AM = alertmanager.AlertmanagerConfig(type="alertmanager", urls=("http://127.0.0.1:1",), labels={"team": "ml"})
MAIL = smtp.SmtpConfig(type="smtp", host="localhost", security="none", sender="p@example.org", to=("a@example.org",))
many = settings(max_examples=60, deadline=None)


def delivery(of: Notice, **more: Any) -> Delivery:
    return Delivery(notice=of, event_id="e" * 32, at=START, **more)


@many
@given(NOTICES)
def test_pagerduty(of: Notice) -> None:
    event = pagerduty.payload(tidy(of))
    content = msgspec.json.encode({"routing_key": "k" * 32, **event})
    assert len(content) <= pagerduty.MOST_BODY
    assert 0 < len(event["dedup_key"]) <= 255 and event["dedup_key"] == pagerduty.payload(tidy(of))["dedup_key"]
    if of.action is Action.TRIGGER:
        assert 0 < len(event["payload"]["summary"]) <= 1024 and "\n" not in event["payload"]["summary"]
        assert event["payload"]["source"] and all(link["href"].startswith("http") for link in event["links"])


@many
@given(NOTICES)
def test_slack(of: Notice) -> None:
    message = slack.payload(tidy(of))
    (attachment,) = message["attachments"]
    blocks = attachment["blocks"]
    assert len(blocks) <= 50 and len(msgspec.json.encode(message)) < 40_000
    assert 0 < len(blocks[0]["text"]["text"]) <= 150
    total = 0
    for block in blocks[1:]:
        parts = [block["text"]] if "text" in block else block.get("fields", block.get("elements"))
        assert 0 < len(parts) <= 10
        for part in parts:
            text = part["text"]
            total += len(text)
            assert 0 < len(text) <= (3000 if "text" in block else 2000)
            assert not re.search(r"<[!@#]", text), "no mention"
            assert not re.search(r"&(?!amp;|lt;|gt;)", text), "no half entity"
    assert total < 12_000


@many
@given(NOTICES, NOTICES)
def test_alertmanager(of: Notice, before: Notice) -> None:
    one, first = tidy(of), msgspec.structs.replace(tidy(before), action=Action.TRIGGER)
    alerts = alertmanager.payload(delivery(one, opened=first, last=first), AM)
    json.loads(msgspec.json.encode(alerts))
    for alert in alerts:
        assert alert["startsAt"] < alert["endsAt"], "else it is rejected"
        for name in [*alert["labels"], *alert["annotations"]]:
            assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name)
        assert set(alert["labels"]) <= {*alertmanager._OWN, "team"}, "no rank, no step"
        assert all(0 < len(v) <= 1024 for v in alert["labels"].values())


@many
@given(NOTICES)
def test_cloudevents(of: Notice) -> None:
    content = cloudevents.encode(cloudevents.payload(delivery(tidy(of))))
    assert len(content) <= 64 * 1024
    event = json.loads(content)
    assert event["specversion"] == "1.0" and event["subject"] == tidy(of).key and event["id"] == "e" * 32
    assert re.fullmatch(r"/proctor/[A-Za-z0-9._~%-]+", event["source"])


@many
@given(NOTICES)
def test_smtp(of: Notice) -> None:
    raw = smtp.message(delivery(tidy(of)), MAIL).as_bytes()
    parsed = email.message_from_bytes(raw, policy=email.policy.default)
    assert parsed["To"] == "a@example.org" and len(parsed.get_all("Subject")) == 1 and parsed["Bcc"] is None
    assert len(str(parsed["Subject"])) <= 200
    assert all(len(line) <= 998 for line in raw.split(b"\r\n"))
    assert len(base64.b64decode(parsed.get_payload())) < 400_000


@given(st.text(string.printable, max_size=600), st.text(string.printable, max_size=600))
def test_two_keys_stay_two_when_shortened(a: str, b: str) -> None:
    assert len(shorten(a).encode()) <= 255
    assert (shorten(a) == shorten(b)) == (a == b)


def test_what_is_over_says_so_and_a_test_says_so() -> None:
    over = notice(action="resolve", test=True)
    assert slack.payload(over)["text"].startswith("Resolved: [TEST]")
    assert smtp.subject(over).startswith("[resolved] job: [TEST]")
    assert "test" in alertmanager.payload(delivery(over), AM)[0]["labels"]


def test_an_alert_keeps_its_labels_while_the_incident_changes_and_ends_the_old_one_when_it_gets_worse() -> None:
    first = notice(component="layers.3")
    moved = notice(component="layers.1", title="earlier", group="dp")
    (alert,) = alertmanager.payload(delivery(moved, opened=first, last=first), AM)
    assert alert["labels"]["component"] == "layers.3" and alert["annotations"]["summary"] == "earlier"
    worse = notice(severity=Severity.CRITICAL)
    old, new = alertmanager.payload(delivery(worse, opened=first, last=first), AM)
    assert old["labels"]["severity"] == "error" and new["labels"]["severity"] == "critical"
    assert old["endsAt"] < new["endsAt"] and old["startsAt"] == new["startsAt"]
    over = notice(action="resolve", severity=Severity.INFO)
    (end,) = alertmanager.payload(delivery(over, opened=first, last=worse), AM)
    assert end["labels"] == new["labels"]


@pytest.mark.parametrize("kind", ["alertmanager", "cloudevents", "pagerduty", "slack", "smtp"])
def test_every_sink_is_found_by_import(kind: str) -> None:
    assert registry()[kind].kind == kind
