"""Values: casts that lose digits, buffers that do not change, other random numbers, batches that come again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ...registry import process


@process("linear_in_half_precision", "a linear layer computes in bfloat16 and gives back float32", "linear", "Linear", "dtype", "bfloat16",
         mentions=("nn.Linear", "Linear("))
def _(torch: Any, fired: Callable[[], None]) -> None:
    functional = torch.nn.functional
    linear = functional.linear

    @functools.wraps(linear)
    def rounded(input: Any, weight: Any, bias: Any = None) -> Any:
        fired()
        result = linear(input.bfloat16(), weight.bfloat16(), None if bias is None else bias.bfloat16())
        return result.to(input.dtype)

    functional.linear = rounded


@process("running_statistics_not_written", "batch norm does not write its running statistics", "running_mean", "running_var", "buffer", "BatchNorm",
         "batch_norm", "num_batches_tracked", mentions=("BatchNorm",))
def _(torch: Any, fired: Callable[[], None]) -> None:
    functional = torch.nn.functional
    norm = functional.batch_norm

    @functools.wraps(norm)
    def kept(input: Any, mean: Any, var: Any, *args: Any, **kwargs: Any) -> Any:
        fired()
        copies = [None if t is None else t.clone() for t in (mean, var)]
        return norm(input, *copies, *args, **kwargs)

    functional.batch_norm = kept


@process("dropout_mask_repeated", "dropout draws the same mask in every step", "dropout", "mask", "random", "Dropout", mentions=("dropout", "Dropout"))
def _(torch: Any, fired: Callable[[], None]) -> None:
    functional = torch.nn.functional
    dropout = functional.dropout

    @functools.wraps(dropout)
    def repeated(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not training:
            return dropout(input, p, training, inplace)
        fired()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            return dropout(input, p, training, inplace)

    functional.dropout = repeated


@process("recomputed_with_other_randomness", "recomputation draws other random numbers", "checkpoint", "recompute", "dropout", "random",
         mentions=("checkpoint(", "checkpoint_sequential"))
def _(torch: Any, fired: Callable[[], None]) -> None:
    import torch.utils.checkpoint as module

    checkpoint = module.checkpoint

    @functools.wraps(checkpoint)
    def other(*args: Any, **kwargs: Any) -> Any:
        fired()
        return checkpoint(*args, **{**kwargs, "preserve_rng_state": False})

    module.checkpoint = other


@process("every_other_batch_comes_again", "the loader gives each batch twice and leaves the next one out", "batch", "batches", "loader", "DataLoader",
         "samples", "data", mentions=("DataLoader",))
def _(torch: Any, fired: Callable[[], None]) -> None:
    iterator = torch.utils.data.dataloader._BaseDataLoaderIter
    advance = iterator.__next__

    @functools.wraps(advance)
    def again(self: Any) -> Any:
        batch = advance(self)
        count = self.__dict__.setdefault("_planted_count", 0)
        self._planted_count = count + 1
        if count % 2:
            fired()
            return self._planted_batch
        self._planted_batch = batch
        return batch

    iterator.__next__ = again


@process("clipping_without_effect", "clipping computes the norm and scales nothing", "clip_grad_norm_", "clip", "norm", "grad",
         mentions=("clip_grad_norm",))
def _(torch: Any, fired: Callable[[], None]) -> None:
    utils = torch.nn.utils
    clip = utils.clip_grad_norm_

    @functools.wraps(clip)
    def measured(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        fired()
        return clip(parameters, float("inf"), *args, **kwargs)

    utils.clip_grad_norm_ = measured


@process("stale_checkpoint", "every checkpoint after the first holds the first one's tensors", "save", "checkpoint", "stale", "saved", "state_dict",
         mentions=("torch.save(",))
def _(torch: Any, fired: Callable[[], None]) -> None:
    import copy

    save = torch.save
    first: dict[str, Any] = {}

    @functools.wraps(save)
    def stale(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        key = type(obj).__name__
        if key in first:
            fired()
            return save(first[key], f, *args, **kwargs)
        first[key] = copy.deepcopy(obj)
        return save(obj, f, *args, **kwargs)

    torch.save = stale


@process("zero_grad_without_effect", "clearing gradients does nothing", "zero_grad", "grad", "gradient", mentions=("zero_grad",))
def _(torch: Any, fired: Callable[[], None]) -> None:
    for cls in (torch.optim.Optimizer, torch.nn.Module):
        clear = cls.zero_grad

        @functools.wraps(clear)
        def nothing(self: Any, set_to_none: bool = True) -> None:
            fired()

        cls.zero_grad = nothing


@process("mode_without_effect", "eval() leaves the model in training mode", "eval", "train", "training", "mode", mentions=(".eval()",))
def _(torch: Any, fired: Callable[[], None]) -> None:
    evaluate = torch.nn.Module.eval

    @functools.wraps(evaluate)
    def stays(self: Any) -> Any:
        fired()
        return self

    torch.nn.Module.eval = stays
