"""What a module decides while it runs: which entries of its scores it chooses, and what it drops by chance.

A function mode sees the calls that decide. A *choice* (`topk`, `argmax`, `sort`, …, of floating-point scores) is recorded with its scores,
and is replaced by the reference's where that is given: values are gathered there, so gradients flow as they would have.
*Dropout* keeps every element while a step is recorded, since masks cannot be alike on both sides; its probability is
noted. The mask that would have been used is still drawn, so that generators go on as without us, and of it a digest is
kept: replicas, and recomputation, must draw the same one. Source: TTrace §4.3 (what is not deterministic is made so), findings §3.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils import _pytree as pytree

from proctor.oracle.collect.choosing.deciding import (
    BERNOULLI,
    CHOICES,
    DROPOUTS,
    INPUT,
    RECURRENT,
    SEEN,
    Argument,
    Choice,
    Dropout,
    recurrent,
)
from proctor.oracle.collect.edges.running import Place
from proctor.oracle.collect.edges.taps import recomputing
from proctor.oracle.collect.finding.roots import local_of
from proctor.oracle.tensors import DRAWN

if TYPE_CHECKING:
    from proctor.oracle.collect.keyed import KeyedDraws

MAX_SCORES: Final = 1 << 22  # elements; larger ones are no router's: attention scores, logits over a vocabulary
DIGEST_BYTES: Final = 8
ENGINE: Final = "_engine_run_backward"  # of torch.autograd: what `backward` and `grad` call, since 2.2




class Host(Protocol):
    """What decisions need of a collector."""

    def place(self) -> Place | None:
        """The innermost module that runs and is recorded; `None` outside of all."""

    def recording(self) -> bool:
        """Whether a step is being recorded."""

    def keep(self, tensor: torch.Tensor, kind: str, place: Place, slot: str) -> None:
        """Record a tensor."""

    def told(self, place: Place, kind: str, slot: str, own: torch.Tensor) -> torch.Tensor | None:
        """The reference's choice, or mask, in the place of a module's own."""

    def drawn(self, place: Place, slot: str, p: float, digest: str, shape: tuple[int, ...], begins: str) -> None:
        """Note that elements of a tensor are dropped, by numbers that begin somewhere."""

    def unseen(self) -> contextlib.AbstractContextManager[None]:
        """Around what is no operation of the program."""

    def fail(self, error: Exception) -> None:
        """Say that recording failed; the program goes on."""


class Decisions(TorchFunctionMode):  # type: ignore[misc]
    """Sees what decides, in the modules of one process.

    Args:
        host: the collector.
        dropout: `keep`: it keeps everything while a step is recorded; `place`: the same, and what it would act on is recorded; `replay`:
            that is recorded, and masks, which are given where there are some; `keyed`, `stock`: it drops what `keyed` draws; `draw`: it is left alone.
        keyed: draws for every rank what one device would.
    """

    def __init__(self, host: Host, dropout: str, keyed: KeyedDraws | None = None) -> None:
        super().__init__()
        self._host, self._dropout, self._keyed = host, dropout, keyed
        self._counts: dict[tuple[Place, str], int] = {}
        self._answers: dict[tuple[str | None, bytes], torch.Tensor] = {}  # what was given, for when it is computed again

    def install(self, wrap: Callable[[Any, str, Callable[..., Any]], None]) -> None:
        """See what is computed again in a backward pass; `backward` itself is no place for it, as it suspends the mode that calls it.

        Args:
            wrap: has calls of an attribute go through a function.
        """
        if hasattr(torch.autograd, ENGINE):
            wrap(torch.autograd, ENGINE, self.around)
        else:
            self._dropout = "draw"  # recomputation would drop what the first pass kept

    def around(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call a function whose decisions are seen, unless somebody further out does so already."""
        if not self._host.recording() or any(mode is self for mode in _get_current_function_mode_stack()):
            return call(*args, **kwargs)
        with self, self._keyed.around() if self._keyed is not None else contextlib.nullcontext():
            return call(*args, **kwargs)

    def next_step(self) -> None:
        """Calls are counted by step."""
        self._counts.clear()
        self._answers.clear()
        if self._keyed is not None:
            self._keyed.next_step()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in SEEN or not self._host.recording():
            return func(*args, **kwargs)
        place = self._host.place()
        if (place is None and not recomputing()) or not _plain(args[0] if args else kwargs.get("input", kwargs.get("query"))):
            return func(*args, **kwargs)
        choice = CHOICES.get(func)
        if choice is not None:
            result = func(*args, **kwargs)
            other = self._safely(lambda: self._chosen(choice, place, args, kwargs, result))
            return result if other is None else other
        instead = self._safely(lambda: self._dropped(func, place, args, kwargs))
        if instead is None:
            return func(*args, **kwargs)
        return instead()

    def _safely(self, look: Callable[[], Any]) -> Any:
        try:
            with self._host.unseen():
                return look()
        except Exception as e:  # noqa: BLE001 - the user's program goes on
            self._host.fail(e)
            return None

    def _slot(self, place: Place, name: str) -> str:
        number = self._counts.get((place, name), 0)
        self._counts[place, name] = number + 1
        return f"{name}.{number}"

    # -- dropout --------------------------------------------------------------------------------------------

    def _dropped(self, func: Any, place: Place | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """What is to be done instead of dropping; `None` where the call is left as it is."""
        if func in BERNOULLI:
            return self._bernoulli(func, place, args, kwargs)
        how = recurrent(args) if func in RECURRENT else DROPOUTS.get(func)
        p = how.p.of(args, kwargs) if how is not None else None
        if how is None or not isinstance(p, int | float):
            return None
        acts = p > 0 and (how.training is None or bool(how.training.of(args, kwargs)))
        slot = self._slot(place, how.name) if place is not None else ""
        if not acts or self._dropout == "draw":
            self._note(place, slot, float(p) if acts else 0.0, "", INPUT.of(args, kwargs) if acts and how.name != "recurrent" else None)
            return None
        begins = _generator(INPUT.of(args, kwargs))
        like = _ones(args, kwargs) if how.elementwise else pytree.tree_map(_detached, (args, kwargs))
        with torch.no_grad(), self._as_torch():
            drawn = func(*like[0], **like[1])
        digest = _digest(drawn, how.elementwise)
        self._note(place, slot, float(p), digest, INPUT.of(args, kwargs), begins)
        if self._dropout in DRAWN:
            return None
        if how.elementwise:
            x = INPUT.of(args, kwargs)
            with torch.no_grad():
                factor = self._factor(how, place, slot, x.detach(), drawn[0] if isinstance(drawn, tuple) else drawn, float(p), digest)
            if func is torch.native_dropout:
                return lambda: (x * factor, factor != 0)
            # A product keeps for the backward pass what dropout does, so that recomputation comes this far.
            return lambda: x.mul_(factor) if how.inplace.of(args, kwargs) else x * factor
        put, more = how.p.put(args, kwargs, 0.0)
        return lambda: func(*put, **more)

    def _as_torch(self) -> contextlib.AbstractContextManager[None]:
        """Around a draw that the program would have made without us."""
        return self._keyed.paused() if self._keyed is not None else contextlib.nullcontext()

    def _factor(self, how: Dropout, place: Place | None, slot: str, x: Any, drawn: Any, p: float, digest: str) -> Any:
        """What elements are multiplied by, where dropout would have multiplied them by `drawn`."""
        first = place is not None and not place.again
        if place is not None and first and self._dropout in ("place", "replay"):
            self._host.keep(x, "dropped", place, slot)
        if self._dropout != "replay" or not how.scales or p >= 1.0:
            return torch.ones_like(x, dtype=torch.bool)
        stays, known = drawn != 0, f"{slot.partition('.')[0]} {digest}".encode()
        if place is not None and first:
            self._host.keep(stays, "mask", place, slot)
            other = self._host.told(place, "mask", slot, stays)
            if other is not None:
                self._remember(place, known, other)
        given = self._recall(place, known)
        return drawn if given is None or given.shape != stays.shape else given.to(x.dtype).div_(1.0 - p)

    def _bernoulli(self, func: Any, place: Place | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[], Any] | None:
        """Draws with one probability of staying: a path or an element that is kept by chance."""
        stays, x = Argument(1, "p", 0.5 if func is torch.Tensor.bernoulli_ else None).of(args, kwargs), INPUT.of(args, kwargs)
        if not isinstance(stays, float) or not 0.0 < stays < 1.0 or kwargs.get("out") is not None:
            return None
        slot = self._slot(place, "bernoulli") if place is not None else ""
        if self._dropout == "draw":
            self._note(place, slot, 1.0 - stays, "", x)
            return None
        begins, like = _generator(x), _ones(args, kwargs)
        with torch.no_grad(), self._as_torch():
            mask = func(*like[0], **like[1])
        self._note(place, slot, 1.0 - stays, _digest(mask, elementwise=True), x, begins)
        if self._dropout in DRAWN:
            return None
        return (lambda: x.fill_(1)) if func is torch.Tensor.bernoulli_ else lambda: torch.ones_like(x)

    def _note(self, place: Place | None, slot: str, p: float, digest: str, x: Any = None, begins: str = "") -> None:
        if place is not None:
            shape = tuple(local_of(x).shape) if isinstance(x, torch.Tensor) else ()
            self._host.drawn(place, slot, p, digest, shape, begins or (_generator(x) if isinstance(x, torch.Tensor) else ""))

    # -- choices --------------------------------------------------------------------------------------------

    def _chosen(self, how: Choice, place: Place | None, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """Record a choice; returns the result for the reference's choice, or `None` where that is the same."""
        x, dim = INPUT.of(args, kwargs), how.dim.of(args, kwargs)
        if not isinstance(dim, int) or isinstance(dim, bool) or kwargs.get("out") is not None:
            return None
        if not x.is_floating_point() or not x.ndim or not 0 < x.numel() <= MAX_SCORES:
            return None
        own = result if isinstance(result, torch.Tensor) else result[1]
        dropped = own.ndim < x.ndim  # the dimension along which it is chosen
        with torch.no_grad():
            scores = x.detach().movedim(dim, -1)
            picks = (own.unsqueeze(dim) if dropped else own).movedim(dim, -1)
            other = self._answer(how.name, place, scores, picks)
        if other is None or bool(torch.equal(local_of(other), local_of(picks))):
            return None
        index = other.movedim(-1, dim)
        shown = index.squeeze(dim) if dropped else index
        if isinstance(result, torch.Tensor):
            return shown
        values = _gathered(x, dim, index)
        return type(result)((values.squeeze(dim) if dropped else values, shown))

    def _answer(self, name: str, place: Place | None, scores: torch.Tensor, picks: torch.Tensor) -> torch.Tensor | None:
        if place is None or place.again:
            return self._recall(place, _print(name, scores)) if self._answers else None
        slot = self._slot(place, name)
        self._host.keep(scores, "score", place, slot)
        self._host.keep(picks, "choice", place, slot)
        other = self._host.told(place, "choice", slot, picks)
        if other is None or not _within(local_of(other), local_of(scores).shape[-1]):
            return None
        self._remember(place, _print(name, scores), other)
        return other

    def _remember(self, place: Place, known: bytes, value: torch.Tensor) -> None:
        self._answers[place.name, known] = self._answers[None, known] = value

    def _recall(self, place: Place | None, known: bytes) -> torch.Tensor | None:
        """What was given for the same values; in the same module, if it is known which one that is."""
        return self._answers.get((place.name if place is not None else None, known))


def _plain(x: Any) -> bool:
    """Whether values can be read: no other layout, with memory, outside of `torch.func`."""
    if not isinstance(x, torch.Tensor) or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return x.layout == torch.strided and not x.is_nested and x.device.type != "meta"


def _ones(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same arguments, with ones in the place of the first."""
    return INPUT.put(args, kwargs, torch.ones_like(INPUT.of(args, kwargs).detach()))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _digest(drawn: Any, elementwise: bool) -> str:
    """Of a mask, or of what was computed with it."""
    out = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for leaf in pytree.tree_leaves(drawn)[:1]:
        local = local_of(leaf.detach())
        out.update(_bytes(local != 0 if elementwise else local))
    return out.hexdigest()


def _generator(x: Any) -> str:
    """A digest of the state of the generator that draws for a tensor; "" of one whose ranks have their states kept apart by torch."""
    if not isinstance(x, torch.Tensor) or hasattr(x, "placements"):
        return ""
    state = torch.random.default_generator.get_state() if x.device.type == "cpu" else torch.get_device_module(x.device).get_rng_state(x.device)
    return hashlib.blake2b(_bytes(state), digest_size=DIGEST_BYTES).hexdigest()


def _print(name: str, scores: torch.Tensor) -> bytes:
    local = local_of(scores)
    return hashlib.blake2b(_bytes(local), digest_size=16, person=name.encode(), salt=str(local.shape[-1]).encode()[:16]).digest()


def _bytes(local: torch.Tensor) -> bytes:
    raw: bytes = local.contiguous().flatten().view(torch.uint8).cpu().numpy().tobytes()
    return raw


def _within(index: torch.Tensor, size: int) -> bool:
    return bool(((index >= 0) & (index < size)).all())


def _gathered(x: Any, dim: int, index: Any) -> Any:
    """`x.gather`, of a DTensor each rank's own part."""
    if not hasattr(x, "placements"):
        return x.gather(dim, index)
    local = x.to_local().gather(dim, index.to_local())
    return type(x).from_local(local, index.device_mesh, index.placements, shape=index.shape, stride=index.stride())

