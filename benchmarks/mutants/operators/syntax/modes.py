"""Modes: training and evaluation, gradients on and off, what is frozen and what is cut from the graph."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from ...registry import Plant, syntax
from ...tree import Spot, become, called, drop, expression, expressions, method, plant, spots, statements

_MODE = ("train", "eval", "training", "mode", "dropout", "batch_norm")


@syntax("train_left_out", "the model is not put back into training mode", *_MODE)
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _mode_calls(tree, "train"):
        yield plant(spot, drop(spot))


@syntax("eval_left_out", "the model, or a teacher, stays in training mode where it evaluates", *_MODE)
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _mode_calls(tree, "eval"):
        yield plant(spot, drop(spot))


@syntax("eval_for_train", "the model trains in evaluation mode", *_MODE)
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _mode_calls(tree, "train"):
        name = (called(spot) or ("", ""))[0]
        value = spot.statement.value if isinstance(spot.statement, ast.Expr) else spot.statement
        yield plant(spot, become(value, expression(f"{name}.eval()")))


def _mode_calls(tree: ast.Module, name: str) -> Iterator[Spot]:
    """`model.train()` and no other method of that name: a trainer's takes arguments or is the program's own."""
    own = {n.name for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)}
    for spot, receiver in statements(tree, name, without="trainer agent"):
        call = spot.statement.value if isinstance(spot.statement, ast.Expr) else None
        if isinstance(call, ast.Call) and not call.args and not call.keywords and not (receiver == "self" and name in own):
            yield spot


@syntax("no_grad_left_out", "a block that needs no gradients records them", "no_grad", "grad", "requires_grad")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        if isinstance(spot.statement, ast.With) and "no_grad" in ast.unparse(spot.statement.items[0]):
            yield plant(spot, _unwrap(spot, spot.statement), spot.statement.items[0])


def _unwrap(spot: Spot, block: ast.With) -> Callable[[], None]:
    def apply() -> None:
        i = spot.position
        spot.body[i : i + 1] = block.body

    return apply


@syntax("detach_added", "a layer's result is cut from the graph, so what is before it does not learn", "detach", "grad", "gradient", "gradients")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, call in _layers(tree):
        yield plant(spot, become(call, expression(f"({ast.unparse(call)}).detach()")), call)


@syntax("detach_left_out", "what should be cut from the graph is not", "detach", "grad", "gradient", "backward")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in expressions(tree):
        found = method(node)
        if found and found[1] == "detach":
            inner = ast.parse(found[0], mode="eval").body
            yield plant(spot, become(node, inner), node)


@syntax("unfrozen", "what should stay frozen trains", "requires_grad", "requires_grad_", "frozen", "parameter", "weight")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        text = ast.unparse(spot.statement)
        if isinstance(spot.statement, ast.Assign | ast.Expr) and (
            text.endswith("requires_grad = False") or "requires_grad_(False)" in text
        ):
            yield plant(spot, drop(spot))


@syntax("frozen", "the first layer's parameters do not train", "requires_grad", "grad", "gradient", "weight", "parameter")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        statement = spot.statement
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) in ("model", "self.model", "net", "generator"):
            name = ast.unparse(statement.targets[0])
            if isinstance(statement.value, ast.Call):
                yield plant(spot, _after(spot, f"next(iter({name}.parameters())).requires_grad_(False)"))


def _after(spot: Spot, text: str) -> Callable[[], None]:
    def apply() -> None:
        spot.body.insert(spot.position + 1, ast.parse(text).body[0])

    return apply


@syntax("dropout_always", "dropout acts in evaluation, too", "dropout", "training")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in expressions(tree):
        if isinstance(node, ast.keyword) and node.arg == "training" and "self.training" in ast.unparse(node.value):
            yield plant(spot, become(node.value, ast.Constant(True)), spot.statement)


@syntax("precision_lost", "a layer's result goes through a half precision cast", "dtype", "bfloat16", "float16", "half", "cast")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, call in _layers(tree):
        text = ast.unparse(call)
        yield plant(spot, become(call, expression(f"({text}).bfloat16().float()")), call)


def _layers(tree: ast.Module) -> Iterator[tuple[Spot, ast.Call]]:
    """`x = self.layer(x)` in a forward."""
    for spot in spots(tree):
        statement = spot.statement
        if isinstance(statement, ast.Assign) and spot.function.endswith(".forward") and _is_layer(statement.value):
            assert isinstance(statement.value, ast.Call)
            yield spot, statement.value


def _is_layer(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("self.") and bool(node.args)
