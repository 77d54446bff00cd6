"""Numbers at a function's own lines: what the training loop has computed, with the formula that its source gives for it.

At an update, at a backward and at clipping, the frames that lead there are looked at: plain numbers, lengths, sizes and
losses that lie on the CPU. After the first looks only those are read again that a formula speaks of. Of the user's
functions that return a number, the arguments and the result are recorded, with the formula of the return statement.

A row's place is `<function>:<name>`; its meta holds the formulas (`instrument/probes/source/formulas.py`), where there are any.
Cost: 30–60 µs a look, 64 looks in a row and then every 16th; the first look parses the source of a few functions.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proctor.instrument.patch.usercode import library_prefixes
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, register
from proctor.instrument.probes.source import assignments, attributes, formulas, reading
from proctor.instrument.probes.source.parsing import dotted, forget, function_tree, module_tree
from proctor.instrument.probes.source.results import FACTS, Results, resolver
from proctor.invariants.schema import MODEL_CALL, Value

LIBRARIES = frozenset({"transformers", "accelerate", "lightning", "pytorch_lightning", "deepspeed"})
UPDATE = "torch.optim.Optimizer.step"
# Functions whose argument has a formula of its own: how the call is written, and which argument it is.
_GIVEN = {
    "torch.Tensor.backward": ("backward", 0, ""),
    "torch.nn.utils.clip_grad_norm_": ("clip_grad_norm_", 1, "max_norm"),
    "torch.utils.data.DistributedSampler.set_epoch": ("set_epoch", 1, "epoch"),
}
_CALLS = frozenset(call for call, _, _ in _GIVEN.values())

MAX_FRAMES = 6  # of the user's, of those that lead to a call
_MAX_STACK = 60
_WHOLE_LOOKS = 4  # looks at all numbers of a frame
_LOOKS, _THEN_EVERY = 64, 16
_MAX_CODES = 256


@dataclass
class _Code:
    """What is known of the code of one frame."""

    name: str
    made: dict[str, list[formulas.Formula]] = field(default_factory=dict)
    through: dict[str, str] = field(default_factory=dict)  # functions that a value comes through
    calls: dict[str, list[tuple[int, int, formulas.Formula | None]]] = field(default_factory=dict)  # lines, formula
    wanted: dict[str, tuple[str, ...]] = field(default_factory=dict)  # names to read later, by the call looked at
    looks: dict[str, int] = field(default_factory=dict)


@register
class Numbers(Probe):
    """Looks at the frames that lead to an update or a backward, and at what the user's functions return."""

    name: ClassVar[str] = "numbers"
    kinds: ClassVar[frozenset[Value]] = frozenset({Value.NUMBER})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._codes: dict[int, tuple[types.CodeType, _Code | None]] = {}  # by id, since the hash of a code object is computed at each question
        self._prefixes = library_prefixes()
        self._loss: float | None = None
        self.results: dict[str, float | None] = {}  # what the user's functions returned last, by name
    def hooks(self, function: str, home: Home) -> Hooks:
        if function == UPDATE:
            return (lambda args, kwargs: self._look(UPDATE, None)), None
        if function in _GIVEN:
            _, position, keyword = _GIVEN[function]

            def given(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
                value = args[position] if len(args) > position else (kwargs or {}).get(keyword)
                self._look(function, reading.number(value))

            return given, None
        if formulas.is_loss_of_torch(function):
            return None, self._lost
        if function == MODEL_CALL:
            return None, self._modelled
        if home is Home.USER:
            return None, Results(self, function).returned
        return NO_HOOKS

    def _lost(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised:
            self._loss = reading.number(result)

    def _modelled(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised:
            self.results[MODEL_CALL] = reading.number(result)

    # -- frames -------------------------------------------------------------------------------------------

    def _look(self, at: str, given: float | None) -> None:
        """Record the numbers of the frames that lead here. `given`: the number that the call was given."""
        frame: types.FrameType | None = sys._getframe(1)
        nearest, left = True, MAX_FRAMES
        for _ in range(_MAX_STACK):
            if frame is None or not left:
                return
            code = self._known(frame)
            if code is not None and (nearest or at == UPDATE):
                self._record(frame, code, at, given if nearest else None)
                nearest, left = False, left - 1
            frame = frame.f_back

    def _known(self, frame: types.FrameType) -> _Code | None:
        code = frame.f_code
        known = self._codes.get(id(code))
        if known is None:
            if len(self._codes) >= _MAX_CODES:
                return None
            known = self._codes[id(code)] = code, self._read_source(frame) if self._is_users(frame) else None
            forget()
        return known[1]

    def _is_users(self, frame: types.FrameType) -> bool:
        code = frame.f_code
        top = str(frame.f_globals.get("__name__", "")).split(".")[0]
        if top in LIBRARIES:
            return True
        if top == "proctor" or not os.path.isfile(code.co_filename) or reading.asks(code):
            return False
        return not os.path.abspath(code.co_filename).startswith(self._prefixes)

    def _read_source(self, frame: types.FrameType) -> _Code:
        """Formulas of everything that this frame's function makes."""
        code = frame.f_code
        module = str(frame.f_globals.get("__name__", ""))
        place = "__main__" if module in ("__main__", "__mp_main__") else module
        name = code.co_name if code.co_name == "<module>" else code.co_qualname.rpartition("<locals>.")[2]
        known = _Code(f"{place}.{name}")
        tree = module_tree(code) if code.co_name == "<module>" else function_tree(code)
        if tree is None:
            return known
        scope = reading.scope_of(frame)
        follows = self.following(module)
        reader = formulas.Reader(resolver(scope, frame.f_globals), follows)
        made = assignments.made(tree, reader, _CALLS)
        known.made, known.through = made.names, made.through
        for target, call in made.built.items():
            known.made.update(_of_constructor(target, call, scope, reader))
        receiver = scope.get("self")
        if receiver is not None and "self" in code.co_varnames[:1]:
            known.made.update(attributes.formulas_of(type(receiver), receiver, follows))
        for written, calls in made.calls.items():
            _, position, keyword = next(v for v in _GIVEN.values() if v[0] == written)
            known.calls[written] = [(c.lineno, c.end_lineno or c.lineno, _argument(c, position, keyword, reader)) for c in calls]
        reading.release(frame, scope)
        return known

    def following(self, module: str) -> Callable[[Any], bool]:
        """Which functions' source belongs to that of a module: what a program gives to a library differs by program."""
        top = module.split(".")[0]

        def follows(function: Any) -> bool:
            path = getattr(getattr(function, "__code__", None), "co_filename", "")
            home = str(getattr(function, "__module__", "")).split(".")[0]
            if home in LIBRARIES or not path:
                return home == top
            users = not os.path.abspath(path).startswith(self._prefixes)
            return users and (home == top or top in ("__main__", "__mp_main__"))

        return follows

    def _record(self, frame: types.FrameType, code: _Code, at: str, given: float | None) -> None:
        looks = code.looks[at] = code.looks.get(at, 0) + 1
        if looks > _LOOKS and looks % _THEN_EVERY:
            return
        scope = reading.scope_of(frame)
        own = {}
        if at != UPDATE:
            written = _GIVEN[at][0]
            own = _own_argument(code, frame, written, given)
        made: Mapping[str, list[formulas.Formula]] = {**code.made, **{k: f for k, (_, f) in own.items()}}
        if looks <= _WHOLE_LOOKS:
            found = reading.numbers(_with_globals(frame, scope))
        else:
            found = reading.numbers(scope, depth=0)
        for name in (*FACTS, *self._wanted(code, at, made)):
            if name not in found and (value := self.value(name, scope, frame.f_globals)) is not None:
                found[name] = value
        found.update({name: value for name, (value, _) in own.items()})
        reading.release(frame, scope)
        for name, value in found.items():
            self.put(code.name, name, value, made.get(name), code.through.get(name, ""))

    def _wanted(self, code: _Code, at: str, made: Mapping[str, list[formulas.Formula]]) -> tuple[str, ...]:
        key = f"{at} {len(made)}" if at == UPDATE else f"{at} {sorted(made.keys() - code.made.keys())}"
        if key not in code.wanted:
            names = {n for several in made.values() for f in several for n in formulas.operands(f)}
            code.wanted[key] = tuple(sorted(names | (made.keys() & code.made.keys())))[: reading.MAX_NUMBERS]
        return code.wanted[key]

    def value(self, name: str, scope: Mapping[str, Any], outer: Mapping[str, Any]) -> float | None:
        """The number of a name where these variables and globals are known."""
        if name in FACTS:
            return self.fact(name)
        if name.endswith("()"):
            function = resolver(scope, outer)(name[:-2])
            return self.results.get(MODEL_CALL if formulas.is_model(function) else _canonical(function))
        return reading.read(name, lambda head: scope[head] if head in scope else outer.get(head))

    def fact(self, name: str) -> float | None:
        """What is known without a variable: the last loss, the number of ranks, this rank."""
        if name == "loss()":
            return self._loss
        import torch.distributed as dist

        ready = dist.is_available() and dist.is_initialized()
        if name == "world_size()":
            return float(dist.distributed_c10d._get_default_group().size()) if ready else 1.0
        return float(dist.distributed_c10d._get_default_group().rank()) if ready else 0.0

    def put(
        self, function: str, name: str, value: float, made: list[formulas.Formula] | None, through: str = ""
    ) -> None:
        """Append a row, with the formulas of this number and the functions that it comes through."""
        facts = {"formula": _encode(made)} if made else {}
        if through:
            facts["through"] = through
        self.sink.number(f"{function}:{name}", value, facts=facts)


def _canonical(function: Any) -> str:
    """The name that a function of the user's is recorded under."""
    function = getattr(function, "__func__", function)
    module = str(getattr(function, "__module__", ""))
    place = "__main__" if module == "__mp_main__" else module
    return f"{place}.{getattr(function, '__qualname__', '')}"


# -- what a frame knows ------------------------------------------------------------------------------------------


def _with_globals(frame: types.FrameType, scope: Mapping[str, Any]) -> dict[str, Any]:
    """Variables, and the numbers among the globals that the code names."""
    if frame.f_code.co_name == "<module>":
        return dict(scope)
    outer = {n: v for n in frame.f_code.co_names if isinstance(v := frame.f_globals.get(n), bool | int | float)}
    return {**scope, **outer}


def _of_constructor(
    target: str, call: ast.Call, scope: Mapping[str, Any], reader: formulas.Reader
) -> dict[str, list[formulas.Formula]]:
    """Formulas of what an object was built with: `loader.batch_size` of `DataLoader(data, batch_size=n // world)`."""
    head, *rest = target.split(".")
    built = formulas.walk(scope.get(head), rest)
    called = dotted(call.func)
    if built is None or not called or type(built).__name__ != called.rpartition(".")[2]:
        return {}
    try:
        parameters = list(inspect.signature(type(built).__init__).parameters)[1:]
    except (TypeError, ValueError):
        return {}
    given = [*zip(parameters, call.args), *((k.arg, k.value) for k in call.keywords if k.arg is not None)]
    found = {}
    for name, node in given:
        formula = reader.formula(node)
        if formula is not None and formulas.operands(formula):
            found[f"{target}.{name}"] = [formula]
    return found


def _argument(call: ast.Call, position: int, keyword: str, reader: formulas.Reader) -> formulas.Formula | None:
    """The formula of the argument of interest; of a method, argument 0 is what it is called on."""
    if isinstance(call.func, ast.Attribute) and call.func.attr in ("backward", "set_epoch"):
        if position == 0:
            return reader.formula(call.func.value)
        position -= 1
    named = next((k.value for k in call.keywords if k.arg == keyword), None)
    node = named if named is not None else call.args[position] if len(call.args) > position else None
    return reader.formula(node) if node is not None else None


def _own_argument(
    code: _Code, frame: types.FrameType, written: str, given: float | None
) -> dict[str, tuple[float, list[formulas.Formula]]]:
    """The number that the running call was given, named by which of the calls in the source it is."""
    if given is None:
        return {}
    for index, (first, last, formula) in enumerate(code.calls.get(written, ())):
        if first <= frame.f_lineno <= last:
            plain = formula is None or not formulas.operands(formula)
            return {f"{written}[{index}]": (given, [] if plain or formula is None else [formula])}
    return {}


def _encode(made: list[formulas.Formula]) -> str:
    return json.dumps(made, separators=(",", ":"))
