"""What a rank of a world does: reads tasks, runs programs, compares with the reference, answers. One line of JSON each way.

A task is `{"codes", "reference", "floor", "tolerance", "steady"}` or, for the reference itself, `{"make", "permuted", "shaken", "rounded", "unit", "to"}`. An answer says "ok", the
differences, or the exception. `{"let_go": true}` leaves all groups, `{"join": path}` meets the other ranks again.
"""

from __future__ import annotations

import base64
import gc
import marshal
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, Final

import msgspec
import numpy as np
import torch

from proctor.oracle.fuzz.running import judge, kept
from proctor.oracle.fuzz.running.observe import Array, module_types, observe, own
from proctor.oracle.fuzz.running.rounding import Rounded

EVERY: Final = 12  # tasks between collections
_WHOLE: Final = 8  # of so many collections one looks at all objects; what a task leaves behind is young
_KEPT: Final = 4  # references in memory
_LINEAR: Final = torch.nn.functional.linear
_references: dict[str, judge.Reference] = {}
_environment: dict[str, str] = {}  # as it was before the first program


def serve(rank: int, world: int, read: Callable[[], bytes], write: Callable[[bytes], None]) -> None:
    """Answer tasks until there are no more."""
    warnings.simplefilter("ignore")
    _environment.update(os.environ)
    gc.disable()  # modules, reducers and autograd nodes are cycles by the thousand: between tasks they cost a fifth of what they cost within
    for count, line in enumerate(iter(read, b""), 1):
        task = msgspec.json.decode(line)
        answer = _regrouped(task, rank, world) or _answer(task, rank, world)
        write(msgspec.json.encode({"task": task.get("id"), **answer}) + b"\n")
        if count % EVERY == 0:
            gc.collect(2 if count // EVERY % _WHOLE == 0 else 0)


def _regrouped(task: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Leave the groups, or meet again, if the task says so; {} where it says something else. What goes wrong ends the rank."""
    if "let_go" in task:
        kept.let_go()
    elif "join" in task:
        kept.join(Path(task["join"]), rank, world, task["timeout_s"])
    else:
        return {}
    return {"done": True}


def _answer(task: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    _seed()
    _restore()
    try:
        if "make" in task:
            return make_reference(task)
        return run(task, rank, world)
    except BaseException as e:  # noqa: BLE001  whatever a library raises is what we are looking for
        return {"raised": describe(e)}


def _restore() -> None:
    """Put back what a library leaves behind in a process, for the scenarios that come."""
    torch.nn.functional.linear = _LINEAR  # ZeRO's third stage puts its own in its place, and leaves it there
    if dict(os.environ) != _environment:  # accelerate says there that FSDP is wanted, and every later Accelerator reads it
        os.environ.clear()
        os.environ.update(_environment)
    if (loss := sys.modules.get("torch.distributed.tensor.parallel")) is not None:
        with loss.loss_parallel():  # an exception within it leaves it on; its end turns it off
            pass


def _seed() -> None:
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` notes a stack for devices that are not there: 1 ms


def program_of(codes: list[str], folder: str = "") -> dict[str, Any]:
    """The names of a program; `codes` are of `Program.codes`, `folder` is where it saves."""
    names: dict[str, Any] = {"__name__": "fuzzed", "folder": folder}
    for code in codes:
        exec(_loaded(code), names)  # our own text: `proctor.oracle.fuzz.program` wrote it
    return names


@lru_cache(64)
def _loaded(code: str) -> CodeType:
    return marshal.loads(base64.b64decode(code))  # type: ignore[no-any-return]


def run(task: dict[str, Any], rank: int, world: int) -> dict[str, Any]:
    """Run a candidate's program and compare it as it goes."""
    reference = _load(task["reference"], task["floor"], steady=task["steady"])
    differences: list[judge.Difference] = []
    digests: dict[str, int] = {}
    net: Any = None
    for moment, step, net, opt, seen in program_of(task["codes"], task.get("folder", ""))["train"](rank, world):
        names = set()
        with torch.no_grad():  # a DTensor's local part is then at hand, without a node
            for one in observe(moment, net, opt, seen):
                names.add(one.name)
                found = judge.judge(one, step, reference, task["tolerance"])
                if found is not None:
                    differences.append(found)
                if one.kind == "parameter" and not (one.sharded and one.index is None):
                    key, sum_ = judge.digest(one)
                    digests[f"{step}/{key}"] = sum_
        if moment == "backward" and not task["tolerance"]:
            shown = own(net)
            lost = [name for name in reference.missing(names, step) if shown is None or name in shown]
            differences += [reference.lost(step, name) for name in lost]
    types = module_types(net) if differences else {}
    named = [msgspec.structs.replace(d, module=types.get(d.name.partition(":")[0], ""), rank=rank) for d in differences]
    named.sort(key=lambda d: (d.rounding, d.order))  # what is no rounding is not left out for what is
    return {"differences": [msgspec.to_builtins(d) for d in named[: judge.MAX_REPORTED]], "digests": digests}


def _load(path: str, floor: float, *, steady: bool) -> judge.Reference:
    from safetensors import safe_open

    if path not in _references:
        while len(_references) >= _KEPT:
            del _references[next(iter(_references))]
        with safe_open(path, "np") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  no mapping
            said = file.metadata() or {}
        noise, rounded = msgspec.json.decode(said["noise"]), msgspec.json.decode(said.get("own", "null"))
        _references[path] = judge.Reference(tensors, noise, floor, steady=steady, own=rounded)
    return _references[path]


def make_reference(task: dict[str, Any]) -> dict[str, Any]:
    """Run the reference's program and, if asked for the noise, the same with its rows in another order and its gradients shaken, or with each operation rounded otherwise; write all down."""
    from safetensors.numpy import save_file

    plain = _tensors(task["make"])
    noise: dict[str, float] = {}
    for seed, codes in enumerate(task["permuted"]):
        _seed()
        for key, values in _tensors(codes, shaken=torch.Generator().manual_seed(seed), by=task["shaken"]).items():
            if key in plain and plain[key].shape == values.shape and values.size:
                apart = np.nan_to_num(np.abs(values.astype(np.float64) - plain[key].astype(np.float64)))
                noise[key] = max(noise.get(key, 0.0), float(apart.max()))
    rounded = _own(plain, task["rounded"], task["unit"]) if task["rounded"] else None
    unfit = next((key for key, values in plain.items() if values.dtype.kind == "f" and not np.isfinite(values).all()), "")
    partial = Path(task["to"] + ".part")
    save_file({k: np.ascontiguousarray(v) for k, v in plain.items()}, partial, metadata={"noise": msgspec.json.encode(noise).decode(), "own": msgspec.json.encode(rounded).decode()})
    partial.replace(task["to"])
    return {"tensors": len(plain), "unfit": unfit}


def _own(plain: Mapping[str, Array], programs: list[list[str]], unit: float) -> dict[str, float]:
    """Tensor → how far runs that are rounded otherwise are from the plain one; `MISSING` where one of them has it and the other has not. What is not finite tells nothing."""
    found: dict[str, float] = {}
    for seed, codes in enumerate(programs):
        _seed()
        tensors = _tensors(codes, rounded=Rounded(unit, seed))
        for key in plain.keys() ^ tensors.keys():
            found[key] = judge.MISSING
        for key in plain.keys() & tensors.keys():
            values, moved = plain[key], tensors[key]
            if values.shape != moved.shape:
                found[key] = judge.MISSING
            elif values.size:
                apart = np.nan_to_num(np.abs(moved.astype(np.float64) - values.astype(np.float64)), posinf=0.0)
                found[key] = max(found.get(key, 0.0), float(apart.max()))
    return found


def _tensors(codes: list[str], shaken: torch.Generator | None = None, by: float = judge.SHAKEN, rounded: Rounded | None = None) -> dict[str, Array]:
    """Everything that a program shows; outputs of microbatches in the order of the batch's rows. With `shaken` gradients move before each update, with `rounded` all results."""
    found: dict[str, Array] = {}
    names = program_of(codes)
    for moment, step, net, opt, seen in names["train"](0, 1) if rounded is None else rounded.through(names):
        for one in observe(moment, net, opt, seen):
            key = judge.key_of(step, one)
            if one.kind in ("output", "evaluation"):
                rows = np.asarray(one.index)
                if key not in found:
                    found[key] = np.zeros((sum(len(p) for p, _ in seen), *one.values.shape[1:]))
                found[key][rows] = one.values
            else:
                found[key] = np.array(one.values)
        if shaken is not None and moment == "backward":
            shake([p.grad for p in net.parameters() if p.grad is not None], shaken, by)
    return found


def shake(gradients: list[torch.Tensor], generator: torch.Generator, by: float) -> None:
    """Move gradients by what rounding, or an approximation that is declared, may do to them, and leave exact zeros.

    Args:
        gradients: of any shapes; others than strided ones stay.
        generator: chance.
        by: relative to the largest element of all; 8 spacings of a gradient's own type at least.

    Another order of rows seldom turns the sign of a gradient that is mathematically zero (the key bias of attention), and an optimizer that takes signs makes
    a full step of it: only this shows how far such an update can move.
    """
    dense = [g for g in gradients if g.layout is torch.strided and g.numel()]
    with torch.no_grad():
        largest = max((float(g.abs().max()) for g in dense), default=0.0)
        for g in dense:
            if np.isfinite(largest):
                noise = torch.randn(g.shape, generator=generator, dtype=torch.float64) * (max(by, 8 * torch.finfo(g.dtype).eps) * largest)
                g.add_(noise.to(g.dtype) * (g != 0))


def describe(error: BaseException) -> dict[str, Any]:
    """An exception as data: its type, its message, the innermost frame in a library, and the traceback's end."""
    text = "".join(traceback.format_exception(error))
    frames = traceback.extract_tb(error.__traceback__)
    failures = getattr(error, "failures", None)
    if isinstance(failures, dict) and failures:  # torch's `CheckpointException` tells of ranks alone; what each of them met is in it
        error, frames = min(failures.items())[1]
    where = next((f"{inner}:{f.name}" for f in reversed(frames) if (inner := within_library(f.filename))), "")
    return {"type": type(error).__name__, "message": str(error)[:2000], "where": where, "traceback": text[-6000:]}


def within_library(file: str) -> str:
    """The path of a source file from the packages of the environment on; "" of one that is elsewhere, or Proctor's own."""
    inner = file.rpartition("site-packages/")[2]
    return "" if inner == file or inner.startswith("proctor/") else inner


def plain_message(message: str) -> str:
    """A message without what differs from run to run: numbers, addresses, paths, and all after the first line."""
    line = next((part for part in message.splitlines() if part.strip()), "")
    for _ in range(3):  # what is in brackets is data: shapes, placements, arguments
        line = re.sub(r"\([^()]*\)|\[[^\[\]]*\]", "", line)
    line = re.sub(r"^'\w+\.[\w.\-]+\.(\w+)'$", r"'….\1'", line)  # the name of a parameter alone
    line = re.sub(r": (\w+)\.[\w.\-]+\.(\w+)(\.?$)", r": \1.….\2\3", line)  # and at the end, where its first word may be a part of a state
    line = re.sub(r"0x[0-9a-f]+|(?:/[\w.\-]+)+|-?\d+(?:\.\d+)?(?:e-?\d+)?", "#", line)
    return line[:160].strip()


def quiet(log: Path) -> None:
    """Send what native code prints to a file."""
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.close(out)
