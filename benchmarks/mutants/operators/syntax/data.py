"""Batches, labels, samplers, and buffers of experience."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...registry import Plant, syntax
from ...tree import become, called, drop, expression, expressions, plant, spots, statements

_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "smooth_l1_loss", "binary_cross_entropy", "l1_loss", "criterion", "loss_fn",
           "loss_func", "binary_cross_entropy_with_logits", "adversarial_loss", "CrossEntropyLoss", "auxiliary_loss")


def _loss_calls(tree: ast.Module) -> Iterator[tuple[object, ast.Call]]:
    for spot, node in expressions(tree):
        if isinstance(node, ast.Call) and len(node.args) >= 2 and ast.unparse(node.func).split(".")[-1] in _LOSSES:
            yield spot, node


@syntax("batch_repeated", "every step gets the first batch", "batch", "batches", "loader", "data", "sample", "samples")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        loop = spot.statement
        if not isinstance(loop, ast.For) or not any(getattr(n, "attr", "") == "backward" for n in ast.walk(loop)):
            continue
        source = loop.iter
        if isinstance(source, ast.Call) and ast.unparse(source.func) == "enumerate" and source.args:
            source = source.args[0]
        text = ast.unparse(source)
        if "load" in text.lower() or "data" in text.lower():
            yield plant(spot, become(source, expression(f"[next(iter({text}))] * len({text})")), source)


@syntax("shuffle_left_out", "the data are not shuffled", "shuffle", "sampler", "epoch", "order", "batch", "samples")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in expressions(tree):
        if isinstance(node, ast.keyword) and node.arg == "shuffle" and isinstance(node.value, ast.Constant) and node.value.value is True:
            yield plant(spot, become(node.value, ast.Constant(False)), spot.statement)


@syntax("set_epoch_left_out", "the sampler draws the same order in every epoch", "set_epoch", "epoch", "sampler", "order", "batch")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, _ in statements(tree, "set_epoch"):
        yield plant(spot, drop(spot))


@syntax("labels_shifted", "each sample gets the label of another one", "target", "labels", "label", "loss")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in _loss_calls(tree):
        second = node.args[1]
        text = ast.unparse(second)
        yield plant(spot, become(second, expression(f"({text}).roll(1, 0)")), node)  # type: ignore[arg-type]


@syntax("scores_twice_normalised", "probabilities are given where the loss wants scores", "cross_entropy", "softmax", "loss")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, node in _loss_calls(tree):
        if ast.unparse(node.func).split(".")[-1] == "cross_entropy":
            first = node.args[0]
            yield plant(spot, become(first, expression(f"({ast.unparse(first)}).softmax(-1)")), node)  # type: ignore[arg-type]


@syntax("memory_never_written", "what should be remembered is not: a replay memory, a queue, a history", "append", "push", "buffer", "memory", "queue")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot, _ in statements(tree, "append", "push", "enqueue", "add", receiver="mem buf queue replay history saved reward"):
        yield plant(spot, drop(spot))


@syntax("copy_left_out", "a copy is never brought up to date: a target network, an average, a buffer", "copy_", "load_state_dict", "target", "stale", "buffer")
def _(tree: ast.Module) -> Iterator[Plant]:
    for spot in spots(tree):
        found = called(spot)
        if found and spot.function and found[1] in ("copy_", "load_state_dict", "lerp_", "update_parameters", "update_bn"):
            yield plant(spot, drop(spot))
