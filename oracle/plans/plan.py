"""The plan: which parameters and activations lie how on the mesh, and what they are called in the reference.

    plan = Plan("dp=2,tp=2")
    plan.shard(r"layers\\.\\d+\\.fc1\\.weight", tp=0).shard(r"layers\\.\\d+\\.qkv\\.weight", tp="interleaved:0:3")
    plan.activation(r"layers\\.\\d+", output={"tp": 0, "dp": 1})
    plan.rename(r"output\\.weight", "embedding.word.weight", where={"pp": 1})

Patterns match the whole canonical name; the first rule that matches wins. Axes not named replicate. Several axes that
cut one dimension nest in mesh order, slow → fast; `dims={0: ["tp", "dp"]}` states another order, outermost first.
`plan_toml` reads the same from a file, `placements` from DTensors and Megatron's attributes.
Source: TTrace §4.1 and figure 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec

from proctor.errors import OracleError
from proctor.oracle.plans.fuse import FuseRule
from proctor.oracle.plans.mesh import Cut, Layout, Mesh
from proctor.oracle.plans.names import compiled, renamed, template
from proctor.oracle.plans.rules import (
    KINDS,
    WHICH,
    ActivationRule,
    AnyRule,
    DrawRule,
    EdgeRule,
    FactoryRule,
    FullyShardRule,
    ParamRule,
    PendingRule,
    PipelineRule,
    RenameRule,
    Row,
    Rule,
    SizeRule,
    Understanding,
    permutation,
)
from proctor.oracle.plans.running import Running, check_run_rule
from proctor.oracle.tensors import slots_in

SCHEMA: Final = 1
_MOST_BYTES: Final = 4 * 1024 * 1024
_MOST_RULES: Final = 10_000

Names = Iterable[str] | Mapping[str, "Sequence[int] | None"]
Spec = Mapping[str, "int | str"]
Dims = Mapping["int | str", "str | Sequence[str]"]


class _Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    schema: int
    mesh: Mesh = Mesh()
    groups: dict[str, str] = {}
    params: tuple[ParamRule, ...] = ()
    activations: tuple[ActivationRule, ...] = ()
    renames: tuple[RenameRule, ...] = ()
    edges: tuple[EdgeRule, ...] = ()
    pendings: tuple[PendingRule, ...] = ()
    draws: tuple[DrawRule, ...] = ()
    sizes: tuple[SizeRule, ...] = ()
    shards: tuple[FullyShardRule, ...] = ()
    pipelines: tuple[PipelineRule, ...] = ()
    factories: tuple[FactoryRule, ...] = ()
    fuses: tuple[FuseRule, ...] = ()


class Plan(Running):
    """See the module. What a run carries out (`redistribute`, `pending`, `draw`, `size`, `style`) is in `Running`.

    Args:
        mesh: "dp=2,tp=2" (slow → fast), a `Mesh`, or axis → size; not given: to be read off the run.
        groups: further names of axes: {"sp": "tp"}, {"dp": "edp+ep"} (a joint axis, slow → fast).

    Raises:
        OracleError: from here and from every method, when something given is not valid.
    """

    def __init__(self, mesh: str | Mesh | Mapping[str, int] = "", *, groups: Mapping[str, str] | None = None) -> None:
        if isinstance(mesh, str):
            mesh = Mesh.parse(mesh)
        elif not isinstance(mesh, Mesh):
            mesh = Mesh(tuple(mesh), tuple(mesh.values()))
        self.mesh: Mesh = mesh
        self.groups: dict[str, str] = dict(groups or {})
        for name, axis in self.groups.items():
            if name in self.mesh.axes:
                raise OracleError(f"group {name!r} has the name of a mesh axis")
            Cut(f"{name}+{axis}")
        self.params: list[ParamRule] = []
        self.activations: list[ActivationRule] = []
        self.renames: list[RenameRule] = []
        self.edges: list[EdgeRule] = []
        self.pendings: list[PendingRule] = []
        self.draws: list[DrawRule] = []
        self.sizes: list[SizeRule] = []
        self.shards: list[FullyShardRule] = []
        self.pipelines: list[PipelineRule] = []
        self.factories: list[FactoryRule] = []
        self.fuses: list[FuseRule] = []
        self._seen: dict[tuple[str, str, str], object] = {}

    def __repr__(self) -> str:
        return f"<Plan on {self.mesh}: {len(self.params)} parameter, {len(self.activations)} activation, {len(self.renames)} rename rules>"

    def on(self, mesh: Mesh) -> Plan:
        """The same rules on another mesh."""
        plan = Plan(mesh, groups={k: v for k, v in self.groups.items() if k not in mesh.axes})
        plan.params, plan.activations, plan.renames = list(self.params), list(self.activations), list(self.renames)
        plan.edges, plan.pendings, plan.draws, plan.sizes = list(self.edges), list(self.pendings), list(self.draws), list(self.sizes)
        plan.fuses, plan.shards, plan.pipelines, plan.factories = list(self.fuses), list(self.shards), list(self.pipelines), list(self.factories)
        return plan

    def shard(self, path: str, *, dims: Dims | None = None, padded: bool = False, **axes: int | str) -> Plan:
        """Parameters that the axes cut.

        Args:
            path: regex on the whole parameter name.
            dims: dimension → axes, outermost first, instead of axis → dimension.
            padded: dimensions may be longer than the reference's, by padding at the end.
            axes: axis → dimension, "strategy:dimension:options", or "partial".
        """
        return self._param(path, msgspec.structs.replace(self.rule(axes, dims), padded=padded))

    def replicate(self, path: str) -> Plan:
        """Parameters of which every rank holds the whole."""
        return self._param(path, Rule())

    def partial(self, path: str, *axes: str) -> Plan:
        """Parameters (gradients) of which ranks along the axes hold addends."""
        return self._param(path, self.rule({axis: "partial" for axis in axes}))

    def activation(
        self,
        module: str,
        *,
        output: Spec | None = None,
        input: Spec | None = None,
        grad_output: Spec | None = None,
        grad_input: Spec | None = None,
        slot: str = ".*",
        transpose: str = "",
        padded: bool = False,
    ) -> Plan:
        """Tensors that go into and out of modules; see `ActivationRule`. Keys that are numbers are dimensions."""
        given = {"output": output, "input": input, "grad_output": grad_output, "grad_input": grad_input}
        rules = {
            which: msgspec.structs.replace(self.either(spec), padded=padded) for which, spec in given.items() if spec is not None
        }
        return self.add(ActivationRule(module, rules, slot, transpose))

    def rename(self, pattern: str, to: str, *, where: Mapping[str, int] | None = None, kind: str = "any") -> Plan:
        """Names that differ from the reference's; see `RenameRule`."""
        return self.add(RenameRule(pattern, to, dict(where or {}), kind))

    def add(self, rule: AnyRule) -> Plan:
        """Appends a rule after checking it."""
        if isinstance(rule, ParamRule):
            compiled(rule.path)
            Layout(rule.rule.cuts)
            self.params.append(rule)
        elif isinstance(rule, ActivationRule):
            compiled(rule.module)
            compiled(rule.slot)
            permutation(rule.transpose)
            if not rule.rules or (odd := sorted(set(rule.rules) - set(WHICH))):
                raise OracleError(f"activation {rule.module[:80]!r} gives {'nothing' if not rule.rules else odd[0]!r}", hint=f"give one of {', '.join(WHICH)}")
            for one in rule.rules.values():
                Layout(one.cuts)
            self.activations.append(rule)
        elif not isinstance(rule, RenameRule):
            check_run_rule(rule)
            self._of_runs(rule).append(rule)
        else:
            template(rule.pattern, rule.to)
            if rule.kind not in KINDS:
                raise OracleError(f"rename {rule.pattern[:80]!r}: kind {rule.kind[:40]!r} is not one of {', '.join(KINDS)}")
            self.renames.append(rule)
        lists: tuple[list[Any], ...] = (self.params, self.activations, self.renames, self.edges, self.pendings, self.draws, self.sizes, self.shards, self.pipelines, self.factories)
        if sum(len(rules) for rules in lists) > _MOST_RULES:
            raise OracleError(f"a plan of more than {_MOST_RULES} rules")
        self._seen.clear()
        return self

    def param_layout(self, name: str) -> Layout | None:
        """Layout of a parameter, by its canonical name; None when no rule matches."""
        found = self._cached("param", name, "")
        return found.rule.layout(self.mesh) if isinstance(found, ParamRule) else None

    def activation_layout(self, name: str, which: str, slot: str = "") -> Layout | None:
        """Layout of what crosses a module's boundary; None when no rule says it.

        Args:
            name: canonical module path.
            which: "input", "output", "grad_input" or "grad_output".
            slot: place in a nested value.
        """
        found = self._cached(which, name, slot)
        rule = found.rule(which) if isinstance(found, ActivationRule) else None
        return rule.layout(self.mesh) if rule else None

    def activation_order(self, name: str, which: str, slot: str = "") -> tuple[int, ...] | None:
        """Axes for `numpy.transpose` that bring a merged tensor into the reference's order; None when it is that."""
        found = self._cached(which, name, slot)
        return permutation(found.transpose) if isinstance(found, ActivationRule) else None

    def canonical(self, name: str, coords: Mapping[str, int], kind: str = "any") -> str:
        """The reference's name of what a rank calls `name`; the first rename that matches is applied, once.

        Args:
            name: without wrappers.
            coords: of the rank.
            kind: "param" or "activation"; "any" applies all renames.
        """
        for rule in self.renames:
            if "any" not in (rule.kind, kind) and rule.kind != kind:
                continue
            if all(self._at(axis, coords) == at for axis, at in rule.where.items()):
                new = renamed(name, rule.pattern, rule.to, coords)
                if new is not None:
                    return new
        return name

    def to_json(self) -> bytes:
        """As one JSON object, schema 1."""
        return msgspec.json.encode(
            _Document(
                SCHEMA, self.mesh, self.groups, tuple(self.params), tuple(self.activations), tuple(self.renames),
                tuple(self.edges), tuple(self.pendings), tuple(self.draws), tuple(self.sizes), tuple(self.shards), tuple(self.pipelines), tuple(self.factories), tuple(self.fuses),
            )
        )

    @classmethod
    def from_json(cls, blob: bytes | str) -> Plan:
        """From `to_json`.

        Raises:
            OracleError: it is not a plan, or one of a newer schema.
        """
        if len(blob) > _MOST_BYTES:
            raise OracleError(f"the plan has more than {_MOST_BYTES >> 20} MiB")
        try:
            schema = msgspec.json.decode(blob, type=dict[str, msgspec.Raw]).get("schema")
            if schema is not None and bytes(schema) != str(SCHEMA).encode():
                raise OracleError(f"the plan is of schema {bytes(schema).decode()[:20]}, this Proctor reads {SCHEMA}", hint="upgrade Proctor")
            document = msgspec.json.decode(blob, type=_Document)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise OracleError(f"the plan is not valid: {str(error)[:200]}") from None
        plan = cls(document.mesh, groups=document.groups)
        rules: list[AnyRule] = [*document.params, *document.activations, *document.renames]
        rules += [*document.edges, *document.pendings, *document.draws, *document.sizes, *document.shards, *document.pipelines, *document.factories]
        for rule in rules:
            plan.add(rule)
        for fuse in document.fuses:
            plan.fuses.append(fuse.checked())
        return plan

    def rule(self, axes: Mapping[str, int | str], dims: Dims | None = None) -> Rule:
        """A layout as written: axis → spec, or dimension → axes; groups are resolved."""
        cuts = [Cut.parse(self._axis(axis), spec) for axis, spec in axes.items()]
        for dim, names in (dims or {}).items():
            for name in [names] if isinstance(names, str) else names:
                if not isinstance(name, str):
                    raise OracleError(f"dimension {dim}: {str(name)[:40]!r} is no mesh axis", hint='write {"0" = ["dp", "tp"]}')
                axis, _, how = name.partition(":")
                strategy, _, options = how.partition(":")
                spec = f"{strategy}:{dim}" + (f":{options}" if options else "") if strategy else str(dim)
                cuts.append(Cut.parse(self._axis(axis), spec))
        Layout(tuple(cuts))
        # Axes as one dimension lists them are in the order meant.
        return Rule(tuple(cuts), ordered=any(not isinstance(n, str) and len(n) > 1 for n in (dims or {}).values()))

    def either(self, spec: Mapping[str, object]) -> Rule:
        """A layout whose keys are axes or dimensions: {"tp": 0} or {"0": ["tp"]}."""
        dims = {key: value for key, value in spec.items() if str(key).lstrip("-").isdigit()}
        axes = {key: value for key, value in spec.items() if key not in dims}
        for dim, names in dims.items():
            if not isinstance(names, str | list | tuple):
                raise OracleError(f"dimension {dim}: {str(names)[:40]!r} is no mesh axis", hint='write {"0" = ["dp"]} or {dp = 0}')
        return self.rule(axes, dims)  # type: ignore[arg-type]  # Cut.parse judges the values

    def understood(self, params: Names, modules: Names = ()) -> Understanding:
        """What the plan says of a model, name by name, and what in it looks like a mistake.

        Args:
            params: canonical names; with their shapes where they are known.
            modules: canonical module paths; with the shapes of their outputs where they are known.
        """
        from proctor.oracle.plans.understood import understand  # it needs Plan

        return understand(self, params, modules)

    def _of_runs(self, rule: AnyRule) -> list[Any]:  # Any: rules of the kind given
        kinds: dict[type, list[Any]] = {EdgeRule: self.edges, PendingRule: self.pendings, DrawRule: self.draws, SizeRule: self.sizes, FullyShardRule: self.shards, PipelineRule: self.pipelines}
        kinds[FactoryRule] = self.factories
        return kinds[type(rule)]

    def _axis(self, axis: str) -> str:
        return "+".join(self.groups.get(name, name) for name in str(axis).split("+"))

    def _at(self, axis: str, coords: Mapping[str, int]) -> int:
        axis = self._axis(axis)
        known = all(name in self.mesh.axes for name in axis.split("+"))
        return self.mesh.index(axis, coords) if known else coords.get(axis, 0)

    def _param(self, path: str, rule: Rule) -> Plan:
        return self.add(ParamRule(path, rule))

    def _cached(self, what: str, name: str, slot: str) -> object:
        key = (what, name, slots_in(slot)[0])
        if key not in self._seen:
            if len(self._seen) > 1_000_000:
                self._seen.clear()
            self._seen[key] = next(iter(self.matching(*key)), None)
        return self._seen[key]

    def matching(self, what: str, name: str, slot: str = "") -> Iterable[ParamRule | ActivationRule]:
        """All rules that match, the one that wins first. `what`: "param" or one of the four boundary tensors."""
        if what == "param":
            return (r for r in self.params if compiled(r.path).fullmatch(name))
        if what not in WHICH:
            raise OracleError(f"{what!r} is not one of {', '.join(WHICH)}")
        return (
            r
            for r in self.activations
            if compiled(r.module).fullmatch(name) and compiled(r.slot).fullmatch(slot) and r.rule(what) is not None
        )


__all__ = [
    "KINDS", "SCHEMA", "WHICH", "ActivationRule", "DrawRule", "EdgeRule", "FullyShardRule", "ParamRule", "PendingRule", "Plan", "RenameRule", "Row",
    "Rule", "SizeRule", "Understanding",
]  # fmt: skip
