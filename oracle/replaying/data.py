"""What the ranks of a job were given in a step: inputs of models, arguments of losses, batches; each replica's once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from proctor.invariants.capsule import Call, Capsule, Seen


class Stream(NamedTuple):
    """Values that the job's calls were given, one item a call, in the order of data-parallel replicas.

    Args:
        place: in the arguments.
        items: rank and key in its capsule.
        dtype: of all.
    """

    place: str
    items: tuple[tuple[int, str], ...]
    dtype: str


def is_model_call(call: Call) -> bool:
    """Called with data alone: a loss is called with what the step made itself."""
    tensors = [s for s in call.inputs if s.dtype]
    return call.what == "module" and bool(tensors) and all(s.key or s.note for s in tensors)


def data_groups(capsules: Mapping[int, Capsule], ranks: Sequence[int]) -> list[int]:
    """One rank of each set of ranks that were given the same data, in order."""
    seen: dict[tuple[Any, ...], int] = {}
    for rank in sorted(ranks):
        content = tuple(_content(s) for c in capsules[rank].calls if is_model_call(c) for s in c.inputs)
        seen.setdefault(content, rank)
    return list(seen.values())


def model_streams(capsules: Mapping[int, Capsule], wanted: Sequence[tuple[str, int]]) -> tuple[list[Stream], list[int], str]:
    """What the model was called with.

    Args:
        capsules: by rank.
        wanted: dtype and number of dimensions of each tensor of a call of the reference's model.

    Returns:
        streams, one rank of each data-parallel replica, and why there are none ("" if there are).
    """
    takes: dict[int, list[Call]] = {}
    for rank, capsule in capsules.items():
        calls = [c for c in capsule.calls if is_model_call(c)]
        if calls and all(sorted((s.dtype, len(s.shape)) for s in c.inputs if s.dtype) == sorted(wanted) for c in calls):
            takes[rank] = calls
    if not takes:
        return [], [], "no rank called a model with such inputs as the reference does"
    ranks = data_groups(capsules, list(takes))
    gone = next((s for r in ranks for c in takes[r] for s in c.inputs if s.dtype and not s.key), None)
    if gone is not None:
        return [], [], f"input {gone.place} is not held: {gone.note}"
    return _streams(ranks, {r: [c.inputs for c in takes[r]] for r in ranks}), ranks, ""


def loss_streams(capsules: Mapping[int, Capsule], ranks: Sequence[int]) -> list[Stream]:
    """What losses were called with besides what the step made; of the ranks that have losses."""
    found = {
        r: calls
        for r in sorted(capsules)
        if (calls := [tuple(s for s in c.inputs if s.key) for c in capsules[r].calls if c.what in ("module", "loss") and not is_model_call(c)])
        and any(calls)
    }
    chosen = [r for r in ranks if r in found]
    if len(chosen) != len(ranks):  # a pipeline: its last stage has the losses
        different: dict[tuple[Any, ...], int] = {}
        for r, calls in found.items():
            different.setdefault(tuple(_content(s) for call in calls for s in call), r)
        chosen = list(different.values())
    return _streams(chosen, {r: found[r] for r in chosen})


def batch_streams(capsules: Mapping[int, Capsule], ranks: Sequence[int]) -> list[Stream]:
    """What loaders gave for this step."""
    items = {}
    for r in ranks:
        first = capsules[r].batches_before - capsules[r].first_batch
        items[r] = [b.items for b in capsules[r].batches if b.number >= first]
    return _streams([r for r in ranks if items[r]], items)


def _streams(ranks: Sequence[int], calls: Mapping[int, Sequence[Sequence[Seen]]]) -> list[Stream]:
    found: dict[str, list[tuple[int, str]]] = {}
    dtypes: dict[str, str] = {}
    for rank in ranks:
        for call in calls[rank]:
            for s in call:
                if s.key and dtypes.setdefault(s.place, s.dtype) == s.dtype:
                    found.setdefault(s.place, []).append((rank, s.key))
    return [Stream(place, tuple(items), dtypes[place]) for place, items in found.items()]


def _content(seen: Seen) -> Any:
    return (seen.content.fp, seen.shape) if seen.content is not None else (seen.value, seen.dtype)

