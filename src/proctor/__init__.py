"""Proctor catches silent errors in PyTorch training.

Two ways in: the command line (`proctor record`, `infer`, `check`, `watch`, `oracle`), and from a script::

    import proctor
    proctor.watch(model, optimizer)      # the same as `proctor record` for this process
    proctor.meta(stage="warmup")         # your own context, kept with the records

    run = proctor.open_run("runs/healthy")   # polars frames of what was recorded

    with proctor.oracle.trace(model, out="candidate"):      # for a comparison with a reference
        train_step()
    proctor.oracle.compare("reference", "candidate")

    proctor.weights.digest(policy)       # has the engine that generates the trainer's weights?

    proctor.parallelize(model, "plan.toml")  # an unchanged model, trained in parallel with the random numbers of one device
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["__version__", "meta", "open_run", "oracle", "parallelize", "watch", "weights"]

if TYPE_CHECKING:
    from proctor import oracle, weights
    from proctor.invariants.trace import Run


def __getattr__(name: str) -> Any:  # Any: a module
    """`proctor.oracle` and `proctor.weights` are imported when they are used."""
    if name not in ("oracle", "weights"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return importlib.import_module(f"proctor.{name}")


def open_run(path: str) -> Run:
    """Open a recorded run; its tables are polars frames.

    Raises:
        TraceError: the directory is not a run, or none of it can be read.
    """
    from proctor.invariants.trace import open_run as _open

    return _open(path)


def parallelize(model: Any, plan: Any, *, rng: str = "keyed", seed: int | None = None, check: bool = True) -> Any:
    """Cut a model as a plan says, and install what makes it train in parallel; `proctor.oracle.parallel.run` tells more.

    Args:
        model: a torch module for one device, the same on every rank, or from `proctor.oracle.parallel.deferred`.
        plan: `proctor.oracle.Plan`, or the path of a TOML file.
        rng: "keyed" (order-free) or "stock" (what plain torch draws on one CPU).
        seed: of the keyed stream; without it torch's.
        check: look at edges and at gradients of replicas in the first step.

    Returns:
        the model.

    Raises:
        OracleError: the plan cannot work for this model.
    """
    from proctor.oracle.parallel import parallelize as _parallelize

    return _parallelize(model, plan, rng=rng, seed=seed, check=check)


def watch(*objects: Any, out: str | None = None) -> None:
    """Record this process from here on, as `proctor record` does.

    Args:
        objects: models and optimizers to observe at once; others are found when they are used.
        out: run directory; without it `$PROCTOR_RUN` or `proctor-runs/<time>-<pid>`.
    """
    from proctor.instrument.attach import watch as _watch

    _watch(*objects, out=out)


def meta(**values: str | int | float | bool | None) -> None:
    """Set context of your own on every later record; `None` removes a key. A no-op when nothing records."""
    from proctor.instrument.attach import meta as _meta

    _meta(values)
