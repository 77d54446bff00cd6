"""Inside a process of a command that is recorded for a proof: started by the hook that is put on PYTHONPATH."""

from __future__ import annotations

import atexit
import json
import multiprocessing.util
from pathlib import Path

from proctor.oracle.prove.planned import planned
from proctor.oracle.prove.session import Session
from proctor.oracle.prove.tape import write


def install_from(activation: str) -> None:
    """Record the first training step of this process into the folder that the file names; by a plan, if it names one, as one rank of it."""
    said = json.loads(Path(activation).read_text())
    folder = Path(said["folder"])

    def save(session: Session) -> None:
        tape = session.tape
        write(tape, folder / f"rank{tape.rank}.tape")
        done = folder / f"rank{tape.rank}.part"
        done.write_text(json.dumps({"rank": tape.rank, "world": tape.world, "updated": session.updated}))
        done.replace(folder / f"rank{tape.rank}.json")

    if "plan" in said:
        session = Session(said["rank"], said["world"], real=False, finished=save)
        planned(session, said["plan"], folder)
    else:
        session = Session(finished=save)
    session.begin()

    def last() -> None:
        if session.recorder is not None:
            session.finish()

    atexit.register(last)
    multiprocessing.util.Finalize(None, last, exitpriority=1000)  # its processes end without functions of atexit
