"""What a run directory and a pack look like on disk, and which versions of them we read.

A run directory::

    RUN/run.json                          command, start time, schema version
    RUN/procs/<rank>-<pid>/process.json   rank, world size, mesh coordinates, losses of records
    RUN/procs/<rank>-<pid>/names.arrow    code → text, for every coded column below
    RUN/procs/<rank>-<pid>/calls.arrow    one row a call, written when it returns
    RUN/procs/<rank>-<pid>/states.arrow   one row a changed variable
    RUN/procs/<rank>-<pid>/values.arrow   one row a value seen at a call: batches, random draws, saved tensors, numbers
    RUN/procs/<rank>-<pid>/context.arrow  one row a distinct context (step, phase, autocast, …)

Each table is an Arrow IPC *stream*, zstd, so a file that was cut by `kill -9` is readable up to its last whole
batch (findings: IPC files and Parquet are not). Codes are local to a process; the reader makes them global.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

import pyarrow as pa

# 1: first version. 2: the table `values`.
TRACE_SCHEMA: Final = 2
ALL_ENDED: Final = "all"  # what an error of ours ended (`blindness`): everything, also which step and phase it is
BLIND_FILE: Final = "blind"  # beside `process.json`, of a process whose writer ended: the step
# 1: first version. 2: evidence, runs, diversity, false alarms and tier of a rule; requires, suppressions, refuted.
PACK_SCHEMA: Final = 2


class Name(IntEnum):
    """What a row of `names` gives a text to."""

    FUNCTION = 0  # canonical public name: torch.optim.Optimizer.step
    SITE = 1  # file:line in the user's code
    SIGNATURE = 2  # arguments or result, `invariants.signature`
    VARIABLE = 3  # JSON object, `invariants.trace.Variable`
    META = 4  # JSON object: dtype, shape, requires_grad, placement, attributes of a variable
    PLACE = 5  # where in the arguments or the result of a call a value was: `0['input_ids']`, `out[1]`


class CallFlag(IntFlag):
    RAISED = 1  # the call ended with an exception
    ROOT = 2  # an outermost module call: the model itself
    THREAD = 4  # not the main thread (autograd device threads, loaders)


class StateFlag(IntFlag):
    NONE = 1  # the attribute is None (no gradient)
    ZERO = 2  # every element is zero
    NONFINITE = 4  # at least one NaN or infinity
    CONSTANT = 8  # every element has the same bits
    UNHASHED = 16  # value not read (sampled out, or an error of ours); only the meta is valid


class Value(IntEnum):
    """What a row of `values` is."""

    BATCH = 0  # a tensor given to an outermost module call
    SAMPLE = 1  # one row (index `item`) of such a tensor
    DRAW = 2  # what a random function returned
    RNG = 3  # the state of a random generator; `item`: loader worker, -1 for the training process
    SAVED = 4  # a tensor of an object that was saved, or that `state_dict` returned
    LOADED = 5  # a tensor of an object that was loaded
    NUMBER = 6  # a plain number in an argument, a result or an attribute
    SENT = 7  # a tensor given to a collective, before it ran
    RECEIVED = 8  # the same tensor after it
    ATTRIBUTE = 9  # place "": how many plain attributes the modules given to a call had; else one that it changed
    GIVEN = 10  # a piece that a collective was given for one rank, or for all (meta `peer`)
    GOT = 11  # a piece that it gave, from one rank or from all
    FIRST = 12  # what a function returned inside a checkpointed function
    AGAIN = 13  # the same when that function is computed again, for its gradient
    AVERAGE = 14  # how a copy of a model moved in a step; the place says which copy, and what is measured
    OPTION = 15  # a number of an optimizer or scheduler, or in a file that was loaded; meta `when`: `instrument/probes/options.py`
    CLIPPED = 16  # the norm of gradients that clipping found
    HANDED = 17  # a tensor that a loader gave, or a model that trains was given; number: its rows whatever their order (`instrument/probes/judged.py`)
    JUDGED = 18  # what a loss of torch was given: place "target" as above, place "scores" with what they are in the meta
    DIGITS = 19  # whose digits the numbers have that a layer was given or gave: meta `digits`; number: how many tell it
    KEPT = 20  # whether something that training rests on is as it was (the place names it): meta `what`, and `seen` where it is not (`relations/stays`)
    MANNER = 21  # what a function of the program, a loss or an optimizer does with what it has: meta `mode`, `has`, `lacks`, `seen` (`relations/manner`)
    USAGE = 22  # whether the program uses a library as it is meant: meta `library`, `mode`, and `seen` where it does not (`relations/usage`)
    SPENT = 23  # a backward pass began at losses that are all exactly 0 (`instrument/probes/spent.py`)


CALLS: Final = pa.schema(
    [
        ("seq", pa.uint32()),  # order of entry in this process, from 1
        ("parent", pa.uint32()),  # seq of the enclosing recorded call in the same thread; 0: none
        ("fn", pa.uint32()),
        ("site", pa.uint32()),
        ("ctx", pa.uint32()),
        ("args", pa.uint32()),
        ("ret", pa.uint32()),
        ("t", pa.int64()),  # ns, CLOCK_MONOTONIC
        ("dur", pa.int64()),  # ns
        ("flags", pa.uint8()),  # CallFlag
    ]
)
STATES: Final = pa.schema(
    [
        ("seq", pa.uint32()),  # last call entered when the value was read: orders states among calls
        ("call", pa.uint32()),  # boundary call; 0: a step boundary outside any call
        ("edge", pa.uint8()),  # 0: before the call ran, 1: after it
        ("ctx", pa.uint32()),
        ("var", pa.uint32()),
        ("meta", pa.uint32()),
        ("fp", pa.uint64()),  # linear fingerprint, `native/memory/fingerprint.h`
        ("norm", pa.float32()),  # Euclidean norm; NaN where not computed
        ("flags", pa.uint8()),  # StateFlag
    ]
)
VALUES: Final = pa.schema(
    [
        ("seq", pa.uint32()),  # the call at which the value was seen; 0: at a step boundary
        ("ctx", pa.uint32()),
        ("kind", pa.uint8()),  # Value
        ("place", pa.uint32()),
        ("item", pa.int32()),  # which of several at this place; -1: the only one
        ("meta", pa.uint32()),  # dtype and shape of a tensor, "" for a number
        ("fp", pa.uint64()),  # fingerprint of a tensor, 0 for a number
        ("norm", pa.float32()),
        ("number", pa.float64()),  # a number, also that of a tensor of one element on the CPU; NaN for others
        ("flags", pa.uint8()),  # StateFlag
    ]
)
CONTEXT: Final = pa.schema(
    [
        ("ctx", pa.uint32()),
        ("step", pa.int32()),  # optimizer updates begun before this record; -1 before the first
        ("micro", pa.int32()),  # forward/backward pairs begun in the step
        ("phase", pa.string()),  # init, train, eval, checkpoint
        ("grad", pa.bool_()),  # autograd records
        ("autocast", pa.string()),  # dtype in force here, "" when off
        ("outer", pa.string()),  # dtype of the nearest enclosing enabled autocast, "" without one
        ("recompute", pa.bool_()),  # inside activation checkpointing's second forward
        ("meta", pa.string()),  # user's own `proctor.meta`, JSON object
    ]
)
NAMES: Final = pa.schema([("kind", pa.uint8()), ("id", pa.uint32()), ("text", pa.string())])

TABLES: Final = {"calls": CALLS, "states": STATES, "values": VALUES, "context": CONTEXT, "names": NAMES}
LATER: Final = {"values": 2}  # tables that traces of an earlier schema do not have

# What rules call the outermost module call, whatever its class.
MODEL_CALL: Final = "<model>.forward"

MAX_NAME_CHARS: Final = 1 << 20
