"""`page.toml`: who is told what, how often, and when not. `docs/paging.md` is the reference."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.invariants.invariant import Tier
from proctor.verify.lifecycle.policy import Policy
from proctor.verify.paging._toml import Document
from proctor.verify.paging.windows import Maintenance
from proctor.verify.sinks import Secret, Sink, SinkConfig, registry
from proctor.verify.sinks._http import check_url

_SINK_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`[job]`: what pages call it.

    Args:
        name: part of every dedup key: keep it over restarts and do not share it between jobs that run at a time.
        runbook: link in every page; `{code}` becomes the rule's code.
        deliver_s: seconds after the end of the job in which notices that receivers did not take are tried again; 0: not at all.
    """

    name: str = ""
    runbook: str = ""
    deliver_s: float = 3600.0

    def __post_init__(self) -> None:
        if not 0 <= self.deliver_s <= 3 * 86400:
            raise ValueError("`deliver_s` must be from 0 to 259200, three days")
        if self.runbook:
            try:
                check_url(self.runbook.replace("{code}", "PR101"), allow_http=True)
            except ValueError as error:
                raise ValueError(f"`runbook` {error}") from None


class Budget(msgspec.Struct, frozen=True, kw_only=True):
    """`[budget]`: incidents an hour that are told one by one; the rest is told in one digest.

    Args:
        pages_per_hour: of tier page.
        tickets_per_hour: of tier ticket.
        digest_s: seconds that the first of a digest waits for others.
    """

    pages_per_hour: int = 6
    tickets_per_hour: int = 60
    digest_s: float = 60.0

    def __post_init__(self) -> None:
        if not (0 <= self.pages_per_hour <= 1000 and 0 <= self.tickets_per_hour <= 1000):
            raise ValueError("budgets must be from 0 to 1000 an hour")
        if not 0 <= self.digest_s <= 3600:
            raise ValueError("`digest_s` must be from 0 to 3600")

    def of(self, tier: Tier) -> int:
        """Incidents an hour of a tier."""
        return self.pages_per_hour if tier is Tier.PAGE else self.tickets_per_hour


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """`[heartbeat]`: somebody else notices when the monitor is silent.

    Args:
        interval_s: seconds between two signs of life.
        sink: name of an Alertmanager sink, which gets the alert `ProctorAlive` again and again.
        url: of a dead man's switch, which is asked with GET; a secret, since it names the check.
        end_url: asked once when the job ends in good order.
        allow_http: also without TLS to other hosts than this one.
        ca_file: certificates to trust instead of the system's, PEM.
        timeout_s: seconds until a receiver counts as down.
    """

    interval_s: float = 60.0
    sink: str = ""
    url: Secret | None = None
    end_url: Secret | None = None
    allow_http: bool = False
    ca_file: str = ""
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.interval_s <= 3600:
            raise ValueError("`interval_s` must be from 1 to 3600")
        if not self.sink and self.url is None:
            raise ValueError("give `sink`, `url_env` or `url_file`")
        for secret in (self.url, self.end_url):
            if secret is not None:
                try:
                    check_url(secret.read(), self.allow_http)
                except ValueError as error:
                    raise ValueError(f"the address in the {secret.place}: {error}") from None


class PageConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All of `page.toml`; without sinks nothing is sent, and incidents are recorded only."""

    job: Job = Job()
    sinks: dict[str, SinkConfig] = {}
    budget: Budget = Budget()
    maintenance: tuple[Maintenance, ...] = ()
    heartbeat: Heartbeat | None = None
    incidents: Policy = Policy()  # `[incidents]`

    def open_sinks(self) -> dict[str, Sink]:
        """The sinks by name."""
        known = registry()
        return {name: known[config.type](name, config) for name, config in self.sinks.items()}


def exposed_secrets(config: PageConfig) -> list[str]:
    """One sentence for each secret that lies in a file that everybody on this host can read."""
    sections = [(f"[sinks.{name}]", sink) for name, sink in config.sinks.items()]
    held = [(where, section) for where, section in [*sections, ("[heartbeat]", config.heartbeat)] if section is not None]
    return [
        f"{where}: everybody on this host can read the {secret.place}  →  chmod 600 {secret.file}"
        for where, section in held
        for secret in msgspec.structs.astuple(section)
        if isinstance(secret, Secret) and secret.exposed
    ]


_SECTIONS: Final = ("job", "sinks", "budget", "maintenance", "heartbeat", "incidents")


def read_config(path: str | Path) -> PageConfig:
    """Read `page.toml` and see that every secret that it names can be read.

    Raises:
        ConfigError: names the key, its line and what to write instead; never the value of a secret.
    """
    doc = Document(Path(path))
    table = doc.table
    doc.known((), table, _SECTIONS)
    heartbeat = doc.decode(Heartbeat, ("heartbeat",), table["heartbeat"]) if "heartbeat" in table else None
    windows = table.get("maintenance", [])
    if not isinstance(windows, list):
        raise doc.error(("maintenance",), "is one table, but there may be several", "write [[maintenance]]")
    sinks = _sinks(doc, table.get("sinks", {}))
    if heartbeat is not None and heartbeat.sink:
        _check_heartbeat(doc, heartbeat, sinks)
    return PageConfig(
        job=doc.decode(Job, ("job",), table.get("job", {})),
        sinks=sinks,
        budget=doc.decode(Budget, ("budget",), table.get("budget", {})),
        maintenance=tuple(_window(doc, n, window, sinks) for n, window in enumerate(windows)),
        heartbeat=heartbeat,
        incidents=doc.decode(Policy, ("incidents",), table.get("incidents", {})),
    )


def _sinks(doc: Document, tables: Any) -> dict[str, SinkConfig]:
    if not isinstance(tables, dict):
        raise doc.error(("sinks",), "is not a table", "write [sinks.NAME]")
    known = registry()
    found: dict[str, SinkConfig] = {}
    for name, table in tables.items():
        path = ("sinks", name)
        if not isinstance(table, dict):
            raise doc.error(path, "is not a table", "write [sinks.NAME] and `type` below it")
        if not _SINK_NAME.fullmatch(name):
            raise doc.error(path, "is no name for a sink: letters, digits, _ and - are", "")
        kind = table.get("type")
        if not isinstance(kind, str) or kind not in known:
            there = "has no `type`" if kind is None else "is no kind of sink"
            where = path if kind is None else (*path, "type")
            raise doc.error(where, f"{there}{doc.suggestion(kind, known)}", f"one of {', '.join(sorted(known))}")
        found[name] = doc.decode(known[kind].Config, path, table)
    return found


def _window(doc: Document, n: int, table: Any, sinks: dict[str, SinkConfig]) -> Maintenance:
    path = ("maintenance", n)
    window = doc.decode(Maintenance, path, table)
    for name in window.sinks:
        if name not in sinks:
            raise doc.error((*path, "sinks"), f"names {name!r}, which is no sink{doc.suggestion(name, sinks)}", "")
    return window


def _check_heartbeat(doc: Document, heartbeat: Heartbeat, sinks: dict[str, SinkConfig]) -> None:
    path, name = ("heartbeat", "sink"), heartbeat.sink
    if name not in sinks:
        raise doc.error(path, f"names {name!r}, which is no sink{doc.suggestion(name, sinks)}", "")
    able = [kind for kind, cls in sorted(registry().items()) if cls.keeps_alive]
    if sinks[name].type not in able:
        raise doc.error(path, f"names a sink of type {sinks[name].type}", f"one of type {', '.join(able)} can carry it")
