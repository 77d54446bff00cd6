"""Twin of `describe.h`: an argument or a result becomes the text of a signature.

`recorder` holds one `Describer`; a tap asks it once for a call's arguments and once for its result. In: objects of the user's.
Out: one JSON text (`invariants/codec/signature.py`), as the native code writes it, byte for byte:

    {"a":[{"T":"float32","s":[8,4],"d":"cpu","g":1}],"k":{"dim":-1}}

Where a rule reads oddly (`list.__len__(x)` and not `len(x)`), it is because describing must never run the user's code.
"""

# ruff: noqa: BLE001  (whatever goes wrong in here, nothing of it may reach the user's call)

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Callable
from typing import Any

from proctor.native.twins.inside import swallow

_MAX_TEXT = 64
_MAX_FUNCTION_TEXT = 200
_MAX_SEQUENCE = 8
_MAX_MAPPING = 16
_MAX_ATTRIBUTES = 12
_MAX_ARGUMENTS = 64
_MAX_DEPTH = 3
_MAX_LEAVES = 256
_SURROGATE = re.compile("[\ud800-\udfff]")
_TORCH_CONSTANTS = frozenset({"torch.dtype", "torch.device", "torch.layout", "torch.memory_format", "torch.qscheme"})
TAPS: set[type] = set()  # classes of taps: a function that is tapped is described as itself

get = object.__getattribute__
_type_dict = type.__dict__["__dict__"].__get__
_type_module = type.__dict__["__module__"].__get__
_type_qualname = type.__dict__["__qualname__"].__get__
_type_name = type.__dict__["__name__"].__get__
_type_mro = type.__dict__["__mro__"].__get__


def clean(text: str) -> str:
    return _SURROGATE.sub("\ufffd", text)


def quote(text: str, limit: int | None = None) -> str:
    # `str.__getitem__`: a subclass may have its own.
    return json.dumps(clean(str.__getitem__(text, slice(0, limit))), ensure_ascii=False)


def _joined(module: object, name: str) -> str:
    return f"{module}.{name}" if type(module) is str and module not in ("", "builtins") else name


def type_text(cls: type) -> str:
    """module.qualname of a type, without asking its metaclass; a builtin has no module in its name."""
    return _joined(_type_module(cls), str(_type_qualname(cls)))


def _module_class(cls: type) -> str:
    module = _type_module(cls)
    if type(module) is str and module.startswith("torch.nn.modules."):
        return f"torch.nn.{_type_name(cls)}"
    return type_text(cls)


def _instance_dict(value: object) -> dict[Any, Any]:
    """The instance's own attributes, past any `__getattr__` or `__dict__` property."""
    for cls in _type_mro(type(value)):
        found = _type_dict(cls).get("__dict__")
        if type(found) is types.GetSetDescriptorType:
            attributes = found.__get__(value)
            return attributes if isinstance(attributes, dict) else {}
    return {}


class Describer:
    """Types and names that are known by sight."""

    def __init__(self) -> None:
        self.tensor: type | None = None
        self.parameter: type | None = None
        self.module: type | None = None
        self.depth: Callable[[], int] | None = None
        self.disable: Callable[[], Any] | None = None
        self.tracked: dict[int, str] = {}

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], detail: int) -> str:
        with Encoder(self, detail) as encoder:
            positional = ",".join([encoder.value(a, 0) for a in args[:_MAX_ARGUMENTS]])
            named = ",".join(
                [f"{quote(k, _MAX_TEXT)}:{encoder.value(v, 0)}" for k, v in list(kwargs.items())[:_MAX_ARGUMENTS]]
            )
        return f'{{"a":[{positional}],"k":{{{named}}}}}'

    def value(self, value: object, detail: int) -> str:
        with Encoder(self, detail) as encoder:
            return encoder.value(value, 0)


class Encoder:
    """Writes one signature."""

    def __init__(self, describer: Describer, detail: int) -> None:
        self._d = describer
        self._scalars = detail < 1
        self._with_dims = detail < 2
        self._leaves = 0
        self._mode_checked = False
        self._guard: Any = None

    def __enter__(self) -> Encoder:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._guard is not None:
            try:
                self._guard.__exit__(None, None, None)
            except BaseException as error:
                swallow(error)

    def value(self, value: Any, depth: int) -> str:
        self._leaves += 1
        if self._leaves > _MAX_LEAVES:
            return '{"e":"cut"}'
        try:
            return self._value(value, depth)
        except BaseException as error:
            swallow(error)
            return '{"e":"error"}'

    def _value(self, value: Any, depth: int) -> str:
        if value is None:
            return "null"
        if value is True or value is False:
            return "true" if value else "false"
        cls = type(value)
        mro = _type_mro(cls)
        if self._d.tensor is not None and cls is self._d.tensor:
            return self._tensor(value, "", exact=True)
        if self._d.parameter is not None and cls is self._d.parameter:
            return self._tensor(value, "Parameter", exact=True)
        if cls is int:
            return self._integer(value)
        if cls in TAPS:
            return self._function(value, 0)
        if self._d.tensor in mro:
            return self._tensor(value, _type_name(cls), exact=False)
        if self._d.module in mro:
            return self._module(value)
        for sequence in (list, tuple):
            if sequence in mro:
                return self._sequence(value, sequence, depth)
        if dict in mro:
            return self._mapping(value, depth)
        for base in (set, frozenset):
            if base in mro:
                return self._set(value, base, depth)
        if str in mro:
            return quote(value, _MAX_TEXT) if self._scalars else '{"e":"str"}'
        if type in mro:
            return self._text(type_text(value))
        if float in mro:
            return self._real(value)
        return self._other(value, cls, mro)

    def _other(self, value: Any, cls: type, mro: tuple[type, ...]) -> str:
        if cls in (types.FunctionType, types.MethodType, types.MethodDescriptorType, types.WrapperDescriptorType) or (
            types.BuiltinFunctionType in mro
        ):
            return self._function(value, 0)
        text = type_text(cls)
        if text in _TORCH_CONSTANTS:
            return f'{{"y":{quote(str(value), _MAX_TEXT)}}}'
        if text == "numpy.ndarray":
            return f'{{"T":{quote("numpy." + value.dtype.name[:_MAX_TEXT])},"s":{self._dims(value.shape)}}}'
        entries = _type_dict(cls).get("__entries")  # a pybind11 enum such as torch.distributed.ReduceOp
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            if type(entry) is tuple and entry and entry[0] is value:
                return f'{{"y":{quote(f"{text}.{name}")}}}'
        return self._object(value)

    def _integer(self, value: int) -> str:
        return str(value) if self._scalars and -(1 << 63) <= value < 1 << 64 else '{"e":"int"}'

    def _real(self, value: float) -> str:
        if not self._scalars:
            return '{"e":"float"}'
        number = float.__float__(value)
        return float.__repr__(number) if math.isfinite(number) else f'"{float.__repr__(number)}"'

    def _sequence(self, value: Any, base: Any, depth: int) -> str:
        if depth >= _MAX_DEPTH:
            return f'{{"e":"{base.__name__}"}}'
        n = base.__len__(value)
        items = [self.value(base.__getitem__(value, i), depth + 1) for i in range(min(n, _MAX_SEQUENCE))]
        return f'{{"L":[{",".join(items)}],"n":{n}}}'

    def _set(self, value: Any, base: Any, depth: int) -> str:
        if depth >= _MAX_DEPTH:
            return '{"e":"set"}'
        n = base.__len__(value)
        items = list(base.__iter__(value)) if n <= 64 else []
        kinds = {type(i) for i in items}
        items = sorted(items) if kinds in ({str}, {int}) else []
        texts = [self.value(i, depth + 1) for i in items[:_MAX_SEQUENCE]]
        return f'{{"L":[{",".join(texts)}],"n":{n}}}'

    def _mapping(self, value: Any, depth: int) -> str:
        if depth >= _MAX_DEPTH:
            return '{"e":"dict"}'
        items = [(k, v) for k, v in dict.items(value) if type(k) is str][:_MAX_MAPPING]
        texts = [f"{quote(k, _MAX_TEXT)}:{self.value(v, depth + 1)}" for k, v in items]
        return f'{{"D":{{{",".join(texts)}}},"n":{dict.__len__(value)}}}'

    @staticmethod
    def _text(text: str) -> str:
        cut = clean(text).encode()[:_MAX_FUNCTION_TEXT].decode(errors="ignore")
        return f'{{"f":{quote(cut)}}}'

    def _function(self, value: Any, hops: int) -> str:
        cls = type(value)
        if cls is types.FunctionType:
            return self._text(_joined(value.__module__, value.__qualname__))
        if types.BuiltinFunctionType in _type_mro(cls):
            return self._text(_joined(value.__module__, value.__name__))
        if cls in (types.MethodDescriptorType, types.WrapperDescriptorType):
            return self._text(f"{type_text(value.__objclass__)}.{value.__name__}")
        if (cls is types.MethodType or cls in TAPS) and hops <= 8:
            inner = value.__func__ if cls is types.MethodType else get(value, "tapped")
            return self._function(inner, hops + 1) if hops < 8 else self._object(inner)
        if type in _type_mro(cls):
            return self._text(type_text(value))
        return self._object(value)

    def _object(self, value: Any) -> str:
        pairs: list[str] = []
        for key, item in _instance_dict(value).items():
            if len(pairs) >= _MAX_ATTRIBUTES:
                break
            if type(key) is not str or len(key) > _MAX_TEXT:
                continue
            if type(item) is str and self._scalars and len(item) <= _MAX_TEXT:
                pairs.append(f"{quote(key)}:{quote(item)}")
            elif item is None or type(item) is bool:
                pairs.append(f"{quote(key)}:{json.dumps(item)}")
        name = self._d.tracked.get(id(value))
        tracked = f',"v":{quote(name)}' if name else ""
        return f'{{"O":{quote(type_text(type(value)))}{tracked},"a":{{{",".join(pairs)}}}}}'

    def _module(self, value: Any) -> str:
        out = f'{{"M":{quote(_module_class(type(value)))}'
        if path := self._d.tracked.get(id(value)):
            out += f',"p":{quote(path)}'
        training = _instance_dict(value).get("training")
        if training is True or training is False:
            out += f',"t":{int(training)}'
        return out + "}"

    def _dims(self, shape: Any) -> str:
        if not self._with_dims or tuple not in _type_mro(type(shape)):
            return "null"
        dims = [tuple.__getitem__(shape, i) for i in range(tuple.__len__(shape))]
        return f"[{','.join([str(d) if type(d) is int else '-1' for d in dims])}]"

    def _read(self, tensor: Any, name: str) -> Any:
        """A C getter of the tensor type, past overrides of subclasses; None where it fails."""
        try:
            for cls in _type_mro(self._d.tensor):
                found = _type_dict(cls).get(name)
                if found is not None:
                    break
            return found.__get__(tensor) if type(found) is types.GetSetDescriptorType else getattr(tensor, name)
        except BaseException as error:
            swallow(error)
            return None

    def _tensor(self, value: Any, name: str, *, exact: bool) -> str:
        self._quiet(exact)
        dtype = self._read(value, "dtype")
        text = "unknown" if dtype is None else str(dtype).removeprefix("torch.")
        device = "cpu" if self._read(value, "is_cpu") is True else "cuda" if self._read(value, "is_cuda") is True else None
        if device is None:
            device = getattr(self._read(value, "device"), "type", "")
        out = f'{{"T":{quote(text)},"s":{self._dims(self._read(value, "shape"))},"d":{quote(device, _MAX_TEXT)}'
        if self._read(value, "requires_grad") is True:
            out += ',"g":1'
        if name:
            out += f',"c":{quote(name)}'
        if tracked := self._d.tracked.get(id(value)):
            out += f',"v":{quote(tracked)}'
        return out + "}"

    def _quiet(self, exact: bool) -> None:
        """Switch `__torch_function__` off for the rest of this signature, once, where a getter would call it."""
        if self._guard is not None or self._d.disable is None:
            return
        try:
            if exact:
                if self._mode_checked or self._d.depth is None:
                    return
                self._mode_checked = True
                if self._d.depth() <= 0:
                    return
            guard = self._d.disable()
            guard.__enter__()
            self._guard = guard
        except BaseException as error:
            swallow(error)
