"""Make a model without its memory, and let each rank make its parts of the very same values.

    model = deferred(GPT, config)        # parameters on the meta device; what initialises them is noted, not done
    proctor.parallelize(model, plan)     # done, for the parts of this rank

Whatever the constructor makes lands on the meta device, so that it sees the shapes of the whole (a fan-in, a depth), and every
operation that writes a tensor is noted. (Not under `torch.device("meta")`: transformers initialises nothing where it sees that.)
Tensors that come from elsewhere, such as a numpy array, keep their values. They are carried out later in the same order: on parts where an operation works
element by element or draws at random, on the whole, one tensor at a time, where it does not (a row set to zero, an
orthogonal matrix), which is cut afterwards. The stock stream then stands where one device's generator would. In the keyed
stream a draw is named after the parameter that comes of it. Source: veScale §12, deferred initialisation.
Limits: an initialisation that looks at values (`trunc_normal_`'s rejections, `.item()`) is refused by the meta device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from proctor.errors import OracleError
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.intercept import placed
from proctor.oracle.parallel.parameters import Held, part_of, tensors_of
from proctor.oracle.parallel.streams import Ident, Stream

_TAPE: Final = "_proctor_tape"
_META: Final = torch.device("meta")
_IS_META, _DEVICE = torch.Tensor.is_meta.__get__, torch.Tensor.device.__get__
# Operations that give each element its own, so that a part can be computed from parts of the same place.
_MAKERS: Final = {"empty", "zeros", "ones", "full", "rand", "randn", "randint", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"}
_ALIASES: Final = {"detach", "alias", "_to_copy", "lift_fresh", "clone"}


class _Slot(NamedTuple):
    """Stands for a tensor in the arguments of a noted operation."""

    number: int


class _Note(NamedTuple):
    """A noted operation.

    Args:
        function: overload of aten.
        args: with slots in place of tensors.
        kwargs: likewise.
        outs: the slot of each tensor that it gives.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]


class _Noting(TorchDispatchMode):  # type: ignore[misc]  # torch is not typed here
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._noted(func, args, dict(kwargs or {}))

    def _noted(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = _META
            kwargs.pop("pin_memory", None)
        given = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if given and not any(t.is_meta for t in given) and "device" not in kwargs:
            if torch.Tag.nondeterministic_seeded in func.tags:
                raise OracleError(f"{func} draws into a tensor that the constructor did not make", hint="make it on the CPU, every rank with the same seed")
            return func(*args, **kwargs)  # of values that are there
        there = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(_META), (args, kwargs))
        out = func(*there[0], **there[1])
        self.tape.note(func, args, kwargs, out)
        return out


class _AsOnCpu(TorchFunctionMode):  # type: ignore[misc]  # torch is not typed here
    """Tells a constructor that its tensors are on the CPU: where it sees that they are not, `trunc_normal_` for one does nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_META and args[0].__class__ in (torch.Tensor, torch.nn.Parameter):
            return False
        if func == _DEVICE and args[0].__class__ in (torch.Tensor, torch.nn.Parameter):
            return torch.device("cpu")
        return func(*args, **(kwargs or {}))


class Tape:
    """What a constructor did to tensors."""

    def __init__(self) -> None:
        self.notes: list[_Note] = []
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._kept: list[torch.Tensor] = []  # so that no memory is given twice
        self.shapes: list[tuple[int, ...]] = []

    def number(self, tensor: torch.Tensor) -> int:
        """Of a tensor; a new one for a new stretch of memory or another view of one. A parameter is what it was made from."""
        key = _memory(tensor)
        if key not in self._numbers:
            self._numbers[key] = len(self._kept)
            self._kept.append(tensor)
            self.shapes.append(tuple(tensor.shape))
        return self._numbers[key]

    def note(self, function: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Keep an operation."""
        # A tensor with values stays what it is now: its owner may write to it later.
        slots = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: _Slot(self.number(t)) if t.is_meta else t.clone(), (args, kwargs))
        outs = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
        kwargs = {k: v for k, v in slots[1].items() if k not in ("device", "pin_memory")}
        self.notes.append(_Note(function, slots[0], kwargs, tuple(self.number(t) for t in outs)))

    def materialise(self, model: torch.nn.Module, held: Held, stream: Stream) -> None:
        """Give every parameter and buffer of a model its part; see the module.

        Raises:
            OracleError: a tensor of the model did not come about in the constructor.
        """
        names: dict[int, str] = {}
        for name, tensor in tensors_of(model):
            if tensor.is_meta and _memory(tensor) not in self._numbers:
                raise OracleError(f"{name} was made outside of what `deferred` called", hint="let deferred call the function that makes the whole model")
            held.place(name, tensor)
            if not tensor.is_meta:
                continue
            names.setdefault(self._numbers[_memory(tensor)], name)
        values = _Replay(self, names, held, stream).run()
        made: dict[int, torch.Tensor] = {}
        for path, module in model.named_modules():
            for table in (module._parameters, module._buffers):
                for key, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in made:
                        name = f"{path}.{key}" if path else key
                        value = values[self._numbers[_memory(tensor)]] if tensor.is_meta else part_of(tensor.data, held.boxes[name])
                        if isinstance(tensor, torch.nn.Parameter):
                            value = torch.nn.Parameter(value, requires_grad=tensor.requires_grad)
                        made[id(tensor)] = value
                    table[key] = made[id(tensor)]
        self.notes.clear()
        self._kept.clear()


class _Replay:
    """Carries a tape out for one rank."""

    def __init__(self, tape: Tape, names: dict[int, str], held: Held, stream: Stream) -> None:
        self.tape, self.names, self.held, self.stream = tape, names, held, stream
        self.root = self._roots()
        self.name_of = self._names()
        self.in_parts = self._parts()
        self.values: dict[int, torch.Tensor] = {}
        self.ordinals: dict[str, int] = {}

    def run(self) -> dict[int, torch.Tensor]:
        """The values by number: a rank's parts of what has a name."""
        last = self._last_uses()
        with torch.no_grad():
            for at, note in enumerate(self.tape.notes):
                self._carry_out(note)
                for number in last.get(at, ()):
                    self.values.pop(number, None)
        found = {}
        for number, name in self.names.items():
            value = self.values[number]
            box = self.held.boxes[name]
            found[number] = value if self.root[number] in self.in_parts else part_of(value, box) if self.held.axes[name] else value
        return found

    def _roots(self) -> dict[int, int]:
        """Tensors that are one in memory, or one's plain copy, by the first of them."""
        root = {n: n for n in range(len(self.tape.shapes))}
        for note in self.tape.notes:
            first = next((a.number for a in note.args if isinstance(a, _Slot)), None)
            for out in note.outs:
                if first is not None and out != first and (_short(note) in _ALIASES):
                    root[out] = root[first]
        return root

    def _names(self) -> dict[int, str]:
        """The name of the tensor that each root ends in: its own, or that of the first named one that is made from it."""
        found: dict[int, str] = {}
        for number, name in self.names.items():
            found.setdefault(self.root[number], name)
        for note in reversed(self.tape.notes):
            mine = next((found[self.root[out]] for out in note.outs if self.root[out] in found), None)
            if mine is not None:
                for number in _inputs(note):
                    found.setdefault(self.root[number], mine)
        return found

    def _parts(self) -> set[int]:
        """Roots of which a part can be computed by itself: every operation on them is one for each element."""
        candidates = {self.root[n] for n in self.names}
        bad: set[int] = set()
        for note in self.tape.notes:
            touched = {self.root[n] for n in (*_inputs(note), *note.outs)}
            if not self._elementwise(note) or len(touched) > 1:
                bad |= touched
        return candidates - bad

    def _elementwise(self, note: _Note) -> bool:
        short = _short(note)
        if short in _ALIASES:
            return True
        if short in _MAKERS:
            return True
        if any(isinstance(leaf, torch.Tensor) and leaf.dim() for leaf in torch.utils._pytree.tree_leaves((note.args, note.kwargs))):
            return False  # values from elsewhere, of the whole
        tagged = torch.Tag.pointwise in note.function.tags or torch.Tag.nondeterministic_seeded in note.function.tags
        return bool(short.endswith("_") and (tagged or short in ("zero_", "fill_", "normal_", "uniform_")) and "Tensor" not in note.function._overloadname)

    def _last_uses(self) -> dict[int, list[int]]:
        last: dict[int, int] = {}
        for at, note in enumerate(self.tape.notes):
            for number in (*_inputs(note), *note.outs):
                last[number] = at
        found: dict[int, list[int]] = {}
        for number, at in last.items():
            if number not in self.names:
                found.setdefault(at, []).append(number)
        return found

    def _carry_out(self, note: _Note) -> None:
        def value(slot: Any) -> Any:
            return self.values[slot.number] if isinstance(slot, _Slot) else slot

        is_slot = lambda x: isinstance(x, _Slot)  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(value, (note.args, note.kwargs), is_leaf=is_slot)
        target = note.outs[0] if note.outs else None
        part = target is not None and self.root[target] in self.in_parts
        if part and _short(note) in _MAKERS and target is not None and not _inputs(note):
            args = _with_shape(args, self.tape.shapes[target], self._box(target).local)
        with placed(lambda tensor: self._place(target, tensor, part)):
            out = note.function(*args, **kwargs)
        for number, made in zip(note.outs, (t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, torch.Tensor))):
            self.values[number] = made

    def _place(self, target: int | None, tensor: torch.Tensor, part: bool) -> tuple[Stream, Box, Ident]:
        name = self.name_of.get(self.root[target], "") if target is not None else ""
        ordinal = self.ordinals.get(name, 0)
        self.ordinals[name] = ordinal + 1
        box = self._box(target) if part and target is not None else Box.whole(tuple(tensor.shape))
        return self.stream, box, Ident(name, ordinal)

    def _box(self, number: int) -> Box:
        return self.held.boxes[self.name_of[self.root[number]]]


def _memory(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _short(note: _Note) -> str:
    name: str = note.function._schema.name.removeprefix("aten::")
    return name


def _inputs(note: _Note) -> list[int]:
    leaves = torch.utils._pytree.tree_leaves((note.args, note.kwargs), is_leaf=lambda x: isinstance(x, _Slot))
    return [leaf.number for leaf in leaves if isinstance(leaf, _Slot)]


def _with_shape(args: tuple[Any, ...], whole: tuple[int, ...], local: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments of `empty` and the like, for a part; the shape is the one list that equals the whole's."""
    return tuple(list(local) if isinstance(a, list | tuple) and tuple(a) == whole else a for a in args)


def deferred(make: Callable[..., torch.nn.Module], *args: Any, **kwargs: Any) -> torch.nn.Module:
    """Make a model on the meta device, and note what initialises it.

    Args:
        make: a class of modules, or a function that gives the whole model.
        args: for it.
        kwargs: for it.

    Raises:
        OracleError: the initialisation looks at values, which the meta device does not have.
    """
    tape = Tape()
    try:
        with _Noting(tape), _AsOnCpu():
            model = make(*args, **kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if "meta" not in str(error).lower():
            raise
        raise OracleError(f"{getattr(make, '__name__', 'the model')} looks at values while it initialises: {str(error)[:120]}", hint="make it on the CPU, every rank with the same seed") from None
    object.__setattr__(model, _TAPE, tape)
    return model


def tape_of(model: torch.nn.Module) -> Tape | None:
    """The tape of a deferred model.

    Raises:
        OracleError: the model is on the meta device and has none.
    """
    tape: Tape | None = getattr(model, _TAPE, None)
    if tape is None and any(t.is_meta for _, t in tensors_of(model)):
        raise OracleError(f"{type(model).__name__} is on the meta device and nothing says how it is initialised", hint="make it by proctor.oracle.parallel.deferred")
    return tape
