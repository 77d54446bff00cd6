"""Reading runs: many processes and many runs become one set of frames with global codes.

`Trace` is what relations work on (integer codes, joined once). `Run` is what a person gets from `proctor.open_run`: the same
tables with names resolved. `tables` reads one file of a process, `merge` joins processes, `windows` are steps of a run with
their context, `grouping` tells rows that are alike.
"""

from __future__ import annotations

from proctor.invariants.trace.names import decode_variable, flat_meta, metas_frame, variables_frame
from proctor.invariants.trace.process import Process, Waiting, process_of
from proctor.invariants.trace.run import Run, open_run
from proctor.invariants.trace.trace import Trace

__all__ = ["Process", "Run", "Trace", "Waiting", "decode_variable", "flat_meta", "metas_frame", "open_run", "process_of", "variables_frame"]
