"""Inside a process of a command that is recorded for a proof: started by the hook that is put on PYTHONPATH.

Without a plan it is recorded as it runs. With one, a program of one device is run as one rank of the plan (`planned`): it is unchanged and
knows nothing of ranks, since the process group is a fake one that is joined only when its model is first called. What the plan does to the
model is `proctor.oracle.parallel`'s; the optimizer that the program has made holds the same parameters, of which there are parts now.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing.util
from pathlib import Path
from typing import Any

from torch import nn

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.prove.recording.session import Session
from proctor.oracle.prove.recording.world import joined
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
        mesh = Mesh.parse(said["mesh"])
        session = Session(said["rank"], mesh.world, real=False, finished=save)
        planned(session, said["plan"], mesh, folder)
    else:
        session = Session(finished=save)
    session.begin()

    def last() -> None:
        if session.recorder is not None:
            session.finish()

    atexit.register(last)
    multiprocessing.util.Finalize(None, last, exitpriority=1000)  # its processes end without functions of atexit


def planned(session: Session, plan: str, mesh: Mesh, folder: Path) -> None:
    """Cut the first module that is called in training as the plan says.

    Args:
        session: of this process, with its rank and world.
        plan: a file.
        mesh: on which its rules are to hold.
        folder: where a plan that does not fit the model leaves what is wrong, in `refused`.
    """
    import torch

    rank, world = session.rank, session.world
    assert rank is not None and world is not None
    original = nn.Module.__call__
    stay = contextlib.ExitStack()

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and self.training and any(p.requires_grad for p in self.parameters()):
            nn.Module.__call__ = original
            _cut(self)
        return original(self, *args, **kwargs)

    def _cut(model: nn.Module) -> None:
        from proctor.oracle.parallel import parallelize
        from proctor.oracle.plans.plan_toml import plan_of

        recorder = session.recorder
        if recorder is not None:
            recorder.on = False
        stay.enter_context(joined(rank, world))
        try:
            found = plan_of(plan)
            assert found is not None
            parallelize(model, found.on(mesh), check=False)
        except OracleError as error:
            (folder / "refused").write_text(str(error))
            raise
        if recorder is not None:
            recorder.on = True
            recorder.forget()

    nn.Module.__call__ = called
