"""What a recorded process was asked to do: read from the activation file, never from the user's arguments.

`proctor record` writes `activation.json` beside the `sitecustomize.py` that it puts first on PYTHONPATH, because
some launchers pass PYTHONPATH on and drop every other variable (findings: DeepSpeed's pdsh runner).
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

from proctor.invariants.schema import Value


class RecordConfig(msgspec.Struct, frozen=True):
    """How to record.

    Args:
        run: run directory, absolute.
        functions: canonical names to patch; `None`: everything (full mode).
        states: attributes to watch among data, grad, buffer, optimizer; `None`: all.
        values: kinds of values to record at calls (`schema.Value` in lower case); `None`: all.
        every: record every n-th step (the others leave no rows, so checks on them are UNKNOWN).
        warmup: steps recorded in full before `every` and `budget` apply.
        warmup_s: seconds from the first step on before `budget` applies, where they end later.
        user_code: also observe functions of the user's own modules.
        stream: address of a verifier or relay that the records also go to, `unix:PATH` or `tcp:HOST:PORT`; "": none.
        token_file: of the job, for `stream`; "": `boot/token` in the run directory.
        budget: share of the time of training that being watched may cost, 0.01 for 1 %; 0: no limit.
        capsules: steps kept in memory to be written when something is found wrong with one; 0: none.
        capsule_budget: bytes of memory that they may take.
        capsule_values: the state before a step by value: auto (within the budget, and as often as it costs little), always,
            never.
        capsule_every: write every n-th step without being asked; 0: none.
        capsule_disk: bytes that the capsules of a rank may take.
        command: process that the command runs in, which says at its end if nothing was recorded; 0: nobody does.
        replay: plan of a re-execution, whose first step is replaced by that of a capsule; "": none.
    """

    run: str
    functions: frozenset[str] | None = None
    states: frozenset[str] | None = None
    values: frozenset[str] | None = None
    every: int = 1
    warmup: int = 10
    warmup_s: float = 0.0
    user_code: bool = True
    stream: str = ""
    token_file: str = ""
    budget: float = 0.0
    capsules: int = 0
    capsule_budget: int = 384 << 20
    capsule_values: Literal["auto", "always", "never"] = "auto"
    capsule_every: int = 0
    capsule_disk: int = 1 << 30
    replay: str = ""
    command: int = 0

    @property
    def selective(self) -> bool:
        return self.functions is not None

    def wants(self, function: str) -> bool:
        return self.functions is None or function in self.functions

    def keeps(self, kind: Value) -> bool:
        return self.values is None or kind.name.lower() in self.values

    def watches(self, attr: str) -> bool:
        return self.states is None or attr in self.states


def read_config(path: Path) -> RecordConfig:
    """Decode an activation file.

    Raises:
        OSError, msgspec.MsgspecError: missing or malformed; the caller reports and stays inert.
    """
    return msgspec.json.decode(path.read_bytes(), type=RecordConfig)
