"""What a candidate is given with `--rng keyed` and `--rng stock`: what the reference drew, and how its own tensors lie in the reference's.

Where `[[draw]]` rules of a plan say how draws lie, that is all. Else both sides run once more with nothing dropped, which tells where
everything lies that crosses an edge of a module, and how a drawn tensor lies follows from that (`collect/lies`).
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from proctor.errors import OracleError
from proctor.oracle.judging.check import Comparison
from proctor.oracle.merging.assemble import ACTIVATIONS
from proctor.oracle.plans.plan import Plan
from proctor.oracle.store import CLEAN, PLACED, Recording, draws

if TYPE_CHECKING:
    from proctor.oracle.recording.record import Recorder


def keep_drawn(recording: Path, run: str) -> bool:
    """Keep what a reference drew in a run beside its recording, for its other runs; whether it drew anything."""
    shutil.rmtree(recording / draws.FOLDER, ignore_errors=True)
    found: draws.Drawns = {}
    for path in sorted((recording / "runs" / run).glob(f"rank*/{draws.DRAWN}")):
        found = {**draws.read(path, draws.Drawns), **found}
    draws.write(recording / draws.FOLDER / draws.DRAWN, found)
    return bool(found)


def give_drawn(recorder: Recorder, reference: Recording) -> bool:
    """Give a candidate that is to be recorded what the reference drew.

    Args:
        recorder: of the candidate, before its first run.
        reference: recorded alike.

    Returns:
        whether it is to be recorded; else it has been, and begins with other parameters than the reference.

    Raises:
        OracleError: the reference was recorded otherwise, or the candidate's command failed.
    """
    source = reference.path / draws.FOLDER / draws.DRAWN
    if not source.is_file():
        raise OracleError(f"{reference.path}: was not recorded with --rng", hint="record both alike")
    folder = recorder.out / draws.FOLDER
    shutil.rmtree(folder, ignore_errors=True)
    drawn = draws.read(source, draws.Drawns)
    plan = Plan.from_json(recorder.info.plan) if recorder.info.plan else None
    if drawn and not (plan is not None and plan.draws):
        ranks = recorder.once(CLEAN, dropout="place")
        if len(ranks) > 1:
            comparison = Comparison(reference, Recording(recorder.out), plan, run=CLEAN, theirs=PLACED)
            if comparison.prepare() is not None:
                return False
            _write_lies(comparison, folder)
    draws.write(folder / draws.DRAWN, drawn)
    return True


def _write_lies(comparison: Comparison, folder: Path) -> None:
    """How each rank's tensors lie in those of the reference."""
    found = {rank: draws.Lies() for rank in comparison.ranks}
    assembler, reference = comparison.assembler, comparison.reference
    theirs = reference.ranks[min(reference.ranks)].dry
    for key in reference.order:
        step, call, kind, module, _ = key
        if kind not in (*ACTIVATIONS, "dropped"):
            continue
        target = reference.entries[key]
        for rank, entry in assembler.pieces.get(key, ()):
            lies = found[rank]
            lies.names[entry.name] = module
            mine = entry.call + assembler.ranks[rank].dry.get(step, 0)
            lies.calls.setdefault(f"{step}/{module}", {})[mine] = call + theirs.get(step, 0)
            piece = assembler.place(rank, entry, key, target)
            if piece.places is None or not piece.firm or piece.kept is not None or len(entry.shape) != len(target.shape):
                continue
            for dim, held in enumerate(piece.places):
                if len(held) < target.shape[dim]:
                    extent = draws.Extent(dim, target.shape[dim], np.ascontiguousarray(held, np.int64).tobytes())
                    known = lies.extents.setdefault(f"{step}/{module}", [])
                    if extent not in known:
                        known.append(extent)
    for rank, lies in found.items():
        draws.write(folder / f"rank{rank}.msgpack", lies)
