from __future__ import annotations

from pathlib import Path

import pytest

from proctor.errors import ConfigError
from proctor.invariants.invariant import Severity
from proctor.verify.lifecycle.policy import Policy
from proctor.verify.paging.config import read_config

KEY = "0123456789abcdef0123456789ABCDEF"
GOOD = """
[job]
name = "llama-70b"
runbook = "https://wiki.example.org/proctor/{code}"

[sinks.oncall]
type = "pagerduty"
routing_key_file = "key"
min_severity = "error"

[sinks.chat]
type = "slack"
webhook_url_env = "PAGE_TEST_HOOK"

[sinks.alerts]
type = "alertmanager"
urls = ["http://127.0.0.1:9093", "https://am.example.org"]
labels = { team = "ml" }

[sinks.mail]
type = "smtp"
host = "mail.example.org"
from = "proctor@example.org"
to = ["oncall@example.org"]

[sinks.hook]
type = "cloudevents"
url = "https://hooks.example.org/proctor"

[budget]
pages_per_hour = 3

[[maintenance]]
daily = "02:00-03:00"
timezone = "Europe/Berlin"
sinks = ["chat"]

[[maintenance]]
start = 2026-12-24T18:00:00+01:00
end = 2026-12-24T23:00:00+01:00

[heartbeat]
sink = "alerts"
interval_s = 30

[incidents]
confirm_k = 4
confirm_n = 6
clean = 9
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv("PAGE_TEST_HOOK", "https://hooks.slack.com/services/T0/B0/verysecret")

    def make(text: str) -> Path:
        path = tmp_path / "page.toml"
        path.write_text(text)
        return path

    return make


def test_everything_is_read(write: object) -> None:
    config = read_config(write(GOOD))  # type: ignore[operator]
    assert config.incidents == Policy(confirm_k=4, confirm_n=6, clean=9)
    assert list(config.sinks) == ["oncall", "chat", "alerts", "mail", "hook"]
    assert config.sinks["oncall"].tier == "page" and config.sinks["oncall"].min_severity is Severity.ERROR
    assert config.sinks["chat"].tier == "all" and len(config.maintenance) == 2
    assert list(config.open_sinks()) == list(config.sinks)


def test_no_secret_is_shown_by_what_was_read(write: object) -> None:
    config = read_config(write(GOOD))  # type: ignore[operator]
    shown = repr(config) + repr([s.settings for s in config.open_sinks().values()])
    assert KEY not in shown and "verysecret" not in shown and "PAGE_TEST_HOOK" in shown


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('routing_key_file = "key"', f'routing_key = "{KEY}"', r"page.toml:8: sinks.oncall.routing_key is a secret.*routing_key_env"),
        ('routing_key_file = "key"', f'routing_key_env = "{KEY}"', r":8: sinks.oncall: the environment variable|is not the name"),
        ('routing_key_file = "key"', 'routing_key_env = "not-a-name"', r":8: sinks.oncall.routing_key_env is not the name"),
        ('routing_key_file = "key"', 'routing_key_file = "nowhere"', r"the file .*nowhere cannot be read: No such file"),
        ('routing_key_file = "key"', 'routing_key_env = "UNSET_PAGE_VAR"', r"environment variable UNSET_PAGE_VAR is not set"),
        ('routing_key_file = "key"', "", r"page.toml:6: sinks.oncall needs routing_key_env or routing_key_file"),
        ('routing_key_file = "key"', 'routing_key_file = "page.toml"', r"holds more than one line"),
        ('min_severity = "error"', 'min_sevrity = "error"', r":9: sinks.oncall.min_sevrity is unknown; did you mean 'min_severity'\?"),
        ('min_severity = "error"', 'min_severity = "loud"', r":9: sinks.oncall.min_severity: invalid enum value 'loud'"),
        ('min_severity = "error"', 'tier = "pages"', r":9: sinks.oncall.tier: invalid enum value 'pages'"),
        ('type = "slack"', 'type = "slak"', r":12: sinks.chat.type is no kind of sink; did you mean 'slack'\?"),
        ('type = "slack"', "", r"sinks.chat has no `type`.*one of alertmanager"),
        ("[sinks.chat]", '[sinks."a b"]', r"is no name for a sink"),
        ("https://am.example.org", "http://am.example.org", r"sinks.alerts: an address in `urls` is not https"),
        ("https://hooks.example.org/proctor", "https://me:pw@hooks.example.org", r"sinks.hook: `url` holds a user name or password"),
        ('team = "ml"', 'rank-0 = "ml"', r"`labels` cannot have 'rank-0'"),
        ("pages_per_hour = 3", 'pages_per_hour = "3"', r"budget.pages_per_hour: expected `int`, got `str`"),
        ("pages_per_hour = 3", "pages_per_hour = -3", r"budget: budgets must be from 0"),
        ('daily = "02:00-03:00"', 'daily = "2-3"', r"maintenance\[0\]: `daily` must look like"),
        ("Europe/Berlin", "Europe/Berlim", r"maintenance\[0\]: `timezone` is unknown"),
        ('sinks = ["chat"]', 'sinks = ["chatt"]', r"names 'chatt', which is no sink; did you mean 'chat'"),
        ("end = 2026-12-24T23:00:00+01:00", "end = 2026-12-24T13:00:00+01:00", r"maintenance\[1\]: `end` is not after `start`"),
        ('sink = "alerts"', 'sink = "chat"', r"heartbeat.sink names a sink of type slack.*alertmanager"),
        ("confirm_k = 4", "confirm_k = 7", r":\d+: incidents: confirm_k = 7 is more than confirm_n = 6"),
        ("clean = 9", "clean = 0", r":\d+: incidents.clean: expected `int` >= 1"),
        ("[incidents]", "[incident]", r"incident is unknown; did you mean 'incidents'"),
        ("[job]", "[job", r"is not TOML"),
        ('to = ["oncall@example.org"]', 'to = ["oncall"]', r"'oncall' is not a mail address"),
        ('host = "mail.example.org"', 'host = "mail.example.org"\nsecurity = "none"', r"sends mails in the clear"),
        ('host = "mail.example.org"', 'host = "mail.example.org"\npassword = "hunter2"', r"sinks.mail.password is a secret"),
    ],
)  # fmt: skip
def test_an_error_names_the_key_and_the_remedy_and_no_secret(write: object, old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(ConfigError, match=said) as raised:
        read_config(write(GOOD.replace(old, new, 1)))  # type: ignore[operator]
    text = str(raised.value)
    assert text.startswith("PR-E400") and "\n" not in text
    assert KEY not in text and "hunter2" not in text and "verysecret" not in text


def test_a_secret_address_is_not_shown_when_it_is_wrong(write: object, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(GOOD)  # type: ignore[operator]
    monkeypatch.setenv("PAGE_TEST_HOOK", "http://hooks.slack.com/services/verysecret")
    with pytest.raises(ConfigError, match="is not https") as raised:
        read_config(path)
    assert "verysecret" not in str(raised.value)


@pytest.mark.parametrize("blob", [b"\xff\xfe", b"a = " + b"[" * 5000, b"x" * (1 << 20) + b"yy"])
def test_a_file_that_is_no_configuration_is_one_line(tmp_path: Path, blob: bytes) -> None:
    (tmp_path / "page.toml").write_bytes(blob)
    with pytest.raises(ConfigError):
        read_config(tmp_path / "page.toml")
    with pytest.raises(ConfigError, match="No such file"):
        read_config(tmp_path / "absent.toml")
