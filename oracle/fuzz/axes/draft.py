"""The training program while axes write into it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from proctor.oracle.fuzz.models import ModelCode


@dataclass
class Draft:
    """Parts of a training program, as source text; `proctor.oracle.fuzz.program` puts them together.

    Attributes:
        code: the model.
        steps: of training.
        batch: rows of a batch, of all ranks together.
        dtype: of parameters and data, "torch.float64".
        imports: lines.
        wrap: lines that distribute `net`.
        net_args: expression of what the optimizer gets.
        optimizer: expression of its class.
        options: its arguments.
        opt: expression that makes it; "" for the class with the options.
        after_build: lines after it is made.
        rows: expression: indices of this rank's rows of a batch of `n`.
        scale: expression by which a rank's share of the loss is multiplied, where gradients are averaged over ranks.
        accumulate: microbatches of a step.
        after_part: lines after a microbatch's backward pass.
        before_part: lines before a microbatch's forward pass; `last` says whether it is the last one.
        contexts: expressions of context managers around forward and backward pass.
        after_backward: lines between backward pass and update.
        update: lines of the update, of an optimizer without a closure.
        after_update: lines after the update, before it is looked at.
        after_step: lines after that.
        forward: expression of the output of microbatch `part`.
        backward: lines of the backward pass, with `{loss}`, `{forward}` and `{scale}` (of the loss).
        before_evaluation: lines after `net.eval()`.
        evaluation: expression of what is compared of the evaluated model; "" for `forward`.
        prelude: lines at the top of `build`, after `net` is made and before it is wrapped.
        closure: whether the optimizer calls for the loss itself.
        passes: statements in place of the forward and backward passes of microbatches; empty for these.
        evaluated: expression of the rows and outputs of the evaluated model.
        clip_norm: statement that clips gradients by their norm, with `{limits}`.
        life: 1 for a program that trains one step, saves and ends, 2 for one that goes on from there, 0 for one that does both.
        first: step that the program begins with.
        before_loop: lines after model, optimizer and scheduler are made.
        own_loop: lines in place of the training loop, where a library has its own; empty for this one.
        within: expressions of context managers around the training loop.
        ends: expression: whether this rank's loop ends before a step; "" for never.
        finish: called when all axes have written (an engine takes in what they made).
    """

    code: ModelCode
    steps: int
    batch: int
    dtype: str = "torch.float64"
    imports: list[str] = field(default_factory=list)
    prelude: list[str] = field(default_factory=list)
    wrap: list[str] = field(default_factory=list)
    net_args: str = "net.parameters()"
    optimizer: str = "torch.optim.SGD"
    options: dict[str, str] = field(default_factory=lambda: {"lr": "0.1"})
    opt: str = ""
    after_build: list[str] = field(default_factory=list)
    rows: str = "torch.arange(n)"
    scale: str = ""
    accumulate: int = 1
    before_part: list[str] = field(default_factory=list)
    contexts: list[str] = field(default_factory=list)
    after_backward: list[str] = field(default_factory=list)
    after_step: list[str] = field(default_factory=list)
    forward: str = "net(*(t[part] for t in x))"
    backward: str = "{loss}.backward()"
    before_evaluation: list[str] = field(default_factory=list)
    evaluation: str = ""
    closure: bool = False
    scheduler: str = ""
    zero_grad: str = "net.zero_grad()"
    passes: list[str] = field(default_factory=list)
    evaluated: str = "[(part, out)]"
    clip_norm: str = "nn.utils.clip_grad_norm_(net.parameters(), {limits})"
    life: int = 0
    first: int = 0
    before_loop: list[str] = field(default_factory=list)
    own_loop: list[str] = field(default_factory=list)
    within: list[str] = field(default_factory=list)
    ends: str = ""
    after_part: list[str] = field(default_factory=list)
    update: list[str] = field(default_factory=lambda: ["opt.step()"])
    after_update: list[str] = field(default_factory=list)
    finish: list[Callable[[], None]] = field(default_factory=list)

    @property
    def local_optimizer(self) -> str:
        """Expression of the optimizer as the class makes it, with its parameters and options."""
        return f"{self.optimizer}({self.net_args}{''.join(f', {k}={v}' for k, v in self.options.items())})"

    def add_import(self, line: str) -> None:
        """Import something once."""
        if line not in self.imports:
            self.imports.append(line)
