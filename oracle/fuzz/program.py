"""Source text of the training program of a scenario: what ranks execute, and what a finding's script contains.

The program has `make()` (the model with its parameters), `batch(step)`, `build(rank, world)` (model and optimizer) and
`train(rank, world)`, a generator that stops at what is compared:

    for moment, step, net, opt, seen in train(rank, world): …

`moment` is "backward" (gradients, outputs of the rank's rows), "clipped" (gradients, where they are clipped), "update" (parameters, state, buffers) or "evaluation". Parameters are drawn from their
names, never from an order of construction, and are never trivial. The loss is each row's share of the mean over the whole
batch, so that neither microbatches nor ranks with few rows change it.
"""

from __future__ import annotations

import base64
import marshal
from functools import lru_cache
from typing import Final

import msgspec

from proctor.oracle.fuzz.axes import axis_of, program_of, whole
from proctor.oracle.fuzz.axes.checkpoint import first_life
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.models import ModelCode, template_of
from proctor.oracle.fuzz.spec import Scenario

IMPORTS: Final = ("import zlib", "import torch", "import torch.distributed as dist", "import torch.nn as nn", "import torch.nn.functional as F")


class Program(msgspec.Struct, frozen=True):
    """A program in parts, each a list of lines.

    Attributes:
        imports, net, make, batch, build, train: of it.
        code: the model.
        dtype: of parameters, "torch.float64".
    """

    imports: tuple[str, ...]
    net: tuple[str, ...]
    make: tuple[str, ...]
    batch: tuple[str, ...]
    build: tuple[str, ...]
    train: tuple[str, ...]
    code: ModelCode
    dtype: str

    def text(self) -> str:
        """The whole."""
        parts = (self.imports, self.net, self.make, self.batch, self.build, self.train)
        return "\n".join(line for part in parts for line in part) + "\n"

    def codes(self) -> list[str]:
        """The whole, compiled, for ranks: each of them would need 5 ms for it. The part that a model's settings share is compiled once."""
        parts = (self.imports, (*self.net, *self.make, *self.batch), (*self.build, *self.train))
        return [compiled("\n".join(lines)) for lines in parts]


@lru_cache(512)
def compiled(text: str) -> str:
    """Source text as code for a process of the same interpreter."""
    return base64.b64encode(marshal.dumps(compile(text, "<scenario>", "exec"))).decode()


def model_code(scenario: Scenario) -> ModelCode:
    """The model of a scenario."""
    return template_of(scenario.template).code(scenario.model)


def reference_of(scenario: Scenario) -> Scenario:
    """The scenario that it is compared with: one rank, nothing distributed, the same program."""
    return scenario.with_setting(program_of(scenario.setting))


def first_of(scenario: Scenario) -> Scenario | None:
    """The scenario of the program that saves what this one begins with; None if it begins by itself."""
    setting = first_life(scenario.setting)
    return None if setting is None else scenario.with_setting(setting)


def program(scenario: Scenario, *, permuted: int = 0, contexts: int | None = None, evaluated: bool = True, life: int | None = None) -> Program:
    """Write a scenario down.

    Args:
        scenario: valid.
        permuted: a seed by which rows are dealt in another order, for the noise; 0 for their own.
        evaluated: whether the model is evaluated at the end.
        contexts: context managers that there must be at least; None for what the scenario has.
        life: 1 for a program that saves after one step and ends; None for what the scenario says.
    """
    draft = _draft(scenario, life)
    evaluated = evaluated and draft.life != 1
    if (contexts or 0) > len(draft.contexts):
        draft.add_import("from contextlib import nullcontext")
    if permuted:
        draft.rows = f"torch.randperm(n, generator=torch.Generator().manual_seed({permuted}))"
        draft.accumulate = 1 if draft.code.traits & {"local statistics", "torchrec"} else 2
    return Program(
        imports=(*IMPORTS, *draft.imports),
        net=draft.code.net,
        make=_make(draft),
        batch=_batch(draft, int(str(scenario.given("seed")))),
        build=_build(draft),
        train=_train(draft, contexts or 0, evaluated=evaluated),
        code=draft.code,
        dtype=draft.dtype,
    )


def contexts_of(scenario: Scenario) -> int:
    """How many context managers its program has."""
    return len(_draft(scenario).contexts)


def _draft(scenario: Scenario, life: int | None = None) -> Draft:
    life = (2 if first_life(scenario.setting) else 0) if life is None else life
    draft = Draft(model_code(scenario), 1 if life == 1 else int(str(scenario.given("steps"))), int(str(scenario.given("batch"))), life=life)
    given = whole(scenario.setting)
    axes = sorted((axis_of(name) for name in scenario.setting), key=lambda a: (a.order, a.name))
    for axis in axes:
        axis.apply(scenario.setting[axis.name], draft, given)
    for finish in draft.finish:
        finish()
    return draft


def _make(draft: Draft) -> tuple[str, ...]:
    return (
        "def make():",
        f"    net = Net().to({draft.dtype})",
        "    for name, p in net.named_parameters():",
        "        g = torch.Generator().manual_seed(zlib.crc32(name.encode()))",
        "        p.data.copy_(torch.randn(p.shape, generator=g) / (p[0].numel() ** 0.5 if p.ndim > 1 else 2) + 0.5 * (p.ndim < 2))",
        "    return net",
    )


def _batch(draft: Draft, seed: int) -> tuple[str, ...]:
    shape = ", ".join(map(str, draft.code.y))
    return (
        "def batch(step):",
        f"    n, g = {draft.batch}, torch.Generator().manual_seed({100 + 10 * seed} + step)",
        f"    x, y = {draft.code.x}, torch.randn(n, {shape}, generator=g)",
        f"    return [t.to({draft.dtype}) if t.is_floating_point() else t for t in x], y.to({draft.dtype})",
    )


def _build(draft: Draft) -> tuple[str, ...]:
    opt = draft.opt or draft.local_optimizer
    lines = ["net = make()", *draft.code.after, *draft.prelude, *draft.wrap, f"opt = {opt}", *draft.after_build, "return net, opt"]
    return ("def build(rank, world):", *(f"    {line}" for line in lines))


def _train(draft: Draft, contexts: int, *, evaluated: bool) -> tuple[str, ...]:
    managers = draft.contexts + ["nullcontext()"] * max(0, contexts - len(draft.contexts))
    loop = draft.own_loop or [
        f"for step in range({draft.steps}):",
        "    x, y = batch(step)",
        f"    n, seen = {draft.batch}, []",
        f"    rows = {draft.rows}",
        f"    parts = rows.tensor_split({draft.accumulate})",
        *([f"    if step < {draft.first}: continue  # it was done before"] if draft.first else []),
        *([f"    if {draft.ends}: break"] if draft.ends else []),
        *_indented(_closure(draft, managers) if draft.closure else _passes(draft, managers), 1),
        *([] if draft.closure else _indented(_backward(draft), 1)),
        *_indented(["opt.step(closure)"] if draft.closure else draft.update, 1),
        *(["    scheduler.step()"] if draft.scheduler else []),
        *_indented(draft.after_update, 1),
        '    yield "update", step, net, opt, ()',
        *_indented(draft.after_step, 1),
    ]
    lines = [
        "net, opt = build(rank, world)",
        *([f"scheduler = {draft.scheduler}"] if draft.scheduler else []),
        *draft.before_loop,
        *([f"with {', '.join(draft.within)}:", *_indented(loop, 1)] if draft.within else loop),
    ]
    if evaluated:
        lines += [
            "net.eval()",
            *draft.before_evaluation,
            "with torch.no_grad():",
            f"    part = {draft.rows}",
            f"    out = {draft.evaluation or draft.forward}",
            f'yield "evaluation", {draft.steps}, net, opt, {draft.evaluated}',
        ]
    return ("def train(rank, world):", *_indented(lines, 1))


def _indented(lines: list[str], levels: int) -> list[str]:
    return ["    " * levels + line for line in lines]


def _passes(draft: Draft, managers: list[str]) -> list[str]:
    """Forward and backward passes of all microbatches."""
    scale = draft.scale.replace(" * ", ".mul(", 1) + ")" if draft.scale else ""
    loss = f"((out - y[part]) ** 2).sum().div(n){scale}"
    inner = draft.passes or [f"out = {draft.forward}", *draft.backward.format(loss=loss, forward=draft.forward, scale=scale).splitlines()]
    for manager in managers:
        inner = [f"with {manager}:", *_indented(inner, 1)]
    zero = [draft.zero_grad] if draft.zero_grad else []
    if draft.passes:
        return [*zero, *inner]
    last = any("last" in line for line in (*draft.before_part, *managers, *draft.after_part))
    return [
        *zero,
        "for part in parts:",
        *(["    last = part is parts[-1]"] if last else []),
        *_indented(draft.before_part, 1),
        *_indented(inner, 1),
        "    seen.append((part, out.detach()))",
        *_indented(draft.after_part, 1),
    ]


def _backward(draft: Draft) -> list[str]:
    """Gradients are looked at before they are clipped, too: a norm that is clipped hides a factor of all of them."""
    seen = 'yield "backward", step, net, opt, seen'
    return [seen, *draft.after_backward, 'yield "clipped", step, net, opt, ()'] if draft.after_backward else [seen]


def _closure(draft: Draft, managers: list[str]) -> list[str]:
    """For optimizers that ask for the loss themselves: the loss of the whole batch, on each rank."""
    body = [*_passes(draft, managers), *draft.after_backward]
    total = [
        "loss = sum(((out - y[part]) ** 2).sum() / n for part, out in seen)",
        *(["dist.all_reduce(loss)"] if draft.scale else []),
        "return loss",
    ]
    return ["def closure():", "    seen.clear()", *_indented(body, 1), *_indented(total, 1)]
