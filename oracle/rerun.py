"""The candidate once more, with the choices of the reference, where its own fell out otherwise.

What comes after a choice near a tie is another computation, and no rounding. With the same choices on both sides everything
can be compared again, and each choice follows from right ones before it. See `choices.py`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

from proctor.errors import OracleError
from proctor.oracle.check import Comparison
from proctor.oracle.choices import digest_of, write_choices
from proctor.oracle.plan import Plan
from proctor.oracle.record import Recorder
from proctor.oracle.store import REPLAYED, Recording, write_json
from proctor.oracle.uncompiled import compiles


def replay_choices(
    reference: Recording, candidate: Recording, plan: Plan | None, command: Sequence[str], *, timeout_s: float = 3600.0
) -> bool:
    """Give a candidate's recording a run `replayed`, if it chose anything else than the reference.

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
    if compiles(candidate) or not any(e.kind == "choice" for record in reference.ranks().values() for e in record.entries):
        return False  # compiled code chooses where nobody sees it
    try:
        comparison = Comparison(reference, candidate, plan)
    except OracleError:
        return False  # whoever compares them says why
    if comparison.prepare() is not None or comparison.choices.replayed or not comparison.choices.differ():
        return False
    folder = candidate.path / "choices"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        if not write_choices(comparison.choices, folder):
            return False
        again = Recorder.again(candidate, command, timeout_s=timeout_s)
        again.once(REPLAYED, decisions=str(folder.resolve()), generate=candidate.info.generate)
        candidate.info.replayed = digest_of(comparison.reference)
        write_json(candidate.path / "oracle.json", candidate.info)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return True
