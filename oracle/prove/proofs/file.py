"""A proof as a file: both sides' tapes, which element is which, and where names are. Whoever has it can check it again.

A zip of `proof.json` and one tape a rank. The check runs the tapes in polynomials with the names that the file lists, and compares
the outputs: it needs no field, no search and no luck, and believes nothing that the file says of its own verdict.
"""

from __future__ import annotations

import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from proctor.errors import OracleError
from proctor.invariants.files import open_file
from proctor.oracle.prove import judge
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.leaves import Alignment
from proctor.oracle.prove.machine import Stuck
from proctor.oracle.prove.proofs import Proof, replayed
from proctor.oracle.prove.tape import Tape, read, write
from proctor.oracle.prove.verdict import Verdict

SCHEMA = 3
_MOST_RANKS = 1 << 16
_MOST_BYTES = 4 << 30


class _Placed(msgspec.Struct):
    rank: int
    name: str
    of: str
    index: list[int]


class _Document(msgspec.Struct):
    schema: int
    ranks: int
    placed: list[_Placed]
    merged: list[str]
    cuts: dict[str, str]
    lemmas: dict[str, list[list[int]]]
    local: bool
    verdict: Verdict


def save(path: Path, verdict: Verdict, reference: Tape, candidate: Sequence[Tape], alignment: Alignment) -> None:
    """Write a proof.

    Args:
        verdict: PROVED; its `cuts` are the proof.

    Raises:
        OracleError: it is another verdict, or the file cannot be written.
    """
    if verdict.verdict != "PROVED":
        raise OracleError(f"{path}: nothing was proved ({verdict.verdict})", hint="there is no proof to write")
    placed = [_Placed(rank, name, alignment.of[rank, name], index.tolist()) for (rank, name), index in alignment.index.items()]
    said = msgspec.structs.replace(verdict, cuts={}, lemmas={})
    document = _Document(SCHEMA, len(candidate), placed, sorted(alignment.merged), verdict.cuts, verdict.lemmas, verdict.local, said)
    try:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, tempfile.TemporaryDirectory() as folder:
            archive.writestr("proof.json", msgspec.json.encode(document))
            for name, tape in (("reference", reference), *((f"rank{tape.rank}", tape) for tape in candidate)):
                write(tape, Path(folder) / f"{name}.tape")
                archive.write(Path(folder) / f"{name}.tape", f"{name}.tape")
    except OSError as error:
        raise OracleError(f"{path}: cannot be written: {error.strerror or error}") from None


def check(path: Path, *, terms: int = 2_000_000) -> Verdict:
    """Verify a proof again.

    Args:
        terms: of polynomials that may be stored, some hundred bytes each; a proof that was found needs far fewer.

    Returns:
        PROVED when all outputs of the file's tapes are the same formulas; else UNPROVED.

    Raises:
        OracleError: the file is no proof, or damaged.
    """
    document, reference, candidate = _read(path)
    alignment = Alignment(
        {(p.rank, p.name): np.array(p.index, np.int64) for p in document.placed}, {(p.rank, p.name): p.of for p in document.placed}, set(document.merged)
    )
    verdict = Verdict("UNPROVED", ranks=len(candidate), assumed=document.verdict.assumed, operations=sum(len(t.nodes) for t in (reference, *candidate)))
    try:
        _fits(path, reference, candidate, alignment)
        doubles = judge.Runs.of(F64(), reference, candidate, alignment)
        verdict.outputs = sum(1 for _ in doubles.pairs(alignment))
        missing = judge.not_covered(reference, doubles, alignment)
        found = replayed(reference, candidate, alignment, Proof(cuts=document.cuts, lemmas=document.lemmas, local=document.local), terms)
    except (Stuck, IndexError, KeyError, ValueError, TypeError, AttributeError, AssertionError, ArithmeticError, MemoryError, RecursionError, StopIteration, NotImplementedError) as error:
        raise OracleError(f"{path}: the proof does not run: {type(error).__name__}: {str(error)[:150]}") from None
    if found.why or found.open or missing or not verdict.outputs:
        what = found.why or (f"{found.open[0][0]} {found.open[0][1]} of rank {found.open[0][2]} is not the same formula" if found.open else f"no rank has all of {missing[0]}" if missing else "it has no outputs")
        verdict.why = f"the file is no proof: {what}"
    else:
        verdict.verdict = "PROVED"
        verdict.why = f"checked again: all {verdict.outputs} outputs are the same formulas ({found.polynomials} polynomials in {found.atoms} atoms)"
    return verdict


def _read(path: Path) -> tuple[_Document, Tape, list[Tape]]:
    try:
        with open_file(path) as file, zipfile.ZipFile(file) as archive, tempfile.TemporaryDirectory() as folder:
            if sum(entry.file_size for entry in archive.infolist()) > _MOST_BYTES:
                raise OracleError(f"{path}: more than {_MOST_BYTES >> 30} GiB")
            document = msgspec.json.decode(archive.read("proof.json"), type=_Document)
            if document.schema != SCHEMA or not 0 < document.ranks <= _MOST_RANKS:
                raise OracleError(f"{path}: schema {document.schema}, this Proctor reads {SCHEMA}")
            tapes = []
            for name in ("reference", *(f"rank{r}" for r in range(document.ranks))):
                part = Path(folder) / f"{name}.tape"
                part.write_bytes(archive.read(f"{name}.tape"))
                try:
                    tapes.append(read(part))
                except OracleError as error:
                    raise OracleError(f"{path}: {name}.tape: {str(error).partition('.tape: ')[2]}") from None
            return document, tapes[0], tapes[1:]
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, NotImplementedError, RuntimeError, msgspec.MsgspecError) as error:
        raise OracleError(f"{path}: is no proof: {str(error)[:150]}") from None


def _fits(path: Path, reference: Tape, candidate: Sequence[Tape], alignment: Alignment) -> None:
    """The file's own claim of which element is which must agree with the values that both sides began with."""
    from proctor.oracle.prove.leaves import content

    there = judge.starting_values(reference)
    for (rank, name), index in alignment.index.items():
        held = next(h for h in candidate[rank].held if h.name == name)
        values, whole = content(candidate[rank], held.window), there.get(alignment.of[rank, name])
        if values is None or whole is None or index.size != values.size:
            raise OracleError(f"{path}: {name} of rank {rank} is not placed")
        if not np.array_equal(np.where(index >= 0, whole[np.maximum(index, 0)], 0.0), values):
            raise OracleError(f"{path}: {name} of rank {rank} does not hold what the file says")
