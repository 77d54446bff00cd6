"""From a notice to the person: what may go out (`gate`), the durable queue (`outbox`), and who sends it (`sender`).

    Pager.notify ─▶ Gate: tiers, mutes, maintenance, budgets ─▶ Outbox (SQLite) ─▶ Sender, one thread a sink ─▶ verify/sinks/

`Pager` is the whole of it; `read_config` reads `page.toml`.
"""

from proctor.verify.paging.config import PageConfig, read_config
from proctor.verify.paging.pager import Pager

__all__ = ["PageConfig", "Pager", "read_config"]
