"""Names and defaults of a function's parameters, read from its installed source without running it.

TrainCheck records positional arguments by position, and imports the function to name them. A trace is data from
somebody else, so nothing that it names is imported here: the file is found by its path and parsed. A function that is
not found, or is built in, keeps its positions, which is what TrainCheck does too.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from proctor.invariants.relations.traincheck.records import Parameter

_MAX_SOURCE_BYTES: Final = 8 << 20
_MAX_DEPTH: Final = 12  # base classes followed, parts of a name
_Function = ast.FunctionDef | ast.AsyncFunctionDef


class Sources:
    """Parsed source files of installed packages."""

    def __init__(self) -> None:
        self._trees: dict[Path, ast.Module | None] = {}

    def parameters(self, function: str) -> list[Parameter] | None:
        """Parameters of a function in order; `None` where its source is not found."""
        parts = function.split(".")
        if len(parts) < 3 or len(parts) > _MAX_DEPTH or not all(p.isidentifier() for p in parts):
            return None
        # A capital letter begins a class; `autocast.__init__` shows that not all classes have one.
        end = next((i for i in range(2, len(parts)) if parts[i][:1].isupper()), len(parts) - 1)
        for cut in dict.fromkeys((end, max(len(parts) - 2, 1))):
            path = _file(parts[:cut])
            tree = self._tree(path) if path is not None else None
            found = _lookup(tree, parts[cut:], 0) if tree is not None else None
            if found is not None:
                return found
        return None

    def _tree(self, path: Path) -> ast.Module | None:
        if path not in self._trees:
            self._trees[path] = _parse(path)
        return self._trees[path]


def _lookup(tree: ast.Module, names: list[str], depth: int) -> list[Parameter] | None:
    """Parameters of a function of a module, or of a method, also one of a base class in the same file."""
    scope: list[ast.stmt] = tree.body
    for name in names[:-1]:
        owners = [n for n in _definitions(scope) if isinstance(n, ast.ClassDef) and n.name == name]
        if not owners:
            return None
        owner = owners[-1]
        scope = owner.body
    functions = [n for n in _definitions(scope) if not isinstance(n, ast.ClassDef) and n.name == names[-1]]
    if functions:
        return _parameters(functions[-1])
    if len(names) < 2:
        return None
    if names[-1] == "__init__" and any("dataclass" in ast.dump(d) for d in owner.decorator_list):
        return _members(owner)
    for base in owner.bases:
        if isinstance(base, ast.Name) and base.id != owner.name and depth < _MAX_DEPTH:
            found = _lookup(tree, [base.id, names[-1]], depth + 1)
            if found is not None:
                return found
    return None


def _members(owner: ast.ClassDef) -> list[Parameter]:
    """Parameters of the `__init__` of a dataclass: its annotated members."""
    out: list[Parameter] = [("self", "p", None)]
    for node in owner.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        if "ClassVar" in ast.dump(node.annotation):
            continue
        default = node.value
        if isinstance(default, ast.Call):
            options = {k.arg: k.value for k in default.keywords}
            made = options.get("init")
            if isinstance(made, ast.Constant) and made.value is False:
                continue
            default = options.get("default")
        out.append((node.target.id, "p", _default(default)))
    return out


def _parse(path: Path) -> ast.Module | None:
    try:
        if path.stat().st_size > _MAX_SOURCE_BYTES:
            return None
        return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _file(module: list[str]) -> Path | None:
    """The source file of a module of an installed package; the package is not imported."""
    if module[0] in sys.builtin_module_names:
        return None
    try:
        spec = importlib.util.find_spec(module[0])
    except (ImportError, ValueError, AttributeError):
        return None
    if spec is None or not spec.origin:
        return None
    if len(module) == 1:
        return Path(spec.origin) if spec.origin.endswith(".py") else None
    for place in spec.submodule_search_locations or ():
        inside = Path(place).joinpath(*module[1:])
        for candidate in (inside.with_suffix(".py"), inside / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _definitions(body: Iterable[ast.stmt]) -> Iterator[_Function | ast.ClassDef]:
    """Functions and classes of a scope, also under `if` and `try`; overloads are no definitions."""
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield node
        elif isinstance(node, _Function):
            if not any("overload" in ast.dump(d) for d in node.decorator_list):
                yield node
        elif isinstance(node, ast.If):
            yield from _definitions([*node.body, *node.orelse])
        elif isinstance(node, ast.Try):
            yield from _definitions([*node.body, *node.orelse, *node.finalbody])


def _parameters(function: _Function) -> list[Parameter]:
    a = function.args
    ordered = [*a.posonlyargs, *a.args]
    defaults: list[ast.expr | None] = [None] * (len(ordered) - len(a.defaults)) + list(a.defaults)
    out: list[Parameter] = [(p.arg, "p", _default(d)) for p, d in zip(ordered, defaults, strict=True)]
    if any(isinstance(d, ast.Name) and d.id == "classmethod" for d in function.decorator_list):
        out = out[1:]
    if a.vararg is not None:
        out.append((a.vararg.arg, "*", None))
    out += [(p.arg, "k", _default(d)) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg is not None:
        out.append((a.kwarg.arg, "**", None))
    return out


def _default(node: ast.expr | None) -> Any:
    """A literal default as TrainCheck writes a value, `{type: value}`; null where there is none."""
    if node is None:
        return None
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
    plain = value is None or isinstance(value, (bool, int, float, str))
    return {type(value).__name__: value} if plain else None
