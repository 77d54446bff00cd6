"""What is saved and loaded, tensor by tensor: fingerprints by path in the saved object.

* `torch.save`, safetensors and `torch.distributed.checkpoint`: `Value.SAVED`, before the call.
* their counterparts: `Value.LOADED`, after it.
* `load_state_dict` of modules and optimizers: `Value.LOADED`, told apart by `item`: what was given (GIVEN) and what the
  module or optimizer holds afterwards (HELD), names that share the module's own memory before (OWN), that the module
  does not know (UNKNOWN), and that it has and were not given (LEFT).

Rows of `Value.KEPT` say of each `load_state_dict` of an optimizer whether its moments keep the precision that they were given in (`precision`), and whether there
are any, where the file that was loaded before it was saved with more tensors than were asked for (`moments`).

The place `<file>` carries a digest of the file's path, so that a load finds its save.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from proctor.instrument.observe import plainly
from proctor.instrument.observe.content import no_torch_function
from proctor.instrument.observe.plainly import is_tensor, lazy
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Probe, Sink, _generators, register
from proctor.invariants.schema import Value

# name → position of the object, position and keyword of the file
SAVES: Final[dict[str, tuple[int, int, str]]] = {
    "torch.save": (0, 1, "f"),
    "safetensors.torch.save_file": (0, 1, "filename"),
    "safetensors.torch.save_model": (0, 1, "filename"),
    "torch.distributed.checkpoint.save": (0, -1, "checkpoint_id"),
}
# name → position of the object (-1: the result), position and keyword of the file
LOADS: Final[dict[str, tuple[int, int, str]]] = {
    "torch.load": (-1, 0, "f"),
    "safetensors.torch.load_file": (-1, 0, "filename"),
    "safetensors.torch.load_model": (0, 1, "filename"),
    "torch.distributed.checkpoint.load": (0, -1, "checkpoint_id"),
}
MODULE_LOAD: Final = "torch.nn.Module.load_state_dict"
OPTIMIZER_LOAD: Final = "torch.optim.Optimizer.load_state_dict"
GIVEN, HELD, OWN, UNKNOWN, LEFT = range(5)
_NAMES: Final = 64  # of each kind without a value
_DEPTH: Final = 6
_TENSORS: Final = 4096  # of one object
_BYTES: Final = 4 << 30  # hashed of one object
_PATH: Final = 200  # characters
_FILES: Final = 256

Found = list[tuple[str, int, Any]]


@register
class Checkpoints(Probe):
    """Rows of `Value.SAVED` and `Value.LOADED`."""

    name = "checkpoints"
    kinds = frozenset({Value.SAVED, Value.LOADED, Value.KEPT})

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._filled: set[int] = set()  # addresses of tensors that were loaded in place
        self._own: list[str] = []  # tensors given to `load_state_dict` that are the module's own
        self._sizes: dict[int, int] = {}  # tensors of saved files
        self._less = 0  # tensors that the last load left in its file

    def hooks(self, function: str, home: Home) -> Hooks:
        if function == MODULE_LOAD:
            return self._module_begins, self._module_loaded
        if function == OPTIMIZER_LOAD:
            return None, self._optimizer_loaded
        if function in SAVES:
            return self._saving(*SAVES[function]), None
        if function in LOADS:
            return None, self._loading(*LOADS[function])
        return NO_HOOKS

    def _saving(self, position: int, file_position: int, keyword: str) -> Any:
        def before(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
            value = args[position] if position < len(args) else next(iter((kwargs or {}).values()), None)
            self._put(Value.SAVED, value, _file(args, kwargs, file_position, keyword))

        return before

    def _loading(self, position: int, file_position: int, keyword: str) -> Any:
        def after(args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
            if not raised:
                value = result if position < 0 else args[position] if position < len(args) else None
                if position >= 0:  # into what may be the module's own memory
                    self._filled = {
                        a for _, _, tensor in flatten(value) if (a := _address(tensor)) is not None
                    }
                self._put(Value.LOADED, value, _file(args, kwargs, file_position, keyword))

        return after

    def _put(self, kind: Value, value: Any, file: str | None) -> None:
        found = flatten(value)
        digest = None if file is None else _generators.digest_text(file)
        if digest is not None:
            self._counted(kind, digest, len(found))
        if found:
            if digest is not None:
                self.sink.fingerprint(kind, "<file>", digest)
            self.sink.tensors(kind, found)

    def _counted(self, kind: Value, digest: int, tensors: int) -> None:
        if kind is Value.LOADED:
            self._less = max(0, self._sizes.get(digest, 0) - tensors)
        elif len(self._sizes) < _FILES:
            self._sizes[digest] = tensors

    # -- load_state_dict ------------------------------------------------------------------------------------------

    def _module_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        given, own = _given(args, kwargs), _tensors_of(args[0])
        places = {k: _address(t) for k, t in given.items() if k in own}
        self._own = [
            k for k, a in places.items() if a is not None and a == _address(own[k]) and a not in self._filled
        ]

    def _module_loaded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool
    ) -> None:
        given = _given(args, kwargs)
        if raised or not given:
            return
        own = _tensors_of(args[0])
        pairs = [(k, i, t) for k in given if k in own for i, t in ((GIVEN, given[k]), (HELD, own[k]))]
        self.sink.tensors(Value.LOADED, _bounded(pairs[: 2 * _TENSORS]))
        for item, names in (
            (OWN, self._own),
            (UNKNOWN, given.keys() - own.keys()),
            (LEFT, own.keys() - given.keys()),
        ):
            for name in sorted(names)[:_NAMES]:
                self.sink.number(name[:_PATH], 1.0, kind=Value.LOADED, item=item)

    def _optimizer_loaded(
        self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool
    ) -> None:
        given = args[1] if len(args) > 1 else (kwargs or {}).get("state_dict")
        if raised or not isinstance(given, Mapping) or "state" not in given:
            return
        ids = [i for group in given["param_groups"] for i in group["params"]]
        params = [p for group in args[0].param_groups for p in group["params"]]
        pairs: Found = []
        for key, param in zip(ids, params):
            held = args[0].state.get(param, {})
            for name, tensor in (given["state"].get(key) or {}).items():
                if is_tensor(tensor) and is_tensor(held.get(name)):
                    pairs += [
                        (f"state[{key}]['{name}']"[:_PATH], i, t)
                        for i, t in ((GIVEN, tensor), (HELD, held[name]))
                    ]
        self.sink.tensors(Value.LOADED, _bounded(pairs))
        self._keeps(args[0], given["state"], pairs)

    def _keeps(self, optimizer: Any, state: Any, pairs: Found) -> None:
        """Say whether the moments that were loaded are held as they were given."""
        less, self._less = self._less, 0
        kind = type(optimizer).__name__
        if pairs:
            coarser = [(name, a, b) for (name, _, a), (_, _, b) in zip(pairs[::2], pairs[1::2]) if _coarser(b, a)]
            seen = f"{coarser[0][0]} of {kind} was given in {_dtype(coarser[0][1])} and is held in {_dtype(coarser[0][2])}, as are {len(coarser)} of {len(pairs) // 2}" if coarser else ""
            self.sink.number(coarser[0][0] if coarser else kind, float(len(coarser)), kind=Value.KEPT, facts={"what": "precision", "seen": seen})
        trained = sum(p.requires_grad for group in optimizer.param_groups for p in group["params"])
        if less or state:
            empty = not state and less >= trained > 0
            seen = f"{kind} is given no moments, and {less} tensors of the file that was loaded were not asked for" if empty else ""
            self.sink.number(kind, float(less), kind=Value.KEPT, facts={"what": "moments", "seen": seen})


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _coarser(held: Any, given: Any) -> bool:
    """Whether a number loses digits on its way from one floating type to the other."""
    both = given.is_floating_point() and held.is_floating_point()
    return bool(both and held.element_size() < given.element_size())


def flatten(value: Any) -> Found:
    """Tensors of nested mappings, lists and modules: path, -1, tensor; at most `_TENSORS`."""
    found: Found = []
    _flatten("", value, _DEPTH, found)
    return _bounded(found)


def _flatten(path: str, value: Any, depth: int, found: Found) -> None:
    if len(found) >= _TENSORS or depth < 0:
        return
    if is_tensor(value) and not lazy(value):
        found.append((path[:_PATH], -1, value))
    elif isinstance(value, Mapping):
        for key, item in list(value.items())[:_TENSORS]:
            _flatten(
                f"{path}['{key}']" if isinstance(key, str) else f"{path}[{key!r}]", item, depth - 1, found
            )
    elif type(value) in (list, tuple):
        for i, item in enumerate(value[:_TENSORS]):
            _flatten(f"{path}[{i}]", item, depth - 1, found)
    elif _is_module(value):
        _flatten(path, _tensors_of(value), depth - 1, found)


def _bounded(found: Found) -> Found:
    kept, size = [], 0
    for entry in found:
        with no_torch_function():
            size += entry[2].numel() * entry[2].element_size()
        if size > _BYTES:
            break
        kept.append(entry)
    return kept


def _given(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[str, Any]:
    given = args[1] if len(args) > 1 else (kwargs or {}).get("state_dict")
    return {str(k): t for k, t in given.items() if is_tensor(t) and not lazy(t)} if isinstance(given, Mapping) else {}


def _tensors_of(module: Any) -> dict[str, Any]:
    """What `state_dict` would hold, without calling it: parameters and persistent buffers by name."""
    found: dict[str, Any] = {}
    for prefix, child in plainly.named_modules(module, remove_duplicate=False):
        hidden = child._non_persistent_buffers_set
        own = [*child._parameters.items(), *((k, b) for k, b in child._buffers.items() if k not in hidden)]
        found.update({f"{prefix}.{k}" if prefix else k: t for k, t in own if t is not None and not lazy(t)})
    return found


def _address(tensor: Any) -> int | None:
    try:
        return int(tensor.data_ptr()) or None
    except RuntimeError:  # no memory of its own
        return None


def _file(args: tuple[Any, ...], kwargs: dict[str, Any] | None, position: int, keyword: str) -> str | None:
    file = args[position] if 0 <= position < len(args) else (kwargs or {}).get(keyword)
    return os.path.abspath(os.fspath(file)) if isinstance(file, str | os.PathLike) else None


def _is_module(value: Any) -> bool:
    from torch.nn import Module

    return isinstance(value, Module)
