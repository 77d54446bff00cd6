"""The rules of a plan, as data.

`plan_toml` makes them of a file and `Plan` of calls; merging places shards by them, and `parallel` carries out the last ones (`RunRule`). Paths are regular
expressions that match a whole canonical name. For example `[[param]] path = '.*qkv.weight', shard = { tp = 0 }` is
`ParamRule(".*qkv.weight", Rule((Cut("tp", dim=0),)))`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Cut, Layout, Mesh

WHICH: Final = ("input", "output", "grad_input", "grad_output")
KINDS: Final = ("any", "param", "activation")
WAYS: Final = ("from", "to", "grad_from", "grad_to")
SCHEDULES: Final = ("gpipe", "1f1b")


class Rule(msgspec.Struct, frozen=True):
    """A layout as written.

    Args:
        cuts: what each axis does.
        ordered: the order of the cuts is meant; else they are put into mesh order.
        padded: dimensions may be longer than the reference's; see `Layout`.
    """

    cuts: tuple[Cut, ...] = ()
    ordered: bool = False
    padded: bool = False

    def layout(self, mesh: Mesh) -> Layout:
        """On a mesh: axes that it lacks are of size 1."""
        layout = Layout(self.cuts, self.padded)
        return (layout if self.ordered or not mesh.axes else layout.sorted(mesh)).on(mesh)


class ParamRule(msgspec.Struct, frozen=True):
    """Parameters whose name matches `path` wholly, and everything of their shape: gradients, optimizer state."""

    path: str
    rule: Rule


class ActivationRule(msgspec.Struct, frozen=True):
    """Tensors that cross the boundary of modules whose path matches `module` wholly.

    Args:
        module: regex.
        rules: "input", "output", "grad_input", "grad_output" → layout. A gradient that is not given lies as its
            tensor does, and is whole where its tensor is an addend.
        slot: regex on the place in a nested value ("" for a plain tensor, "0", "hidden_states").
        transpose: "sbh->bsh": the order of dimensions in the candidate and in the reference; "" when equal.
    """

    module: str
    rules: dict[str, Rule]
    slot: str = ".*"
    transpose: str = ""

    def rule(self, which: str) -> Rule | None:
        """The layout of one of the four tensors; None when nothing is said of it."""
        if which in self.rules:
            return self.rules[which]
        forward = self.rules.get(which.removeprefix("grad_")) if which.startswith("grad_") else None
        return msgspec.structs.replace(forward, cuts=Layout(forward.cuts).gradient().cuts) if forward else None


class RenameRule(msgspec.Struct, frozen=True):
    """Another name in the reference.

    Args:
        pattern: regex on the whole name.
        to: the new name; \\1 and {name} as in `re`, and {g1 + 2*pp}: a sum over groups (g1, …) and coordinates.
        where: coordinates at which it applies, e.g. {"pp": 1}.
        kind: "param", "activation" (module paths) or "any".
    """

    pattern: str
    to: str
    where: dict[str, int] = {}
    kind: str = "any"


class EdgeRule(msgspec.Struct, frozen=True):
    """A change of layout where tensors enter or leave modules: what a run carries out there, and its gradient undoes.

    Args:
        module: regex on the module path; "" is the model.
        at: "input" or "output".
        rules: "from", "to", "grad_from", "grad_to" → layout. What is not given is whole; a gradient that is not given goes
            back the way its tensor came, and is whole where its tensor is an addend.
        slot: regex on the place in nested arguments ("0", "hidden_states"); integers and masks are tensors like others.
        after: a parameter of the module that is added once, after the transition ("bias" of a row-parallel layer).
        lookup: the axis that cuts the rows of an embedding: tokens of other ranks' rows give zeros.
    """

    module: str
    at: str
    rules: dict[str, Rule]
    slot: str = ".*"
    after: str = ""
    lookup: str = ""

    def layouts(self, mesh: Mesh) -> tuple[Layout, Layout, Layout, Layout]:
        """From, to, and the same of the gradient, which goes from the second pair's first to its second."""
        source, target = (self.rules.get(key, Rule()).layout(mesh) for key in ("from", "to"))
        back = self.rules["grad_from"].layout(mesh) if "grad_from" in self.rules else target.gradient()
        home = self.rules["grad_to"].layout(mesh) if "grad_to" in self.rules else source.gradient()
        return source, target, back, home


class PendingRule(msgspec.Struct, frozen=True):
    """Gradients of parameters that are addends over some axes after a backward, until a run reduces them.

    Args:
        path: regex on the parameter name.
        axes: over which they are to be combined.
        reduce: "sum" or "avg".
    """

    path: str
    axes: tuple[str, ...]
    reduce: str = "sum"


class DrawRule(msgspec.Struct, frozen=True):
    """How tensors lie that a module draws at random: dropout's masks, a router's noise.

    Args:
        module: regex on the path of the innermost module that a rule matches.
        rule: the layout.
        ndim: of tensors with so many dimensions only; 0 for all.
        fold: (dim, n) where dimension `dim` of the tensor is two in one, rows times n heads, say, with n of one device. The layout then speaks of
            the tensor with both; nothing where it is one.
    """

    module: str
    rule: Rule
    ndim: int = 0
    fold: tuple[int, ...] = ()


class FactoryRule(msgspec.Struct, frozen=True):
    """How tensors lie that a module's forward makes out of nothing: positions, masks, slopes of heads.

    Args:
        module: regex on the path of the innermost module that a rule matches.
        rule: the layout.
        names: of functions of torch ("arange", "zeros"); nothing for all that are known.
        ndim: of tensors with so many dimensions only; 0 for all.
        sizes: "whole" where the program gives those of one device, "part" where they are this rank's already.
    """

    module: str
    rule: Rule
    names: tuple[str, ...] = ()
    ndim: int = 0
    sizes: str = "whole"


class SizeRule(msgspec.Struct, frozen=True):
    """Whole numbers that modules keep as attributes and that are those of a rank: heads, widths of a split.

    Args:
        module: regex on the module path.
        names: attributes, each divided by the size of the axis.
        axis: of the mesh.
    """

    module: str
    names: tuple[str, ...]
    axis: str


class FullyShardRule(msgspec.Struct, frozen=True):
    """Modules whose parameters lie cut between their uses and are whole along the axis while the module computes (ZeRO-3).

    Carried out by torch's `fully_shard`; two phases of one parameter, as veScale §4 has it. All parameters of the model that
    no such module holds belong to the model itself.

    Args:
        module: regex on the path of modules that are gathered at once; "" is the model.
        axis: of the mesh, of data parallelism; not a joint one.
    """

    module: str
    axis: str


class PipelineRule(msgspec.Struct, frozen=True):
    """Stages of a pipeline: each rank along the axis holds and computes the modules of one stage, or of every n-th one of n ranks.

    A module that a pattern matches and none around it is a unit; all parameters lie in units, and a unit takes from the unit before
    it and from the model's inputs only.

    Args:
        axis: of the mesh; not a joint one.
        stages: in order, a regex on the paths of the modules of each.
        microbatches: into how many the rows of the model's inputs are split.
        schedule: "gpipe", or "1f1b": a microbatch goes back as soon as it can, for a model that gives its own loss.
    """

    axis: str
    stages: tuple[str, ...]
    microbatches: int = 1
    schedule: str = "gpipe"


RunRule = EdgeRule | PendingRule | DrawRule | FactoryRule | SizeRule | FullyShardRule | PipelineRule
AnyRule = ParamRule | ActivationRule | RenameRule | RunRule


class Row(msgspec.Struct, frozen=True):
    """How one name is understood.

    Args:
        kind: "param", "input", "output", "grad_input" or "grad_output".
        name: canonical.
        layout: in words, e.g. "tp:0"; "replicated".
        rule: the pattern that says so; "" when none matches.
        slot: the pattern of places in nested values that the rule is about.
    """

    kind: str
    name: str
    layout: str
    rule: str
    slot: str = ""


class Understanding(msgspec.Struct, frozen=True):
    """What a plan says of a model, and what in it looks like a mistake."""

    rows: tuple[Row, ...]
    warnings: tuple[str, ...]


def permutation(transpose: str) -> tuple[int, ...] | None:
    """ "sbh->bsh" as axes for `numpy.transpose`: (1, 0, 2); None for ""."""
    if not transpose.strip():
        return None
    here, arrow, there = (part.strip() for part in transpose.partition("->"))
    if not arrow or sorted(here) != sorted(there) or len(set(here)) < len(here) or not here.isalpha():
        raise OracleError(f"{transpose[:40]!r} is not a change of dimensions", hint='candidate -> reference, one letter each: "sbh->bsh"')
    return tuple(here.index(letter) for letter in there)
