"""Jobs without the rights of root, to whom neither permissions nor `ulimit -u` apply: what they may not write, and processes that they cannot start."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks.faults.trial import Outside, Stage, UnavailableError

_NOBODY: Final = "65534"
_READS: Final = "--inh-caps=+dac_read_search --ambient-caps=+dac_read_search"  # the interpreter may lie in a home of root's
_ORDINARY: Final = "setpriv --bounding-set=-dac_override,-dac_read_search --inh-caps=-dac_override,-dac_read_search"


def needs_root(folder: Path) -> Sequence[str]:
    """Rights can be given away only by who has them; as what is arranged for a trial."""
    if os.geteuid() or not all(map(shutil.which, ("setpriv", "prlimit"))):
        raise UnavailableError("needs root, setpriv and prlimit")
    return ()


def few_processes(number: int) -> Sequence[str]:
    """Words for a job of a user that may have so many processes and threads; the folders of the trial become that user's."""
    user = f"setpriv --reuid={_NOBODY} --regid={_NOBODY} --clear-groups {_READS}"
    script = f'chown {_NOBODY} . ${{FAULT_RUN:+"$(dirname "$FAULT_RUN")"}}; chmod a+r train.py; exec {user} prlimit --nproc={number}:{number} -- "$@"'
    return ["bash", "-c", script, "bash"]


def ordinary() -> Sequence[str]:
    """Words for a job of root's that is bound to permissions as any other user is."""
    return ["bash", "-c", f'exec {_ORDINARY} -- "$@"', "bash"]


def forbid(part: str, mode: int) -> Outside:
    """Permissions of a part of the run directory change."""

    def change(stage: Stage) -> None:
        if stage.run is not None:
            (stage.run / part).chmod(mode)

    return change
