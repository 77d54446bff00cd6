"""What a plan says for a run that it carries out itself: transitions, pending gradients, draws, sizes, and styles.

`Plan` inherits these; `parallel` reads them. A style is a set of such rules under a name (`styles`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Layout
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.rules import (
    SCHEDULES,
    WAYS,
    DrawRule,
    EdgeRule,
    FactoryRule,
    FullyShardRule,
    PendingRule,
    PipelineRule,
    RunRule,
    SizeRule,
)

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan

Spec = Mapping[str, "int | str"]


class Running:
    """The part of a plan that a run carries out."""

    edges: list[EdgeRule]
    pendings: list[PendingRule]
    draws: list[DrawRule]
    factories: list[FactoryRule]
    sizes: list[SizeRule]
    shards: list[FullyShardRule]
    pipelines: list[PipelineRule]

    def redistribute(
        self: Any,  # Plan; mypy takes no subclass here
        module: str,
        *,
        at: str,
        src: Spec | None = None,
        dst: Spec | None = None,
        grad_src: Spec | None = None,
        grad_dst: Spec | None = None,
        slot: str = ".*",
        after: str = "",
        lookup: str = "",
    ) -> Plan:
        """A change of layout at an edge; see `EdgeRule`. Layouts are given as for `activation`."""
        given = dict(zip(WAYS, (src, dst, grad_src, grad_dst)))
        rules = {way: self.either(spec) for way, spec in given.items() if spec is not None}
        plan: Plan = self.add(EdgeRule(module, at, rules, slot, after, self._axis(lookup) if lookup else ""))
        return plan

    def pending(self: Any, path: str, *axes: str, reduce: str = "sum") -> Plan:
        """Gradients that are reduced over axes after each backward; see `PendingRule`."""
        plan: Plan = self.add(PendingRule(path, tuple(self._axis(axis) for axis in axes), reduce))
        return plan

    def draw(self: Any, module: str, *, ndim: int = 0, fold: tuple[int, ...] = (), **axes: int | str) -> Plan:
        """How random tensors of a module lie; see `DrawRule`."""
        plan: Plan = self.add(DrawRule(module, self.rule(axes), ndim, fold))
        return plan

    def factory(self: Any, module: str, *names: str, ndim: int = 0, sizes: str = "whole", **axes: int | str) -> Plan:
        """How tensors lie that a forward makes out of nothing; see `FactoryRule`."""
        plan: Plan = self.add(FactoryRule(module, self.rule(axes), names, ndim, sizes))
        return plan

    def size(self: Any, module: str, *names: str, axis: str) -> Plan:
        """Attributes that are divided by the size of an axis; see `SizeRule`."""
        plan: Plan = self.add(SizeRule(module, names, self._axis(axis)))
        return plan

    def fully_shard(self: Any, module: str, *, axis: str) -> Plan:
        """Modules whose parameters are cut between their uses (ZeRO-3); see `FullyShardRule`."""
        plan: Plan = self.add(FullyShardRule(module, self._axis(axis)))
        return plan

    def pipeline(self: Any, *stages: str, axis: str, microbatches: int = 1, schedule: str = "gpipe") -> Plan:
        """Modules by stages; see `PipelineRule`."""
        plan: Plan = self.add(PipelineRule(self._axis(axis), stages, microbatches, schedule))
        return plan

    def style(self: Any, name: str, module: str, axis: str, **options: Any) -> Plan:
        """A style of `styles`, for the modules whose path matches `module`.

        Raises:
            OracleError: there is no such style, or it takes no such option.
        """
        from proctor.oracle.styles import apply

        apply(self, name, module, axis, options)
        plan: Plan = self
        return plan


def check_run_rule(rule: RunRule) -> None:
    """Refuse what cannot be meant.

    Raises:
        OracleError: says what, and what is allowed.
    """
    if isinstance(rule, PendingRule):
        compiled(rule.path)
        if rule.reduce not in ("sum", "avg") or not rule.axes:
            raise OracleError(f"pending {rule.path[:80]!r}: reduce is sum or avg, over at least one axis")
        return
    if isinstance(rule, PipelineRule):
        for pattern in rule.stages:
            compiled(pattern)
        if not rule.stages or rule.microbatches < 1 or "+" in rule.axis:
            raise OracleError(f"pipeline over {rule.axis[:80]!r}: it needs one axis of the mesh, a pattern for each stage, and at least one microbatch")
        if rule.schedule not in SCHEDULES:
            raise OracleError(f"pipeline over {rule.axis[:80]!r}: schedule is {rule.schedule[:40]!r}", hint=f"give one of {', '.join(SCHEDULES)}")
        return
    compiled(rule.module)
    if isinstance(rule, FullyShardRule) and "+" in rule.axis:
        raise OracleError(f"fully_shard {rule.module[:80]!r}: {rule.axis} is a joint axis", hint="name one axis of the mesh")
    if isinstance(rule, DrawRule):
        Layout(rule.rule.cuts)
        if any(cut.reduction for cut in rule.rule.cuts):
            raise OracleError(f"draw {rule.module[:80]!r}: addends cannot be drawn", hint="say how their sum lies")
        if rule.fold and (len(rule.fold) != 2 or rule.fold[0] < 0 or rule.fold[1] < 1):
            raise OracleError(f"draw {rule.module[:80]!r}: fold is {list(rule.fold)[:4]}", hint="[dimension, how many of the inner one on one device]")
    elif isinstance(rule, FactoryRule):
        Layout(rule.rule.cuts)
        if rule.sizes not in ("whole", "part"):
            raise OracleError(f"factory {rule.module[:80]!r}: sizes is {rule.sizes[:40]!r}", hint="whole (as on one device) or part (as on a rank)")
        if any(cut.reduction for cut in rule.rule.cuts):
            raise OracleError(f"factory {rule.module[:80]!r}: what is made is no addend")
    elif isinstance(rule, EdgeRule):
        _check_edge(rule)


def _check_edge(rule: EdgeRule) -> None:
    compiled(rule.slot)
    if rule.at not in ("input", "output"):
        raise OracleError(f"redistribute {rule.module[:80]!r}: at is {rule.at[:40]!r}", hint="input or output")
    for one in rule.rules.values():
        Layout(one.cuts)
    if rule.after and rule.at != "output":
        raise OracleError(f"redistribute {rule.module[:80]!r}: what is added after belongs to the output")
    if not (rule.rules or rule.after or rule.lookup):
        raise OracleError(f"redistribute {rule.module[:80]!r} says nothing", hint=f"give one of {', '.join(WAYS)}")
