"""Asks the oracle where the two programs of an inconsistent finding part: in which module, which direction, which operation.

Called by the command at the end of a campaign, for what its script has confirmed. Beside the script stand then `programs.py`, which makes its two programs functions, and `oracle.html`,
the report of `proctor oracle run` on them. What it says is evidence beside the script's: a finding does not depend on it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from proctor.oracle.fuzz.axes import ALONE, wrappers
from proctor.oracle.fuzz.program import first_of
from proctor.oracle.fuzz.running.worlds import end_process
from proctor.oracle.fuzz.search.findings import Finding, library_of
from proctor.oracle.fuzz.sessions.journal import Journal
from proctor.oracle.recording.ranks import MODULE

TIMEOUT_S: Final = 240.0  # recording, six runs of a program of milliseconds, and the search take 15 to 60 s
_PROGRAMS: Final = '''"""The two programs of `script.py` as functions of one process and of a rank, for `proctor oracle run`."""

import torch.distributed as dist
from script import train


def reference():
    for _ in train(0, 0):
        pass


def candidate():
    if not dist.is_initialized():  # one rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in train(dist.get_rank(), dist.get_world_size()):
        pass
'''


def locate(journal: Journal, tell: Callable[[str], None]) -> None:
    """Ask for every finding that is new, confirmed and of tensors that differ, and write the answers down.

    Args:
        journal: of the campaign.
        tell: takes one line for each answer.
    """
    for finding in journal.findings():
        if finding.confirmed == "yes" and not finding.known and not finding.culprit:
            folder = journal.path / "findings" / finding.id
            finding.culprit = culprit_of(finding, folder / "script.py")
            if finding.culprit:
                journal.put(finding, (folder / "script.py").read_text(), (folder / "output.txt").read_text())
                tell(f"{finding.id}: {finding.culprit}")


def culprit_of(finding: Finding, script: Path, timeout_s: float = TIMEOUT_S) -> str:
    """Run the oracle on a finding's programs.

    Args:
        finding: confirmed, of tensors that differ.
        script: of the finding, in a folder of its own.
        timeout_s: for all of it.

    Returns:
        what it says in a sentence; why it says nothing, where it does not. "" where it is not asked: of exceptions, hangs, programs that save on disk, libraries that are not torch, and wrappers under which it finds no parameters (`Wrapper.named`).
    """
    first = finding.outcome.first
    setting = finding.scenario.setting
    if first is None or library_of(finding) in ALONE or {"disk", "ds_state"} & set(setting) or first_of(finding.scenario) is not None:
        return ""
    if "wrapper" in setting and not wrappers()[str(setting["wrapper"])].named:
        return ""
    script = script.resolve()  # the oracle runs in its folder
    (script.parent / "programs.py").write_text(_PROGRAMS)
    with tempfile.TemporaryDirectory(prefix="proctor-culprit-") as cache:
        programs = ["--reference", _command(script.parent, "reference", 1), "--candidate", _command(script.parent, "candidate", finding.scenario.world)]
        steps = max(1, first.step) if first.kind == "evaluation" else first.step + 1  # the evaluation comes behind the last step
        more = ["--steps", str(steps), "--cache", cache, "--timeout", f"{timeout_s / 4:.0f}", "--format", "json", "--html", str(script.parent / "oracle.html")]
        words = [sys.executable, "-m", "proctor.cli", "oracle", "run", *programs, *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, start_new_session=True, cwd=script.parent) as process:
            try:
                said, complained = process.communicate(timeout=timeout_s)
            except BaseException as e:
                ended(process)
                if isinstance(e, subprocess.TimeoutExpired):
                    return f"the oracle did not answer within {timeout_s:.0f} s"
                raise
    try:
        return sentence(msgspec.json.decode(said))
    except (msgspec.DecodeError, TypeError, KeyError):
        return f"the oracle says nothing: {(complained.decode(errors='replace').strip().splitlines() or ['no reason'])[-1][:300]}"


def ended(process: subprocess.Popen[bytes]) -> None:
    """Kill the oracle and what it started: its recordings have sessions of their own, and would go on writing into a folder that is gone."""
    with suppress(OSError):
        os.kill(process.pid, signal.SIGSTOP)  # it starts no other one meanwhile
    for pid in (*_below(process.pid), process.pid):
        end_process(pid)
    process.communicate()


def _below(pid: int) -> list[int]:
    """Processes that one started, and those that they started."""
    found: list[int] = []
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            for child in map(int, file.read_text().split()):
                found += [child, *_below(child)]
    return found


def _command(folder: Path, function: str, ranks: int) -> str:
    path = folder.resolve()
    more = msgspec.json.encode({"module": "programs", "path": [str(path)]}).decode()
    return shlex.join([sys.executable, "-m", MODULE, str(ranks), f"{path / 'programs.py'}::{function}", more])


def sentence(report: Mapping[str, Any]) -> str:
    """The culprit of a report of `proctor oracle run --format json`, in a sentence.

    Args:
        report: decoded. Read are `verdict`, `reason`, `culprit` and `first`.
    """
    culprit, first = report.get("culprit"), report.get("first")
    if report["verdict"] != "different":
        return f"the oracle finds them {report['verdict']}: {report['reason']}"[:300]
    if culprit:
        place = " ".join(filter(None, [culprit["module"] or "the whole model", f"({culprit['direction']})", culprit["operation"], culprit["source"]]))
        return f"the oracle: {place}: {culprit['text']}"[:500]
    where = f", first in {first['kind']} {first['name']} ({first['class']}): {first['note']}" if first else ""
    return f"the oracle: {report['reason']}{where}"[:500]
