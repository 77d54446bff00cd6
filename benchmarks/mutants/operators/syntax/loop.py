"""The training loop: its calls left out, doubled, or in another order."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from ...registry import Plant, syntax
from ...tree import Spot, called, code, drop, insert, method, move, plant, spots, statements

_OPTIMIZER = "opt"
_NO_OPTIMIZER = "sched lr_ scaler ema"
_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")
_SCHEDULER = "sched lr_"


def _updates(tree: ast.Module) -> Iterator[Spot]:
    for spot, _ in statements(tree, "step", receiver=_OPTIMIZER, without=_NO_OPTIMIZER):
        yield spot


def _clears(tree: ast.Module) -> Iterator[Spot]:
    for spot, _ in statements(tree, "zero_grad"):
        yield spot


def _backwards(tree: ast.Module) -> Iterator[Spot]:
    for spot, _ in statements(tree, "backward"):
        yield spot


def _beside(spots: Iterator[Spot], other: Spot) -> Spot | None:
    """The last of these before a statement, in its block."""
    before = [s for s in spots if s.body is other.body and s.position < other.position]
    return before[-1] if before else None


@syntax("zero_grad_left_out", "gradients are never cleared", "zero_grad", "grad", "gradient", "gradients")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _clears(tree):
        yield plant(spot, drop(spot))


@syntax("zero_grad_before_step", "gradients are cleared between backward and the update", "zero_grad", "grad", "step", "update")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _clears(tree):
        update = next((u for u in _updates(tree) if u.body is spot.body and u.position > spot.position), None)
        if update is not None:
            yield plant(spot, move(spot, update, after=False))


@syntax("step_left_out", "the optimizer never updates", "step", "update", "optimizer")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _updates(tree):
        yield plant(spot, drop(spot))


@syntax("step_twice", "the optimizer updates twice with one gradient", "step", "update")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _updates(tree):
        yield plant(spot, insert(spot, code(ast.unparse(spot.statement))))


@syntax("step_before_backward", "the update uses the gradients of the step before", "step", "backward", "update")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _updates(tree):
        backward = _beside(_backwards(tree), spot)
        if backward is not None:
            yield plant(spot, move(spot, backward, after=False))


@syntax("backward_twice", "one loss is propagated twice, so its gradient counts double", "backward", "grad", "gradient")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _backwards(tree):
        found = called(spot)
        call = spot.statement.value if isinstance(spot.statement, ast.Expr) else None
        if found and isinstance(call, ast.Call) and not call.args and not call.keywords:
            yield plant(spot, insert(spot, code(f"{found[0]}.backward(retain_graph=True)")))


@syntax("backward_left_out", "the loss is never propagated", "backward", "grad", "gradient")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _backwards(tree):
        yield plant(spot, drop(spot))


def _clip_spots(tree: ast.Module) -> Iterator[Spot]:
    for spot in spots(tree):
        value = getattr(spot.statement, "value", None)
        found = method(value) if isinstance(value, ast.AST) else None
        name = found[1] if found else value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        if name in _CLIPS and isinstance(spot.statement, ast.Expr):
            yield spot


@syntax("clip_left_out", "gradients are not clipped", *_CLIPS, "clip", "grad")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _clip_spots(tree):
        yield plant(spot, drop(spot))


@syntax("clip_after_step", "gradients are clipped after the update that should use them", *_CLIPS, "clip", "step")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _clip_spots(tree):
        update = next((u for u in _updates(tree) if u.body is spot.body and u.position > spot.position), None)
        if update is not None:
            yield plant(spot, move(spot, update, after=True))


@syntax("clip_before_backward", "the gradients of the step before are clipped", *_CLIPS, "clip", "backward")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _clip_spots(tree):
        backward = _beside(_backwards(tree), spot)
        if backward is not None:
            yield plant(spot, move(spot, backward, after=False))


@syntax("unscale_left_out", "scaled gradients are clipped", "unscale_", "unscale", "GradScaler", "clip")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, _name in statements(tree, "unscale_"):
        yield plant(spot, drop(spot))


@syntax("scheduler_left_out", "the learning rate schedule never steps", "step", "scheduler", "lr")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, _name in statements(tree, "step", receiver=_SCHEDULER):
        yield plant(spot, drop(spot))


@syntax("scheduler_twice", "the learning rate schedule steps twice", "step", "scheduler", "lr")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, _name in statements(tree, "step", receiver=_SCHEDULER):
        yield plant(spot, insert(spot, code(ast.unparse(spot.statement))))


@syntax("scheduler_each_batch", "the schedule of epochs steps after every batch", "step", "scheduler", "lr")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, _name in statements(tree, "step", receiver=_SCHEDULER):
        inner = [u for u in _updates(tree) if u.loops > spot.loops and u.function == spot.function]
        if inner:
            yield plant(spot, move(spot, inner[0], after=True))


@syntax("rate_not_set", "the learning rate that was computed is never given to the optimizer", "lr", "param_groups", "learning rate")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        statement = spot.statement
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
            key = statement.targets[0].slice
            if isinstance(key, ast.Constant) and key.value == "lr" and "group" in ast.unparse(statement.targets[0]):
                yield plant(spot, drop(spot))


@syntax("accumulation_ignored", "the optimizer updates after every microbatch", "step", "update", "accumulation", "backward")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        statement = spot.statement
        if isinstance(statement, ast.If) and not statement.orelse and any(isinstance(n, ast.Mod) for n in ast.walk(statement.test)):
            inner = [called(s) for s in spots(statement)]
            if any(c and c[1] == "step" and "opt" in c[0].lower() for c in inner):
                inside = next(s for s in spots(statement) if (called(s) or ("", ""))[1] == "step")
                yield plant(spot, _always(statement), inside.statement)


def _always(statement: ast.If) -> Callable[[], None]:
    def apply() -> None:
        statement.test = ast.Constant(True)

    return apply
