"""Running programs of several ranks on gloo, whose teardown is a race in torch itself.

`destroy_process_group` sometimes ends a rank with "terminate called without an active exception" (a thread of gloo that is
destroyed before it is joined), also in programs that nobody observes. Such a run says nothing and is done again.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

TEARDOWN = "terminate called without an active exception"


def run_ranks(command: Sequence[str], environment: Mapping[str, str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command; at most twice more when gloo's teardown ended it."""
    for _ in range(3):
        done = subprocess.run(
            list(command), env=dict(environment), capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode == 0 or TEARDOWN not in done.stderr:
            break
    return done
