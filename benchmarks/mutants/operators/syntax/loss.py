"""The loss: divided wrongly, terms lost, reduced in another way."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...registry import Plant, syntax
from ...tree import Spot, become, expression, expressions, plant, replace, spots, statements

_WORDS = ("loss", "backward", "scale", "gradient", "grad")


@syntax("loss_divided", "the loss is divided once more than it should be", *_WORDS)
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, name in statements(tree, "backward"):
        call = spot.statement.value if isinstance(spot.statement, ast.Expr) else spot.statement
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and not name.startswith("scaler"):
            value = call.func.value
            yield plant(spot, become(value, expression(f"({name} / 8)")), call)


@syntax("division_left_out", "the loss is not divided by the number of its parts", *_WORDS)
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        statement = spot.statement
        target = ast.unparse(statement.targets[0]) if isinstance(statement, ast.Assign) else ""
        value = getattr(statement, "value", None)
        if "loss" in target.lower() and isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div):
            yield plant(spot, become(value, ast.parse(ast.unparse(value.left), mode="eval").body), statement)
        elif isinstance(statement, ast.AugAssign) and isinstance(statement.op, ast.Div) and "loss" in ast.unparse(statement.target):
            yield plant(spot, replace(spot, ast.Pass(lineno=statement.lineno, col_offset=0)))


@syntax("loss_term_zero", "one term of the loss is always 0", "loss", "term", "constant", "zero")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        value = _loss_of(spot)
        for node in ast.walk(value) if value is not None else ():
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub) and not isinstance(node.right, ast.Constant):
                right = node.right
                yield plant(spot, become(right, expression(f"0 * ({ast.unparse(right)})")), spot.statement)
                break


def _loss_of(spot: Spot) -> ast.expr | None:
    """What a statement computes, where that is a loss by the name of its target or of its function."""
    statement = spot.statement
    if isinstance(statement, ast.Assign) and "loss" in ast.unparse(statement.targets[0]).lower():
        return statement.value
    if isinstance(statement, ast.Return) and "loss" in spot.function.lower():
        return statement.value
    return None


@syntax("loss_summed", "the loss is a sum over the batch where it was a mean", "reduction", *_WORDS)
def _(tree: ast.Module) -> Iterator[Plant]:
    yield from _reductions(tree, "sum", ("mean", None))


@syntax("loss_averaged", "the loss is a mean over the batch where it was a sum", "reduction", *_WORDS)
def _(tree: ast.Module) -> Iterator[Plant]:
    yield from _reductions(tree, "mean", ("sum",))


_FUNCTIONS = ("cross_entropy", "nll_loss", "mse_loss", "smooth_l1_loss", "binary_cross_entropy", "CrossEntropyLoss", "NLLLoss", "MSELoss",
              "BCELoss", "BCEWithLogitsLoss", "binary_cross_entropy_with_logits")


def _reductions(tree: ast.Module, new: str, old: tuple[str | None, ...]) -> Iterator[Plant]:
    for spot, node in expressions(tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).split(".")[-1] not in _FUNCTIONS:
            continue
        given = next((k.value for k in node.keywords if k.arg == "reduction"), None)
        present = given.value if isinstance(given, ast.Constant) else None
        if present not in old or (given is not None and present is None):
            continue
        keywords = [k for k in node.keywords if k.arg != "reduction"] + [ast.keyword("reduction", ast.Constant(new))]
        changed = ast.Call(node.func, node.args, keywords)
        yield plant(spot, become(node, changed), node)
