"""The tables of a plan's file that a run carries out: [[style]], [[redistribute]], [[pending]], [[draw]], [[factory]], [[size]], [[fully_shard]], [[pipeline]].

Called by `plan_toml`, which knows the other tables; `where` is one table of the file, which knows where it stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from proctor.oracle.plans.rules import (
    WAYS,
    DrawRule,
    EdgeRule,
    FactoryRule,
    FullyShardRule,
    PendingRule,
    PipelineRule,
    Rule,
    RunRule,
    SizeRule,
)

if TYPE_CHECKING:
    from proctor.errors import OracleError
    from proctor.oracle.plans.plan import Plan

_STYLE: Final = ("style", "module", "axis")
_EDGE: Final = ("module", "at", *WAYS, "slot", "after", "lookup")
_PENDING: Final = ("path", "axes", "reduce")
_DRAW: Final = ("module", "layout", "ndim", "fold")
_FACTORY: Final = ("module", "layout", "names", "ndim", "sizes")
_SIZE: Final = ("module", "names", "axis")
_SHARD: Final = ("module", "axis")
_PIPELINE: Final = ("axis", "stages", "microbatches", "schedule")


class Where(Protocol):
    """One table of the file."""

    where: str
    table: dict[str, Any]

    def error(self, key: str, said: str, hint: str = "") -> OracleError: ...
    def known(self, keys: Iterable[str]) -> None: ...
    def text(self, key: str, default: str | None = None) -> str: ...
    def sub(self, key: str) -> dict[str, Any]: ...


Either = Callable[["Plan", Any, str, dict[str, Any]], Rule]


def add_style(plan: Plan, where: Where, either: Either) -> None:
    """[[style]] style = "colwise", module = '…', axis = "tp", and the style's own options."""
    options = {key: value for key, value in where.table.items() if key not in _STYLE}
    plan.style(where.text("style"), where.text("module"), where.text("axis"), **options)


def add_edge(plan: Plan, where: Where, either: Either) -> None:
    """[[redistribute]] module = '…', at = "output", from = { tp = "partial" }, to = {}."""
    where.known(_EDGE)
    rules: dict[str, Rule] = {way: either(plan, where, way, where.sub(way)) for way in WAYS if way in where.table}
    lookup = where.text("lookup", "")
    edge = EdgeRule(where.text("module"), where.text("at"), rules, where.text("slot", ".*"), where.text("after", ""), lookup)
    plan.add(edge)


def add_pending(plan: Plan, where: Where, either: Either) -> None:
    """[[pending]] path = '.*', axes = ["dp"], reduce = "sum"."""
    where.known(_PENDING)
    plan.pending(where.text("path"), *_names(where, "axes"), reduce=where.text("reduce", "sum"))


def add_draw(plan: Plan, where: Where, either: Either) -> None:
    """[[draw]] module = '.*drop', layout = { dp = 0 }, ndim = 3."""
    where.known(_DRAW)
    ndim = where.table.get("ndim", 0)
    if type(ndim) is not int:
        raise where.error("ndim", f"must be a number of dimensions, not {repr(ndim)[:60]}")
    fold = where.table.get("fold", [])
    if not isinstance(fold, list) or not all(type(n) is int for n in fold):
        raise where.error("fold", f"must be [dimension, how many of the inner one], not {repr(fold)[:60]}")
    plan.add(DrawRule(where.text("module"), either(plan, where, "layout", where.sub("layout")), ndim, tuple(fold)))


def add_factory(plan: Plan, where: Where, either: Either) -> None:
    """[[factory]] module = '.*attention', layout = { tp = 0 }, names = ["arange"], sizes = "part"."""
    where.known(_FACTORY)
    ndim = where.table.get("ndim", 0)
    if type(ndim) is not int:
        raise where.error("ndim", f"must be a number of dimensions, not {repr(ndim)[:60]}")
    names = tuple(_names(where, "names")) if "names" in where.table else ()
    plan.add(FactoryRule(where.text("module"), either(plan, where, "layout", where.sub("layout")), names, ndim, where.text("sizes", "whole")))


def add_size(plan: Plan, where: Where, either: Either) -> None:
    """[[size]] module = '.*attn', names = ["num_heads"], axis = "tp"."""
    where.known(_SIZE)
    plan.size(where.text("module"), *_names(where, "names"), axis=where.text("axis"))


def add_shard(plan: Plan, where: Where, either: Either) -> None:
    """[[fully_shard]] module = 'layers\\.\\d+', axis = "dp"."""
    where.known(_SHARD)
    plan.fully_shard(where.text("module"), axis=where.text("axis"))


def add_pipeline(plan: Plan, where: Where, either: Either) -> None:
    """[[pipeline]] axis = "pp", stages = ['embedding|layers\\.0', 'layers\\.1|norm|head'], microbatches = 4."""
    where.known(_PIPELINE)
    microbatches = where.table.get("microbatches", 1)
    if type(microbatches) is not int:
        raise where.error("microbatches", f"must be a whole number, not {repr(microbatches)[:60]}")
    plan.pipeline(*_names(where, "stages"), axis=where.text("axis"), microbatches=microbatches, schedule=where.text("schedule", "gpipe"))


TABLES: Final = (
    ("style", add_style), ("redistribute", add_edge), ("pending", add_pending), ("draw", add_draw), ("factory", add_factory), ("size", add_size), ("fully_shard", add_shard), ("pipeline", add_pipeline),
)  # fmt: skip


def lines(rule: RunRule, spec: Callable[[str, Rule], str], toml: Callable[[object], str]) -> list[str]:
    """A rule as lines of a file."""
    if isinstance(rule, PendingRule):
        return ["[[pending]]", f"path = {toml(rule.path)}", f"axes = {toml(list(rule.axes))}", f"reduce = {toml(rule.reduce)}", ""]
    if isinstance(rule, SizeRule):
        return ["[[size]]", f"module = {toml(rule.module)}", f"names = {toml(list(rule.names))}", f"axis = {toml(rule.axis)}", ""]
    if isinstance(rule, FullyShardRule):
        return ["[[fully_shard]]", f"module = {toml(rule.module)}", f"axis = {toml(rule.axis)}", ""]
    if isinstance(rule, PipelineRule):
        return ["[[pipeline]]", f"axis = {toml(rule.axis)}", f"stages = {toml(list(rule.stages))}", f"microbatches = {rule.microbatches}", f"schedule = {toml(rule.schedule)}", ""]
    if isinstance(rule, FactoryRule):
        some = [f"names = {toml(list(rule.names))}"] if rule.names else []
        some += [f"ndim = {rule.ndim}"] if rule.ndim else []
        return ["[[factory]]", f"module = {toml(rule.module)}", spec("layout", rule.rule), *some, f"sizes = {toml(rule.sizes)}", ""]
    if isinstance(rule, DrawRule):
        more = [f"ndim = {rule.ndim}"] if rule.ndim else []
        more += [f"fold = {list(rule.fold)}"] if rule.fold else []
        return ["[[draw]]", f"module = {toml(rule.module)}", spec("layout", rule.rule), *more, ""]
    texts = {"slot": rule.slot if rule.slot != ".*" else "", "after": rule.after, "lookup": rule.lookup}
    return [
        "[[redistribute]]", f"module = {toml(rule.module)}", f"at = {toml(rule.at)}",
        *(spec(way, one) for way, one in rule.rules.items()),
        *(f"{key} = {toml(text)}" for key, text in texts.items() if text), "",
    ]  # fmt: skip


def _names(where: Where, key: str) -> list[str]:
    value = where.table.get(key, [])
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise where.error(key, f'must be a list of names such as ["dp"], not {repr(value)[:60]}')
    return value
