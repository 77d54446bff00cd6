"""What an imported run keeps beside our own tables: TrainCheck's records as they were, columnar.

    RUN/traincheck-parameters.json                          parameters of functions that were called by position
    RUN/procs/<rank>-<pid>/traincheck-records.arrow         one row a record, in the order of their times
    RUN/procs/<rank>-<pid>/traincheck-texts.arrow           code → text, for the coded columns

Our tables show such a run to every command. TrainCheck's rules need what those leave out: addresses, threads, every
attribute of every argument, and nanoseconds at which variables were seen.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import pyarrow as pa

RECORDS_FILE: Final = "traincheck-records.arrow"
TEXTS_FILE: Final = "traincheck-texts.arrow"
PARAMETERS_FILE: Final = "traincheck-parameters.json"

CONTEXT_MANAGERS: Final = "meta_vars.context_managers."
STAGE: Final = "meta_vars.stage"
STEP: Final = "meta_vars.step"
NO_STEP: Final = -1


class Record(IntEnum):
    PRE = 0  # function_call (pre)
    POST = 1  # function_call (post)
    RAISED = 2  # function_call (post) (exception)
    STATE = 3  # state_change


RECORDS: Final = pa.schema(
    [
        ("kind", pa.uint8()),  # Record
        ("file", pa.uint16()),  # trace file that it was read from
        ("line", pa.uint32()),  # its place in that file, from 0
        ("time", pa.int64()),  # ns
        ("thread", pa.int64()),
        ("seq", pa.uint32()),  # of a call: the same as in `calls`; of a state: the last call that had begun
        ("step", pa.int32()),  # meta_vars.step, -1 where it is not set
        ("name", pa.uint32()),  # of a call: its function; of a state: JSON list of name and type of the variable
        ("meta", pa.uint32()),  # JSON object: all other plain fields, flattened; 0 at the end of a call
        ("body", pa.uint32()),  # JSON object: args and kwargs, return_values or exception, or flattened attributes
        ("obj", pa.int64()),  # address of the object that a method was called on; null: none
    ]
)
TEXTS: Final = pa.schema([("id", pa.uint32()), ("text", pa.string())])
