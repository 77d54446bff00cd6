"""Sinks against servers on loopback: what an answer means, and what errors do not give away."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from helpers.live.pages import START, notice
from helpers.live.receivers import ROUTING_KEY, PagerDuty, Webhook, free_port

from proctor.errors import DeliveryError
from proctor.verify.sinks import Delivery, Secret, alertmanager, cloudevents, pagerduty, slack, smtp
from proctor.verify.sinks._http import HttpConfig, check_url, post

PATH = "/services/T000/B000/verysecrettoken"


def delivery(action: str = "trigger") -> Delivery:
    return Delivery(notice=notice(action=action), event_id="e1", at=START)


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch, pagerduty: PagerDuty, webhook: Webhook) -> None:
    monkeypatch.setenv("PAGE_KEY", ROUTING_KEY)
    monkeypatch.setenv("PAGE_HOOK", webhook.url + PATH)
    monkeypatch.setenv("PAGE_TOKEN", "bearer-token-123")


def test_pagerduty_takes_a_whole_life_and_a_planned_change(pagerduty: PagerDuty, secrets: None) -> None:
    sink = sink_pagerduty(pagerduty.url)
    for action in ("trigger", "acknowledge", "resolve"):
        sink.send(delivery(action))
    sink.change("restarted from step 4000", START, "job")
    (incident,) = pagerduty.incidents
    assert incident.acknowledged and incident.resolved and len(pagerduty.changes) == 1 and not pagerduty.rejected


def sink_pagerduty(url: str) -> pagerduty.PagerDuty:
    config = pagerduty.PagerDutyConfig(type="pagerduty", routing_key=Secret(env="PAGE_KEY"), url=url, timeout_s=1.0)
    return pagerduty.PagerDuty("oncall", config)


def test_slack_and_cloudevents_send_what_they_build(webhook: Webhook, secrets: None) -> None:
    slack.Slack("chat", slack.SlackConfig(type="slack", webhook_url=Secret(env="PAGE_HOOK"))).send(delivery())
    config = cloudevents.CloudEventsConfig(type="cloudevents", url=webhook.url + "/in", token=Secret(env="PAGE_TOKEN"))
    cloudevents.CloudEvents("hook", config).send(delivery())
    first, second = webhook.hits
    assert first.path == PATH and "norm.weight" in first.body["text"]
    assert second.headers["Content-Type"] == "application/cloudevents+json; charset=utf-8"
    assert second.headers["Authorization"] == "Bearer bearer-token-123" and second.body["data"]["step"] == 40


@pytest.mark.parametrize(
    ("status", "retry", "unsure"),
    [(400, False, False), (413, False, False), (401, True, False), (404, True, False), (408, True, False), (429, True, False), (500, True, True), (502, True, True), (503, True, False), (302, True, False)],
)  # fmt: skip
def test_what_an_answer_means(webhook: Webhook, secrets: None, status: int, retry: bool, unsure: bool) -> None:
    echo = f"no good: {webhook.url}{PATH}".encode()
    webhook.script = [(status, {"Location": "http://127.0.0.1:1/elsewhere"}, echo)]
    with pytest.raises(DeliveryError) as raised:
        slack.Slack("chat", slack.SlackConfig(type="slack", webhook_url=Secret(env="PAGE_HOOK"))).send(delivery())
    error = raised.value
    assert (error.retry, error.unsure) == (retry, unsure)
    assert "verysecret" not in str(error) and str(status) in str(error) and webhook.hits == []


def test_an_echoed_key_is_not_quoted(pagerduty: PagerDuty, secrets: None) -> None:
    pagerduty.script = [(400, {}, f"bad key {ROUTING_KEY} \x1b[31m".encode())]
    with pytest.raises(DeliveryError, match=r"bad key \*\*\*") as raised:
        sink_pagerduty(pagerduty.url).send(delivery())
    assert ROUTING_KEY not in str(raised.value) and "\x1b" not in str(raised.value)


@pytest.mark.parametrize(("value", "seconds"), [("7", 7.0), ("999999999999", 3600.0), ("soon", None), ("", None), ("-3", None)])
def test_retry_after_is_bounded(webhook: Webhook, value: str, seconds: float | None) -> None:
    webhook.script = [(429, {"Retry-After": value}, b"")]
    with pytest.raises(DeliveryError) as raised:
        post(webhook.url, b"{}", HttpConfig(type="x"))
    assert raised.value.retry_after_s == seconds


def test_a_cut_connection_leaves_it_open_whether_it_was_taken(webhook: Webhook) -> None:
    webhook.script = ["late"]
    with pytest.raises(DeliveryError) as raised:
        post(webhook.url, b"{}", HttpConfig(type="x"))
    assert raised.value.unsure and len(webhook.hits) == 1
    with pytest.raises(DeliveryError, match="refused") as raised:
        post(f"http://127.0.0.1:{free_port()}", b"{}", HttpConfig(type="x"))
    assert not raised.value.unsure


@contextmanager
def raw_server(answer: bytes, pause_s: float = 0.0, repeat: int = 1) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve() -> None:
            try:
                peer, _ = server.accept()
                peer.recv(65536)
                for _ in range(repeat):
                    peer.sendall(answer)
                    time.sleep(pause_s)
                peer.close()
            except OSError:
                pass

        threading.Thread(target=serve, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x"


def test_a_hostile_answer_is_bounded_in_time_and_size() -> None:
    begin = time.monotonic()
    with raw_server(b"HTTP/1.1 200 OK\r\nContent-Length: 99999999\r\n\r\n") as url:
        assert post(url, b"{}", HttpConfig(type="x", timeout_s=0.3)).status == 200
    with raw_server(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100, 0.05, 200) as url:
        assert len(post(url, b"{}", HttpConfig(type="x", timeout_s=0.3)).text) <= 160
    with raw_server(b"garbage\r\n\r\n") as url, pytest.raises(DeliveryError):
        post(url, b"{}", HttpConfig(type="x", timeout_s=0.3))
    with raw_server(b"") as url, pytest.raises(DeliveryError) as raised:
        post(url, b"{}", HttpConfig(type="x", timeout_s=0.3))
    assert raised.value.unsure
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("url", ["ftp://x.org", "http://x.org/", "https://", "https://a:b@x.org", "x", "https://x.org/a b", "https://[x"])
def test_addresses_that_are_not_used(url: str) -> None:
    with pytest.raises(ValueError, match=r"^(is|holds|has)"):
        check_url(url, allow_http=False)


@pytest.mark.parametrize("url", ["https://x.org/a", "http://127.0.0.1:9093", "http://localhost", "http://[::1]:80/a"])
def test_addresses_that_are_used(url: str) -> None:
    assert check_url(url, allow_http=False) == url


def test_one_peer_of_a_cluster_is_enough(webhook: Webhook) -> None:
    dead = f"http://127.0.0.1:{free_port()}"
    config = alertmanager.AlertmanagerConfig(type="alertmanager", urls=(dead, webhook.url))
    alertmanager.Alertmanager("am", config).send(delivery())
    assert [hit.path for hit in webhook.hits] == ["/api/v2/alerts"]
    alone = alertmanager.Alertmanager("am", msgspec.structs.replace(config, urls=(dead, dead)))
    with pytest.raises(DeliveryError, match="1 more peer"):
        alone.send(delivery())


def test_a_rotated_secret_counts_at_once(tmp_path: Path, webhook: Webhook) -> None:
    (tmp_path / "hook").write_text(webhook.url + "/old\n")
    sink = slack.Slack("chat", slack.SlackConfig(type="slack", webhook_url=Secret(file=str(tmp_path / "hook"))))
    sink.send(delivery())
    (tmp_path / "hook").write_text(webhook.url + "/new\n")
    sink.send(delivery())
    (tmp_path / "hook").unlink()
    with pytest.raises(DeliveryError, match="cannot be read"):
        sink.send(delivery())
    assert [hit.path for hit in webhook.hits] == ["/old", "/new"]


class TestMail:
    """Against aiosmtpd."""

    @pytest.fixture
    def box(self) -> Iterator[tuple[int, list[bytes], list[str]]]:
        pytest.importorskip("aiosmtpd", reason="aiosmtpd is not installed")
        from aiosmtpd.controller import Controller

        mails: list[bytes] = []
        answers: list[str] = []

        class Handler:
            async def handle_DATA(self, server: object, session: object, envelope: object) -> str:
                if answers:
                    return answers.pop(0)
                mails.append(envelope.content)  # type: ignore[attr-defined]
                return "250 OK"

        controller = Controller(Handler(), hostname="127.0.0.1", port=free_port())
        controller.start()
        yield controller.port, mails, answers
        controller.stop()

    def sink(self, port: int, **more: str) -> smtp.Smtp:
        given = {"security": "none", **more}
        config = msgspec.convert(
            {"type": "smtp", "host": "127.0.0.1", "port": port, "from": "p@example.org", "to": ["a@example.org"], "timeout_s": 2, **given},
            smtp.SmtpConfig,
        )
        return smtp.Smtp("mail", config)

    def test_a_mail_arrives_with_its_key_and_threads_with_its_end(self, box: tuple[int, list[bytes], list[str]]) -> None:
        port, mails, _ = box
        sink = self.sink(port)
        sink.send(delivery())
        sink.send(delivery("resolve"))
        import email.policy

        first, second = (email.message_from_bytes(m, policy=email.policy.default) for m in mails)
        assert first["Subject"] == "[error] job: layers.3.norm.weight differs between ranks"
        assert first["X-Proctor-Key"] == "proctor:job:r1:dp" and first["References"] == second["References"]
        assert "Since step 40." in first.get_content()  # type: ignore[attr-defined]

    @pytest.mark.parametrize(("answer", "retry"), [("451 later", True), ("554 no", False)])
    def test_what_the_server_answers(self, box: tuple[int, list[bytes], list[str]], answer: str, retry: bool) -> None:
        port, _, answers = box
        answers.append(answer)
        with pytest.raises(DeliveryError) as raised:
            self.sink(port).send(delivery())
        assert raised.value.retry is retry and not raised.value.unsure

    def test_no_mail_goes_out_in_the_clear_where_tls_was_asked_for(self, box: tuple[int, list[bytes], list[str]]) -> None:
        port, mails, _ = box
        with pytest.raises(DeliveryError, match="STARTTLS"):
            self.sink(port, security="starttls").send(delivery())
        assert mails == []

    def test_a_server_that_is_down_did_not_take_it(self) -> None:
        with pytest.raises(DeliveryError) as raised:
            self.sink(free_port()).send(delivery())
        assert raised.value.retry and not raised.value.unsure
