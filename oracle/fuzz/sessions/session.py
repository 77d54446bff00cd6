"""One invocation of a campaign: workers, budget, journal, confirmation, Ctrl-C, resume.

A worker is a process forked from this one once it is warm; worker w of W runs the pairs of models w, w + W, … and writes its own journal. It hears of the others' findings
before each pair (`search/board.py`). The parent shows progress and merges findings by signature.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import msgspec

from proctor.errors import ProctorError
from proctor.oracle.fuzz.keras import catalogue
from proctor.oracle.fuzz.keras.client import START_S, Server
from proctor.oracle.fuzz.keras.runner import KerasRunner
from proctor.oracle.fuzz.running.child import STOPS
from proctor.oracle.fuzz.running.evaluate import Runner
from proctor.oracle.fuzz.running.worlds import Worlds, undisturbed
from proctor.oracle.fuzz.search.board import CLAIMS, Board
from proctor.oracle.fuzz.search.campaign import INPUTS, Campaign, Pair, Runs, following
from proctor.oracle.fuzz.search.findings import Finding, Known
from proctor.oracle.fuzz.sessions.confirm import confirm
from proctor.oracle.fuzz.sessions.journal import Asked, Journal
from proctor.oracle.fuzz.sessions.script import script_of
from proctor.oracle.fuzz.space import Point

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
    if not confirmed(journal, asked, tell):
        return True
    shutil.rmtree(journal.path / CLAIMS, ignore_errors=True)  # of workers that are gone

    def work(worker: int) -> bool:
        board = Board(journal.path, str(worker)) if asked.workers > 1 else None
        numbers = _numbers(journal, worker, asked.workers, limits.pairs)
        return worked(Share(journal, asked, known, limits.timeout_s, end, held(journal), worker, board), numbers, tell, prepare)

    if asked.workers == 1:
        return work(0)
    with undisturbed():
        children = [_forked(work, w) for w in range(asked.workers)]
    return _waited(children)


def confirmed(journal: Journal, asked: Asked, tell: Tell) -> bool:
    """Confirm findings whose scripts were interrupted; False if this is, too."""
    try:
        for finding in journal.findings():
            if not finding.confirmed:
                _confirmed(finding, journal, asked, tell)
    except KeyboardInterrupt:
        return False
    return True


@dataclass(frozen=True)
class Share:
    """What one process does of a campaign.

    Attributes:
        journal, asked, known: of the campaign.
        timeout_s: of one scenario.
        end: when it ends (monotonic).
        held: settings that were run.
        worker: number of its journal.
        board: by which it hears of other workers; None where there are none.
        given: findings besides those that lie in the directory.
    """

    journal: Journal
    asked: Asked
    known: list[Known]
    timeout_s: float
    end: float
    held: tuple[Point, ...] = ()
    worker: int = 0
    board: Board | None = None
    given: tuple[Finding, ...] = ()


def worked(share: Share, numbers: Iterable[int], tell: Tell, prepare: Callable[[], None] | None = None) -> bool:
    """Run pairs and write them down; returns whether it was interrupted.

    Args:
        share: of a campaign.
        numbers: of pairs, as many as there is time for.
        tell: takes lines.
        prepare: called in each rank.
    """
    asked, journal = share.asked, share.journal
    given = {f.id: f for f in (*share.given, *journal.findings())}
    with _runner(asked, share.timeout_s, prepare) as runner:
        campaign = Campaign(runner, asked.seed, share.known, libraries=asked.libraries, rows=asked.rows, models=asked.models, axes=asked.axes, board=share.board)
        campaign.findings.update(given)
        for setting in share.held:
            campaign.cover.hold(setting)
        ours = []
        try:
            for found in _pairs(campaign, numbers, share.end):
                if isinstance(found, Finding):
                    ours.append(found)
                    _confirmed(found, journal, asked, tell)
                else:
                    journal.add(share.worker, found)
                    tell(_progress(campaign, found, share.end))
        except KeyboardInterrupt:
            return True
        finally:
            for finding in ours:
                _counted(finding, journal)
    return False


@contextmanager
def _runner(asked: Asked, timeout_s: float, prepare: Callable[[], None] | None) -> Iterator[Runs]:
    """What runs scenarios of the libraries that are asked for."""
    if "keras" in asked.libraries:
        with Server(asked.python, timeout_s) as server:
            catalogue.use(server.catalogue())
            yield KerasRunner(server)
    else:
        with Worlds(timeout_s=timeout_s, prepare=prepare) as worlds:
            yield Runner(worlds)


def held(journal: Journal) -> tuple[Point, ...]:
    """Settings that the journal holds."""
    return tuple(row.setting for _, pair in journal.pairs() for row in pair.rows)


def _pairs(campaign: Campaign, numbers: Iterable[int], end: float) -> Iterator[Finding | Pair]:
    for number in numbers:
        if time.monotonic() >= end:
            break
        yield from campaign.pair(number, until=end)
    yield from campaign.ended(end)


def _numbers(journal: Journal, worker: int, workers: int, most: int | None) -> Iterator[int]:
    """Pairs of a worker that come after those that the journal holds of it."""
    number = worker * INPUTS
    for w, pair in journal.pairs():
        if w == worker:
            number = max(number, following(pair.number, workers))
    while most is None or number < most:
        yield number
        number = following(number, workers)


def _confirmed(finding: Finding, journal: Journal, asked: Asked, tell: Tell) -> None:
    script = journal.put(finding, script_of(finding, heading(asked)), "")
    hangs = finding.outcome.verdict == "hang"
    raised = finding.outcome.symptom.what if finding.outcome.trace and finding.outcome.symptom is not None and not hangs else ""
    finding.confirmed, output = confirm(script, raises=raised, compares=finding.outcome.first is not None, hangs=hangs, python=asked.python)
    journal.put(finding, script.read_text(), output)
    mark = "known" if finding.known else "new" if finding.confirmed == "yes" else "not confirmed"
    tell(f"{mark} {finding.id}: {setting_words(finding)}: {finding.outcome.why[:200]}")


def heading(asked: Asked) -> str:
    """Versions, as a script names them."""
    if "keras" in asked.versions:
        return ", ".join(f"{name} {asked.versions[name]}" for name in ("keras", "tensorflow"))
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


def _forked(work: Callable[[int], bool], worker: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPS)
        code = 130 if work(worker) else 0
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


def versions(libraries: tuple[str, ...], python: str = "") -> dict[str, str]:
    """Versions of the libraries, as their packages say, or the interpreter that has them.

    Raises:
        OracleError: the interpreter has no Keras.
    """
    from importlib import metadata

    found: dict[str, str] = {}
    if "keras" in libraries:
        with Server(python, START_S) as server:
            found = dict(server.catalogue().versions)
    for library in dict.fromkeys(("torch", *libraries)):
        if library in found:
            continue
        try:
            found[library] = metadata.version(_PACKAGES.get(library, library))
        except metadata.PackageNotFoundError:
            found[library] = ""
    return found
