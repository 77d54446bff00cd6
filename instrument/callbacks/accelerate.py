"""accelerate: `Accelerator(log_with=[ProctorTracker()])`, then `init_trackers` and `log` as with any tracker.

Records the process when no `proctor record` does, from the tracker's construction on, and tells the step that the
program logs and the accumulation. Logged values are not kept: losses and norms are in the trace. Build it before the
model and the optimizer, as an argument of `Accelerator`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from proctor.instrument.callbacks.session import Session

if TYPE_CHECKING:  # the library need not be there where types are checked
    GeneralTracker = object
    GradientState: Any
else:
    from accelerate.state import GradientState
    from accelerate.tracking import GeneralTracker


class ProctorTracker(GeneralTracker):
    """Record an Accelerator's run.

    Args:
        out: run directory; default: that of `proctor record`, `$PROCTOR_RUN`, or a new one in `proctor-runs/`.
    """

    name = "proctor"
    requires_logging_directory = False
    main_process_only = False  # every rank is recorded

    def __init__(self, out: str | os.PathLike[str] | None = None) -> None:
        super().__init__()
        self._session = Session("accelerate.Accelerator", out)

    @property
    def tracker(self) -> None:
        """accelerate asks each tracker for the object behind it; there is none."""
        return

    def start(self) -> None:
        """Called by `Accelerator.init_trackers`."""
        self._session.run(self._begun)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Nothing of the program's configuration is kept: it may hold secrets."""

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._session.run(self._logged, step)

    def finish(self) -> None:
        self._session.tell(step=None)

    def _begun(self) -> None:
        self._session.tell(accumulation=int(GradientState().num_steps))

    def _logged(self, step: int | None) -> None:
        if step is not None:
            self._session.tell(step=int(step))
