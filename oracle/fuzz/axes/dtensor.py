"""DTensor's rules for operators: the tensors of an expression are cut over a mesh, one by one, and the expression is the same.

Each operator has a rule of its own by which it says which placements it takes, what it redistributes, and what comes out; forward and backward are compared.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import Axis, Rule, Wrapper, fixed, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

OURS: Final = frozenset({"operator"})
_SQUARE: Final = ("S0 S1", "S1 S0", "S0 S0", "S1 S1", "S1 R")
_PROGRAM: Final[dict[str, tuple[Value, ...]]] = {
    "optimizer": ("SGD",), "option": ("",), "groups": ("one",), "implementation": ("",), "scheduler": ("no",), "resume": ("no",), "recompute": ("no",),
    "clip": ("no", "2", "inf"),
}  # fmt: skip
_WORDS: Final = {"R": "Replicate()", "S0": "Shard(0)", "S1": "Shard(1)"}


def placements(value: Value, mesh: Value) -> str:
    """Source text of the placements of a value; of one word, those of the mesh's last dimension."""
    words = str(value).split()
    return ", ".join(_WORDS[w] for w in (["R"] * (mesh == "square") + words)[-(1 + (mesh == "square")) :])


@register_wrapper
class Distributed(Wrapper):
    """Every tensor of the model is a DTensor; each rank has all rows of the batch."""

    name: ClassVar[str] = "dtensor"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "it distributes the tensors of one expression", when={"wrapper": ("dtensor",)}, lacks=OURS),
        Rule("invalid", "tensors of an expression are distributed one by one", unless={"wrapper": ("none", "dtensor")}, traits=OURS),
        *fixed("the expression is what is looked at", OURS, _PROGRAM),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        draft.add_import("from torch.distributed.device_mesh import init_device_mesh")
        draft.add_import("from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor")
        mesh = setting["dt_mesh"]
        cuts = {name: placements(setting[axis], mesh) for name, axis in (("a", "dt_a"), ("b", "dt_b"), ("m", "dt_a")) if any(f".{name} = " in line or f"'{name}'" in line for line in draft.code.net)}
        rest = placements("R", mesh)
        draft.wrap += [
            f"mesh = init_device_mesh('cpu', {'(2, 2)' if mesh == 'square' else '(world,)'})",
            f"cuts = {{{', '.join(f'{name!r}: [{cut}]' for name, cut in cuts.items() if cut != rest)}}}",
            "for name, t in [*net.named_parameters(), *net.named_buffers()]:",
            f"    t = distribute_tensor(t.detach(), mesh, cuts.get(name, [{rest}]))",
            "    setattr(net, name, nn.Parameter(t) if name in net._parameters else t)",
        ]
        # Gradients are compared as they come out; where they are placed otherwise than the parameter the optimizer would refuse them.
        draft.wrap.append("def place(*_): [setattr(p, 'grad', p.grad.redistribute(placements=p.placements)) for p in net.parameters() if isinstance(p.grad, DTensor)]")
        draft.after_build.append("opt.register_step_pre_hook(place)")


class _Placement(Axis):
    order = 35
    places = True

    def __init__(self, name: str, tensors: frozenset[str]) -> None:
        self.choice = Choice(name, ("R", "S0", "S1", *_SQUARE))
        self.rules = (
            Rule("invalid", "the expression has no such tensor", unless={name: ("R",)}, lacks=tensors),
            Rule("invalid", "the expression's tensors are no DTensors", unless={name: ("R",), "wrapper": ("dtensor",)}),
            Rule("invalid", "the mesh has one dimension", when={name: _SQUARE}, unless={"dt_mesh": ("square",)}),
        )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: the wrapper reads it."""


@register
class First(_Placement):
    """How `a` and its mask are cut."""

    def __init__(self) -> None:
        super().__init__("dt_a", frozenset({"tensor a", "tensor m"}))


@register
class Second(_Placement):
    """How `b` is cut."""

    def __init__(self) -> None:
        super().__init__("dt_b", frozenset({"tensor b"}))


@register
class Mesh(Axis):
    """All ranks in a line, or two by two."""

    order = 35
    choice = Choice("dt_mesh", ("line", "square"))

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        return "" if setting["wrapper"] == "dtensor" and setting["world"] == 4 else "a square mesh of DTensors has four ranks"

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """Nothing: the wrapper reads it."""


@register
class LossParallel(Axis):
    """The context manager under which a cross entropy is computed of scores that stay cut along their classes."""

    order = 35
    choice = Choice("dt_loss", ("no", "loss_parallel"))
    rules = (
        Rule("invalid", "there are no scores of classes", unless={"dt_loss": ("no",)}, lacks=frozenset({"classes"})),
        Rule("invalid", "it takes scores that are cut along their classes, over one dimension of a mesh", unless={"dt_loss": ("no",), "dt_a": ("S1",)}),
        Rule("invalid", "over a mesh of two dimensions it takes no mean", when={"dt_loss": ("loss_parallel",), "dt_mesh": ("square",)}),
        Rule("invalid", "its documentation says that it knows no label smoothing", unless={"dt_loss": ("no",)}, traits=frozenset({"smoothing"})),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.add_import("from torch.distributed.tensor.parallel import loss_parallel")
        draft.contexts.append("loss_parallel()")
