"""Has the engine that generates the weights that the trainer has? For reinforcement learning, after every synchronisation.

The trainer and the engine (vLLM, SGLang, another process, another format) each make a digest, a small table of fingerprints that can be sent or
written as JSON, and one of them compares::

    sent = proctor.weights.digest(policy, dtype=torch.bfloat16, fuse={"layers.0.qkv.weight": ["layers.0.q.weight", "layers.0.k.weight", "layers.0.v.weight"]})
    here = proctor.weights.digest(engine_model)                       # in the engine, behind its load_weights
    proctor.weights.require_same(sent, here)                          # or differing(sent, here): one line for each difference

Fingerprints of parts add up to that of the whole, so matrices that an engine joins are compared without joining them. A digest reads every
weight once and copies none but those that `dtype` converts, one at a time. It draws no random number and leaves the weights as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from proctor.errors import ProctorError

if TYPE_CHECKING:
    from torch import Tensor

Digest = dict[str, dict[str, Any]]  # by name of a weight: fp (hexadecimal), norm, dtype, shape
_SHOWN: Final = 20


class WeightsDiffer(ProctorError):
    """The engine generates with other weights than the trainer has."""


def digest(weights: Any, *, dtype: Any = None, fuse: Mapping[str, Sequence[str]] | None = None) -> Digest:
    """What the weights are, in a few bytes each.

    Args:
        weights: a module, a state dict, or pairs of name and tensor. Of a DTensor the whole is gathered, on all ranks.
        dtype: that floating-point weights are converted to first: the one that the engine has.
        fuse: name that the engine has → names that lie in it one behind the other along the first dimension.

    Raises:
        ProctorError: a name in `fuse` is not there, parts do not fit together, or a weight cannot be read.
    """
    import torch

    found: dict[str, Tensor] = {name: tensor for name, tensor in _pairs(weights) if isinstance(tensor, torch.Tensor)}
    joined = {name: list(parts) for name, parts in (fuse or {}).items()}
    used = {part for parts in joined.values() for part in parts}
    if missing := sorted(used - found.keys()):
        raise ProctorError(f"no weight is called {missing[0]!r}", hint="names in `fuse` are those of the weights that are given")
    joined |= {name: [name] for name in found if name not in used and name not in joined}
    return {name: _one(name, [found[part] for part in parts], dtype) for name, parts in joined.items()}


def differing(trainer: Digest, engine: Digest) -> list[str]:
    """One line for each weight that is not the same on both sides, or on one side only; empty: all are."""
    lines = [f"{name}: the engine has none" for name in trainer if name not in engine]
    lines += [f"{name}: the trainer has none" for name in engine if name not in trainer]
    for name, here in trainer.items():
        there = engine.get(name)
        if there is None:
            continue
        if (here["dtype"], list(here["shape"])) != (there["dtype"], list(there["shape"])):
            lines.append(f"{name}: {here['dtype']}{list(here['shape'])} in the trainer, {there['dtype']}{list(there['shape'])} in the engine")
        elif here["fp"] != there["fp"]:
            lines.append(f"{name}: other values (norm {here['norm']:.9g} in the trainer, {there['norm']:.9g} in the engine)")
    return lines


def require_same(trainer: Digest, engine: Digest) -> None:
    """As `differing`, for a program that had better end.

    Raises:
        WeightsDiffer: a weight is not the same.
    """
    lines = differing(trainer, engine)
    if lines:
        more = f" (and {len(lines) - _SHOWN} more)" if len(lines) > _SHOWN else ""
        raise WeightsDiffer(f"{len(lines)} of {len(trainer.keys() | engine.keys())} weights differ: " + "; ".join(lines[:_SHOWN]) + more)


def _pairs(weights: Any) -> Iterable[tuple[str, Any]]:
    if hasattr(weights, "state_dict"):
        weights = weights.state_dict()
    return weights.items() if isinstance(weights, Mapping) else weights


def _one(name: str, parts: list[Tensor], dtype: Any) -> dict[str, Any]:
    import torch

    from proctor.instrument.observe.fingerprint import fingerprint, merge
    from proctor.invariants.schema import StateFlag

    fps, square, start, rows = [], 0.0, 0, 0
    first = parts[0]
    for part in parts:
        if part.dtype != first.dtype or part.shape[1:] != first.shape[1:] or (len(parts) > 1 and not part.dim()):
            raise ProctorError(f"{name}: its parts do not lie one behind the other: {list(first.shape)} and {list(part.shape)}")
        with torch.no_grad():
            plain = part.detach()
            plain = plain.full_tensor() if hasattr(plain, "full_tensor") else plain
            plain = plain.to(dtype) if dtype is not None and plain.is_floating_point() else plain
        seen = fingerprint(plain, start)
        if seen.flags & int(StateFlag.UNHASHED):
            raise ProctorError(f"{name}: its values cannot be read ({plain.device}, {plain.layout})")
        fps.append(seen.fp)
        square += float(seen.norm) ** 2
        start += plain.numel()
        rows += plain.shape[0] if plain.dim() else 0
        kind = plain.dtype
    shape = [rows, *first.shape[1:]] if first.dim() else []
    return {"fp": f"{merge(fps):016x}", "norm": square**0.5, "dtype": str(kind).removeprefix("torch."), "shape": shape}
