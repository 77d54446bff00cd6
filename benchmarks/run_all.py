"""`make bench`: every benchmark of this folder that needs nothing but Proctor, one after another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
COMMANDS = (
    ["tap.py"], ["fingerprint.py"], ["overhead.py"], ["infer_trace.py"], ["infer_scale.py"],
    ["encode.py"], ["transport.py"], ["many_ranks.py"], ["latency.py"], ["watch_cost.py"],
)


def main() -> int:
    failed = 0
    for command in COMMANDS:
        print(f"\n== {' '.join(command)}", flush=True)
        failed += subprocess.run([sys.executable, str(HERE / command[0]), *command[1:]], check=False).returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
