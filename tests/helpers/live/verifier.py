"""A verifier in a process of its own that only counts: `verifier.py ADDRESS TOKEN_FILE OUT [RUN]`.

Writes OUT (JSON) after every round of events: first columns seen of each process and table, gaps, what the server says.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from proctor.invariants.wire.peer import read_token
from proctor.verify.transport.fill import fill
from proctor.verify.transport.inbox import Gap, Inbox, Left, Rows
from proctor.verify.transport.server import Server


def main(address: str, token: str, out: Path, run: Path | None) -> None:
    inbox = Inbox()
    seen: dict[str, dict[str, list[int]]] = {}
    gaps: list[dict[str, Any]] = []
    left: dict[str, str] = {}

    def count(process: str, records: dict[str, Any]) -> None:
        for table, rows in records.items():
            column = rows.column("id" if table == "names" else "ctx" if table == "context" else "seq")
            seen.setdefault(process, {}).setdefault(table, []).extend(column.to_pylist())

    with Server([address], read_token(Path(token)), inbox, grace_s=0.5) as server:
        print(server.addresses[0], flush=True)
        while True:
            for event in inbox.get(0.05):
                if isinstance(event, Rows):
                    count(event.process, dict(event.records))
                elif isinstance(event, Gap):
                    found = fill(run, event) if run is not None else None
                    gaps.append({"first": event.first, "last": event.last, "rows": event.rows,
                                 "missing": event.rows if found is None else found.missing, "why": found and found.why})  # fmt: skip
                    if found is not None:
                        count(event.process, found.records)
                elif isinstance(event, Left):
                    left[event.process] = event.how
            stats = server.stats()
            report = {"seen": seen, "gaps": gaps, "left": left, "refused": stats.refused, "frames": stats.frames}
            partial = out.with_suffix(".tmp")
            partial.write_text(json.dumps(report))
            partial.replace(out)


if __name__ == "__main__":
    pa.set_cpu_count(1)
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]) if len(sys.argv) > 4 else None)
