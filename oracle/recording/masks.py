"""The reference's dropout masks, cut for the ranks of a candidate (`--dropout replay`).

A mask lies as the values that it is for, and those are placed by a run of each side in which nothing was dropped. Masks inside
fused attention and recurrent layers cannot be seen from outside: these keep everything on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from proctor.errors import OracleError
from proctor.oracle.merging.assemble import Assembler
from proctor.oracle.merging.locate import take
from proctor.oracle.merging.padding import filled
from proctor.oracle.merging.reference import Key, Reference
from proctor.oracle.tensors import key_of


def masks(assembler: Assembler, trusted: Reference, *, all_of_them: bool = True) -> Iterator[tuple[int, str, npt.NDArray[Any]]]:
    """What each rank is to keep: (rank, key, mask).

    Args:
        assembler: of the candidate, beside a run of the reference in which nothing was dropped.
        trusted: the reference's run whose masks are taken.
        all_of_them: it is an error where one has no place; else that is left out.

    Values that are wrong lie where their form lets them lie, and are found out after that. Of padding nothing is dropped.

    Raises:
        OracleError: nobody knows where something lies that is dropped.
    """
    for key in trusted.order:
        if key[2] != "mask":
            continue
        of_values: Key = (key[0], key[1], "dropped", key[3], key[4])
        if of_values not in assembler.reference.entries:
            continue
        whole = trusted.array(trusted.entries[key])
        for rank, entry in assembler.pieces.get(of_values, []):
            piece = assembler.place(rank, entry, of_values, assembler.reference.entries[of_values])
            if piece.places is None and not all_of_them:
                continue
            if piece.places is None:
                raise OracleError(
                    f"where the values lie that {key[3] or 'the model'} drops is not known, so its mask cannot be replayed", hint="--dropout keep"
                )
            call = entry.call + assembler.ranks[rank].dry.get(key[0], 0)
            yield rank, key_of(key[0], "mask", entry.name, entry.slot, call), np.ascontiguousarray(filled(np.ones(entry.shape, whole.dtype), piece.kept, take(whole, piece.places)))
