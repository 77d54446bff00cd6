from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.live.pages import notice
from helpers.live.receivers import ROUTING_KEY, PagerDuty, Webhook, free_port

from proctor.cli import main
from proctor.verify.paging import Pager, read_config


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    def make(*sinks: str) -> Path:
        path = tmp_path / "page.toml"
        path.write_text('[job]\nname = "job"\n' + "\n".join(sinks))
        return path

    monkeypatch.setenv("PAGE_KEY", ROUTING_KEY)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "run").mkdir()
    return make


def oncall(url: str) -> str:
    return f'[sinks.oncall]\ntype = "pagerduty"\nurl = "{url}"\nrouting_key_env = "PAGE_KEY"'


def test_a_test_goes_through_a_whole_life_at_every_sink(config: Callable[..., Path], pagerduty: PagerDuty, webhook: Webhook, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(oncall(pagerduty.url), f'[sinks.hook]\ntype = "cloudevents"\nurl = "{webhook.url}"')
    assert main(["page", "test", "--config", str(path)]) == 0
    (incident,) = pagerduty.incidents
    assert incident.acknowledged and incident.resolved and incident.summaries[0].startswith("[TEST]")
    assert [h.body["type"].rpartition(".")[2] for h in webhook.hits] == ["trigger", "acknowledge", "resolve"]
    assert capsys.readouterr().out.count("taken") == 6


def test_a_test_says_which_sink_does_not_answer(config: Callable[..., Path], webhook: Webhook, capsys: pytest.CaptureFixture[str]) -> None:
    path = config(oncall(f"http://127.0.0.1:{free_port()}"), f'[sinks.hook]\ntype = "cloudevents"\nurl = "{webhook.url}"')
    assert main(["page", "test", "--config", str(path)]) == 1
    out = capsys.readouterr().out
    assert "oncall: trigger: 127.0.0.1 cannot be reached" in out and "not tried" in out and len(webhook.hits) == 3
    assert main(["page", "test", "--config", str(path), "--sink", "hook"]) == 0
    assert main(["page", "test", "--config", str(path), "--sink", "hok"]) == 2


def test_a_secret_that_everybody_can_read_is_warned_of(config: Callable[..., Path], tmp_path: Path, webhook: Webhook, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("s3cr3t")
    path = config(f'[sinks.hook]\ntype = "cloudevents"\nurl = "{webhook.url}"\ntoken_file = "token"')
    for mode, warned in ((0o644, True), (0o600, False), (0o640, False)):
        (tmp_path / "token").chmod(mode)
        assert main(["page", "test", "--config", str(path)]) == 0
        out = capsys.readouterr().out
        assert ("[sinks.hook]: everybody on this host can read" in out) is warned and "s3cr3t" not in out


def test_what_a_dead_verifier_left_is_shown_and_flushed(config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port, run = free_port(), str(tmp_path / "run")
    path = config(oncall(f"http://127.0.0.1:{port}"))
    pager = Pager(read_config(path), tmp_path / "run" / "verify" / "outbox.db")
    pager.notify(notice())
    pager._store.close()
    assert main(["page", "status", "--run", run]) == 0
    assert "pending  oncall: trigger layers.3.norm.weight differs" in capsys.readouterr().out
    assert main(["page", "flush", "--run", run, "--config", str(path), "--timeout", "1s"]) == 1
    assert ROUTING_KEY not in capsys.readouterr().out
    server = PagerDuty(port)
    try:
        assert main(["page", "flush", "--run", run, "--config", str(path)]) == 0
        assert [i.key for i in server.incidents] == ["proctor:job:r1:dp"]
        assert main(["page", "status", "--run", run, "--json"]) == 0
    finally:
        server.close()
    out = capsys.readouterr().out
    assert json.loads(out[out.index("{") :])["sinks"]["oncall"]["sent"] == 1


def test_mute_and_unmute(config: Callable[..., Path], tmp_path: Path, pagerduty: PagerDuty, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(tmp_path / "run")
    assert main(["page", "mute", "--run", run, "--for", "2h"]) == 2
    assert main(["page", "mute", "--run", run, "--for", "2 weeks", "--reason", "x"]) == 2
    assert main(["page", "mute", "--run", run, "--for", "2h", "--reason", "storage", "--by", "ada"]) == 0
    pager = Pager(read_config(config(oncall(pagerduty.url))), tmp_path / "run" / "verify" / "outbox.db")
    pager.notify(notice())
    capsys.readouterr()
    assert main(["page", "status", "--run", run]) == 0
    out = capsys.readouterr().out
    assert "not told oncall" in out and "mute 1: everything for another" in out and "muted by ada: storage" in out
    assert main(["page", "unmute", "--run", run, "7"]) == 2
    assert main(["page", "unmute", "--run", run]) == 0
    pager.tick()
    for sender in pager.senders:
        sender.step()
    assert len(pagerduty.incidents) == 1
    pager.close(0)


@pytest.mark.parametrize("args", [["status", "--run", "nowhere"], ["status", "--run", "."], ["flush", "--run", "."], ["test", "--config", "nowhere.toml"], ["unmute", "--run", "."]])
def test_bad_input_is_one_line(args: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["page", *args]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_test_whose_answer_is_lost_or_that_is_interrupted_does_not_stay_open(
    config: Callable[..., Path], pagerduty: PagerDuty, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config(oncall(pagerduty.url))
    pagerduty.script.append("late")
    assert main(["page", "test", "--config", str(path)]) == 1
    (incident,) = pagerduty.incidents
    assert incident.resolved and "FAILED" in capsys.readouterr().out

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("proctor.cli.page.test.time.sleep", interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        raise SystemExit(main(["page", "test", "--config", str(path), "--hold", "30s"]))
    assert len(pagerduty.incidents) == 2 and all(one.resolved for one in pagerduty.incidents)


class Relay:
    """A mail server that takes a mail for some and refuses others."""

    def __init__(self, refused: str) -> None:
        self.refused = refused

    def send_message(self, mail: object, from_addr: str, to_addrs: list[str]) -> dict[str, tuple[int, bytes]]:
        return {who: (550, b"no such user") for who in to_addrs if who == self.refused}

    def quit(self) -> None:
        pass


def test_a_mail_that_does_not_reach_everybody_is_no_success(
    config: Callable[..., Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = config('[sinks.mail]\ntype = "smtp"\nhost = "127.0.0.1"\nport = 1\nsecurity = "none"\nfrom = "p@example.org"\nto = ["a@example.org", "oncall@example.org"]')
    relay = Relay("oncall@example.org")
    monkeypatch.setattr("proctor.verify.sinks.smtp.Smtp._connect", lambda self: relay)
    assert main(["page", "test", "--config", str(path)]) == 1
    assert "mail: told: 127.0.0.1 refused oncall@example.org (550)" in capsys.readouterr().out
    relay.refused = ""
    assert main(["page", "test", "--config", str(path)]) == 0
