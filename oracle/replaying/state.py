"""From the capsules of all ranks to one whole state under the reference's names: parameters, buffers, optimizer state.

Where the shards of a parameter lie is said by a plan, or the shard is whole, or (a *guess*) ranks hold consecutive parts
along the one dimension in which shapes differ. A guess is right where the reference then computes the recorded loss.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from proctor.errors import OracleError
from proctor.invariants.capsule import TENSORS, Capsule, Variable
from proctor.oracle.numbers.dtypes import storage
from proctor.oracle.plans.plan import Plan

Array = npt.NDArray[Any]
Index = tuple[npt.NDArray[np.int64], ...]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # of the reference: dtype and shape by name
Read = Callable[[int, str], Array]  # a tensor of a rank's capsule

REPLICATED: Final = frozenset({"ddp", "dp", "dp_replicate", "data", "replicate"})  # names of mesh axes along which models are copied
WRAPPERS: Final = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module"})
_SUFFIX: Final = re.compile(r"((?:\['[^']+'\]|\[\d+\])+)$")
CODES: Final = {  # torch's name → safetensors'
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "complex64": "C64", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_STORED: Final = {code: storage(name) for name, code in CODES.items()}


class Shard(NamedTuple):
    """What a rank holds of a parameter.

    Args:
        rank: of the job.
        name: what the capsule calls it.
        places: global indices along each dimension.
        sure: a plan says so, or it is the whole.
    """

    rank: int
    name: str
    places: Index
    sure: bool


class State(NamedTuple):
    """The state of all ranks as one.

    Args:
        tensors: by the name of the reference's parameter.
        buffers: by name without wrappers: dtype and value of the first rank that has it.
        optimizer: by parameter; tensors of its shape are whole, others and plain values as they were.
        shards: of each parameter.
        trouble: what could not be placed; a step with any cannot be judged.
        notes: what is less than certain.
        apart: replicas, which a plan or a data-parallel mesh says they are, that were not alike before the step.
    """

    tensors: dict[str, Array]
    buffers: dict[str, tuple[str, Array]]
    optimizer: dict[str, dict[str, Any]]
    shards: dict[str, list[Shard]]
    trouble: list[str]
    notes: list[str]
    apart: list[str]


class Files:
    """The tensors of the ranks' capsules, mapped from disk, as numpy has them (`bfloat16` as `uint16`).

    Args:
        folders: by rank.
        lent: rank and key of a tensor that another rank's capsule holds: that rank and key.
    """

    def __init__(self, folders: Mapping[int, Path], lent: Mapping[tuple[int, str], tuple[int, str]] | None = None) -> None:
        self._folders, self._lent = folders, lent or {}
        self._open: dict[int, tuple[dict[str, Any], Array]] = {}

    def __call__(self, rank: int, key: str) -> Array:
        """One tensor, read-only.

        Raises:
            OracleError: it is not there, or damaged.
        """
        rank, key = self._lent.get((rank, key), (rank, key))
        header, data = self._file(rank)
        try:
            found = header[key]
            dtype, shape = _STORED[found["dtype"]], tuple(int(n) for n in found["shape"])
            start, stop = (int(n) for n in found["data_offsets"])
            return data[start:stop].view(dtype).reshape(shape)
        except (KeyError, TypeError, ValueError, OverflowError):
            raise OracleError(f"{self._folders[rank] / TENSORS}: {key!r} cannot be read") from None

    def _file(self, rank: int) -> tuple[dict[str, Any], Array]:
        if rank not in self._open:
            path = self._folders[rank] / TENSORS
            try:
                whole: Array = np.memmap(path, dtype=np.uint8, mode="r")
                length = int.from_bytes(whole[:8].tobytes(), "little")
                header = json.loads(whole[8 : 8 + length].tobytes()) if length <= whole.size - 8 else None
            except (OSError, ValueError, RecursionError):
                header = None
            if not isinstance(header, dict):
                raise OracleError(f"{path}: not a safetensors file")
            self._open[rank] = header, whole[8 + length :]
        return self._open[rank]


def borrow(capsules: Mapping[int, Capsule]) -> tuple[dict[int, Capsule], dict[tuple[int, str], tuple[int, str]]] | int:
    """Ranks whose capsules hold fingerprints only have the values of a rank whose fingerprints are the same.

    Returns:
        the capsules with keys for all parameters, and where those tensors are; or a rank whose state nobody holds.
    """
    held: dict[tuple[str, str, int], tuple[int, Variable]] = {}
    for rank, capsule in sorted(capsules.items()):
        for v in capsule.state if capsule.by_value else ():
            if v.role in ("parameter", "buffer") and v.key and v.before is not None:
                held.setdefault((v.role, v.name, v.before.fp), (rank, v))
    out: dict[int, Capsule] = {}
    lent: dict[tuple[int, str], tuple[int, str]] = {}
    for rank, capsule in capsules.items():
        if capsule.by_value:
            out[rank] = capsule
            continue
        state: list[Variable] = []
        for v in capsule.state:
            twin = held.get((v.role, v.name, v.before.fp)) if v.before is not None else None
            if twin is not None:
                key = f"lent {v.role} {v.name}"
                lent[rank, key] = twin[0], twin[1].key
                state.append(msgspec.structs.replace(twin[1], after=v.after, key=key))
            elif v.role == "parameter":
                return rank
            elif v.role == "gradient":
                state.append(v)
        out[rank] = msgspec.structs.replace(capsule, state=tuple(state))
    return out, lent


def place_state(shapes: Shapes, capsules: Mapping[int, Capsule], read: Read, plan: Plan | None) -> State:
    """Put the ranks' states together.

    Args:
        shapes: parameters of the reference, in the order of its model.
        capsules: by rank; all of the world.
        read: gives their tensors.
        plan: how the job is cut; `None` if nobody says.
    """
    state = State({}, {}, {}, {}, [], [], [])
    names = {rank: parameter_names(shapes, capsule, plan, state.notes) for rank, capsule in capsules.items()}
    held: dict[str, list[tuple[int, Variable]]] = {}
    for rank, capsule in capsules.items():
        for v in capsule.state:
            if v.role == "parameter" and v.key and v.name in names[rank]:
                held.setdefault(names[rank][v.name], []).append((rank, v))
    for name, (dtype, shape) in shapes.items():
        if name not in held:
            state.trouble.append(f"no rank holds parameter {name}")
            continue
        kinds = {v.dtype for _, v in held[name]}
        if kinds != {dtype}:
            state.trouble.append(f"parameter {name} is {', '.join(sorted(kinds))} in the job and {dtype} in the reference")
            continue
        shards = _place(name, shape, held[name], capsules, plan)
        if isinstance(shards, str):
            state.trouble.append(shards)
            continue
        keys = {rank: v.key for rank, v in held[name]}
        whole = assemble(shape, storage(dtype), [(s, read(s.rank, keys[s.rank])) for s in shards])
        if isinstance(whole, str):
            state.trouble.append(f"parameter {name}: {whole}")
            state.apart.extend(_replicas_apart(name, held[name], shards, capsules, plan))
            continue
        state.tensors[name], state.shards[name] = whole, shards
    guessed = [name for name, shards in state.shards.items() if not all(s.sure for s in shards)]
    if guessed:
        state.notes.append(f"{len(guessed)} parameters, {guessed[0]} first, are taken to be cut into consecutive parts: no plan says how")
    _place_buffers(capsules, read, state)
    _place_optimizer(shapes, capsules, names, read, state)
    return state


def parameter_names(shapes: Shapes, capsule: Capsule, plan: Plan | None, notes: list[str]) -> dict[str, str]:
    """The reference's name of each parameter of a capsule that has one."""
    coords = plan.mesh.coords(capsule.rank) if plan is not None and plan.mesh.world > capsule.rank else dict(capsule.coords)
    mine = [v for v in capsule.state if v.role == "parameter"]
    found: dict[str, str] = {}
    for v in mine:
        for name in (v.name, without_wrappers(v.name)):
            canonical = plan.canonical(name, coords, "param") if plan is not None else name
            if canonical in shapes and canonical not in found.values():
                found[v.name] = canonical
                break
    strangers = [v for v in mine if v.name not in found and v.key]
    left = [n for n in shapes if n not in found.values()]
    if strangers and [v.shape for v in strangers] == [shapes[n][1] for n in left] and len(strangers) == len(mine):
        found |= {v.name: n for v, n in zip(strangers, left, strict=True)}
        notes.append(f"rank {capsule.rank}: parameters are matched by their order, since no name is the reference's")
    return found


def without_wrappers(name: str) -> str:
    """A path without the parts that lead through DDP, FSDP, `torch.compile` and the like."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _place(
    name: str, shape: tuple[int, ...], held: Sequence[tuple[int, Variable]], capsules: Mapping[int, Capsule], plan: Plan | None
) -> list[Shard] | str:
    """Where each rank's part of a parameter lies, or why nobody knows."""
    layout = plan.param_layout(name) if plan is not None else None
    if plan is not None and layout is not None:
        out = []
        for rank, v in held:
            try:
                index = tuple(layout.on(plan.mesh).indices(shape, plan.mesh, plan.mesh.coords(rank)))
            except OracleError as e:
                return f"parameter {name}: {e.message}"
            if tuple(len(i) for i in index) != v.shape:
                return f"parameter {name} has {list(v.shape)} on rank {rank}, the plan says {[len(i) for i in index]}"
            out.append(Shard(rank, v.name, index, sure=True))
        return out
    if all(v.shape == shape for _, v in held):
        whole = tuple(np.arange(n, dtype=np.int64) for n in shape)
        return [Shard(rank, v.name, whole, sure=True) for rank, v in held]
    return _consecutive(name, shape, held)


def _consecutive(name: str, shape: tuple[int, ...], held: Sequence[tuple[int, Variable]]) -> list[Shard] | str:
    """Consecutive parts along one dimension, in the order of ranks; ranks of the same content hold the same part."""
    unknown = f"where the shards of parameter {name} lie is not known: say it in a plan"
    if any(len(v.shape) != len(shape) for _, v in held):
        return unknown
    cut = [d for d in range(len(shape)) if any(v.shape[d] != shape[d] for _, v in held)]
    prints = {(v.before.fp, v.shape) if v.before is not None else (rank, v.shape) for rank, v in held}
    if len(cut) != 1:
        return unknown
    dim = cut[0]
    constant = len(prints) == 1 and len(held) > 1
    index, at, known = [], 0, {}
    for rank, v in sorted(held, key=lambda h: h[0]):
        content = (v.before.fp, v.shape) if v.before is not None and not constant else (rank, v.shape)
        if content not in known:
            known[content] = at
            at += v.shape[dim]
        start = known[content]
        along = [np.arange(n, dtype=np.int64) for n in shape]
        along[dim] = np.arange(start, start + v.shape[dim], dtype=np.int64)
        index.append(Shard(rank, v.name, tuple(along), sure=False))
    if constant and at % shape[dim] == 0:  # all parts alike, some of them several times: any order gives the same whole
        index = [s._replace(places=(*s.places[:dim], s.places[dim] % shape[dim], *s.places[dim + 1 :])) for s in index]
        at = shape[dim]
    return index if at == shape[dim] else unknown


def assemble(shape: Sequence[int], dtype: np.dtype[Any], parts: Sequence[tuple[Shard, Array]]) -> Array | str:
    """The whole of its parts, or why there is none."""
    whole: Array = np.zeros(tuple(shape), dtype)
    covered = np.zeros(tuple(shape), bool)
    first: dict[tuple[bytes, ...], tuple[int, Array]] = {}
    for shard, values in parts:
        key = tuple(i.tobytes() for i in shard.places)
        before = first.setdefault(key, (shard.rank, values))
        if before[1] is not values and before[1].tobytes() != values.tobytes():
            return f"ranks {before[0]} and {shard.rank} hold other values of the same part: replicas that differ, or parts that a plan must tell apart"
        where = np.ix_(*shard.places) if shard.places else ()
        whole[where] = values
        covered[where] = True
    return whole if bool(covered.all()) else "the ranks do not hold all of it"


def _replicas_apart(
    name: str, held: Sequence[tuple[int, Variable]], shards: Sequence[Shard], capsules: Mapping[int, Capsule], plan: Plan | None
) -> list[str]:
    """Ranks that surely should hold the same part of a parameter, and do not."""
    planned = plan is not None and plan.param_layout(name) is not None
    places = {s.rank: tuple(i.tobytes() for i in s.places) for s in shards}
    for (a, x), (b, y) in itertools.combinations(held, 2):
        if x.before is None or y.before is None or x.before.same(y.before) or places[a] != places[b]:
            continue
        axes = {axis for axis, at in capsules[a].coords.items() if capsules[b].coords.get(axis) != at}
        if planned or (axes and axes <= REPLICATED):
            return [f"ranks {a} and {b} are replicas and held other values of {name}"]
    return []


def _place_buffers(capsules: Mapping[int, Capsule], read: Read, state: State) -> None:
    for rank, capsule in sorted(capsules.items()):
        for v in capsule.state:
            name = without_wrappers(v.name)
            if v.role == "buffer" and v.key and name not in state.buffers:
                state.buffers[name] = v.dtype, read(rank, v.key)


def _place_optimizer(
    shapes: Shapes, capsules: Mapping[int, Capsule], names: Mapping[int, Mapping[str, str]], read: Read, state: State
) -> None:
    parts: dict[tuple[str, str], list[tuple[Shard, Variable]]] = {}
    for rank, capsule in capsules.items():
        mine = {(s.name): (name, s) for name, shards in state.shards.items() for s in shards if s.rank == rank}
        for v in capsule.state:
            match = _SUFFIX.search(v.name) if v.role == "optimizer" else None
            home = mine.get(v.name[: match.start()]) if match is not None else None
            if match is None or home is None:
                continue
            parts.setdefault((home[0], match[1]), []).append((home[1], v))
    for (name, place), held in parts.items():
        values = state.optimizer.setdefault(name, {})
        shard, v = held[0]
        local = tuple(len(i) for i in shard.places)
        if not v.key:
            values[place] = v.value
        elif v.shape and v.shape == local:
            whole = assemble(shapes[name][1], storage(v.dtype), [(s, read(s.rank, x.key)) for s, x in held])
            if isinstance(whole, str):
                state.notes.append(f"optimizer state {place} of {name} is not restored: {whole}")
            else:
                values[place] = (v.dtype, whole)
        else:
            values[place] = (v.dtype, read(shard.rank, v.key))


def hyperparameters(capsules: Mapping[int, Capsule]) -> tuple[str, dict[str, Any]]:
    """Class of the job's optimizer, and the options that all of its groups and ranks share; "" where there are several classes."""
    groups = [g for c in capsules.values() for g in c.groups]
    kinds = {g.kind for g in groups}
    if len(kinds) != 1:
        return "", {}
    shared = {k: v for k, v in groups[0].values.items() if all(g.values.get(k) == v for g in groups)}
    return kinds.pop(), shared
