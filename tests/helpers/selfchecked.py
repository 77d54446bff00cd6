"""One step of a model, and what a relation of the self-check says of it."""

from __future__ import annotations

import torch

from proctor.oracle.selfcheck import registry
from proctor.oracle.selfcheck.watching.fork import random_states
from proctor.oracle.selfcheck.watching.step import Call
from proctor.oracle.selfcheck.watching.values import tensors


def call_of(module, *args, targets=(), **kwargs):
    """A real step of a module: results, and what comes back to them from the mean of their squares."""
    torch.manual_seed(0)
    call = Call(module, type(module).__name__, args, kwargs, random_states(), module.training, targets=list(targets))
    out = dict(tensors(module(*args, **kwargs)))
    call.results = {p: (tuple(t.shape), t.dtype) for p, t in out.items()}
    wanted = {p: t for p, t in out.items() if t.requires_grad}
    slopes = torch.autograd.grad(sum((t * t).mean() for t in wanted.values()), list(wanted.values()))
    call.gradients = dict(zip(wanted, slopes, strict=True))
    return call


def verdict(name, call):
    return registry()[name].check(call)
