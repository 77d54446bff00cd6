"""Makes the process warm that ranks are forked from: what a library imports and caches at first use is then paid once and not by each rank.

A fresh rank takes 4 s to its first FSDP2 step on a loaded machine, nearly all of it imports (dynamo among them) and DTensor's first look at each operator. So
programs of some wrappers run here once, over torch's fake process group, which has no threads and sends nothing. It has one rank: DTensor's
caches hold what is true of a rank in a mesh, and a larger mesh's would be inherited by ranks for which it is false (seen: a world of four that multiplied
with another rank's shard).
"""

from __future__ import annotations

import gc
import importlib
import os
import warnings
from contextlib import redirect_stderr, redirect_stdout, suppress
from typing import Final

from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario

_MODEL: Final[Point] = {"layers": ["mlp", "layernorm"], "width": 5}
_SETTINGS: Final[tuple[Point, ...]] = (
    {"wrapper": "ddp", "optimizer": "Adam", "clip": "2"},
    {"wrapper": "fsdp2", "optimizer": "Adam", "clip": "2", "resume": "full"},
    {"wrapper": "tp", "tp_style": "pairs"},
    {"wrapper": "zero"},
    {"wrapper": "ddp", "compile": "model"},
)
_ENVIRONMENT: Final = {"deepspeed": {"DS_ACCELERATOR": "cpu"}}  # what libraries read when they are imported


def modules_of(libraries: tuple[str, ...]) -> tuple[str, ...]:
    """What a campaign of some libraries imports before ranks are forked."""
    own = {
        "torchrec": ("torchrec.distributed", "torchrec.inference.modules"),
        "transformers": ("transformers.modeling_utils",),
        "megatron": ("megatron.core.distributed", "megatron.core.tensor_parallel"),
    }
    return tuple(module for name in libraries for module in own.get(name, (name,)))


def warm_up(more: tuple[str, ...] = ()) -> None:
    """Import and run everything once.

    Args:
        more: modules to import besides.
    """
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    _without_monitor()
    os.environ.update({k: v for name in more for k, v in _ENVIRONMENT.get(name, {}).items()})
    for name in ("torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", *more):
        importlib.import_module(name)
    if "deepspeed" in more:  # it asks the compiler what can be built, which takes seconds; the extension for inference is switched off by each program, too
        importlib.import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        _run_all()
    # A million objects that stay: no collection of a rank need look at them, nor copy the pages that they lie on.
    gc.collect()
    gc.freeze()


def _without_monitor() -> None:
    """No thread of tqdm's, which dynamo begins where it is installed: a process that has one cannot be forked."""
    with suppress(ImportError):
        importlib.import_module("tqdm").tqdm.monitor_interval = 0


def _run_all() -> None:
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from proctor.oracle.fuzz.program import program
    from proctor.oracle.fuzz.running.rank import program_of

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        for setting in _SETTINGS:
            codes = program(Scenario("chain", {**_MODEL}, {"batch": 8}, {**setting})).codes()
            with suppress(Exception):  # what does not run here runs in a rank, or is found there
                for _ in program_of(codes)["train"](0, 1):
                    pass
    finally:
        importlib.import_module("torch._dynamo").reset()  # what it compiled here is not for ranks
        dist.destroy_process_group()
