"""Numbers of optimizers and schedulers: options of their groups, how many updates they count, and what they are resumed with.

Rows of `Value.OPTION`; `item` is the group, and meta `when` says what they are:

* `update`: an option of a group, when its optimizer steps; all groups of an option, at its first steps and whenever one of them has
  changed. After a `load_state_dict` also `step`, how many updates the optimizer has counted.
* `given`: the same numbers in what `Optimizer.load_state_dict` was given, and `last_epoch` of what a scheduler was given.
* `file`: plain integers in what was loaded from a file, and `last_epoch` of each scheduler's state in it; the place is the path.
* `saved`: the same in what is saved.

Nothing is read from a device, and groups whose plain numbers are the same as at the last step are not gone through again.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final

from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.invariants.schema import Value

_UPDATE: Final = "torch.optim.Optimizer.step"
_GIVEN: Final = "torch.optim.Optimizer.load_state_dict"
_SCHEDULE_GIVEN: Final = "torch.optim.lr_scheduler.LRScheduler.load_state_dict"
_FIRST: Final = 4  # steps at which all options are told
_GROUPS: Final = 64  # of one optimizer
_PLAIN: Final = 16  # numbers of one file
_DEPTH: Final = 3
_ENTRIES: Final = 64
_PATH: Final = 100
# Not options: schedulers note there what they make options of.
_RESTATED: Final = frozenset({"params", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"})
_NO_NUMBERS: Final = frozenset({bool, type(None), tuple, list, str})
_NUMBERS: Final = frozenset({int, float})
COUNT: Final = "step"
SCHEDULE: Final = "last_epoch"

_Options = dict[str, list[float | None]]


class _Known:
    """What the last rows of an optimizer said."""

    def __init__(self, optimizer: Any) -> None:
        self.ref = weakref.ref(optimizer)
        self.options: _Options = {}
        self.plain: list[int | float] | None = None  # all numbers of its groups; None where there are others, as a rate in a tensor
        self.resumed = False
        self.looks = 0


@register
class Options(Probe):
    """Options of groups."""

    name = "options"
    kinds = frozenset({Value.OPTION})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._known: dict[int, _Known] = {}

    def hooks(self, function: str, home: Home) -> Hooks:
        return {
            _UPDATE: (self._updates, None),
            _GIVEN: (self._given, self._resumed),
            _SCHEDULE_GIVEN: (self._schedule_given, None),
            "torch.load": (None, self._loaded),
            "torch.save": (self._saves, None),
        }.get(function, NO_HOOKS)

    def _of(self, optimizer: Any) -> _Known:
        known = self._known.get(id(optimizer))
        if known is None or known.ref() is not optimizer:
            known = self._known[id(optimizer)] = _Known(optimizer)
        return known

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        known, groups = self._of(args[0]), args[0].param_groups[:_GROUPS]
        known.looks += 1
        plain = [value for group in groups for value in group.values() if type(value) in _NUMBERS]
        if plain != known.plain or known.looks <= _FIRST:
            options = _options(groups)
            for name, values in options.items():
                if known.looks <= _FIRST or values != known.options.get(name):
                    self._put("update", name, values)
            known.options = options
            known.plain = plain if all(type(value) in _NUMBERS or type(value) in _NO_NUMBERS for group in groups for value in group.values()) else None
        if known.resumed:
            known.resumed = False
            self._put("update", COUNT, [_count(args[0].state.get(p) for p in group["params"]) for group in groups])

    def _given(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        state = args[1] if len(args) > 1 else (kwargs or {}).get("state_dict")
        if not isinstance(state, Mapping) or not isinstance(state.get("param_groups"), list):
            return
        groups, held = state["param_groups"][:_GROUPS], state.get("state")
        for name, values in _options(groups).items():
            self._put("given", name, values)
        if isinstance(held, Mapping):
            self._put("given", COUNT, [_count(held.get(p) for p in group["params"]) for group in groups])

    def _resumed(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised:
            known = self._of(args[0])
            known.options, known.plain, known.resumed = {}, None, True

    def _schedule_given(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        state = args[1] if len(args) > 1 else (kwargs or {}).get("state_dict")
        if isinstance(state, Mapping):
            self._put("given", SCHEDULE, [_number(state.get(SCHEDULE))])

    def _loaded(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised:
            self._file("file", result)

    def _saves(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if args:
            self._file("saved", args[0])

    def _file(self, when: str, value: Any) -> None:
        for i, (place, number) in enumerate(_integers(value, "", _DEPTH)):
            if i >= _PLAIN:
                return
            self._put(when, place[:_PATH], [number])

    def _put(self, when: str, place: str, values: list[float | None]) -> None:
        for group, value in enumerate(values):
            if value is not None:
                self.sink.number(place, value, kind=Value.OPTION, item=group, facts={"when": when})


def _options(groups: list[Any]) -> _Options:
    """Numbers of each option by group; None where a group has none that can be read."""
    found: _Options = {}
    for at, group in enumerate(groups):
        for name, value in group.items():
            if type(value) in _NO_NUMBERS or name in _RESTATED:
                continue
            number = _number(value)
            if number is not None:
                found.setdefault(name, [None] * len(groups))[at] = number
    return found


def _number(value: Any) -> float | None:
    """A plain number, or that of a tensor of one element on the CPU: to ask a device would wait for it."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return float(value)
    on_cpu = getattr(getattr(value, "device", None), "type", "") == "cpu" and value.numel() == 1
    return float(value.detach()) if on_cpu else None


def _count(states: Iterator[Any]) -> float | None:
    """How many updates the first parameter with a state has seen."""
    for state in states:
        count = _number(state.get(COUNT)) if isinstance(state, Mapping) else None
        if count is not None:
            return count
    return None


def _integers(value: Any, place: str, depth: int) -> Iterator[tuple[str, float]]:
    """Path and number of plain integers in nested mappings; of a scheduler's state its position alone, of an optimizer's none."""
    if not isinstance(value, Mapping) or "param_groups" in value:
        return
    for key, item in list(value.items())[:_ENTRIES]:
        path = f"{place}[{key!r}]"
        if SCHEDULE in value and key != SCHEDULE:
            continue
        if isinstance(item, int) and not isinstance(item, bool):
            yield path, float(item)
        elif depth:
            yield from _integers(item, path, depth - 1)
