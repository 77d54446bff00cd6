"""The candidate once more, with the choices of the reference, where its own fell out otherwise, and with its masks on request.

What comes after a choice near a tie is another computation, and no rounding. With the same choices on both sides everything
can be compared again, and each choice follows from right ones before it. See `choices.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from proctor.errors import OracleError
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.choices import digest_of, write_values
from proctor.oracle.mapping.mapped import Mapped, mapped
from proctor.oracle.merging.reference import Reference
from proctor.oracle.plans.plan import Plan
from proctor.oracle.recording.fitted import fitted
from proctor.oracle.recording.masks import masks
from proctor.oracle.recording.record import Recorder
from proctor.oracle.recording.uncompiled import compiles
from proctor.oracle.store import CLEAN, PLACED, REPLAYED, Recording, write_json


def replay_decisions(
    reference: Recording, candidate: Recording, plan: Plan | None, command: Sequence[str], *, timeout_s: float = 3600.0
) -> bool:
    """Give a candidate's recording a run `replayed`, if it chose anything else than the reference, or the reference has masks.

    Args:
        reference: trusted.
        candidate: as it was recorded.
        plan: of the candidate.
        command: the candidate's.
        timeout_s: after which it is ended.

    Returns:
        whether there is something new to compare.

    Raises:
        OracleError: the command failed when it ran again.
    """
    if compiles(candidate) or not any(e.kind in ("choice", "mask") for record in reference.ranks(reference.trusted).values() for e in record.entries):
        return False  # compiled code chooses where nobody sees it
    masked = reference.info.dropout == "replay"
    try:
        held = mapped(reference, fitted(reference, candidate, plan), plan)[0]
        comparison = Comparison(reference, held, plan, run=CLEAN, theirs=PLACED if masked else "")
    except OracleError:
        return False  # whoever compares them says why
    if comparison.prepare() is not None or not (masked or comparison.choices.differ()):
        return False
    trusted = Reference(reference) if masked else comparison.reference
    found = [*comparison.choices.values(trusted), *(masks(comparison.assembler, trusted) if masked else ())]
    folder = candidate.path / "choices"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if not write_values(found, comparison.ranks, folder, *([held.own] if isinstance(held, Mapped) else [])):
            return False
        candidate.info.dropout = reference.info.dropout
        again = Recorder.again(candidate, command, timeout_s=timeout_s)
        again.once(REPLAYED, decisions=str(folder.resolve()), generate=candidate.info.generate)
        candidate.info.replayed = digest_of(trusted)
        write_json(candidate.path / "oracle.json", candidate.info)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return True
