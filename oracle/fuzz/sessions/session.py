"""One invocation of a campaign: workers, budget, journal, confirmation, Ctrl-C, resume.

A worker is a process forked from this one once it is warm; worker w of W runs the pairs of models w, w + W, … and writes its own journal. The
parent shows progress and merges findings by signature.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Final

import msgspec

from proctor.errors import ProctorError
from proctor.oracle.fuzz.running.child import STOPS
from proctor.oracle.fuzz.running.evaluate import Runner
from proctor.oracle.fuzz.running.worlds import Worlds, undisturbed
from proctor.oracle.fuzz.search.campaign import INPUTS, Campaign, Pair, following
from proctor.oracle.fuzz.search.findings import Finding, Known
from proctor.oracle.fuzz.sessions.confirm import confirm
from proctor.oracle.fuzz.sessions.journal import Asked, Journal
from proctor.oracle.fuzz.sessions.script import script_of

_POLL_S: Final = 0.2
_PACKAGES: Final = {"megatron": "megatron-core"}  # where the name of the package is another


class Limits(msgspec.Struct, frozen=True):
    """When a campaign ends.

    Attributes:
        budget_s: of this invocation.
        pairs: of the whole campaign; None for as many as the budget allows.
        timeout_s: of one scenario.
    """

    budget_s: float
    pairs: int | None = None
    timeout_s: float = 20.0


Tell = Callable[[str], None]


def run(journal: Journal, asked: Asked, limits: Limits, known: list[Known], tell: Tell, prepare: Callable[[], None] | None = None) -> bool:
    """Run until the budget is spent; returns whether it was interrupted.

    Args:
        journal: of the campaign; what it holds is not done again.
        asked: of the campaign.
        limits: of this invocation.
        known: findings that are known.
        tell: takes one line for each new finding and now and then one on progress.
        prepare: called in each rank (a mutation of the library, in the self-test).
    """
    end = time.monotonic() + limits.budget_s
    try:
        for finding in journal.findings():
            if not finding.confirmed:  # it was interrupted there
                _confirmed(finding, journal, asked, tell)
    except KeyboardInterrupt:
        return True
    if asked.workers == 1:
        return _work(0, journal, asked, limits, known, tell, prepare, end)
    with undisturbed():
        children = [_forked(w, journal, asked, limits, known, tell, prepare, end) for w in range(asked.workers)]
    return _waited(children)


def _work(
    worker: int, journal: Journal, asked: Asked, limits: Limits, known: list[Known], tell: Tell, prepare: Callable[[], None] | None, end: float
) -> bool:
    with Worlds(timeout_s=limits.timeout_s, prepare=prepare) as worlds:
        campaign = Campaign(Runner(worlds), asked.seed, known, libraries=asked.libraries, rows=asked.rows, models=asked.models, axes=asked.axes)
        number = _restored(campaign, journal, worker, asked.workers)
        try:
            while time.monotonic() < end and (limits.pairs is None or number < limits.pairs):
                for found in campaign.pair(number, until=end):
                    if isinstance(found, Finding):
                        _confirmed(found, journal, asked, tell)
                    else:
                        journal.add(worker, found)
                        tell(_progress(campaign, found, end))
                number = following(number, asked.workers)
        except KeyboardInterrupt:
            return True
        finally:
            for finding in campaign.findings.values():
                _counted(finding, journal)
    return False


def _restored(campaign: Campaign, journal: Journal, worker: int, workers: int) -> int:
    """Take up what the journal holds; returns the next pair's number."""
    number = worker * INPUTS
    for w, pair in journal.pairs():
        if w == worker:
            number = max(number, following(pair.number, workers))
        for row in pair.rows:
            campaign.cover.hold(row.setting)
    for finding in journal.findings():
        campaign.findings[finding.id] = finding
    return number


def _confirmed(finding: Finding, journal: Journal, asked: Asked, tell: Tell) -> None:
    script = journal.put(finding, script_of(finding, _heading(asked)), "")
    finding.confirmed, output = confirm(script, raises=finding.outcome.symptom.what if finding.outcome.trace and finding.outcome.symptom is not None else "")
    journal.put(finding, script.read_text(), output)
    mark = "known" if finding.known else "new" if finding.confirmed == "yes" else "not confirmed"
    tell(f"{mark} {finding.id}: {setting_words(finding)}: {finding.outcome.why[:200]}")


def _heading(asked: Asked) -> str:
    more = "".join(f", {name} {version}" for name, version in asked.versions.items() if name != "torch")
    return asked.versions["torch"] + more


def setting_words(finding: Finding) -> str:
    """A trigger set in words."""
    words = " ".join(f"{k}={v}" for k, v in finding.triggers.items()) or "any setting"
    return words + (f" with {', '.join(finding.needs)}" if finding.needs else "")


def _counted(finding: Finding, journal: Journal) -> None:
    folder = journal.path / "findings" / finding.id
    if (folder / "script.py").exists():
        output = (folder / "output.txt").read_text() if (folder / "output.txt").exists() else ""
        journal.put(finding, (folder / "script.py").read_text(), output)


def _progress(campaign: Campaign, pair: Pair, end: float) -> str:
    left = max(0, int(end - time.monotonic()))
    new = sum(not f.known for f in campaign.findings.values())
    return f"pair {pair.number} ({pair.scenario.template}): {campaign.runner.runs:,} runs, {new} findings, {left // 60}:{left % 60:02} left"


def _forked(
    worker: int, journal: Journal, asked: Asked, limits: Limits, known: list[Known], tell: Tell, prepare: Callable[[], None] | None, end: float
) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        code = 130 if _work(worker, journal, asked, limits, known, tell, prepare, end) else 0
    except ProctorError as e:
        print(f"proctor: {e}", file=sys.stderr)
        code = e.exit_code
    except SystemExit:  # SIGTERM
        code = 143
    except BaseException:  # noqa: BLE001  the parent tells that a worker is gone
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _waited(children: list[int]) -> bool:
    """Wait for all workers; a second Ctrl-C ends them at once."""
    interrupted = False
    left = set(children)
    while left:
        try:
            for pid in list(left):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    left.discard(pid)
                    code = os.waitstatus_to_exitcode(status)
                    interrupted |= code == 130
                    if code not in (0, 130):
                        raise ProctorError(f"a worker ended with exit code {code}", hint="its pairs up to then are in the journal")
            time.sleep(_POLL_S)
        except KeyboardInterrupt:
            for pid in left if interrupted else ():
                os.kill(pid, signal.SIGTERM)
            interrupted = True
    return interrupted


def merged(journal: Journal) -> tuple[list[Finding], list[Pair]]:
    """Findings of all workers, one a signature, and all pairs in order."""
    pairs = sorted((p for _, p in journal.pairs()), key=lambda p: p.number)
    counts: dict[str, int] = {}
    for pair in pairs:
        for row in pair.rows:
            if row.finding:
                counts[row.finding] = counts.get(row.finding, 0) + 1
    findings = journal.findings()
    for finding in findings:
        finding.count = counts.get(finding.id, finding.count)
    return sorted(findings, key=lambda f: (bool(f.known), f.confirmed != "yes", -f.count, f.id)), pairs


def versions(libraries: tuple[str, ...]) -> dict[str, str]:
    """Versions of the libraries, as their packages say."""
    from importlib import metadata

    found = {}
    for library in dict.fromkeys(("torch", *libraries)):
        try:
            found[library] = metadata.version(_PACKAGES.get(library, library))
        except metadata.PackageNotFoundError:
            found[library] = ""
    return found
