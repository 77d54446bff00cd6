"""Small training programs, recorded by one process as `proctor record` would: texts with SEED, WIDTH, OUT and BUG."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

from helpers.warm import python
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

RUNNER = """
import json, sys
import torch
torch.set_num_threads(1)
from pathlib import Path
from proctor.instrument import attach
from proctor.instrument.config import RecordConfig
from proctor.instrument.record.rundir import create_run

for path, out, seed, width, bug in json.loads(sys.argv[1]):
    create_run(Path(out), [Path(path).name], overwrite=True)
    attach.install(RecordConfig(run=out))
    main = type(sys)("__main__")
    main.__dict__.update(__file__=path, SEED=seed, WIDTH=width, BUG=bug, OUT=out)
    sys.modules["__main__"] = main
    exec(compile(Path(path).read_text(), path, "exec"), main.__dict__)
    attach.detach()
"""
HEAD = """
import os, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(SEED)
"""
Job = tuple[str, str, int, int, str]  # program, name of its run, seed, width, bug


def record(folder: Path, programs: Mapping[str, str], jobs: Iterable[Job]) -> None:
    """Run each job and record it into `folder/<program>-<name>`."""
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(HEAD + textwrap.dedent(text))
    told = [(str(folder / f"{program}.py"), str(folder / f"{program}-{name}"), *how) for program, name, *how in jobs]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PROCTOR")} | {"OMP_NUM_THREADS": "1"}
    command = [python(), "-W", "ignore", "-c", RUNNER, json.dumps(told)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@functools.lru_cache(maxsize=2)
def trace_of(run: Path) -> Trace:
    """A finished run, read once for all modes that are asked about it."""
    return Trace.load([run])


def failed_of(relation: str, mode: str, run: Path) -> list[str]:
    """What a mode of a relation, whose rules speak of updates, says of a run."""
    known, trace = registry()[relation], trace_of(run)
    rule = Hypothesis.of(relation, mode=mode, what="updates")
    frame = known.examples(trace, [rule]).frame
    assert frame.height
    return [f"{detail.variable}: {detail.seen}" for row in frame.filter(~frame["passed"]).to_dicts() for detail in (known.detail(trace, rule, row),)]
