"""What a training step does besides one forward pass, one backward pass and an update; and how parameters are set once the model is wrapped.

Each form is a few lines of a plain training loop (two losses of one forward pass, a penalty on slopes, gradients that are cleared late, weights that are read or set in
between). In one process they all work; wrappers hang on hooks of the forward and of the backward pass, and on parameters that stay the objects they were.
"""

from __future__ import annotations

from typing import Final

from proctor.oracle.fuzz.axes import Axis, Rule, not_of_calls, register
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

WRAPPERS: Final = ("none", "ddp", "zero", "fsdp2", "hsdp", "replicate", "fsdp1", "tp", "tp_fsdp2")
_SHARE: Final = "share = lambda out: {loss}"
_FREE: Final = "[p for p in net.parameters() if p.requires_grad]"

# Form → the lines of its backward pass, after `out` is made; `{loss}` is a rank's share of the loss, `{forward}` the forward pass, `{scale}` as the loss has it.
_BACKWARD: Final[dict[str, tuple[str, ...]]] = {
    "backward twice": ("loss = {loss}", "loss.backward(retain_graph=True)", "loss.backward()"),
    "two forwards": (_SHARE, "also = {forward}", "share(out).backward()", "share(also).backward()"),
    "two forwards, last first": (_SHARE, "also = {forward}", "share(also).backward()", "share(out).backward()"),
    "two forwards, one backward": (_SHARE, "(share(out) + share({forward})).backward()"),
    "inputs": (f"{{loss}}.backward(inputs={_FREE})",),
    "slopes": (
        "slopes = torch.autograd.grad(out.sum(), [t for t in given if t.requires_grad], create_graph=True)",
        "({loss} + sum((t ** 2).sum() for t in slopes).div(n){scale}).backward()",
    ),
}
# Form → lines before a microbatch's forward pass.
_BEFORE: Final[dict[str, tuple[str, ...]]] = {
    "evaluate": ("net.eval()", "with torch.no_grad(): {forward}", "net.train()"),
    "inference": ("net.eval()", "with torch.inference_mode(): {forward}", "net.train()"),
    "turns": ("for p in [p for name, p in net.named_parameters() if name in free][:1]: p.requires_grad_(step % 2 == 0)",),
}
# Form → lines after an update.
_AFTER: Final[dict[str, tuple[str, ...]]] = {
    "assigned": ("for p in net.parameters(): p.data = p.data * 0.5",),
    "in place": ("for p in net.parameters(): p.data.mul_(0.5)",),
    "copied": ("for p in net.parameters(): p.data.copy_(p.detach().clone() * 0.5)",),
    "rows": ("with torch.no_grad():", "    for p in net.parameters():", "        if p.ndim == 2: p[1:].mul_(0.5)"),
}
_CLEARED: Final = ("clear the model between", "clear the optimizer between")
# Axis → values under which the program does not begin anew from what it saved (FSDP1's own states: its parameters are one group).
_RESTARTS: Final[dict[str, tuple[Value, ...]]] = {"resume": ("no", "asked"), "disk": ("no",)}
_FORMS: Final = (*_BACKWARD, *_BEFORE, *_AFTER, *_CLEARED, "gradient hooks")


@register
class Form(Axis):
    """A step that is not one forward pass, one backward pass and an update."""

    program = True
    order = 90  # the last: it changes what others have written
    sorts = True  # what fails in one form may be sound in another, or fail for a reason of its own
    choice = Choice("form", ("plain", *_FORMS), rare=0.15)
    rules = (
        Rule("invalid", "the wrapper has a training loop of its own", unless={"form": ("plain",), "wrapper": WRAPPERS}),
        Rule("invalid", "what is compiled is one forward pass", unless={"form": ("plain",), "compile": ("no",)}),
        Rule("invalid", "reentrant checkpoints take one plain backward pass, and say so", when={"recompute": ("reentrant",)}, unless={"form": ("plain",)}),
        Rule("invalid", "LBFGS calls for the loss itself", when={"optimizer": ("LBFGS",)}, unless={"form": ("plain",)}),
        *not_of_calls({"form": ("plain",)}),
        Rule("invalid", "FSDP1 asks for parameters of a unit that all require a gradient, or none", when={"form": ("turns",), "wrapper": ("fsdp1",)}),
        Rule("invalid", "FSDP1's parameters are views of its own", when={"form": ("assigned", "rows"), "wrapper": ("fsdp1",)}),
        Rule("invalid", "ZeRO documents that data of parameters are views of its buckets", when={"form": ("assigned",), "zero_view": (True,)}),
        Rule("invalid", "DDP asks for find_unused_parameters where parameters are not used", when={"form": ("turns",), "wrapper": ("ddp", "zero")},
             unless={"ddp": ("find_unused_parameters=True",), "ddp_also": ("find_unused_parameters=True",)}),
        *(
            Rule("invalid", "a static graph promises the same parameters in each step", when={"form": ("turns",), axis: ("static_graph=True",)})
            for axis in ("ddp", "ddp_also")
        ),
        *(
            Rule("invalid", "a checkpoint holds no gradients, and those of parameters that the optimizer has not are never cleared: they add up over steps",
                 when={"form": ("clear the optimizer between",), "groups": ("matrices", "bags")}, unless={axis: without})
            for axis, without in _RESTARTS.items()
        ),
        Rule("invalid", "the model has no input with slopes", when={"form": ("slopes",)}, lacks=frozenset({"numbers"})),
    )  # fmt: skip

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        form = str(value)
        if form in _CLEARED:
            line = draft.zero_grad if form == _CLEARED[0] else draft.zero_grad.replace("net.", "opt.")
            draft.zero_grad, draft.backward = "", f"if part is parts[0]: {line}\n{draft.backward}"
        if form == "gradient hooks":
            draft.after_build.append(f"for p in {_FREE}: p.register_hook(lambda g: g * 2)")
        if form == "slopes":
            draft.before_part.append("given = [t[part].requires_grad_(t.is_floating_point()) for t in x]")
            draft.forward = "net(*given)"
            draft.evaluation = draft.evaluation or "net(*(t[part] for t in x))"
        if form == "turns":
            draft.before_loop.append("free = {name for name, p in net.named_parameters() if p.requires_grad}")
        if form in _BACKWARD:
            draft.backward = "\n".join(_BACKWARD[form])
        draft.before_part += [line.format(forward=draft.forward) for line in _BEFORE.get(form, ())]
        draft.after_update += _AFTER.get(form, ())


@register
class Init(Axis):
    """How matrices are set once the model is wrapped: by one of torch's functions that draw no random numbers."""

    program = True
    order = 46  # after the wrapper, before a checkpoint is loaded
    choice = Choice("init", ("no", "constant_", "eye_"), rare=0.08)
    rules = (
        Rule("invalid", "the wrapper has parameters of its own", unless={"init": ("no",), "wrapper": tuple(w for w in WRAPPERS if w != "fsdp1")}),
        Rule("invalid", "the model has no matrices", unless={"init": ("no",)}, lacks=frozenset({"matrix"})),
        *not_of_calls({"init": ("no",)}),
    )  # fmt: skip

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`; the last matrix alone, so that there is something to be learned."""
        more = ", 0.3" if value == "constant_" else ""
        draft.wrap.append(f"nn.init.{value}([p for p in net.parameters() if p.ndim == 2][-1]{more})")
