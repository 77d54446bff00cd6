"""What the way from ranks to the verifier costs: the rank's side of a flush, and ranks that one verifier's core holds.

    python benchmarks/transport.py [--ranks 4096] [--bytes 4096] [--seconds 10] [--per-connection 8] [--json FILE]

`offer`: CPU microseconds of the writer's thread to encode a flush and put it into the ring, beside writing it to a file.
`server`: a process of simulated ranks (one channel each, `--per-connection` to a connection, as relays of such nodes have) sends
flushes of about `--bytes` as fast as they are taken; a server and a reader of its inbox in this process take them. Rounds with
records and with empty flushes alternate, so that what decoding costs is seen on the same machine state. CPU time is that of the
server's process: messages a CPU second are what one core holds. RSS is looked at throughout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from proctor.instrument.guard import Guard
from proctor.instrument.record.stream import Sender
from proctor.instrument.record.writer import Stream
from proctor.invariants.schema import TABLES
from proctor.invariants.wire import frames, peer
from proctor.invariants.wire.arrow_message import Encoded, Encoder
from proctor.invariants.wire.frames import ORDER, Flush, Hello
from proctor.verify.transport.inbox import Inbox, Rows
from proctor.verify.transport.server import Server

ROUND_S = 2.0
WAIT, EMPTY, FULL, STOP = range(4)


def records(size: int) -> dict[str, pa.RecordBatch]:
    """A step's rows of about this many bytes on the wire: calls, states and contexts."""
    rng = np.random.default_rng(0)
    counts = {"calls": max(1, size // 140), "states": max(1, size // 110), "context": 2}
    found = {}
    for table, count in counts.items():
        arrays = []
        for field in TABLES[table]:
            if pa.types.is_string(field.type):
                arrays.append(pa.array(["train"] * count, type=field.type))
            elif pa.types.is_boolean(field.type):
                arrays.append(pa.array([True] * count, type=field.type))
            else:
                arrays.append(pa.array(rng.integers(0, 100, count).astype(field.type.to_pandas_dtype())))
        found[table] = pa.RecordBatch.from_arrays(arrays, schema=TABLES[table])
    return found


def offer_cost(size: int, rounds: int = 15, flushes: int = 200) -> dict[str, float]:
    """Median over rounds of thread CPU microseconds a flush: offered, and appended to files."""
    batches = records(size)
    columns = {t: {c: np.asarray(rows[c]) for c in rows.schema.names} for t, rows in batches.items()}
    encoders = {t: Encoder(TABLES[t]) for t in batches}
    offered, written = [], []
    with tempfile.TemporaryDirectory() as folder:
        streams = {t: Stream(Path(folder) / f"{t}.arrow", TABLES[t]) for t in batches}
        for _ in range(rounds):
            sender = Sender("unix:/nowhere", Path("/nowhere"), lambda: ("0-1", "", {}), Guard())
            began = time.thread_time_ns()
            for step in range(flushes):
                sender.offer({t: made for t, rows in columns.items() if (made := encoders[t].encode(rows))}, step)
            offered.append((time.thread_time_ns() - began) / flushes / 1e3)
            began = time.thread_time_ns()
            for _ in range(flushes):
                for table, batch in batches.items():
                    streams[table].append(batch)
            written.append((time.thread_time_ns() - began) / flushes / 1e3)
    return {"offer_us": statistics.median(offered), "files_us": statistics.median(written)}


def ranks(address: str, token: bytes, count: int, per_connection: int, size: int, mode: Any) -> None:
    """Simulated ranks: every one says hello, then all take turns, while `mode` is EMPTY or FULL."""
    kinds = {EMPTY: ((0,) * len(ORDER), (0,) * len(ORDER), []), FULL: frames.pack({t: Encoded.of(rows) for t, rows in records(size).items()})}
    sockets = []
    for first in range(0, count, per_connection):
        sock = peer.connect(peer.parse_address(address), 30.0)
        peer.prove(sock, token, "relay", 30.0)
        sock.settimeout(60.0)
        channels = range(1, 1 + min(per_connection, count - first))
        hellos = [Hello(f"{first + c - 1}-1", "bench", "s", {"world": count}) for c in channels]
        sock.sendall(b"".join(frames.encode(hello, channel=c) for c, hello in zip(channels, hellos, strict=True)))
        sockets.append((sock, channels))
    at, n, kind = [0] * len(ORDER), 0, frames.kind_of(Flush)
    while mode.value != STOP:
        if mode.value == WAIT:
            time.sleep(0.005)
            continue
        rows, sizes, body = kinds[mode.value]
        flush = frames.encode_object(Flush(n, n, tuple(at), rows, sizes))
        for sock, channels in sockets:
            sock.sendall(b"".join(frames.wrap(kind, flush, channel=c, number=n + 1, body=body) for c in channels))
        at = [a + r for a, r in zip(at, rows, strict=True)]
        n += 1


def rss_mib() -> float:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def server_rate(count: int, per_connection: int, size: int, seconds: float) -> dict[str, float]:
    """Messages a second of wall clock and of the server's CPU, records in them or not; and its memory."""
    token, inbox = b"0123456789abcdef" * 2, Inbox()
    taken = {"rows": 0, "joined": 0}
    over = threading.Event()

    def read() -> None:
        while not over.is_set():
            for event in inbox.get(0.1):
                taken["rows" if isinstance(event, Rows) else "joined"] += 1

    rates: dict[int, list[tuple[float, float]]] = {EMPTY: [], FULL: []}
    with Server(["tcp:127.0.0.1:0"], token, inbox) as server:
        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        spawn = multiprocessing.get_context("spawn")
        mode = spawn.Value("i", WAIT)
        child = spawn.Process(
            target=ranks, args=(server.addresses[0], token, count, per_connection, size, mode), daemon=True
        )
        child.start()
        while taken["joined"] < count:
            time.sleep(0.01)
        began_mib = most_mib = rss_mib()
        for turn in range(2 * max(1, round(seconds / ROUND_S))):
            mode.value = EMPTY if turn % 2 else FULL
            time.sleep(0.1)
            wall, cpu, rows = time.perf_counter(), time.process_time(), taken["rows"]
            while time.perf_counter() - wall < ROUND_S:
                time.sleep(0.05)
                most_mib = max(most_mib, rss_mib())
            done = taken["rows"] - rows
            rates[mode.value].append((done / (time.perf_counter() - wall), done / (time.process_time() - cpu)))
        mode.value = STOP
        child.join(60)
        over.set()
        reader.join()
        refused = server.stats().refused
    if refused:
        raise SystemExit(f"peers were refused: {refused}")
    found: dict[str, float] = {"rss_begin_mib": began_mib, "rss_most_mib": most_mib}
    for kind, name in ((FULL, "records"), (EMPTY, "empty")):
        found[f"{name}_per_s"] = statistics.median(wall for wall, _ in rates[kind])
        found[f"{name}_per_cpu_s"] = statistics.median(cpu for _, cpu in rates[kind])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4096)
    parser.add_argument("--bytes", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--per-connection", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pa.set_cpu_count(1)
    wire = sum(map(len, frames.pack({t: Encoded.of(rows) for t, rows in records(args.bytes).items()})[2]))
    found: dict[str, float] = {"record_bytes": wire, **offer_cost(args.bytes)}
    found |= server_rate(args.ranks, args.per_connection, args.bytes, args.seconds)
    for name, value in found.items():
        print(f"{name:20} {value:12,.1f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
