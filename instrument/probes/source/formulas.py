"""Which formula gives a number? Read from the source of the function that is running, without running anything.

`total = math.ceil(len(loader) / accum) * epochs` becomes `["*", ["ceil", ["/", "len(loader)", "accum"]], "epochs"]`, in
the language of `invariants/relations/scalar/formulas.py`: texts are names of numbers in the same frame, lists are operations.
Calls of the user's own straight-line functions are followed. What cannot be said as arithmetic gives nothing.
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from proctor.instrument.probes.source.parsing import dotted, function_tree, pairs, written

Formula = str | int | float | list[Any]
Resolve = Callable[[str], Any]
"""The object that a dotted name means where the code runs; `None` if it cannot be told without side effects."""

MAX_NODES = 60  # of a formula
MAX_WORK = 20_000  # expressions read of one function, with all that it calls: about 20 ms
MAX_DEPTH = 3  # functions within functions

_OPERATORS: dict[type, str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.And: "and", ast.Or: "or",
}  # fmt: skip
_FUNCTIONS = {
    "int": "int", "float": "float", "round": "round", "abs": "abs", "max": "max", "min": "min", "math.ceil": "ceil",
    "math.floor": "floor", "math.sqrt": "sqrt", "math.exp": "exp", "math.log": "log", "math.cos": "cos", "ceil": "ceil",
    "floor": "floor", "sqrt": "sqrt", "bool": "bool",
}  # fmt: skip
_SEVERAL = frozenset({"max", "min"})
_SAME = frozenset({"item", "detach", "float", "double", "cpu", "tolist"})  # methods that keep a number what it is


class Reader:
    """Translates expressions of one function.

    Args:
        resolve: what a name means at run time; tells loss functions and the user's functions.
        follows: whether a function's source may be read.
        meaning: what names stand for inside a function that was followed; `None` for what cannot be said.
    """

    def __init__(
        self,
        resolve: Resolve,
        follows: Callable[[Any], bool],
        meaning: Mapping[str, Formula | None] | None = None,
        depth: int = 0,
        through: set[str] | None = None,
        left: list[int] | None = None,
        part: int | None = None,
    ) -> None:
        self._resolve, self._follows = resolve, follows
        self.through: set[str] = set() if through is None else through  # functions that were called on the way
        self._depth, self._part = depth, part  # which element of the tuple that is returned
        self._left = [MAX_WORK] if left is None else left
        self.meaning: dict[str, Formula | None] = dict(meaning or {})
        self._closed = meaning is not None

    def formula(self, node: ast.expr) -> Formula | None:
        """The formula of an expression, if it is one and is not too long."""
        found = self._read(node)
        return found if found is not None and size(found) <= MAX_NODES else None

    def _read(self, node: ast.expr) -> Formula | None:
        self._left[0] -= 1
        if self._left[0] < 0:
            return None
        match node:
            case ast.Constant(value=bool() as value):
                return int(value)
            case ast.Constant(value=int() | float() as number):
                return number if abs(number) < 1e300 else None
            case ast.Subscript(value=ast.Call() as call, slice=ast.Constant(value=int() as part)):
                return self._follow(call, dotted(call.func), part)
            case ast.Name() | ast.Attribute() | ast.Subscript():
                return self._place(node)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return self._apply(_OPERATORS[type(op)], left, right)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return self._apply("neg", operand)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._apply("not", operand)
            case ast.BoolOp(op=op, values=values):
                return self._apply(_OPERATORS[type(op)], *values)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return self._apply(_OPERATORS[type(op)], left, right)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self._apply("if", test, body, orelse)
            case ast.NamedExpr(value=value):
                return self._read(value)
            case ast.Call():
                return self._call(node)
        return None

    def _apply(self, operation: str, *nodes: ast.expr) -> Formula | None:
        parts = [self._read(n) for n in nodes]
        return None if any(p is None for p in parts) else [operation, *parts]

    def _place(self, node: ast.expr) -> Formula | None:
        """A name, with what it stands for: `args.epochs`, `sizes['train']`."""
        match node:
            case ast.Name(id=name):
                if name in self.meaning:
                    return self.meaning[name]
                return None if self._closed else name
            case ast.Attribute(value=inner, attr=attribute):
                owner = self._place(inner)
                if not isinstance(owner, str):
                    return None
                path = f"{owner}.{attribute}"
                return self.meaning[path] if path in self.meaning else self._property(owner, attribute, path)
            case ast.Subscript(value=ast.Attribute(value=inner, attr="shape"), slice=ast.Constant(value=int() as axis)):
                return _dimension(self._place(inner), axis)
            case ast.Subscript(value=inner, slice=ast.Constant(value=str() as key)):
                owner = self._place(inner)
                return f"{owner}[{key!r}]" if isinstance(owner, str) else None
        return None

    def _property(self, owner: str, attribute: str, path: str) -> Formula | None:
        """What a property of the user's class returns; the name itself of anything else."""
        holder = self._resolve(owner)
        static = inspect.getattr_static(type(holder), attribute, None) if holder is not None else None
        if not isinstance(static, property):
            return path
        getter = inspect.unwrap(static.fget) if callable(static.fget) else None
        if not isinstance(getter, types.FunctionType):
            return None
        return self._inside(getter, [owner], {})

    def _call(self, node: ast.Call) -> Formula | None:
        if (node.keywords and any(k.arg is None for k in node.keywords)) or any(isinstance(a, ast.Starred) for a in node.args):
            return None
        called = dotted(node.func)
        plain = not node.keywords
        if called == "len" and plain and len(node.args) == 1:
            inner = self._place(node.args[0])
            return f"len({inner})" if isinstance(inner, str) else None
        operation = _FUNCTIONS.get(called)
        if operation is not None and plain and node.args and (len(node.args) == 1) != (operation in _SEVERAL):
            return self._apply(operation, *node.args)
        if isinstance(node.func, ast.Attribute):
            method, owner = node.func.attr, node.func.value
            if method in _SAME and not node.args and plain:
                return self._read(owner)
            if method == "size" and len(node.args) == 1 and isinstance(node.args[0], ast.Constant):
                return _dimension(self._place(owner), node.args[0].value)
            if method in ("get_world_size", "get_rank") and not node.args:
                return "world_size()" if method == "get_world_size" else "rank()"
        return self._follow(node, called)

    def _follow(self, node: ast.Call, called: str, part: int | None = None) -> Formula | None:
        """What one of the user's functions returns, in terms of what the caller gives it, or what it returned last.

        Args:
            part: of a tuple, this element.
        """
        within = called.split(".")[0] in self.meaning
        place = self._place(node.func) if within else called
        function = self._resolve(place) if isinstance(place, str) and place else None
        if function is None:
            return None
        if is_loss(function) and part is None:
            self.through.add("loss()")
            return "loss()"
        # A name that only the followed function knows means nothing where the number is read.
        last = f"{place}()" if part is None and (within or not self._depth) else None
        receiver: Formula | None = None
        if isinstance(function, types.MethodType):
            receiver = self._place(node.func.value) if isinstance(node.func, ast.Attribute) else None
            function = function.__func__
        function = inspect.unwrap(function) if callable(function) else function
        if not isinstance(function, types.FunctionType):
            return last if is_model(function) else None
        given: list[Formula | None] = [receiver] if receiver is not None else []
        given += [self._read(a) for a in node.args]
        named = {k.arg: self._read(k.value) for k in node.keywords if k.arg is not None}
        found = self._inside(function, given, named, part)
        # Of what is given to a library, the result counts and not how it is made.
        return last if found is None and not str(function.__module__).startswith("torch.") else found

    def _inside(
        self,
        function: types.FunctionType,
        given: Sequence[Formula | None],
        named: Mapping[str, Formula | None],
        part: int | None = None,
    ) -> Formula | None:
        """What a function returns that is given these."""
        if self._depth >= MAX_DEPTH or not self._follows(function):
            return None
        tree = function_tree(function.__code__)
        if tree is None:
            return None
        self.through.add(f"{function.__module__}.{function.__qualname__}")
        meaning = _bound(tree, given, named)
        inside = Reader(self._resolve_in(function), self._follows, meaning, self._depth + 1, self.through, self._left, part)
        return inside.returned(tree.body)

    def _resolve_in(self, function: types.FunctionType) -> Resolve:
        outer, names = self._resolve, function.__globals__

        def resolve(path: str) -> Any:
            head = path.split(".")[0]
            return walk(names.get(head), path.split(".")[1:]) if head in names else outer(path)

        return resolve

    def returned(self, body: Sequence[ast.stmt]) -> Formula | None:
        """What straight-line code with branches returns, in terms of `meaning`."""
        for at, statement in enumerate(body):
            self._left[0] -= 1
            if self._left[0] < 0:
                return None
            match statement:
                case ast.Return(value=ast.Tuple(elts=several)) if self._part is not None and self._part < len(several):
                    return self.formula(several[self._part])
                case ast.Return(value=value):
                    return None if value is None or self._part is not None else self.formula(value)
                case ast.If(test=test, body=yes, orelse=no):
                    condition, rest = self._read(test), body[at + 1 :]
                    if condition is None:
                        return None
                    if isinstance(condition, int | float):
                        return self._branch([*(yes if condition else no), *rest])
                    both = [self._branch([*part, *rest]) for part in (yes, no)]
                    if None in both:
                        return None
                    whole: Formula = ["if", condition, *both]
                    return whole if size(whole) <= MAX_NODES else None
                case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
                    self.assign(statement)
                case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Assert() | ast.Global():
                    pass
                case ast.Expr() | ast.Import() | ast.ImportFrom():
                    pass
                case _:
                    if any(isinstance(n, ast.Return) for n in ast.walk(statement)):
                        return None
                    self.meaning.update(dict.fromkeys(written(statement), None))
        return None

    def _branch(self, body: Sequence[ast.stmt]) -> Formula | None:
        return Reader(self._resolve, self._follows, self.meaning, self._depth, self.through, self._left, self._part).returned(body)

    def assign(self, statement: ast.Assign | ast.AnnAssign | ast.AugAssign) -> None:
        """Remember what a name stands for from here on."""
        for target, value in pairs(statement):
            name, found = dotted(target), self.formula(value)
            self.meaning.update(dict.fromkeys([name] if name else written(target), found if name else None))


def _bound(
    tree: ast.FunctionDef, given: Sequence[Formula | None], named: Mapping[str, Formula | None]
) -> dict[str, Formula | None]:
    """What the parameters of a function stand for."""
    parameters = [*tree.args.posonlyargs, *tree.args.args]
    meaning: dict[str, Formula | None] = {p.arg: None for p in [*parameters, *tree.args.kwonlyargs]}
    defaults: list[ast.expr | None] = [None] * (len(parameters) - len(tree.args.defaults)) + list(tree.args.defaults)
    for parameter, default in [*zip(parameters, defaults), *zip(tree.args.kwonlyargs, tree.args.kw_defaults)]:
        if isinstance(default, ast.Constant) and isinstance(default.value, int | float):
            meaning[parameter.arg] = default.value
    meaning.update({p.arg: value for p, value in zip(parameters, given)})
    meaning.update({name: value for name, value in named.items() if name in meaning})
    return meaning


def is_loss(function: Any) -> bool:
    """A loss function of torch, or a module that is one."""
    if type(function).__module__ == "torch.nn.modules.loss":
        return True
    function = inspect.unwrap(function) if callable(function) else function
    if getattr(function, "__module__", "") != "torch.nn.functional":
        return False
    return is_loss_name(str(getattr(function, "__name__", "")))


def is_loss_name(name: str) -> bool:
    """A function of `torch.nn.functional` that gives a loss."""
    return name.endswith("_loss") or name in ("cross_entropy", "kl_div") or name.startswith("binary_cross_entropy")


def is_loss_of_torch(function: str) -> bool:
    """Whether a recorded function, by its whole name, is one of torch's that gives a loss."""
    return function.startswith("torch.nn.functional.") and is_loss_name(function.rpartition(".")[2])


def is_model(function: Any) -> bool:
    """A module of torch, told without importing it."""
    return any(c.__module__ == "torch.nn.modules.module" and c.__name__ == "Module" for c in type(function).__mro__)


def prefixes(path: str) -> Iterator[str]:
    plain = path.removeprefix("len(").rstrip(")").split("[")[0]
    parts = plain.split(".")
    yield from (".".join(parts[: i + 1]) for i in range(len(parts)))


def walk(thing: Any, attributes: Sequence[str]) -> Any:
    """An attribute of an attribute, without running the user's properties."""
    for attribute in attributes:
        if thing is None:
            return None
        own = getattr(thing, "__dict__", None)
        if isinstance(own, dict | types.MappingProxyType) and attribute in own:
            thing = own[attribute]
            continue
        modules = own.get("_modules") if isinstance(own, dict) else None
        if isinstance(modules, dict) and attribute in modules:
            thing = modules[attribute]
            continue
        plain = inspect.getattr_static(thing, attribute, None)
        if isinstance(plain, types.FunctionType):
            plain = types.MethodType(plain, thing) if not isinstance(thing, type | types.ModuleType) else plain
        elif isinstance(plain, staticmethod):
            plain = plain.__func__
        elif not isinstance(plain, int | float) and not callable(plain):
            return None
        elif callable(plain) and hasattr(plain, "__wrapped__") and not isinstance(thing, type | types.ModuleType):
            inner = inspect.unwrap(plain)
            plain = types.MethodType(inner, thing) if isinstance(inner, types.FunctionType) else None
        thing = plain
    return thing


def operands(formula: Formula) -> set[str]:
    """Names in a formula."""
    if isinstance(formula, str):
        return {formula}
    return {n for part in formula[1:] for n in operands(part)} if isinstance(formula, list) else set()


def size(formula: Formula) -> int:
    return 1 + sum(size(part) for part in formula[1:]) if isinstance(formula, list) else 1


def _dimension(owner: Formula | None, axis: Any) -> Formula | None:
    if not isinstance(owner, str) or not isinstance(axis, int) or isinstance(axis, bool):
        return None
    return f"len({owner})" if axis == 0 else f"{owner}.shape[{axis}]"
