"""Ranks that work together by hand: reductions left out, of another kind or not divided, and parts of the data."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...registry import Plant, syntax
from ...tree import Spot, become, called, drop, expression, expressions, method, plant, spots

_WORDS = ("all_reduce", "reduce", "ranks", "rank", "replicas", "gradient", "grad", "weight", "bias", "parameter")
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce")


def _reductions(tree: ast.Module) -> Iterator[Spot]:
    for spot in spots(tree):
        found = called(spot)
        if found and found[1] in _REDUCTIONS and "dist" in found[0]:
            yield spot


@syntax("reduction_left_out", "what the ranks should add up, each keeps for itself", *_WORDS)
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _reductions(tree):
        yield plant(spot, drop(spot))


@syntax("reduction_of_another_kind", "the ranks take the largest where they should add", *_WORDS, "MAX", "SUM")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _reductions(tree):
        call = spot.statement.value if isinstance(spot.statement, ast.Expr) else None
        if isinstance(call, ast.Call):
            said = next((k.value for k in call.keywords if k.arg == "op"), None)
            largest = ast.Attribute(said.value, "MAX") if isinstance(said, ast.Attribute) else expression("__import__('torch').distributed.ReduceOp.MAX")
            keywords = [k for k in call.keywords if k.arg != "op"] + [ast.keyword("op", largest)]
            yield plant(spot, become(call, ast.Call(call.func, call.args[:1], keywords)), call.func)


@syntax("reduction_not_divided", "a sum over the ranks is not divided by their number", *_WORDS, "world_size", "size", "mean")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in _reductions(tree):
        for other in spots(tree):
            if other.body is spot.body and 0 < other.position - spot.position <= 2 and _divides(other.statement):
                yield plant(other, drop(other))


def _divides(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.AugAssign):
        return isinstance(statement.op, ast.Div)
    value = statement.value if isinstance(statement, ast.Assign | ast.Expr) else None
    found = method(value) if value is not None else None
    return (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Div)) or bool(found and found[1] == "div_")


@syntax("first_slice_on_every_rank", "every rank takes the first rank's part of the data", "batch", "batches", "data", "samples", "rank", "ranks", "sampler",
        "partition", "shard", "DistributedSampler")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in expressions(tree):
        name = ast.unparse(node.func).lower() if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and any(word in name for word in ("partition", "shard", "split", "sampler", ".use")):
            for given in [*node.args, *(k.value for k in node.keywords)]:
                if ast.unparse(given) in ("rank", "self.rank", "dist.get_rank()", "torch.distributed.get_rank()", "local_rank", "global_rank"):
                    yield plant(spot, become(given, ast.Constant(0)), node)


@syntax("broadcast_left_out", "the ranks do not begin with the first rank's values", "broadcast", *_WORDS)
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        found = called(spot)
        if found and found[1].startswith("broadcast") and "dist" in found[0]:
            yield plant(spot, drop(spot))
