"""Libraries' own tests, bare and under `proctor watch`: the same tests must pass, fail and be skipped.

Called by `__main__.py --suites`. A suite is an entry of `suites.toml`; its outcome is one JSON file beside the programs' results and
is not made again.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.wild.attempt import importable

ROOT: Final = Path(__file__).resolve().parents[2]
SUITES: Final = Path(__file__).parent / "suites.toml"
LONGEST_S: Final = 3600


class Suite(msgspec.Struct, forbid_unknown_fields=True):
    """Some test files of a library.

    Args:
        name: unique.
        project: `owner+name`, folder of the checkout.
        links: folders of the checkout that are the library's packages.
        needs: packages that must be importable.
        tests: files or node ids, below the checkout.
        options: more for pytest.
    """

    name: str
    project: str
    tests: list[str]
    links: list[str] = []
    needs: list[str] = []
    options: list[str] = []


class Outcome(msgspec.Struct, kw_only=True):
    """How a suite came out: each test as `passed`, `failed`, `error` or `skipped`, bare and attached."""

    name: str
    state: str
    why: str = ""
    bare: dict[str, str] = {}
    attached: dict[str, str] = {}

    @property
    def different(self) -> list[str]:
        """Tests that ended otherwise, or only once."""
        return sorted(t for t in self.bare.keys() | self.attached.keys() if self.bare.get(t) != self.attached.get(t))


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
    found = {}
    for arm in ("bare", "attached"):
        place = work / arm
        installed = place / "site-packages"
        installed.mkdir(parents=True)
        for link in suite.links:
            (installed / Path(link).name).symlink_to(checkout / link)
        report = place / "junit.xml"
        watch = [sys.executable, "-m", "proctor.cli", "watch", "-o", str(place / "run"), "--fail-on", "never", "--"]
        tests = [str(checkout / test) for test in suite.tests]
        pytest = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("PROCTOR_")},
            "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "",
            "HOME": str(place), "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        try:
            done = subprocess.run(
                [*(watch if arm == "attached" else []), *pytest, *suite.options, *tests],
                cwd=checkout, env=environment, capture_output=True, text=True, timeout=LONGEST_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(name=suite.name, state="slow", why=f"{arm}: more than {LONGEST_S} s")
        found[arm] = outcomes(report)
        if arm == "bare" and "passed" not in found[arm].values():
            return Outcome(name=suite.name, state="does not run", why=(done.stdout + done.stderr)[-400:], bare=found[arm])
    return Outcome(name=suite.name, state="run", bare=found["bare"], attached=found["attached"])


def table(found: list[Outcome]) -> str:
    """Markdown: one line a suite."""
    lines = ["| suite | tests | passed bare | passed attached | different |", "|---|---|---|---|---|"]
    for one in found:
        if one.state != "run":
            last = (one.why.strip().splitlines() or [""])[-1][:100].replace("|", "/")
            lines.append(f"| {one.name} | {one.state}: {last} | | | |")
            continue
        passed = [sum(v == "passed" for v in arm.values()) for arm in (one.bare, one.attached)]
        lines.append(f"| {one.name} | {len(one.bare)} | {passed[0]} | {passed[1]} | {len(one.different)} |")
    return "\n".join(lines) + "\n"


def run_suites(wild: Path, folder: Path, only: str) -> int:
    """All suites whose name holds a text; what has a result is not run again."""
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
            one = run_suite(suite, wild / suite.project, folder / "work" / f"suite-{suite.name}")
            path.write_bytes(msgspec.json.encode(one))
        found.append(one)
        for test in one.different if one.state == "run" else []:
            print(f"{suite.name}: {test}: {one.bare.get(test, 'not run')} bare, {one.attached.get(test, 'not run')} attached")
    print(table(found))
    (folder / "suites.json").write_text(json.dumps({o.name: len(o.different) for o in found if o.state == "run"}) + "\n")
    return 0
