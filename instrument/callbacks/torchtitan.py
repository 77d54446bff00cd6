"""torchtitan: a handler of its structured log, which says at which step and in which stage the trainer is.

    TITAN_STRUCT_LOGGER_HANDLERS=proctor.instrument.callbacks.torchtitan.factory

torchtitan then registers no handler but the named ones; to keep its own log, name
`torchtitan.observability.structured_logger.jsonl_handler.register_jsonl_handler` too, separated by a comma.

Records the process when no `proctor record` does: torchtitan sets its log up before it builds model and optimizers.
"""

from __future__ import annotations

import logging
from typing import Final

from proctor.instrument.callbacks.session import Session

# Spans of torchtitan 0.3 (`log_trace_span`) that are a stage of their own.
_STAGES: Final = ("eval", "checkpoint_save", "checkpoint_load")


class StepHandler(logging.Handler):
    """Reads step and stage off torchtitan's records; writes nothing."""

    def __init__(self, session: Session) -> None:
        super().__init__(logging.INFO)
        self._session = session
        self._open: list[str] = []  # stages that have begun, innermost last

    def emit(self, record: logging.LogRecord) -> None:
        self._session.run(self._read, record)

    def _read(self, record: logging.LogRecord) -> None:
        event, edge = _event(record)
        step = getattr(record, "step", None)
        if event == "step" and edge == "start" and isinstance(step, int):
            self._session.tell(step=step, stage="train")
        elif event in _STAGES and edge == "start":
            self._open.append(event)
            self._session.tell(stage=event)
        elif event in _STAGES and edge == "end" and event in self._open:
            self._open.remove(event)
            self._session.tell(stage=self._open[-1] if self._open else "train")


def factory(*, structured_logger: logging.Logger, rank: int, source: str, output_dir: str) -> None:
    """Add the handler; called by `torchtitan.observability.structured_logger.init_structured_logger`."""
    structured_logger.addHandler(StepHandler(Session("torchtitan")))


def _event(record: logging.LogRecord) -> tuple[str, str]:
    name = getattr(record, "log_type_name", None)
    if not isinstance(name, str):
        return "", ""
    event, _, edge = name.rpartition("_")
    return event, edge
