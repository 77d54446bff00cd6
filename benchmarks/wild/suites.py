"""Libraries' own tests, bare and under `proctor watch`: the same tests must pass, fail and be skipped, and no error be said.

Called by `__main__.py --suites`. A suite is an entry of `suites.toml`; its outcome is one JSON file beside the programs' results and
is not made again. All its tests run in one process, as their authors run them, so one job holds dozens of small trainings one after
the other. Of the shims only those for every program act: names of torchvision's operators, and seeds. Where bare and attached differ, it runs bare once more: a test counts as different when it ended attached as in neither.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.wild.attempt import FIXED, importable, incidents, judged
from benchmarks.wild.manifest import SHIMS
from benchmarks.wild.table import grid, write_section

ROOT: Final = Path(__file__).resolve().parents[2]
SUITES: Final = Path(__file__).parent / "suites.toml"
LONGEST_S: Final = 1200  # an arm of a suite
BEGIN, END = "<!-- suites -->", "<!-- /suites -->"


class Suite(msgspec.Struct, forbid_unknown_fields=True):
    """Some test files of a library.

    Args:
        name: unique.
        project: `owner+name`, folder of the checkout; empty: the tests lie beside `suites.toml` and are of an installed library.
        tests: files or node ids, below the checkout.
        links: folders of the checkout that are the library's packages.
        paths: folders of the checkout that are searched for modules.
        needs: packages that must be importable.
        options: more for pytest.
        environment: of the tests.
    """

    name: str
    project: str
    tests: list[str]
    links: list[str] = []
    paths: list[str] = []
    needs: list[str] = []
    options: list[str] = []
    environment: dict[str, str] = {}


class Outcome(msgspec.Struct, kw_only=True):
    """How a suite came out.

    Args:
        state: `run`, `skipped`, `does not run` or `slow` (see `why`).
        bare, again, attached: each test as `passed`, `failed`, `error` or `skipped`; `again` only where the two others differ.
        bare_s, attached_s: of the whole suite, wall clock.
        verdict: of `judge.py`, on the attached run.
        incidents: that people would have been told while it ran.
    """

    name: str
    state: str
    why: str = ""
    bare: dict[str, str] = {}
    again: dict[str, str] = {}
    attached: dict[str, str] = {}
    bare_s: float = 0
    attached_s: float = 0
    verdict: dict[str, Any] = {}
    incidents: list[dict[str, Any]] = []

    @property
    def different(self) -> list[str]:
        """Tests that ended attached as in no bare run."""
        bare = [self.bare, *([self.again] if self.again else [])]
        tests = self.attached.keys() | self.bare.keys()
        return sorted(t for t in tests if self.attached.get(t) not in [arm.get(t) for arm in bare])

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Violations of severity error or more."""
        return [v for v in self.verdict.get("violations", []) if v["severity"] in ("error", "critical")]


def read_suites(path: Path = SUITES) -> list[Suite]:
    """Raises ValueError in one line: file, place, what is wrong."""
    try:
        raw: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
        suites = msgspec.convert(raw.get("suites", []), list[Suite])
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path.name}: {' '.join(str(error).split())}") from None
    names = [s.name for s in suites]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice or not suites:
        raise ValueError(f"{path.name}: {'there twice: ' + ', '.join(twice) if twice else 'no suites in there'}")
    return suites


def outcomes(report: Path) -> dict[str, str]:
    """Every test of a JUnit file that pytest wrote, and how it ended; empty when there is none."""
    try:
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    except (OSError, ElementTree.ParseError):
        return {}
    ended = {"failure": "failed", "error": "error", "skipped": "skipped"}
    return {
        f"{case.get('classname')}::{case.get('name')}": next((ended[c.tag] for c in case if c.tag in ended), "passed")
        for case in cases
    }


def run_suite(suite: Suite, checkout: Path, work: Path) -> Outcome:
    """Bare first; a suite of which nothing passes bare is not run attached."""
    missing = [n for n in suite.needs if not importable(n)]
    if missing or not checkout.is_dir():
        return Outcome(name=suite.name, state="skipped", why=f"not there: {', '.join(missing) or checkout.name}")
    shutil.rmtree(work, ignore_errors=True)
    found = Outcome(name=suite.name, state="run")
    try:
        found.bare, found.bare_s, end = _arm(suite, checkout, work / "bare")
        if "passed" not in found.bare.values():
            return Outcome(name=suite.name, state="does not run", why=end, bare=found.bare)
        found.attached, found.attached_s, _ = _arm(suite, checkout, work / "attached", work / "run")
        if found.different:
            found.again, _, _ = _arm(suite, checkout, work / "again")
    except subprocess.TimeoutExpired:
        return Outcome(name=suite.name, state="slow", why=f"more than {LONGEST_S} s", bare=found.bare, bare_s=found.bare_s)
    found.verdict = judged(work / "run", LONGEST_S)
    found.incidents = incidents(work / "run")
    return found


def _arm(suite: Suite, checkout: Path, place: Path, run: Path | None = None) -> tuple[dict[str, str], float, str]:
    """Outcomes of the tests, seconds and the end of what was said; attached where a run is named.

    Raises:
        subprocess.TimeoutExpired: it took more than `LONGEST_S`.
    """
    installed, report = place / "site-packages", place / "junit.xml"
    installed.mkdir(parents=True)
    for link in suite.links:
        (installed / Path(link).name).symlink_to(checkout / link)
    watch = [sys.executable, "-m", "proctor.cli", "watch", "-o", str(run), "--fail-on", "never", "--"] if run else []
    pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
    tests = [str(checkout / test) for test in suite.tests]
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith("PROCTOR_")}, **FIXED,
        "PYTHONPATH": os.pathsep.join([str(SHIMS), str(installed), *(str(checkout / p) for p in suite.paths)]),
        "HOME": str(place), "TEMP_DIR": str(place), "PYTHONDONTWRITEBYTECODE": "1", **suite.environment,
    }  # fmt: skip
    started = time.monotonic()
    with (place / "output").open("wb") as output:
        process = subprocess.Popen(
            [*watch, *pytest, *suite.options, *tests], cwd=checkout, env=environment, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(LONGEST_S)
        finally:
            with contextlib.suppress(ProcessLookupError):  # what tests left behind ends with them
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outcomes(report), round(time.monotonic() - started, 1), (place / "output").read_text(errors="replace")[-400:]


def table(found: list[Outcome]) -> str:
    """Markdown: one line a suite."""
    ran, lines = [one for one in found if one.state == "run"], []
    for one in ran:
        passed = [sum(v == "passed" for v in arm.values()) for arm in (one.bare, one.attached)]
        ends = [end for _, end, _ in one.verdict.get("rules", {}).values()]
        lines.append((
            one.name, len(one.bare), *passed, len(one.different), one.verdict.get("steps", 0), len(ends) - ends.count("idle"),
            len(one.errors), sum(i["tier"] == "page" for i in one.incidents), f"{one.bare_s:.0f}, {one.attached_s:.0f}",
        ))  # fmt: skip
    told = grid(
        ("suite", "tests", "passed bare", "attached", "different", "steps", "rules that applied", "errors", "pages", "seconds, bare and attached"), lines
    )
    for one in found:
        if one.state != "run":
            last = (one.why.strip().splitlines() or [""])[-1][:100]
            told += [f"{one.name}: {one.state}: {last}"]
    return "\n".join(told).rstrip() + "\n"


def run_suites(wild: Path, folder: Path, only: str, document: Path | None = None) -> int:
    """All suites whose name holds a text; what has a result is not run again. The table goes into a document, too, where one is named."""
    try:
        suites = [s for s in read_suites() if only in s.name]
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    kept = folder / "suites"
    kept.mkdir(parents=True, exist_ok=True)
    found = []
    for suite in suites:
        path = kept / f"{suite.name}.json"
        try:
            one = msgspec.json.decode(path.read_bytes(), type=Outcome)
        except (OSError, msgspec.MsgspecError):
            checkout = wild / suite.project if suite.project else SUITES.parent
            one = run_suite(suite, checkout, folder / "work" / f"suite-{suite.name}")
            if one.state in ("run", "slow"):
                path.write_bytes(msgspec.json.encode(one))
        found.append(one)
        for test in one.different if one.state == "run" else []:
            print(f"{suite.name}: {test}: {one.bare.get(test, 'not run')} bare, {one.attached.get(test, 'not run')} attached")
        for v in one.errors:
            print(f"{suite.name}: {v['tier']} {v['relation']} {v['rule']}: {v['text']} | seen {v['seen']} | step {v['step']}")
    print(table(found))
    if document is not None:
        write_section(document, table(found), (BEGIN, END))
    (folder / "suites.json").write_text(json.dumps({o.name: len(o.different) for o in found if o.state == "run"}) + "\n")
    return 0
