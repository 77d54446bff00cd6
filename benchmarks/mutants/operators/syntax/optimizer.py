"""What the optimizer is given: parameters left out or stale, options of the wrong group."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from ...registry import Plant, syntax
from ...tree import Spot, become, code, expression, expressions, insert, method, plant, spots

_CLASSES = ("SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "RMSprop", "LBFGS", "NAdam", "RAdam", "Rprop")


def _optimizers(tree: ast.Module) -> Iterator[tuple[Spot, ast.Call]]:
    for spot, node in expressions(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).split(".")[-1] in _CLASSES:
            yield spot, node


@syntax("parameters_left_out", "the optimizer does not get the last parameter", "parameters", "optimizer", "parameter", "never", "weight", "bias")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in _optimizers(tree):
        first = node.args[0]
        found = method(first)
        if found and found[1] == "parameters":
            text = ast.unparse(first)
            yield plant(spot, become(first, expression(f"list({text})[:-1]")), node)


@syntax("optimizer_of_a_copy", "the optimizer holds copies of the parameters, as if built before the model was wrapped or moved",
        "parameters", "optimizer", "step", "parameter", "update")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in _optimizers(tree):
        first = node.args[0]
        found = method(first)
        if found and found[1] == "parameters":
            yield plant(spot, become(first, expression(f"__import__('copy').deepcopy({found[0]}).parameters()")), node)


@syntax("decay_on_norms", "weight decay acts on norms and biases, too", "weight_decay", "decay", "param_groups", "group")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in expressions(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and key.value == "weight_decay" and ast.unparse(value) in ("0.0", "0"):
                    yield plant(spot, become(value, ast.Constant(0.1)), node)


@syntax("untied", "weights that should be shared are not", "weight", "tied", "shared")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        statement = spot.statement
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Attribute) and spot.function.endswith("__init__"):
            left, right = ast.unparse(statement.targets[0]), ast.unparse(statement.value)
            if left.endswith(".weight") and right.endswith(".weight"):
                yield plant(spot, _copy(spot, left, right))


def _copy(spot: Spot, left: str, right: str) -> Callable[[], None]:
    def apply() -> None:
        spot.body[spot.position] = code(f"{left} = type({right})({right}.detach().clone())")

    return apply


@syntax("state_forgotten", "the optimizer's state is lost before every update", "state", "exp_avg", "momentum", "optimizer", "step")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        if isinstance(spot.statement, ast.Expr):
            found = method(spot.statement.value)
            if found and found[1] == "step" and "opt" in found[0].lower() and "sched" not in found[0].lower():
                yield plant(spot, insert(spot, code(f"{found[0]}.state.clear()")))
