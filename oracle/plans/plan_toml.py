"""A plan from a TOML file.

    [mesh]
    axes = ["pp", "dp", "cp", "tp"]              # slow → fast
    sizes = [1, 2, 1, 2]
    groups = { sp = "tp" }                       # further names; joint axes: { dp = "edp+ep" }

    [[param]]                                    # the first rule that matches wins
    path = 'layers\\.\\d+\\.attn\\.qkv\\.(weight|bias)'
    shard = { tp = "interleaved:0:3" }           # or dims = { "0" = ["tp"] }, partial = ["tp"], replicate = true;
                                                 # padded = true where the reference's dimensions may be shorter

    [[activation]]
    module = 'layers\\.\\d+'
    output = { sp = 0, dp = 1 }                  # also input, grad_output, grad_input; keys may be dimensions
    layout = "sbh->bsh"                          # where the reference has another order of dimensions

    [[rename]]
    from = 'layers\\.(\\d+)\\.(.*)'                 # layers are counted from 0 on every stage
    to = 'layers.{g1 + 4*pp}.\\2'
    where = { pp = 1 }                           # optional, as is kind = "param" or "activation"

    # What `proctor.parallelize` carries out (docs/parallel.md):

    [[style]]                                    # colwise, rowwise, vocab, sequence, batch: rules under a name
    style = "colwise"
    module = 'layers\\.\\d+\\.fc1'
    axis = "tp"

    [[redistribute]]                             # a transition: what comes, what leaves, and the same of the gradient
    module = 'layers\\.\\d+\\.attn'
    at = "output"                                # or "input"
    from = { tp = "partial" }
    to = {}                                      # grad_from, grad_to, slot, after, lookup: see `EdgeRule`

    [[pending]]                                  # gradients that are reduced after a backward
    path = '.*'
    axes = ["dp"]

    [[draw]]                                     # how tensors lie that a module draws at random
    module = '.*drop'
    layout = { dp = 0 }

    [[size]]                                     # attributes that are divided by an axis
    module = '.*attn'
    names = ["num_heads"]
    axis = "tp"

    [[fully_shard]]                              # parameters that are cut between their uses (ZeRO-3)
    module = 'layers\\.\\d+'
    axis = "dp"
"""

from __future__ import annotations

import difflib
import functools
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.errors import OracleError
from proctor.invariants.files import UNREADABLE, read_file
from proctor.oracle.plans import running_toml as _running_toml
from proctor.oracle.plans.fuse import FuseRule
from proctor.oracle.plans.mesh import Mesh
from proctor.oracle.plans.plan import SCHEMA, WHICH, ActivationRule, ParamRule, Plan, RenameRule, Rule
from proctor.oracle.plans.rules import RunRule

_MOST_BYTES: Final = 1024 * 1024
_HINT: Final = "docs/oracle.md shows a plan"
_TOP: Final = ("schema", "mesh", "param", "activation", "rename", "fuse", *(name for name, _ in _running_toml.TABLES))
_MESH: Final = ("axes", "sizes", "groups")
_PARAM: Final = ("path", "shard", "dims", "partial", "replicate", "padded")
_ACTIVATION: Final = ("module", *WHICH, "dims", "slot", "layout", "padded")
_FUSE: Final = ("from", "to", "groups", "transpose")
_RENAME: Final = ("from", "to", "where", "kind")


def plan_of(plan: Plan | str | Path | None) -> Plan | None:
    """A plan as people give it: the object, or a TOML or JSON file; "" for none.

    Raises:
        OracleError: the file cannot be read or is not a plan.
    """
    return plan if isinstance(plan, Plan) else read_plan(Path(plan)) if plan else None


def read_plan(path: Path) -> Plan:
    """A plan from a `.toml` file, or from a `.json` one as `Plan.to_json` writes it.

    Raises:
        OracleError: the file cannot be read or is not a plan; with the table and the key.
    """
    try:
        blob = read_file(path, _MOST_BYTES)
    except OSError as error:
        raise OracleError(f"{path}: {error.strerror or error}", hint=_HINT) from None
    if path.suffix == ".json":
        try:
            return Plan.from_json(blob)
        except OracleError as error:
            raise OracleError(f"{path}: {error.message}", hint=error.hint) from None
    try:
        return parse_plan(blob.decode(), str(path))
    except UnicodeDecodeError:
        raise OracleError(f"{path} is not UTF-8 text", hint=_HINT) from None


def parse_plan(text: str, name: str = "plan") -> Plan:
    """A plan from the text of a TOML file.

    Args:
        text: of the file.
        name: of it, for messages.

    Raises:
        OracleError: it is not a plan; with the table and the key.
    """
    try:
        table = tomllib.loads(text)
    except UNREADABLE as error:
        raise OracleError(f"{name} is not TOML: {str(error)[:120]}", hint=_HINT) from None
    _Table(name, table).known(_TOP)
    if (schema := table.get("schema", SCHEMA)) != SCHEMA:
        raise OracleError(f"{name}: schema = {str(schema)[:20]}, this Proctor reads {SCHEMA}", hint="upgrade Proctor")
    plan = _mesh(_Table(f"{name}: [mesh]", table.get("mesh", {})))
    readers: list[tuple[str, Callable[[Plan, _Table], None]]] = [("param", _param), ("activation", _activation), ("rename", _rename), ("fuse", _fuse)]
    readers += [(kind, functools.partial(add, either=_either)) for kind, add in _running_toml.TABLES]
    for kind, add in readers:
        rules = table.get(kind, [])
        if not isinstance(rules, list):
            raise OracleError(f"{name}: [{kind}] must be a list of tables", hint=f"write [[{kind}]]")
        for number, rule in enumerate(rules, 1):
            where = _Table(f"{name}: [[{kind}]] {number}", rule)
            try:
                add(plan, where)
            except OracleError as error:
                if error.message.startswith(where.where):
                    raise
                raise OracleError(f"{where.where}: {error.message}", hint=error.hint) from None
    if not (plan.mesh.axes or plan.params or plan.activations or plan.renames or plan.edges or plan.pendings or plan.draws or plan.sizes or plan.shards or plan.pipelines or plan.factories or plan.fuses):
        raise OracleError(f"{name} says nothing", hint=_HINT)
    return plan


def format_plan(plan: Plan) -> str:
    """A plan as TOML that `parse_plan` reads back; groups are written out."""
    lines = []
    if plan.mesh.axes:
        lines += ["[mesh]", f"axes = {_toml(list(plan.mesh.axes))}", f"sizes = {list(plan.mesh.sizes)}", ""]
    for param in plan.params:
        lines += ["[[param]]", f"path = {_toml(param.path)}"]
        lines += [_spec("dims" if param.rule.ordered else "shard", param.rule) if param.rule.cuts else "replicate = true"]
        lines += ["padded = true", ""] if param.rule.padded else [""]
    for module in plan.activations:
        lines += ["[[activation]]", f"module = {_toml(module.module)}"]
        lines += [f"slot = {_toml(module.slot)}"] if module.slot != ".*" else []
        lines += [_spec(which, rule) for which, rule in module.rules.items()]
        lines += [f"layout = {_toml(module.transpose)}"] if module.transpose else []
        lines += ["padded = true", ""] if any(rule.padded for rule in module.rules.values()) else [""]
    for name in plan.renames:
        lines += ["[[rename]]", f"from = {_toml(name.pattern)}", f"to = {_toml(name.to)}"]
        lines += [f"where = {_toml(name.where)}"] if name.where else []
        lines += [f"kind = {_toml(name.kind)}"] if name.kind != "any" else []
        lines += [""]
    running: list[RunRule] = [*plan.edges, *plan.pendings, *plan.draws, *plan.factories, *plan.sizes, *plan.shards, *plan.pipelines]
    for rule in running:
        lines += _running_toml.lines(rule, _spec, _toml)
    for fuse in plan.fuses:
        lines += ["[[fuse]]", f"from = {_toml(fuse.pattern)}", f"to = {_toml(list(fuse.to))}"]
        lines += [f"groups = {fuse.groups}"] if fuse.groups else []
        lines += ["transpose = true", ""] if fuse.transpose else [""]
    return "\n".join(lines)


def _spec(key: str, rule: Rule) -> str:
    table: dict[str, Any] = {}
    for cut in rule.cuts:
        how = str(cut).partition(":")[2]
        if cut.reduction or not rule.ordered:
            table[cut.axis] = cut.dim if cut.strategy == "chunk" else how
        else:
            options = "".join(f":{n}" for n in cut.options)
            table.setdefault(str(cut.dim), []).append(cut.axis if cut.strategy == "chunk" else f"{cut.axis}:{cut.strategy}{options}")
    return f"{key} = {_toml(table)}"


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_toml(str(k))} = {_toml(v)}" for k, v in value.items()) + " }" if value else "{}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, str):
        literal = value.isprintable() and "'" not in value and "\\" in value
        # JSON's texts are TOML's basic strings, but for DEL.
        return f"'{value}'" if literal else json.dumps(value).replace("\x7f", "\\u007f")
    return str(value).lower()


class _Table:
    """One table of the file, which knows where it stands."""

    def __init__(self, where: str, table: object) -> None:
        self.where = where
        if not isinstance(table, dict):
            raise OracleError(f"{where} must be a table", hint=_HINT)
        self.table: dict[str, Any] = table

    def error(self, key: str, said: str, hint: str = _HINT) -> OracleError:
        return OracleError(f"{self.where}: `{key}` {said}", hint=hint)

    def known(self, keys: Iterable[str]) -> None:
        for key in self.table:
            if key not in keys:
                close = difflib.get_close_matches(key, list(keys), 1)
                raise self.error(key[:40], f"is unknown{f'; did you mean `{close[0]}`?' if close else ''}", f"allowed: {', '.join(keys)}")

    def text(self, key: str, default: str | None = None) -> str:
        value = self.table.get(key, default)
        if value is None:
            raise self.error(key, "is missing")
        if not isinstance(value, str):
            raise self.error(key, f"must be a text, not {_shown(value)}")
        return value

    def flag(self, key: str) -> bool:
        value = self.table.get(key, False)
        if not isinstance(value, bool):
            raise self.error(key, f"must be true or false, not {_shown(value)}")
        return value

    def sub(self, key: str) -> dict[str, Any]:
        value = self.table.get(key, {})
        if not isinstance(value, dict):
            raise self.error(key, f"must be a table such as {{ tp = 0 }}, not {_shown(value)}")
        return value


def _mesh(table: _Table) -> Plan:
    table.known(_MESH)
    axes, sizes = table.table.get("axes", []), table.table.get("sizes", [])
    if not isinstance(axes, list) or not all(isinstance(a, str) for a in axes):
        raise table.error("axes", f'must be a list of names such as ["dp", "tp"], slow → fast, not {_shown(axes)}')
    if not isinstance(sizes, list) or not all(type(n) is int for n in sizes):
        raise table.error("sizes", f"must be a list of whole numbers, not {_shown(sizes)}")
    groups = table.sub("groups")
    if not all(isinstance(axis, str) for axis in groups.values()):
        raise table.error("groups", 'must name axes, e.g. { sp = "tp", dp = "edp+ep" }')
    try:
        return Plan(Mesh(tuple(axes), tuple(sizes)), groups=groups)
    except OracleError as error:
        raise OracleError(f"{table.where}: {error.message}", hint=error.hint) from None


def _param(plan: Plan, table: _Table) -> None:
    table.known(_PARAM)
    path = table.text("path")
    axes, dims = table.sub("shard"), table.sub("dims")
    partial, replicate = table.table.get("partial", []), table.flag("replicate")
    if isinstance(partial, str):
        partial = [partial]
    if not isinstance(partial, list) or not all(isinstance(a, str) for a in partial):
        raise table.error("partial", f'must be a list of axes such as ["tp"], not {_shown(partial)}')
    if replicate and (axes or dims or partial):
        raise table.error("replicate", "contradicts the other keys", "leave axes out that replicate the parameter")
    if twice := set(axes) & set(partial):
        raise table.error("partial", f"names {sorted(twice)[0]!r}, which `shard` names too")
    if not any(key in table.table for key in ("shard", "dims", "partial", "replicate")):
        raise OracleError(f"{table.where} ({_shown(path)}) says nothing of the layout", hint="shard = { tp = 0 }, or replicate = true")
    rules = [_either(plan, table, "shard", axes), _either(plan, table, "dims", dims)]
    rules.append(plan.rule({axis: "partial" for axis in partial}))
    plan.add(ParamRule(path, msgspec.structs.replace(_joined(rules), padded=table.flag("padded"))))


def _activation(plan: Plan, table: _Table) -> None:
    table.known(_ACTIVATION)
    rules = {which: _either(plan, table, which, table.sub(which)) for which in WHICH if _is_table(table, which)}
    if "dims" in table.table:
        both = _either(plan, table, "dims", table.sub("dims"))
        asked = [which for which in WHICH if table.table.get(which) is True] or ["output"]
        if clash := [which for which in asked if which in rules]:
            raise table.error("dims", f"and `{clash[0]}` both say where the tensor is cut", "keep one of them")
        rules |= dict.fromkeys(asked, both)
    if not rules:
        raise OracleError(f"{table.where} ({_shown(table.text('module'))}) says nothing of a tensor", hint=f"give one of {', '.join(WHICH)}")
    rules = {which: msgspec.structs.replace(rule, padded=table.flag("padded")) for which, rule in rules.items()}
    plan.add(ActivationRule(table.text("module"), rules, table.text("slot", ".*"), table.text("layout", "")))


def _rename(plan: Plan, table: _Table) -> None:
    table.known(_RENAME)
    where = table.sub("where")
    for axis, at in where.items():
        if type(at) is not int:
            raise table.error("where", f"must give a coordinate for {axis[:40]!r}, e.g. {{ pp = 1 }}, not {_shown(at)}")
    plan.add(RenameRule(table.text("from"), table.text("to"), where, table.text("kind", "any")))


def _fuse(plan: Plan, table: _Table) -> None:
    table.known(_FUSE)
    to, groups = table.table.get("to"), table.table.get("groups", 0)
    if not isinstance(to, list) or not all(isinstance(name, str) for name in to):
        raise table.error("to", f"must be a list of names, not {_shown(to)}")
    if type(groups) is not int:
        raise table.error("groups", f"must be a number, not {_shown(groups)}")
    plan.fuses.append(FuseRule(table.text("from"), tuple(to), groups, table.flag("transpose")).checked())


def _is_table(table: _Table, key: str) -> bool:
    """Whether a layout is given; `output = true` beside `dims` says which tensor `dims` is about."""
    if table.table.get(key) is True and "dims" in table.table:
        return False
    return key in table.table


def _either(plan: Plan, table: _Table, key: str, spec: Mapping[str, object]) -> Rule:
    try:
        return plan.either(spec)
    except OracleError as error:
        raise OracleError(f"{table.where}: `{key}`: {error.message}", hint=error.hint) from None


def _joined(rules: Iterable[Rule]) -> Rule:
    rules = [rule for rule in rules if rule.cuts]
    return Rule(tuple(cut for rule in rules for cut in rule.cuts), any(rule.ordered for rule in rules))


def _shown(value: object) -> str:
    return repr(value)[:60]
