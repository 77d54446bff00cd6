"""A program of one device, run as one rank of a plan: its first model that trains is cut as the plan says, when it is called first.

The program is unchanged and knows nothing of ranks: the process group is a fake one, and joined only then. What the plan does to
the model is `proctor.oracle.parallel`'s; the optimizer that the program has made holds the same parameters, of which there are parts now.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from torch import nn

from proctor.errors import OracleError
from proctor.oracle.prove.session import Session
from proctor.oracle.prove.world import joined


def planned(session: Session, plan: str, folder: Path) -> None:
    """Cut the first module that is called in training.

    Args:
        session: of this process, with its rank and world.
        plan: a file.
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

        recorder = session.recorder
        if recorder is not None:
            recorder.on = False
        stay.enter_context(joined(rank, world))
        try:
            parallelize(model, plan, check=False)
        except OracleError as error:
            (folder / "refused").write_text(str(error))
            raise
        if recorder is not None:
            recorder.on = True
            recorder.forget()

    nn.Module.__call__ = called
