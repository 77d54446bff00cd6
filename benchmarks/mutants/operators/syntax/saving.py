"""Checkpoints without a part, resumes that do not load, wrappers that are bypassed."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...registry import Plant, syntax
from ...tree import become, drop, expression, expressions, plant, spots


@syntax("checkpoint_without_a_part", "a part is missing from the checkpoint", "save", "checkpoint", "state_dict", "optimizer", "saved")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in expressions(tree):
        if isinstance(node, ast.Dict) and len(node.keys) > 1:
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and "state_dict" in ast.unparse(value):
                    kept = [(k, v) for k, v in zip(node.keys, node.values) if k is not key]
                    new = ast.Dict(keys=[k for k, _ in kept], values=[v for _, v in kept])
                    yield plant(spot, become(node, new), node)


@syntax("load_left_out", "a checkpoint is read and not loaded", "load_state_dict", "load", "resume", "checkpoint")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        if isinstance(spot.statement, ast.Expr) and "load_state_dict(" in ast.unparse(spot.statement):
            yield plant(spot, drop(spot))


@syntax("wrapper_bypassed", "the model is called without its data parallel wrapper", "DistributedDataParallel", "module", "all_reduce",
        "replicas", "ranks", "rank", "gradient", "grad", "weight", "parameter")
def _(tree: ast.Module) -> Iterator[Plant]:
    wrapped = {
        ast.unparse(spot.statement.targets[0])
        for spot in spots(tree)
        if isinstance(spot.statement, ast.Assign) and _wraps(spot.statement.value)
    }
    for spot, node in expressions(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in wrapped and not _wraps(node):
            name = ast.unparse(node.func)
            yield plant(spot, become(node.func, expression(f"{name}.module")), node)


def _wraps(node: ast.AST) -> bool:
    name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) and node.args else ""
    return name in ("DDP", "DistributedDataParallel")
