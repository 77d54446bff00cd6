"""A plan that also runs the model: parameters cut, random numbers of one device, transitions where the plan says.

    proctor.parallelize(model, "plan.toml")            # under torchrun; docs/parallel.md
    model = deferred(GPT, config)                      # values of one device without its memory
    run_threads(lambda rank: train(rank), 4)           # four ranks in one process

Imports torch.
"""

from __future__ import annotations

from proctor.oracle.parallel.deferred import deferred
from proctor.oracle.parallel.run import parallelize
from proctor.oracle.parallel.streams import stream
from proctor.oracle.parallel.threads import run as run_threads

__all__ = ["deferred", "parallelize", "run_threads", "stream"]
