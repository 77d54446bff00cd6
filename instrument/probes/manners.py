"""What the program's own functions do with tensors, and whether numbers that their objects hold stay.

Rows of `Value.MANNER`, of the first calls of each function. `holds`: words that are true of a tensor that it was given or gave (`has`), clearly not (`lacks`), or neither (`open`): a share (all
elements lie within 0 and 1), nothing negative, unit rows, rows that sum to 1, some negative whole number (`-100`, which losses leave out), more than one value, gradients flow
through it or none do, where its triangle begins (a mask); that the result is none of the arguments, nor another result in another shape, an argument none of the others, and that one of the next calls is given it (the state of a
recurrent model, a memory), that it is another in each call, that its second half is not the first one again, that it begins where what it is cut from begins, or behind (a target that is shifted); of a float that it was given, whether it changes, and begins anew (one that is drawn out of a few has no course). Of whole models the last is asked, and whether gradients flow through their results (a target without a stop). `leaves` and `writes`: whether an argument is another after the call. `steady`: a float of an object, in each
call of one of its methods in the first steps.

Only dense CPU tensors of at most 65,536 elements are looked at; of larger ones some elements, for whether they are others in each call. Cost: 20 to 100 µs a tensor, of twelve calls of a function; 2 µs for the numbers of an object, of 64 calls and then of each sixteenth.
"""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from proctor.instrument.observe import content
from proctor.instrument.observe.modules import class_name
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes._cuts import Cuts
from proctor.instrument.probes._repeats import Held, Numbers, Repeats, numbers_of
from proctor.instrument.probes._words import FEWEST, words
from proctor.instrument.probes.judged import readable
from proctor.invariants.schema import MODEL_CALL, Value

_CALLS: Final = 12  # of one function
_AGO: Final = 4  # calls in which a state comes back: of each microbatch or part, say, there is one
_LOOKS: Final = 3  # at what came back: one shows no manner
_CHAIN: Final = 4  # results of which none came back, fewer show nothing
_NESTED: Final = 16  # tensors of a state
_FLOWS: Final = ("gradients flow through it", "no gradients flow through it")
_APART: Final = "it is none of the other arguments"
_OWN: Final = "it is none of the other results"  # a target that holds what its input does, in whatever shape
_CARRIED: Final = "a later call is given it"
_WATCHED: Final = 64  # calls of methods of one object, before only each sixteenth is looked at
_THEN_EVERY: Final = 16
_TENSORS: Final = 8  # of one call
_LARGEST: Final = 1 << 16
_HUGE: Final = 1 << 28
_SOME: Final = 1 << 13  # elements of a large tensor
_LAST_STEP: Final = 64
_OBJECTS: Final = 512
_PASSES_AT: Final = (4, 5, 6)  # calls after which numbers that stayed are said to stay
_AFTER: Final = {"leaves": "it is as it was before the call", "writes": "it is another after the call"}

Seen = list[tuple[str, Any, int]]  # name, tensor, fingerprint
Print = tuple[tuple[int, ...], int]  # shape and fingerprint


@register
class Manners(Probe):
    """What functions of the program do."""

    name = "manners"
    kinds = frozenset({Value.MANNER})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._over = False
        self._calls: dict[str, int] = {}
        self._open: list[tuple[int, Seen, frozenset[Print]]] = []
        self._chains: dict[str, _Chain] = {}
        self._repeats, self._numbers, self._cuts = Repeats(), Numbers(), Cuts()
        self._objects: dict[int, Held] = {}

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODEL_CALL:
            return self._model_begins, self._model_ends
        if home is not Home.USER or function.rpartition(".")[2] == "__init__":
            return NO_HOOKS
        names: list[str] = []

        def before(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
            if function not in self._calls:
                self._calls[function] = 0
                names.extend(_names(function))
            self._counts(function, names, args, kwargs)
            if self._over:
                return
            calls = self._calls[function] = self._calls[function] + 1
            if args:
                self._meet(args[0], function)
            if calls <= _CALLS:
                given = _fingerprinted(_given(names, args, kwargs))
                self._open.append((self.sink.call, given, _all_prints(args, kwargs)))
                self._again(function, [*given, *_fingerprinted(_one_row(names, args, kwargs))], _fingerprinted(_large(names, args, kwargs)))

        def after(args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
            while self._open and self._open[-1][0] > self.sink.call:
                self._open.pop()  # left by an exception
            if self._open and self._open[-1][0] == self.sink.call:
                _, given, prints = self._open.pop()
                if not raised:
                    self._compare(function, given, result)
                    self._carry(function, prints, result)
            if args and not self._over and not raised:
                self._hold(args[0])

        return before, after

    def _model_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if self._over and not self._numbers.follows():
            return
        name = _model(args[0])
        self._counts(name, [], args[1:], kwargs)
        if self._over:
            return
        chain = self._chains.get(name) or self._chains.setdefault(name, _Chain())
        chain.given = None
        if chain.calls < _CALLS:
            chain.given = _all_prints(args[1:], kwargs)
            self._tell_apart(name, given := _fingerprinted(_given([], args[1:], kwargs)))
            self._again(name, [*given, *_fingerprinted(_one_row([], args[1:], kwargs))], _fingerprinted(_large([], args[1:], kwargs)))

    def _model_ends(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if self._over or raised:
            return
        name = _model(args[0])
        chain = self._chains.get(name)
        if chain is not None and chain.given is not None:
            self._carry(name, chain.given, result)
            for place, tensor in islice(_nested("result", result), _TENSORS):
                flows = _flows(tensor)
                if flows is not None:
                    self._say(name, place, "holds", _FLOWS[not flows], _FLOWS[flows])

    def step_begins(self, step: int) -> None:
        if step > _LAST_STEP and not self._over:
            self._over = True
            self._numbers.late()
            self._open.clear()
            self._chains.clear()
            self._objects.clear()

    # -- tensors --------------------------------------------------------------------------------------------------

    def _compare(self, function: str, given: Seen, result: Any) -> None:
        now = _fingerprinted([(name, tensor) for name, tensor, _ in given])
        for (name, tensor, old), (_, _, new) in zip(given, now):
            for mode, held in (("leaves", old == new), ("writes", old != new)):
                self._say(function, f"argument {name}", mode, _AFTER[mode] if held else "", "" if held else _AFTER[mode])
            self._holds(function, f"argument {name}", tensor)
        self._tell_apart(function, given)
        results = _fingerprinted(list(_tensors("result", result)))
        for name, tensor, new in results:
            others = [fp for other, like, fp in results if other != name and like.numel() == tensor.numel() and like.dtype == tensor.dtype]
            if others and tensor.numel() >= FEWEST:
                self._say(function, name, "holds", _OWN if new not in others else "", _OWN if new in others else "")
            alike = [argument for argument, other, _ in given if other.shape == tensor.shape and other.dtype == tensor.dtype]
            if alike:
                same = [argument for argument, other, old in given if old == new and other.shape == tensor.shape]
                self._say(function, name, "holds", "" if same else "it is none of the arguments", "it is none of the arguments" if same else "")
            self._holds(function, name, tensor)

    def _tell_apart(self, function: str, given: Seen) -> None:
        """Whether arguments of one shape are different, as two views of a sample are."""
        for name, tensor, fp in given:
            alike = [other for known, like, other in given if known != name and like.shape == tensor.shape and like.dtype == tensor.dtype]
            if alike and tensor.numel() >= FEWEST:
                self._say(function, f"argument {name}", "holds", _APART if fp not in alike else "", _APART if fp in alike else "")

    def _again(self, function: str, given: Seen, large: Seen) -> None:
        for name, has, lacks, left_open in self._repeats.told(function, [*given, *large], _CALLS - _LOOKS + 1):
            self._say(function, f"argument {name}", "holds", has, lacks, left_open)
        for name, has, lacks in self._cuts.told(function, given):
            self._say(function, f"argument {name}", "holds", has, lacks)

    def _counts(self, function: str, names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        for name, has, lacks in self._numbers.told(function, names, args, kwargs):
            self._say(function, f"argument {name}", "holds", has, lacks)

    def _carry(self, function: str, given: frozenset[Print], result: Any) -> None:
        """Whether calls are given what one of those before gave."""
        chain = self._chains.setdefault(function, _Chain())
        chain.calls += 1
        for results in chain.last:
            for name in [name for name, told in results.items() if told in given]:
                chain.carried[name] += 1
                del results[name]
        now = _prints(list(_nested("result", result)))
        before = {told for results in chain.last for told in results.values()} | given
        chain.last.append({name: told for name, told in now.items() if told not in before})  # what stays as it is says nothing
        if chain.calls <= _CALLS - _AGO:
            chain.seen.update(chain.last[-1].keys())
        if chain.calls <= _CALLS - _LOOKS:
            return
        for name, times in chain.seen.items():
            if times >= _CHAIN and 2 * chain.carried[name] >= times:
                self._say(function, name, "holds", _CARRIED, "")
            elif times >= _CHAIN and not chain.carried[name]:
                self._say(function, name, "holds", "", _CARRIED)

    def _holds(self, function: str, name: str, tensor: Any) -> None:
        has, lacks = words(tensor)
        flows = _flows(tensor)
        if flows is not None:
            has, lacks = [*has, _FLOWS[not flows]], [*lacks, _FLOWS[flows]]
        if has or lacks:
            self._say(function, name, "holds", "|".join(has), "|".join(lacks))

    def _say(self, function: str, name: str, mode: str, has: str, lacks: str, left_open: str = "") -> None:
        facts = {"mode": mode, "has": has, "lacks": lacks} | ({"open": left_open} if left_open else {})
        self.sink.number(f"{function}, {name}", 1.0, kind=Value.MANNER, facts=facts)

    # -- numbers of objects ---------------------------------------------------------------------------------------

    def _meet(self, thing: Any, function: str) -> None:
        """Before the first call of a method of an object: what that call changes is a change, too."""
        known = self._objects.get(id(thing))
        if known is not None and known.thing() is thing:
            return
        owner, _, method = function.rpartition(".")
        if len(self._objects) < _OBJECTS and owner.endswith(f".{type(thing).__qualname__}") and hasattr(type(thing), method):
            with contextlib.suppress(TypeError):  # held weakly, where that can be: a batch, say, has to go when the program lets it go
                self._objects[id(thing)] = Held(weakref.ref(thing), owner, numbers_of(thing))

    def _hold(self, thing: Any) -> None:
        known = self._objects.get(id(thing))
        if known is None or not known.numbers or known.thing() is not thing:
            return
        known.calls += 1
        if known.calls > _WATCHED and known.calls % _THEN_EVERY:
            return
        for name, old, new in known.changed(numbers_of(thing)):
            self.sink.number(known.owner, new, kind=Value.MANNER, facts={"mode": "steady", "has": "", "lacks": name, "seen": f"{name} was {old:.6g} and is {new:.6g}"})
        if known.calls in _PASSES_AT and known.numbers:
            self.sink.number(known.owner, 1.0, kind=Value.MANNER, facts={"mode": "steady", "has": "|".join(sorted(known.numbers)), "lacks": ""})


class _Chain:
    """What the calls of a function handed on, from one to the next."""

    def __init__(self) -> None:
        self.calls = 0
        self.given: frozenset[Print] | None = None  # what the call is given that runs
        self.last: deque[dict[str, Print]] = deque(maxlen=_AGO)  # results that have not come back
        self.seen: Counter[str] = Counter()
        self.carried: Counter[str] = Counter()


# -- tensors ---------------------------------------------------------------------------------------------------------


def _names(function: str) -> list[str]:
    """Names of the positional parameters of a function of the program."""
    from proctor.instrument.probes.source.results import function_named

    found = function_named(function)
    return [] if found is None else list(inspect.signature(found).parameters)


def _named(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[str, Any]]:
    pairs = [(names[i] if i < len(names) else str(i), value) for i, value in enumerate(args)]
    return [*pairs, *(kwargs or {}).items()]


def _given(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[str, Any]]:
    return [found for name, value in _named(names, args, kwargs) for found in _tensors(name, value)][:_TENSORS]


def _one_row(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """What an agent sees, say: of such tensors it is only asked whether they are others in each call."""
    return [(name, value) for name, value in _named(names, args, kwargs) if content.plain(value, _LARGEST) and value.dim() > 0 and value.shape[0] == 1]


def _large(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> list[tuple[str, Any]]:
    """Some elements of each tensor that is too large for all of them, as a batch of pictures is: of these, too, it is only asked whether they are others in each call."""
    found = [(n, v.detach().view(-1)) for n, v in _named(names, args, kwargs) if content.plain(v, _HUGE) and v.numel() > _LARGEST and v.is_contiguous()][:_TENSORS]
    return [(name, some) for name, flat in found if bool(((some := flat[:: flat.numel() // _SOME]) != some[0]).any())]


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """A tensor, or those in a short tuple."""
    if readable(value):
        yield name, value
    elif type(value) is tuple and len(value) <= _TENSORS:
        for i, item in enumerate(value):
            if readable(item):
                yield f"{name}[{i}]", item


def _nested(name: str, value: Any, depth: int = 3) -> Iterator[tuple[str, Any]]:
    """The tensors of a state: one, or those in tuples and lists of them."""
    if content.plain(value, _LARGEST) and not value.is_complex():
        yield name, value
    elif depth and type(value) in (tuple, list) and len(value) <= _TENSORS:
        for i, item in enumerate(value):
            yield from _nested(f"{name}[{i}]", item, depth - 1)


def _prints(found: list[tuple[str, Any]]) -> dict[str, Print]:
    kept = [(name, tensor) for name, tensor in found if FEWEST <= tensor.numel() <= _LARGEST and tensor.is_floating_point()][:_NESTED]
    return {name: (tuple(tensor.shape), fp) for name, tensor, fp in _fingerprinted(kept, _NESTED)}


def _all_prints(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> frozenset[Print]:
    given = [found for i, value in enumerate([*args, *(kwargs or {}).values()]) for found in _nested(str(i), value)]
    return frozenset(_prints(given).values())


def _model(model: Any) -> str:
    return f"{MODEL_CALL} of {class_name(model)}"


def _flows(tensor: Any) -> bool | None:
    """Whether gradients flow through a tensor; None where none flow through anything."""
    import torch

    if not tensor.is_floating_point():
        return None
    return True if tensor.requires_grad else False if torch.is_grad_enabled() else None


def _fingerprinted(found: list[tuple[str, Any]], most: int = _TENSORS) -> Seen:
    from proctor.instrument.observe.fingerprint import fingerprint_all

    kept = [(name, tensor) for name, tensor in found if tensor.numel() <= _LARGEST][:most]
    prints = fingerprint_all([tensor.detach() for _, tensor in kept]) if kept else []
    return [(name, tensor, summary[0]) for (name, tensor), summary in zip(kept, prints)]
