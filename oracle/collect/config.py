"""What an injected collector is told: a small file beside the start-up hook."""

from __future__ import annotations

from pathlib import Path

import msgspec

from proctor.errors import OracleError


class CollectConfig(msgspec.Struct, frozen=True):
    """One run of the command.

    Attributes:
        folder: where the ranks put their folders, absolute.
        steps: optimizer updates to record.
        whole: of these everything is recorded, of the others parameters, gradients, buffers, choices and numbers; () all.
        noise: seed of the noise sample; `None` records without noise.
        force: folder with the inputs and incoming gradients that modules are given (`oracle localise`); "" none.
        given: folder with generated values that take the place of the program's data (`oracle/recording/inputs.py`); "" none.
        decisions: folder with the choices and masks that modules take instead of their own; "" none.
        draws: folder with what the reference drew, and how this run's ranks lie in it (`store/draws`); "" none.
        dropout: as of `collect.choosing.decisions.Decisions`.
        fp8: modules that cast to 8-bit floats inside, found by an earlier run.
        watch_fp8: look for such casts.
        generate: seed of generated parameters; `None` keeps the user's.
        plan: the plan as JSON, "" without one.
        replay: folder with the state and data of a capsule's step, which the first step gets; "" none.
        ops: by rank the module of which operations are recorded, and nothing else (`oracle localise`).
        ops_step: the step in which they are.
        busy: modules with many operations of their own, found by an earlier run; noise goes to each of these as well.
        watch_busy: look for such modules.
        evaluations: forwards without gradients that are recorded in each step.
        forward: nothing trains: every forward is an evaluation, and a step is what happens between two changes of the weights.
        until_evaluation: where none came within the steps, run on until one does, and record only that.
        statistics: of tensors sums over tiles are recorded (`numbers/tiles.py`).
        compiled: what `torch.compile` wraps runs compiled, and is seen at its edges.
    """

    folder: str
    agent: str = "oracle"
    steps: int = 1
    whole: tuple[int, ...] = ()
    noise: int | None = None
    force: str = ""
    given: str = ""
    decisions: str = ""
    draws: str = ""
    dropout: str = "keep"
    fp8: tuple[str, ...] = ()
    watch_fp8: bool = False
    generate: int | None = None
    plan: str = ""
    replay: str = ""
    ops: dict[int, str] = {}
    ops_step: int = 0
    compiled: bool = False
    busy: tuple[str, ...] = ()
    watch_busy: bool = False
    evaluations: int = 4
    until_evaluation: bool = False
    forward: bool = False
    statistics: bool = False


def read_config(path: Path) -> CollectConfig:
    """Read it.

    Raises:
        OracleError: it is damaged.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=CollectConfig)
    except (OSError, msgspec.MsgspecError) as e:
        raise OracleError(f"{path}: {e}") from None
