"""TensorBoard: event files in a folder, written by the package `tensorboard` alone, without torch or TensorFlow.

Curves are scalars `proctor/<name>`; incidents are texts under `proctor/incidents`, as code blocks, because TensorBoard
renders Markdown and names in a trace are not ours.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, Final

from proctor.invariants.invariant import Severity
from proctor.verify.writers import PREFIX, Writer, library

KIND: Final = "tensorboard"
TARGET: Final = "DIR"
PACKAGE: Final = "tensorboard"

_FLUSH_S: Final = 10


class TensorBoard:
    """One event file."""

    def __init__(self, folder: str) -> None:
        self._events = library("tensorboard.compat.proto.event_pb2")
        self._summaries = library("tensorboard.compat.proto.summary_pb2")
        self._tensors = library("tensorboard.compat.proto.tensor_pb2")
        self._types = library("tensorboard.compat.proto.types_pb2")
        self._text = library("tensorboard.plugins.text.metadata")
        self._file: Any = library("tensorboard.summary.writer.event_file_writer").EventFileWriter(
            folder, flush_secs=_FLUSH_S, filename_suffix=".proctor"
        )

    def series(self, step: int, values: Mapping[str, float]) -> None:
        value = self._summaries.Summary.Value
        self._add(step, [value(tag=PREFIX + name, simple_value=number) for name, number in values.items()])

    def incident(self, step: int | None, title: str, text: str, severity: Severity) -> None:
        lines = [f"{severity.value}: {title}", *text.splitlines()]
        block = "\n".join("    " + line for line in lines)
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[block.encode("utf-8", "replace")])
        about = self._text.create_summary_metadata("incidents", "what Proctor found")
        self._add(step or 0, [self._summaries.Summary.Value(tag=PREFIX + "incidents", metadata=about, tensor=tensor)])
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summaries.Summary(value=values)
        self._file.add_event(self._events.Event(wall_time=time.time(), step=step, summary=summary))


def open_target(target: str, run: str) -> Writer:
    """Begin an event file in `target/run`."""
    return TensorBoard(os.path.join(target, run))
