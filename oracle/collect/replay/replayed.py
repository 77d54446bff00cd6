"""Inside a reference that does the step of a capsule: its first step gets the job's state and data.

Parameters and buffers are overwritten before the first training forward; what loaders give, models and losses are called
with is exchanged where it is passed (a tensor keeps its identity, its content is another); optimizers get the job's
moments and options when they are about to step for the first time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from proctor.errors import OracleError
from proctor.instrument.capsules import rng as _rng
from proctor.instrument.capsules.held import leaves
from proctor.oracle.collect.finding.roots import local_of
from proctor.oracle.collect.replay.replay_plan import (
    PLAN,
    REPORT,
    TENSORS,
    Draw,
    Fed,
    Feed,
    ReplayPlan,
    ReplayReport,
)

if TYPE_CHECKING:
    from proctor.oracle.collect.finding.models import Models

_ENTRY = re.compile(r"\['([^']+)'\]")


class Replayed:
    """The step of a capsule in one process.

    Args:
        folder: holds the plan and its tensors.

    Raises:
        OracleError: they cannot be read.
    """

    def __init__(self, folder: str) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self.plan = msgspec.json.decode((Path(folder) / PLAN).read_bytes(), type=ReplayPlan)
            self._file: Any = safe_open(str(Path(folder) / TENSORS), framework="pt")
        except (OSError, SafetensorError, msgspec.MsgspecError) as e:
            raise OracleError(f"{folder}: {e}") from None
        self.report = ReplayReport()
        self._feeds: dict[str, list[_Feeding]] = {}
        for feed in self.plan.feeds:
            feeding = _Feeding(feed, self._tensor)
            self._feeds.setdefault(feed.kind, []).append(feeding)
            self.report.fed.append(feeding.fed)
        self._model_calls = 0
        self._before_forward: list[Any] = []

    def _tensor(self, key: str) -> torch.Tensor:
        found: torch.Tensor = self._file.get_tensor(key)
        return found

    def install(self, wrap: Callable[[Any, str, Callable[..., Any]], None], outside: Callable[[], bool]) -> None:
        """Patch loaders and the functions that compute losses.

        Args:
            wrap: puts a function around an attribute.
            outside: whether no module of the user runs, and a step is recorded or about to be.
        """
        from torch.nn import functional
        from torch.utils.data import dataloader

        def loaded(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if outside():
                self._exchange("batch", leaves(result))
            return result

        def loss(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            if outside() and torch.is_grad_enabled():
                self._exchange("loss", leaves((*args, kwargs), names=True))
            return original(*args, **kwargs)

        wrap(dataloader._BaseDataLoaderIter, "__next__", loaded)
        for name in vars(functional):
            if name.endswith(("_loss", "_entropy", "kl_div", "_with_logits")) and not name.startswith("_"):
                wrap(functional, name, loss)

    def begin(self, models: Models) -> None:
        """Before the first training forward: the job's state takes the place of the program's."""
        with torch.no_grad():
            for name, parameter in models.parameters():
                key = self.plan.parameters.get(name)
                if key is None:
                    self.report.trouble.append(f"parameter {name} is in no capsule")
                elif why := _fill(local_of(parameter.detach()), self._tensor(key)):
                    self.report.trouble.append(f"parameter {name}: {why}")
            for module in (m for root in models.roots for m in root.modules()):
                path = models.names.modules.get(id(module), "")
                for name, buffer in module._buffers.items():
                    key = self.plan.buffers.get(f"{path}.{name}".strip("."))
                    if key is not None and buffer is not None:
                        _fill(local_of(buffer.detach()), self._tensor(key))
        self._draw(self.plan.generators)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A model or a loss module is called by the program itself."""
        found = leaves((*args, kwargs), names=True)
        tensors = [leaf for _, leaf in found if isinstance(leaf, torch.Tensor)]
        if not tensors:
            return
        if any(t.grad_fn is not None for t in tensors):
            self._exchange("loss", found)
            return
        self._exchange("model", found)
        if self._model_calls < len(self.plan.draws):
            self._draw(self.plan.draws[self._model_calls])
        self._model_calls += 1
        self._before_forward = _states()

    def backward(self) -> None:
        """Gradients are about to be computed."""
        if self._before_forward and not self.report.drew:
            self.report.drew = any(not torch.equal(a, b) for a, b in zip(self._before_forward, _states(), strict=False))
        self._before_forward = []

    def before_update(self, optimizer: Any, names: dict[int, str]) -> None:
        """An optimizer is about to step for the first time."""
        if type(optimizer).__name__ != self.plan.optimizer:
            return
        for group in optimizer.param_groups:
            for option, value in self.plan.options.items():
                if option in group and option != "params":
                    group[option] = tuple(value) if isinstance(value, list) and isinstance(group[option], tuple) else value
            for parameter in group["params"]:
                name = names.get(id(parameter), "")
                state = self._state(parameter, name) if name else None
                if state is not None:
                    if state:
                        optimizer.state[parameter] = state
                    self.report.updates.append(name)

    def _state(self, parameter: torch.Tensor, name: str) -> dict[str, Any] | None:
        """The optimizer's state of a parameter; `None` where it cannot be put back."""
        out: dict[str, Any] = {}
        for place, slot in self.plan.state.get(name, {}).items():
            match = _ENTRY.fullmatch(place)
            if match is None:
                return None
            if not slot.key:
                out[match[1]] = slot.value
                continue
            value = self._tensor(slot.key)
            if value.dim() and value.shape != parameter.shape:
                return None
            out[match[1]] = value if slot.on_cpu else value.to(parameter.device)
        return out

    def close(self, folder: Path) -> None:
        """Say what was done."""
        if folder.is_dir():
            (folder / REPORT).write_bytes(msgspec.json.encode(self.report))

    def _exchange(self, kind: str, found: Iterable[tuple[str, Any]]) -> None:
        feeds = self._feeds.get(kind, [])
        here = [(p, x) for p, x in found if isinstance(x, torch.Tensor) and x.grad_fn is None and not hasattr(x, "_local_tensor")]
        places = {p for p, _ in here}
        named = any(f.fed.place in places for f in feeds)
        taken: set[int] = set()
        for place, tensor in here:
            for i, feeding in enumerate(feeds):
                fits = feeding.fed.place == place if named else feeding.fits(tensor)
                if i in taken or not fits:
                    continue
                taken.add(i)
                why = feeding.give(tensor)
                if why and kind != "batch":
                    self.report.trouble.append(f"{kind} argument {place}: {why}")
                break

    def _draw(self, draws: Iterable[Draw]) -> None:
        for draw in draws:
            words = self._tensor(draw.key)
            _rng.write(_rng.RngState(draw.name, words if draw.name.startswith(("torch", "cuda")) else words.numpy(), draw.plain))


class _Feeding:
    """A feed and how far it was used; calls of the reference may take more or fewer rows than those of the job."""

    def __init__(self, feed: Feed, tensor: Callable[[str], torch.Tensor]) -> None:
        self._feed, self._load = feed, tensor
        self._row = 0
        self.fed = Fed(feed.kind, feed.place, total=len(feed.keys))

    def fits(self, tensor: torch.Tensor) -> bool:
        if self.fed.used >= self.fed.total or str(tensor.dtype) != f"torch.{self._feed.dtype}":
            return False
        return bool(self._load(self._feed.keys[self.fed.used]).dim() == tensor.dim())

    def give(self, tensor: torch.Tensor) -> str:
        """Make a tensor hold what comes next; why not, or ""."""
        if str(tensor.dtype) != f"torch.{self._feed.dtype}":
            return f"{tensor.dtype} in the reference, {self._feed.dtype} in the job"
        parts: list[torch.Tensor] = []
        wanted = tuple(tensor.shape)
        rows = wanted[0] if wanted else 0
        while self.fed.used < self.fed.total:
            item = self._load(self._feed.keys[self.fed.used])
            if not self._row and not parts and tuple(item.shape) == wanted:
                self.fed.used += 1
                parts = [item]
                break
            if not wanted or tuple(item.shape[1:]) != wanted[1:] or not item.dim():
                return f"has shape {list(wanted)} in the reference and {list(item.shape)} in the job"
            self.fed.regrouped = True
            part = item[self._row : self._row + rows]
            parts.append(part)
            rows -= part.shape[0]
            self._row += part.shape[0]
            if self._row >= item.shape[0]:
                self.fed.used, self._row = self.fed.used + 1, 0
            if not rows:
                break
        value = torch.cat(parts) if len(parts) > 1 else parts[0] if parts else None
        if value is None or tuple(value.shape) != wanted:
            return "the reference uses more data in its step than the job did"
        with torch.no_grad():
            tensor.data = value.to(tensor.device)
        return ""


def _fill(there: torch.Tensor, value: torch.Tensor) -> str:
    if there.shape != value.shape or there.dtype != value.dtype:
        return f"{there.dtype} {list(there.shape)} in the reference, {value.dtype} {list(value.shape)} in the capsules"
    there.copy_(value)
    return ""


def _states() -> list[torch.Tensor]:
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():
        states += [g.get_state() for g in torch.cuda.default_generators]
    return states
