"""Checkpoints of the unsharded model and optimizer, written and read by torch's own distributed checkpoint in O(local).

    save(model, optimizer, "checkpoint")       # under a plan; every rank writes its parts, a replica once
    load(model, optimizer, "checkpoint")       # under this plan or another one; without a plan torch's own load does

What lies there is what `torch.distributed.checkpoint` writes for the model of one device: `{"model": …, "optimizer": …}` of
`get_state_dict`, in chunks. So each reads what the other wrote, on any mesh. A part that is several blocks of the whole (interleaved query, key
and value) is several chunks. Values that are no tensors (learning rates) are read as plain data. The index of torch's format is a pickle that torch
reads itself: load checkpoints that are yours.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from proctor.errors import OracleError
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.threads import Thread
from proctor.oracle.parallel.zero import local

if TYPE_CHECKING:
    from proctor.oracle.parallel.run import Parallel

Boxes = Mapping[tuple[object, ...], Box]


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Write a checkpoint; a collective of all ranks.

    Args:
        model: that runs by a plan.
        optimizer: of its parameters; None for the model alone.
        path: of a folder.

    Raises:
        OracleError: the model runs by no plan, on threads or in stages; or a state of the optimizer is no part of a parameter's.
    """
    running = _running(model)
    state, boxes = _state(running, optimizer)
    dcp.save(state, checkpoint_id=str(path), planner=_Writes(boxes), no_dist=not _distributed())


def load(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Read a checkpoint that `save` or torch wrote, on any mesh; a collective of all ranks.

    Args:
        model: that runs by a plan; its parameters are overwritten in place.
        optimizer: gets the states of the checkpoint; None leaves them there.
        path: of the folder.

    Raises:
        OracleError: there is no checkpoint, or it is of another model.
    """
    running = _running(model)
    try:
        known: Mapping[str, Any] = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:  # noqa: BLE001  # a pickle of somebody's raises whatever it likes
        raise OracleError(f"{str(path)[:160]} holds no checkpoint: {type(error).__name__}: {str(error)[:120]}") from None
    state, boxes = _state(running, None)
    if optimizer is not None:
        state["optimizer"], more = _awaited(running, optimizer, known)
        boxes |= more
    _fits(state["model"], boxes, known)
    dcp.load(state, checkpoint_id=str(path), planner=_Reads(boxes), no_dist=not _distributed())
    if optimizer is not None:
        _hand_over(running, optimizer, state["optimizer"])


def _distributed() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _running(model: torch.nn.Module) -> Parallel:
    running: Parallel | None = getattr(model, "_proctor_parallel", None)
    if running is None:
        raise OracleError(f"{type(model).__name__} runs by no plan", hint="torch.distributed.checkpoint.save writes it, and load here reads that")
    if isinstance(running.comm, Thread):
        raise OracleError("torch's checkpoints know processes, and these ranks are threads", hint="model.state_dict() is that of one device")
    if running.stages is not None and not running.stages.alone:
        raise OracleError("checkpoints of the stages of a pipeline are not built", hint="model.state_dict() is that of one device")
    return running


def _state(running: Parallel, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Any], dict[tuple[object, ...], Box]]:
    """What a rank holds as `get_state_dict` would lay it out, and of what it is parts."""
    held = running.held
    with held.as_it_lies():
        found = running.model.state_dict()
    state: dict[str, Any] = {"model": {name: local(value) if isinstance(value, torch.Tensor) else value for name, value in found.items()}}
    boxes: dict[tuple[object, ...], Box] = {("model", name): box for name, box in held.boxes.items() if name in found}
    if optimizer is None:
        return state, boxes
    names = {id(parameter): name for name, parameter in running.model.named_parameters()}
    states: dict[str, dict[str, Any]] = {}
    for parameter, values in optimizer.state.items():
        name = names[id(parameter)]
        states[name] = {}
        for key, value in values.items():
            states[name][key] = value = local(value) if isinstance(value, torch.Tensor) else value
            if isinstance(value, torch.Tensor) and value.dim() and running.held.axes[name]:
                if tuple(value.shape) != held.boxes[name].local:
                    raise OracleError(f"{type(optimizer).__name__} keeps {key} {list(value.shape)} of {name}, of which this rank holds {list(held.boxes[name].local)}")
                boxes["optimizer", "state", name, key] = held.boxes[name]
    groups = [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
    return {**state, "optimizer": {"state": states, "param_groups": groups}}, boxes


def _awaited(running: Parallel, optimizer: torch.optim.Optimizer, known: Mapping[str, Any]) -> tuple[dict[str, Any], dict[tuple[object, ...], Box]]:
    """Empty states of the optimizer, as the checkpoint has them."""
    names = {id(parameter): name for name, parameter in running.model.named_parameters()}
    states: dict[str, dict[str, Any]] = {}
    boxes: dict[tuple[object, ...], Box] = {}
    count = len(optimizer.param_groups)
    if f"optimizer.param_groups.{count - 1}.params" not in known or f"optimizer.param_groups.{count}.params" in known:
        raise OracleError(f"the checkpoint has no optimizer of {count} parameter groups", hint="make it with the groups that it had, or give None to load the model alone")
    # What another version of torch does not know stays as it is here.
    groups = [{key: None for key in group if f"optimizer.param_groups.{i}.{key}" in known} for i, group in enumerate(optimizer.param_groups)]
    for name in (names[id(p)] for group in optimizer.param_groups for p in group["params"]):
        prefix = f"optimizer.state.{name}."
        box = running.held.boxes[name]
        for key, what in ((k.removeprefix(prefix), v) for k, v in known.items() if k.startswith(prefix)):
            if "." in key:
                continue  # of a parameter whose name begins like this one's
            if not isinstance(what, TensorStorageMetadata):
                states.setdefault(name, {})[key] = None
                continue
            cut = tuple(what.size) == box.shape and len(box.shape) > 0
            states.setdefault(name, {})[key] = torch.zeros(box.local if cut else what.size, dtype=what.properties.dtype)
            if cut:
                boxes["optimizer", "state", name, key] = box
    return {"state": states, "param_groups": groups}, boxes


def _fits(model: Mapping[str, Any], boxes: Boxes, known: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another model before anything is overwritten."""
    for name, value in model.items():
        what = known.get(f"model.{name}")
        if what is None:
            raise OracleError(f"the checkpoint has no model.{name}", hint='it is to hold {"model": …} of the unsharded model')
        box = boxes.get(("model", name))
        shape = box.shape if box is not None else tuple(value.shape) if isinstance(value, torch.Tensor) else None
        if shape is not None and tuple(getattr(what, "size", ())) != shape:
            raise OracleError(f"model.{name} is {list(getattr(what, 'size', ()))} in the checkpoint and {list(shape)} in the model")


def _hand_over(running: Parallel, optimizer: torch.optim.Optimizer, loaded: dict[str, Any]) -> None:
    """States that were read become the optimizer's."""
    order: dict[str, int] = {}
    groups = []
    names = {id(parameter): name for name, parameter in running.model.named_parameters()}
    for own, group in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
        here = [names[id(p)] for p in own["params"]]
        if sorted(here) != sorted(group["params"]):
            raise OracleError("the checkpoint's optimizer has other parameters in its groups", hint="make it with the groups that it had")
        order |= {name: len(order) + i for i, name in enumerate(here)}
        groups.append({**own, **group, "params": [order[name] for name in here]})
    distributed = running.held.distributed
    states = {
        order[name]: {
            key: distributed(name, value) if distributed is not None and isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in values.items()
        }
        for name, values in loaded["state"].items()
    }
    optimizer.load_state_dict({"state": states, "param_groups": groups})


def _chunks(box: Box) -> Iterator[tuple[ChunkStorageMetadata, tuple[slice, ...]]]:
    """A rank's part as blocks of the whole, each with its place in the part."""
    sides = []
    for held in box.indices:
        edges = [0, *(np.flatnonzero(np.diff(held) != 1) + 1).tolist(), len(held)]
        sides.append([(int(held[a]), slice(a, b)) for a, b in itertools.pairwise(edges) if b > a])
    for block in itertools.product(*sides):
        sizes = torch.Size(where.stop - where.start for _, where in block)
        yield ChunkStorageMetadata(offsets=torch.Size(start for start, _ in block), sizes=sizes), tuple(where for _, where in block)


class _Writes(DefaultSavePlanner):  # type: ignore[misc]  # torch is not typed here
    """Tensors with a box are written as chunks of the whole; a chunk that several ranks hold is written by one of them."""

    def __init__(self, boxes: Boxes) -> None:
        super().__init__()
        self._boxes = boxes
        self._parts: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        """See torch."""
        cut = {key: box for key in self.state_dict if (box := self._boxes.get(tuple(self.mappings[key]))) is not None and not box.is_whole()}
        rest = {key: value for key, value in self.state_dict.items() if key not in cut}
        items = list(create_default_local_save_plan(rest, self.is_coordinator).items)
        for key, box in cut.items():
            tensor = self.state_dict[key]
            properties = TensorProperties.create_from_tensor(tensor)
            for chunk, where in _chunks(box):
                index = MetadataIndex(key, chunk.offsets)
                self._parts[index] = tensor.detach()[where]
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=torch.Size(box.shape))))
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        """See torch."""
        part = self._parts.get(MetadataIndex(index.fqn, index.offset))
        return super().lookup_object(index) if part is None else part


class _Reads(DefaultLoadPlanner):  # type: ignore[misc]  # torch is not typed here
    """Tensors with a box are read from whatever chunks there are."""

    def __init__(self, boxes: Boxes) -> None:
        super().__init__()
        self._boxes = boxes
        self._parts: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        """See torch."""
        cut = {key: box for key in self.state_dict if (box := self._boxes.get(tuple(self.mappings[key]))) is not None and not box.is_whole()}
        rest = {key: value for key, value in self.state_dict.items() if key not in cut}
        items: list[ReadItem] = list(create_default_local_load_plan(rest, self.metadata, strict=True).items)
        for key, box in cut.items():
            blocks = list(_chunks(box))
            items += create_read_items_for_chunk_list(key, self.metadata.state_dict_metadata[key], [chunk for chunk, _ in blocks])
            self._parts |= {MetadataIndex(key, chunk.offsets): self.state_dict[key].detach()[where] for chunk, where in blocks}
        return LoadPlan(items)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """See torch."""
        part = self._parts.get(MetadataIndex(index.fqn, index.offset))
        found: torch.Tensor = super().lookup_tensor(index) if part is None else part
        return found

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """As plain data, no pickle."""
        place = self.original_state_dict
        *way, last = self.mappings[read_item.dest_index.fqn]
        for key in way:
            place = place[key]
        place[last] = torch.load(value, weights_only=True)
