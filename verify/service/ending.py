"""The end of a watch: the report of the run, the verdict, what to do next, and the exit code.

`serve` calls it when the verifier is done. A report that cannot be written is said, and there is a verdict all the same.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime
from pathlib import Path

from proctor.errors import ProctorError
from proctor.invariants.invariant import Severity
from proctor.verify import wording
from proctor.verify.checker import exit_code
from proctor.verify.coverage import coverage
from proctor.verify.report import Report
from proctor.verify.report.beside import read_beside
from proctor.verify.report.keep import keep
from proctor.verify.service.processes import deliver_later, say
from proctor.verify.service.settings import Settings, Verdict
from proctor.verify.service.verifier import Verifier
from proctor.verify.service.whole import Summary

_NOTHING = "no rule could be judged"


def conclude(settings: Settings, summary: Summary, verifier: Verifier) -> int:
    """Write the reports of the run, the verdict, and what to do next."""
    page, unsure = "", ""
    try:
        page, unsure = _pages(settings, summary, verifier)
    except Exception as e:  # noqa: BLE001  whatever is wrong with the report, there is a verdict
        say(f"the report was not written: {type(e).__name__}: {e}  →  proctor report {settings.run}")
    steps = max(summary.judged + 1, summary.trace.steps if summary.trace is not None else 0)
    worst = summary.worst()
    verdict = Verdict(worst=worst.value if worst else None, violations=len(summary.violations), steps=steps, lost=dict(summary.lost), unsure=unsure)
    if verifier.undelivered:
        verdict.delivering = _deliver_later(settings)
    try:
        settings.give(verdict)
    except OSError as e:
        say(f"{settings.folder}: the verdict was not written: {e.strerror or e}")
    if steps:
        number = len(summary.violations)
        rules = f"{number} rule{'s' if number > 1 else ''} violated" if number else f"not clean, but unknown: {unsure}" if unsure else "no violation"
        say(f"watched {steps} steps: {rules}" + (f"; report in {page}" if page else ""))
    if verdict.fails(settings.fail_on):
        return wording.EXIT_VIOLATED
    return wording.EXIT_CLEAN if steps else wording.EXIT_INCONCLUSIVE


def _deliver_later(settings: Settings) -> int:
    """What receivers did not take goes out when they are back; says so. The id of the process that does it, 0 without one."""
    from proctor.verify.paging import read_config

    limit_s = 0.0
    with contextlib.suppress(ProctorError):
        limit_s = read_config(settings.page).job.deliver_s
    pid = deliver_later(settings, limit_s)
    if pid:
        say(f"some notices are not delivered yet; process {pid} tries for another {limit_s / 60:.0f} min  →  proctor page status --run {settings.run}")
    else:
        say(f"some notices could not be delivered; they wait in the outbox  →  proctor page flush --run {settings.run} --config {settings.page}")
    return pid


def _pages(settings: Settings, summary: Summary, verifier: Verifier) -> tuple[str, str]:
    """Write what `proctor check` writes beside a run, from what the verifier knows; where the page is, and why the run cannot be called clean."""
    if summary.result is None or summary.trace is None:
        live = summary.live
        return "", _NOTHING if live is not None and live.unknown and not live.checked else ""
    run = Path(settings.run)
    seen = coverage(summary.trace)
    fail_on = None if settings.fail_on == "never" else Severity(settings.fail_on)
    report = Report(
        result=summary.result,
        trace=summary.trace,
        info=summary.info,
        exit_code=exit_code(summary.result, fail_on, complete=seen.complete),
        packs=verifier.job.pack_names,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        missing=seen.missing,
        beside=read_beside(run),
    )
    report, trouble = keep(report, run)
    if trouble:
        say(trouble)
    return report.page, "" if report.exit_code != wording.EXIT_INCONCLUSIVE else next(iter([*seen.notes, *summary.result.notes]), _NOTHING)
