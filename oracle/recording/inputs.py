"""Data that two runs have in common and that hides nothing: the model's inputs, seeded by their canonical names.

A program may train on data in which a mistake cannot show: padding throughout, one token again and again, a constant image,
a loss whose mask is zero. Generated tensors take the place of such data on both sides (TTrace §4.2). Both runs were recorded
with their own data before; where each rank's part lies is known from there, and the generated whole is cut at the same place,
so no plan is needed. Only what modules are called with from outside is replaced:

* integers that an embedding takes: any row of it;
* real numbers that a layer with weights takes as they are: normal; that are transformed first: normal within their own range;
* all else stays: labels, masks, positions, lengths. A loss is then that of the program's labels for other inputs, which is
  as good a function of the parameters as any. Inputs that are equal stay equal.

Where neither a plan nor content tells which rows a rank has (all are equal), its inputs stay as they are. Equal rows for all
ranks would do for that, but rounding errors of equal rows add up, which noise that differs by element does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from proctor.errors import OracleError
from proctor.oracle.judging.check import Comparison
from proctor.oracle.mapping.mapped import Mapped
from proctor.oracle.merging.assemble import LIKE_NEIGHBOURS, PARTIAL, Piece
from proctor.oracle.merging.locate import Index, near, take
from proctor.oracle.merging.reference import Key, Reference, slot_text
from proctor.oracle.numbers.dtypes import as_float, is_floating
from proctor.oracle.recording.recipes import Recipe, drawn, recipe_of
from proctor.oracle.tensors import Entry, key_of, slots_in

if TYPE_CHECKING:
    import torch

Files = dict[int, dict[str, "torch.Tensor"]]  # by rank, then by key


class _Part(NamedTuple):
    """What one rank holds of a tensor, and where that lies."""

    piece: Piece
    places: Index


class _Group(NamedTuple):
    """An input, or gradient, in all calls of a step; its parts by key of the reference."""

    recipe: Recipe
    parts: dict[Key, list[_Part]]


def generate_inputs(comparison: Comparison, seed: int, folder: Path, *, gradients: bool = False) -> list[str]:
    """Write what the ranks of both sides get: `folder/reference` and `folder/candidate`, a file a rank.

    Args:
        comparison: of the runs with their own data, after its `run`.
        seed: of the whole set.
        folder: is made.
        gradients: also those that come back to the model's output, of order one, whatever the loss.

    Returns:
        what is generated and what is kept, one sentence each.

    Raises:
        OracleError: nothing can be generated.
    """
    reference = comparison.reference
    outside = _called_from_outside(reference)
    files: dict[str, Files] = {"reference": {rank: {} for rank in reference.ranks}, "candidate": {rank: {} for rank in comparison.ranks}}
    groups: dict[tuple[int, str, str, str], list[Key]] = {}
    for key in reference.order:
        if key[3] in outside and (key[2] == "input" or (gradients and key[2] == "grad_output")):
            groups.setdefault((key[0], *key[2:]), []).append(key)
    held = dict(comparison.shards())
    made: dict[str, str] = {}
    kept: dict[str, str] = {}
    for (_, kind, name, slot), keys in groups.items():
        if kind == "input" and any(_differentiated(reference, k) for k in keys):
            continue  # what another module computed
        said = f"{'the gradient of the output' if kind != 'input' else 'input'}{slot_text(slot)} of {name or 'the model'}"
        found = _group(comparison, keys, held) if kind == "input" else _output_group(comparison, keys, held, outside)
        if isinstance(found, str):
            kept[said] = found
            continue
        for key, parts in found.parts.items():
            _add(comparison, key, found.recipe, parts, seed, files)
        made[said] = found.recipe.text
    if not made:
        raise OracleError(
            "no input of the model can be generated" + "".join(f"; {said}: {why}" for said, why in list(kept.items())[:4]),
            hint='a plan says where inputs lie: [[activation]] module = "", input = { dp = 0 }',
        )
    if isinstance(comparison.candidate, Mapped):
        files["candidate"] = comparison.candidate.own(files["candidate"])
    _write(folder, files)
    return [f"{said} is generated: {how}" for said, how in made.items()] + [
        f"{said} is the program's own: {why}" for said, why in kept.items() if said not in made
    ]


def _differentiated(reference: Reference, key: Key) -> bool:
    """Whether the reference has a gradient of an input."""
    step, call, _, name, slot = key
    return any(slot in slots_in(s) for s in reference.slots.get((step, call, "grad_input", name), ()))


def _add(comparison: Comparison, key: Key, recipe: Recipe, parts: Sequence[_Part], seed: int, files: Mapping[str, Files]) -> None:
    """Draw one tensor, and give each rank its part."""
    step, call, kind, name, slot = key
    reference = comparison.reference
    entry = reference.entries[key]
    full = drawn(recipe, entry, seed, _first_equal(reference, key) if kind == "input" else key)
    for rank in _holders(reference, key, entry):
        at = call + reference.ranks[rank].dry.get(step, 0)
        files["reference"][rank][key_of(step, kind, name, slot, at)] = full.clone()
    scale = comparison.assembler.gradient_scale if kind != "input" else 1
    for piece, places in parts:
        own = piece.entry
        at = own.call + comparison.ranks[piece.rank].dry.get(step, 0)
        values = full[np.ix_(*places)] if places else full
        files["candidate"][piece.rank][key_of(step, kind, own.name, own.slot, at)] = (values * scale).to(full.dtype).contiguous().clone()


def _first_equal(reference: Reference, key: Key) -> Key:
    """The first input of the same call that holds the same: what is passed in twice, as tokens that are labels too, stays equal."""
    step, call, kind, name, _ = key
    mine = reference.entries[key]
    for slot in reference.slots[step, call, kind, name]:
        other = reference.entries[step, call, kind, name, slot]
        if other.dtype == mine.dtype and np.array_equal(reference.array(other), reference.array(mine)):
            return step, call, kind, name, slot
    return key


def _called_from_outside(reference: Reference) -> set[str]:
    """Modules that no module of the model called."""
    names = {k[3] for k in reference.entries if k[2] == "input" and k[0] == 0}
    return {n for n in names if not any(a in names for a in _ancestors(n))}


def _ancestors(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:i]) for i in range(len(parts))] if name else []


def _holders(reference: Reference, key: Key, entry: Entry) -> list[int]:
    """Ranks of the reference that get a tensor: one, but in a pipeline."""
    values = reference.array(entry).tobytes()
    return [
        rank
        for rank, record in reference.ranks.items()
        if any((e.step, e.call, e.kind, e.name, e.slot) == key and record.array(e).tobytes() == values for e in record.entries)
    ]


def _group(comparison: Comparison, keys: Sequence[Key], held: Mapping[Key, Sequence[Piece]]) -> _Group | str:
    """How an input is drawn and where ranks hold it; why it is not."""
    reference = comparison.reference
    recipe: Recipe | None = None
    for key in keys:
        one = recipe_of(reference, key, reference.entries[key])
        if isinstance(one, str):
            return one
        recipe = one if recipe is None else recipe._replace(rows=min(recipe.rows, one.rows))
    assert recipe is not None
    if _calls_alike(comparison, keys):
        return "two microbatches have the same, so the data do not tell which a rank has"
    parts: dict[Key, list[_Part]] = {}
    for key in keys:
        found = _parts(comparison, key, held.get(key, ()))
        if isinstance(found, str):
            return found
        parts[key] = found
    placed = {id(p.piece.entry) for found in parts.values() for p in found}
    slots = {p.piece.entry.slot for found in parts.values() for p in found}
    for rank, name in comparison.names_of(keys[0][3]).items():
        for e in comparison.ranks[rank].entries:
            mine = (e.step, e.kind, e.name) == (keys[0][0], "input", name) and e.slot in slots and not e.recompute
            if mine and id(e) not in placed and not _computed(comparison, rank, e):
                return f"that of rank {rank} in call {e.call} is no part of the reference's"
    return _Group(recipe, parts)


def _parts(comparison: Comparison, key: Key, pieces: Sequence[Piece]) -> list[_Part] | str:
    """Where ranks hold an input; why not, where that is not known of all of them.

    Data are copied, not computed: a part is where the rank's values are bit for bit.
    """
    target = comparison.reference.entries[key]
    theirs = comparison.reference.array(target)
    found: list[_Part] = []
    covered = np.zeros(target.shape, bool)
    if comparison.plan is not None and comparison.plan.activation_order(key[3], key[2], key[4]) is not None:
        return "a plan says that its dimensions are in another order"
    for piece in pieces:
        own, places = piece.entry, piece.places
        mine = comparison.assembler.values(piece)
        if places is None or own.dtype != target.dtype or not np.array_equal(mine, take(theirs, places)):
            if _computed(comparison, piece.rank, own):
                continue  # a later stage of a pipeline, which is called like the model
            return f"that of rank {piece.rank} is no part of the reference's"
        if piece.kept is not None:
            return f"that of rank {piece.rank} is padded"
        if own.shape != target.shape and not piece.firm and piece.label != LIKE_NEIGHBOURS:
            return f"the data do not tell which part of it rank {piece.rank} has"
        found.append(_Part(piece, places))
        covered[np.ix_(*places)] = True
    if not covered.all():
        return "not all of it is found on the ranks"
    return found


def _computed(comparison: Comparison, rank: int, own: Entry) -> bool:
    """Whether a gradient came back through an input."""
    place = (own.step, own.call, "grad_input", own.name)
    back = (e.slot for e in comparison.ranks[rank].entries if (e.step, e.call, e.kind, e.name) == place)
    return is_floating(own.dtype) and any(own.slot in slots_in(s) for s in back)


def _calls_alike(comparison: Comparison, keys: Sequence[Key]) -> bool:
    """Whether ranks share out microbatches of which two have the same input: content does not tell whose they are."""
    if all(calls.ratio <= 1 for calls in comparison.assembler.calls.values()):
        return False
    reference = comparison.reference
    return len({reference.array(reference.entries[k]).tobytes() for k in keys}) < len(keys)


def _output_group(
    comparison: Comparison, keys: Sequence[Key], held: Mapping[Key, Sequence[Piece]], outside: set[str]
) -> _Group | str:
    """Where ranks hold the gradient of an output: where they hold the output, whose values tell."""
    parts: dict[Key, list[_Part]] = {}
    for key in keys:
        if len(outside) > 1 or math.prod(comparison.reference.entries[key].shape) < 2:
            return "it is a number, or belongs to one of several models"
        if not comparison.reference.floats(comparison.reference.entries[key]).any():
            return "it is zero, so by how much ranks scale it is not known"
        found = _output_parts(comparison, key, held.get(key, ()))
        if isinstance(found, str):
            return found
        parts[key] = found
    return _Group(Recipe("normal, of order one"), parts)


def _output_parts(comparison: Comparison, key: Key, pieces: Sequence[Piece]) -> list[_Part] | str:
    step, call, _, name, slot = key
    place = (step, call, "output", name, slots_in(slot)[0])
    target = comparison.reference.entries.get(place)
    merged = comparison.assembler.merge(place) if target is not None else None
    if target is None or merged is None or merged.full is None or not pieces:
        return "where the output lies is not known"
    theirs = comparison.reference.floats(target)
    found: list[_Part] = []
    covered = np.zeros(target.shape, bool)
    for piece in merged.pieces:
        if piece.label == PARTIAL or piece.addend or piece.places is None:
            return "ranks hold partial sums of the output"
        if piece.kept is not None:
            return f"that of rank {piece.rank} is padded"
        mine = as_float(comparison.assembler.values(piece), piece.entry.dtype)
        part = take(theirs, piece.places)
        if near(mine, part):
            found.append(_Part(piece, piece.places))
            covered[np.ix_(*piece.places)] = True
    have = {(p.piece.rank, p.piece.entry.call) for p in found}
    shapes = {target.shape, *(p.piece.entry.shape for p in found)}  # others come out of earlier stages of a pipeline
    lost = [p for p in pieces if (p.rank, p.entry.call) not in have and p.entry.shape in shapes]
    return found if covered.all() and not lost else "not all of it is found on the ranks"


def _write(folder: Path, files: Mapping[str, Files]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for side, ranks in files.items():
        try:
            (folder / side).mkdir(parents=True)
            for rank, tensors in ranks.items():
                save_file(tensors, str(folder / side / f"rank{rank}.safetensors"))
        except (OSError, SafetensorError) as e:
            raise OracleError(f"{folder / side}: cannot be written: {e}") from None
