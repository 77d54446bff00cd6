"""States of random generators at the moments between which they should move, and what random functions drew.

Rows of `Value.RNG`; the place is "<moment> <generator>":

* `forward`, `forward end`: around a training forward, the generators that dropout draws from. After the first few, the end
  is looked at only where the beginning looks like the one before, which tells a forward that draws nothing from one that
  draws the same.
* `step`: at the end of a step, every generator that has ever moved.
* `load`, `load end`: around the loading of a batch, likewise, where the loader feeds the training.
* `worker`, `worker end`: around the first batch of a loader worker (`_workers`); `item` is the worker, `seq` the call of
  `DataLoader.__iter__`.
* `epoch`: what the order of a shuffling sampler follows from, when an epoch begins.

Rows of `Value.DRAW`: what random functions returned; the place says how: `fill` a tensor was
filled in place, `own` from a generator that was passed, `shared` from the process's.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from proctor.instrument.observe.plainly import held, own
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, _generators, register
from proctor.instrument.probes._workers import Reports
from proctor.invariants.schema import MODEL_CALL, Value

ITER: Final = "torch.utils.data.DataLoader.__iter__"
NEXT: Final = "torch.utils.data.DataLoader.__next__"
DRAWS: Final = frozenset(
    [
        f"torch.{n}"
        for n in "rand randn randint randperm rand_like randn_like bernoulli normal multinomial".split()
    ]
    + ["torch.Tensor.normal_", "torch.Tensor.uniform_"]
)
_DRAWS_A_STEP: Final = 32
_DRAWS_BEFORE: Final = 4096  # before the first step
_SMALL: Final = 1 << 16  # elements of a draw in training
_WEIGHT: Final = 1 << 23  # and of a parameter that is being filled
_FIRST_FORWARDS: Final = 4  # of which the end is looked at, too
_FIRST_STEPS: Final = 64  # in which generators are looked at, and then
_EVERY_STEP: Final = 8  # one in so many,
_LATER: Final = 1024  # and from this one on
_EVERY_LATER: Final = 32
_FIRST_LOADS: Final = 4  # batches of each epoch at which generators are looked at, and then
_EVERY_LOAD: Final = 8  # one in so many


class _Loader:
    """What is known of one loader."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.call = 0  # of `__iter__`, the last one
        self.trains: bool | None = None  # whether the first model call after it began to load trained
        self.generators: list[tuple[str, Any]] = []
        self.loads = 0  # batches of this epoch
        self.last: dict[str, int] = {}  # state of each generator when it was last looked at
        self.waiting: list[
            tuple[str, int, int, int]
        ] = []  # place, state, item, call: until we know that it trains


@register
class Randomness(Probe):
    """Generators and draws."""

    name = "randomness"
    kinds = frozenset({Value.RNG, Value.DRAW})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._rng, self._draw = sink.config.keeps(Value.RNG), sink.config.keeps(Value.DRAW)
        self._looks = True  # in this step
        self._thin = False  # some steps are left out, so that nobody knows which forward has drawn
        self._forwards = 0  # training forwards so far
        self._forward: dict[str, int] = {}  # states at the beginning of the last training forward
        self._again: dict[str, int] = {}  # those in which the one that runs began, too
        self._states: dict[str, int] = {}  # of each generator at the last end of a step
        self._moved: set[str] = set()
        self._draws = _DRAWS_BEFORE
        self._loaders: dict[int, _Loader] = {}  # by id of the loader
        self._iterators: dict[int, _Loader] = {}  # by id of what iterates over it
        self._newest: _Loader | None = None  # began to load, and no model was called since
        self._reports = Reports(sink.config.run)
        self._fed: dict[
            int, bool
        ] = {}  # call of a loader's `__iter__` → whether what it loaded was for training

    def hooks(self, function: str, home: Home) -> Hooks:
        if function in DRAWS and self._draw:
            return None, self._filled if function.endswith("_") else self._drawn
        if not self._rng:
            return NO_HOOKS
        if function == MODEL_CALL:
            return self._forward_begins, self._forward_ends
        if function == ITER:
            return self._epoch_begins, self._loading_begins
        return (self._load_begins, self._load_ends) if function == NEXT else NO_HOOKS

    # -- forward and step -----------------------------------------------------------------------------------------

    def _forward_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        training = bool(getattr(args[0], "training", False)) and torch.is_grad_enabled()
        loader, self._newest = self._newest, None
        if loader is not None:
            self._used_by(loader, training)
        self._again = {}
        if training and self._looks:
            for name, generator in _generators.dropouts():
                state = _generators.digest(generator) or 0
                self.sink.fingerprint(Value.RNG, f"forward {name}", state)
                if state == self._forward.get(name) or self._forwards < _FIRST_FORWARDS:
                    self._again[name] = state
                self._forward[name] = state
            self._forwards += 1

    def _forward_ends(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool
    ) -> None:
        if self._again:
            for name, generator in _generators.dropouts():
                state = _generators.digest(generator) or 0
                if state != self._again.get(name, state):
                    self.sink.fingerprint(Value.RNG, f"forward end {name}", state)
            self._again = {}

    def step_begins(self, step: int) -> None:
        self._draws = _DRAWS_A_STEP
        if not self._rng or not self.sink.live:
            return
        self._workers_report()
        self._looks = not self._thin and (step < _FIRST_STEPS or step % (_EVERY_STEP if step < _LATER else _EVERY_LATER) == 0)
        if not self._looks:
            return
        for name, generator in self._known():
            state = _generators.digest(generator)
            if state is None:
                continue
            if self._states.setdefault(name, state) != state:
                self._moved.add(name)
                self._states[name] = state
            if name in self._moved:
                self.sink.fingerprint(Value.RNG, f"step {name}", state, call=0)

    def thinned(self) -> None:
        self._thin, self._looks = True, False
        self._again = {}

    def closing(self) -> None:
        self._workers_report()
        self._reports.close()

    def _known(self) -> list[tuple[str, Any]]:
        held = [pair for loader in self._loaders.values() if loader.trains for pair in loader.generators]
        return [*_generators.shared(), *held]

    # -- loaders --------------------------------------------------------------------------------------------------

    def _epoch_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        loader = self._loader(args[0])
        order = _order(args[0])
        loader.waiting = (
            [] if order is None else [(f"epoch {order[0]}", order[1], loader.number, self.sink.call)]
        )

    def _loading_begins(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool
    ) -> None:
        if raised:
            return
        loader = self._loader(args[0])
        loader.loads, loader.call = 0, self.sink.call
        loader.trains = None
        found = [
            *_generators.held("dataset", own(args[0], "dataset")),
            *_generators.held("collate_fn", own(args[0], "collate_fn")),
        ]
        loader.generators = list(dict(found).items())
        self._newest = loader
        workers = getattr(result, "_workers", None)
        if workers:
            self._reports.expect([w.pid for w in workers], self.sink.call)
        else:
            self._iterators = {id(result): loader, **dict(list(self._iterators.items())[:15])}

    def _loader(self, loader: Any) -> _Loader:
        known = self._loaders.get(id(loader))
        if known is None:
            if len(self._loaders) >= 64:
                self._loaders.pop(next(iter(self._loaders)))
            known = self._loaders[id(loader)] = _Loader(len(self._loaders))
        return known

    def _used_by(self, loader: _Loader, training: bool) -> None:
        """A model is called: what was loaded last was for training, or was not."""
        loader.trains = training
        self._fed[loader.call] = training
        for place, state, item, call in loader.waiting if training else ():
            self.sink.fingerprint(Value.RNG, place, state, item=item, call=call)
        loader.waiting = []

    def _load_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        loader = self._iterators.get(id(args[0]))
        if (
            loader is None
            or loader.trains is False
            or (loader.loads >= _FIRST_LOADS and loader.loads % _EVERY_LOAD)
        ):
            return
        loader.last = {
            name: s for name, g in self._sources(loader) if (s := _generators.digest(g)) is not None
        }

    def _load_ends(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool
    ) -> None:
        loader = self._iterators.get(id(args[0]))
        if loader is None:
            return
        loader.loads += 1
        before, loader.last = loader.last, {}
        if (
            raised or not before or loader.loads == 1
        ):  # with the first batch of an epoch the order is drawn, too
            return
        for name, generator in self._sources(loader):
            earlier, state = before.get(name), _generators.digest(generator)
            if earlier is not None and state is not None and state != earlier:
                self._say(loader, f"load {name}", earlier)

    @staticmethod
    def _sources(loader: _Loader) -> list[tuple[str, Any]]:
        return [*_generators.shared(), *loader.generators]

    def _say(self, loader: _Loader, place: str, state: int) -> None:
        if loader.trains:
            self.sink.fingerprint(Value.RNG, place, state, item=loader.number)
        elif len(loader.waiting) < 64:
            loader.waiting.append((place, state, loader.number, self.sink.call))

    def _workers_report(self) -> None:
        for call, worker, name, before, after in self._reports.take(self._fed):
            self.sink.fingerprint(Value.RNG, f"worker {name}", before, item=worker, call=call)
            self.sink.fingerprint(Value.RNG, f"worker end {name}", after, item=worker, call=call)

    # -- draws ----------------------------------------------------------------------------------------------------

    def _drawn(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised:
            own = (kwargs or {}).get("generator") is not None
            self._put("own" if own else "shared", result, _SMALL)

    def _filled(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool
    ) -> None:
        if not raised:
            self._put("fill", result, _WEIGHT if result.requires_grad else _SMALL)

    def _put(self, place: str, drawn: Any, most: int) -> None:
        if self._draws > 0 and isinstance(drawn, torch.Tensor) and 16 <= drawn.numel() <= most and drawn.device.type == "cpu":
            self._draws -= 1
            self.sink.tensors(Value.DRAW, [(place, -1, drawn)])


def _order(loader: Any) -> tuple[str, int] | None:
    """What the order of a loader follows from: kind of sampler, digest; `None` where it is not shuffled, or unknown."""
    batches = own(loader, "batch_sampler")
    known = (own(batches, "sampler"), batches, own(loader, "sampler"))
    sampler = next((one for one in known if one is not None), None)
    kind = type(sampler).__name__
    epoch, seed = own(sampler, "epoch"), own(sampler, "seed")
    if own(sampler, "shuffle", True) is not True:
        return None
    if isinstance(epoch, int):
        return kind, _generators.digest_text(f"{seed} {epoch}")
    if "generator" not in held(sampler):
        return None
    generator = own(sampler, "generator")
    state = _generators.digest(torch.default_generator if generator is None else generator)
    return None if state is None else (kind, state)
