"""Pipelines: every schedule of `torch.distributed.pipelining`, over the stages of models that are a chain.

A rank keeps the layers of its own stages; only the rank of the last stage has outputs. What ranks share of a step are microbatches, not rows.
"""

from __future__ import annotations

from typing import ClassVar, Final

from torch.distributed import pipelining
from torch.distributed.pipelining import schedules

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

_OURS: Final[dict[str, tuple[Value, ...]]] = {"wrapper": ("pipeline",)}
# Schedules of the library, the simplest first; those of V shape have the first and the last stage on one rank.
_SCHEDULES: Final = ("ScheduleGPipe", *(name for name in sorted(pipelining.__all__) if name.startswith("Schedule") and name != "ScheduleGPipe"))
_SHAPED: Final = tuple(name for name in _SCHEDULES if "V" in name)
_PROGRAM: Final[dict[str, tuple[Value, ...]]] = {
    "groups": ("one", "named"), "clip": ("no", "value"), "accumulate": (1,), "resume": ("no", "plain", "asked"), "disk": ("no", "flat"), "compile": ("no", "units"), "recompute": ("no", "non-reentrant"), "split": ("even",),
}  # fmt: skip
_LOCAL: Final = "the layer's statistics are those of a microbatch"


def stages_of(setting: Point) -> int:
    """How many stages a setting's pipeline has."""
    multi = issubclass(getattr(pipelining, str(setting["pipe_schedule"])), schedules.PipelineScheduleMulti)
    return int(str(setting["world"])) * (2 if multi else 1)


def microbatches_of(setting: Point) -> int:
    """How many microbatches a step has."""
    return int(str(setting["world"])) * (2 if setting["pipe_micro"] == "two a rank" else 1)


@register_wrapper
class Pipeline(Wrapper):
    """Layers in stages, one or two a rank; the loss is that of the whole batch."""

    name: ClassVar[str] = "pipeline"
    named: ClassVar[bool] = False
    rules: ClassVar[tuple[Rule, ...]] = (
        *(Rule("invalid", f"pipelines have no other {axis} here", when=_OURS, unless={axis: values}) for axis, values in _PROGRAM.items()),
        Rule("invalid", "each rank has an optimizer of its own, and LBFGS asks for the loss of all", when={**_OURS, "optimizer": ("LBFGS",)}),
        *(Rule("invalid", _LOCAL, when=_OURS, traits=frozenset({trait})) for trait in ("local statistics", "powers")),
    )

    def invalid(self, setting: Point, traits: frozenset[str]) -> str:
        """As `Wrapper.invalid`."""
        rows = next((int(t.removeprefix("rows ")) for t in traits if t.startswith("rows ")), 0)
        parts = next((int(t.removeprefix("pipeline of ")) for t in traits if t.startswith("pipeline of ")), 0)
        if parts < stages_of(setting):
            return "the model is no chain of so many stages"
        return "microbatches have rows alike" if rows % microbatches_of(setting) else ""

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        kind, count, micro = str(setting["pipe_schedule"]), stages_of(setting), microbatches_of(setting)
        several = count > int(str(setting["world"]))
        mine = "[rank]" if not several else "[rank, 2 * world - 1 - rank]" if kind in _SHAPED else "[rank, rank + world]"
        parts = draft.code.stages
        cuts = [parts[i * len(parts) // count : (i + 1) * len(parts) // count] for i in range(count)]
        stages = ", ".join(f"nn.Sequential({', '.join(layer for part in cut for layer in part)})" for cut in cuts)
        draft.add_import(f"from torch.distributed.pipelining import PipelineStage, {kind}")
        scale = "" if setting["pipe_scale"] else f" * {micro}"  # it divides gradients by the number of microbatches
        option = ", scale_grads=False" if setting["pipe_scale"] else ""
        draft.wrap += [
            f"mine, stages = {mine}, [{stages}]",
            "kept = {id(layer) for i in mine for layer in stages[i]}",
            "for i, layer in enumerate(net.layers): net.layers[i] = layer if id(layer) in kept else nn.Identity()",
            f"parts = [PipelineStage(stages[i], i, {count}, torch.device('cpu')) for i in mine]",
            f"loss = lambda out, y: ((out - y) ** 2).sum() / {draft.batch}{scale}",
            f"object.__setattr__(net, 'schedule', {kind}({'parts' if several else 'parts[0]'}, {micro}, loss_fn=loss{option}))",
            f"net.first, net.last = 0 in mine, {count - 1} in mine",
        ]
        given = "*(x if net.first else ()), **({'target': y} if net.last else {})"
        draft.passes = [f"out = net.schedule.step({given})", "if net.last: seen.append((torch.arange(n), out.detach()))"]
        draft.evaluation = f"net.schedule.eval({given})" if setting["pipe_eval"] else "None"
        draft.evaluated = "[(part, out)] if net.last else []" if setting["pipe_eval"] else "[]"


class _Option(OfWrapper):
    of = ("pipeline",)
    absent = "there is no pipeline"


@register
class Schedule(_Option):
    """The schedule's class."""

    choice = Choice("pipe_schedule", _SCHEDULES)
    rules = (Rule("invalid", "it asks for more microbatches than stages", when={"pipe_schedule": ("ScheduleDualPipeV",)}, unless={"pipe_micro": ("two a rank",)}),)


@register
class Microbatches(_Option):
    """How many microbatches a rank of the pipeline stands for."""

    choice = Choice("pipe_micro", ("one a rank", "two a rank"))


@register
class Scale(_Option):
    """`scale_grads=False`."""

    choice = Choice("pipe_scale", (False, True), rare=0.4)


@register
class Evaluate(_Option):
    """Whether the trained model is evaluated by the schedule's `eval`, or only trained."""

    choice = Choice("pipe_eval", (False, True))
