"""One wild program: bare, then under `proctor watch` with the shipped packs, then judged. Gives a `Result`.

The bare run says whether the program is healthy here: it ends with 0. What it trained is a hash of its parameters, written
by the shim `limit` when it ends; where these are not finite, the program diverges by itself and is no healthy one. Numbers are read as a
terminal shows them in the end: how often a progress bar is drawn is a matter of the clock. Where bare and watched differ, the program runs
bare twice more, the second time with its memory elsewhere: if any of these three differ, it is not deterministic and its bits say nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.forks import Forks
from benchmarks.wild.files import make
from benchmarks.wild.manifest import SHIMS, Program

ROOT: Final = Path(__file__).resolve().parents[2]
MEMORY_BYTES: Final = 12 * 1024**3  # of data, each process
FIXED: Final = {  # environment of all programs
    "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "PYTHONHASHSEED": "0",
    "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
NOT_FINITE: Final = "not finite"  # the end of a digest, as the shim `limit` writes it
_BIG: Final = 5_000_000  # files of a checkout that are not copied
_LOSS: Final = re.compile(r"(?i)\b\w*(?:loss|nll|ppl|acc\w*|return|reward)\w*\b[^\d\n-]{0,12}(-?\d+\.\d+(?:e[-+]?\d+)?)")
_UP: Final = "\x1b[A"
_MOVES: Final = re.compile(f"(\r|\n|{re.escape(_UP)})")
_TOLD: Final = re.compile(r"^proctor:.*", re.MULTILINE)


class Arm(msgspec.Struct, kw_only=True):
    """One run of a program.

    Args:
        exit: its code; `None`: it took too long.
        wall_s, cpu_s: of all its processes.
        digest: of the parameters, by rank.
        losses: numbers after words such as loss, as printed.
        end: last lines of stderr.
    """

    exit: int | None
    wall_s: float
    cpu_s: float
    digest: dict[str, str] = {}
    losses: list[str] = []
    end: str = ""


class Result(msgspec.Struct, kw_only=True):
    """What came out; one JSON file a program.

    Args:
        state: `healthy`, `skipped` (see `why`), `does not run`, `slow` or `diverges` (all three bare), or `crashed` (watched only).
        bits: `equal`, `differ`, `not deterministic` or `not known`.
        recorded: steps were judged.
        verdict: of `judge.py`.
        incidents: that the verifier told, live: tier, severity, title, rules.
        said: Proctor's lines on the program's stderr.
        live: it ran under `watch`; else it was recorded in a fork of a warm process and checked afterwards.
    """

    name: str
    project: str
    half: str
    product: str
    trains: str
    state: str
    why: str = ""
    bare: Arm | None = None
    watched: Arm | None = None
    bits: str = "not known"
    recorded: bool = False
    verdict: dict[str, Any] = {}
    incidents: list[dict[str, Any]] = []
    live: bool = True
    said: list[str] = []

    @property
    def retracted(self) -> set[str]:
        """Rules that failed while the program ran and not when the whole run was checked."""
        live = {rule for incident in self.incidents for rule in incident.get("rules", ())}
        return live - {v["rule"] for v in self.verdict.get("violations", [])}

    @property
    def errors(self) -> list[dict[str, Any]]:
        """Violations of severity error or more: each is false, since the program is healthy."""
        return [v for v in self.verdict.get("violations", []) if v["severity"] in ("error", "critical")]

    @property
    def pages(self) -> int:
        """Incidents that would have woken somebody."""
        return sum(i["tier"] == "page" for i in self.incidents)


class Warm:
    """Runs programs in forks of one process that has imported torch, and judges them in another that stays: an import is what costs most."""

    def __init__(self) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PROCTOR_", "WILD_"))} | FIXED
        self.forks = Forks(SHIMS / "sitecustomize.py", clean, timeout_s=900, memory_mib=MEMORY_BYTES >> 20)
        self._judge: subprocess.Popen[str] | None = None

    def judged(self, run: Path, seconds: int) -> dict[str, Any]:
        if self._judge is None:
            command = [sys.executable, "-m", "benchmarks.wild.judge"]
            self._judge = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._judge.stdin is not None and self._judge.stdout is not None
        self._judge.stdin.write(f"{run}\n")
        self._judge.stdin.flush()
        ready, _, _ = select.select([self._judge.stdout], [], [], seconds)
        line = self._judge.stdout.readline() if ready else ""
        if not line:
            self._end_judge()
            return {"exit": None, "trouble": [f"no verdict within {seconds} s"], "violations": [], "rules": {}}
        told: dict[str, Any] = json.loads(line)
        return told

    def close(self) -> None:
        self.forks.close()
        self._end_judge()

    def _end_judge(self) -> None:
        if self._judge is not None:
            self._judge.kill()
            self._judge.wait()
            self._judge = None


def attempt(program: Program, checkout: Path, work: Path, product: str, warm: Warm | None = None, options: Sequence[str] = ()) -> Result:
    """Run one program in every way.

    Args:
        program: of the manifest.
        checkout: of its project.
        work: folder of its own; emptied.
        product: commit of Proctor.
        warm: where to run it; without it, in processes of its own, and watched live.
        options: of `watch`.
    """
    said: dict[str, Any] = {"live": warm is None, "name": program.name, "project": program.project, "half": program.half, "product": product, "trains": program.trains}
    if program.skip:
        return Result(**said, state="skipped", why=program.skip)
    if not (checkout / program.path).is_file():
        return Result(**said, state="skipped", why=f"{program.path} is not in the checkout")
    missing = [n for n in program.needs if not importable(n)]
    if missing:
        return Result(**said, state="skipped", why=f"not installed: {', '.join(missing)}")
    shutil.rmtree(work, ignore_errors=True)
    bare = _arm(program, checkout, work / "bare", [], warm)
    if bare.exit != 0:
        state = "slow" if bare.exit is None else "does not run"
        return Result(**said, state=state, why=bare.end[-300:], bare=bare)
    if any(told.endswith(NOT_FINITE) for told in bare.digest.values()):
        return Result(**said, state="diverges", why="a parameter is NaN or infinite at its end", bare=bare)
    run = work / "run"
    watch = [sys.executable, "-m", "proctor.cli", "watch", "-o", str(run), "--fail-on", "never", *options, "--"]
    watched = _arm(program, checkout, work / "watched", watch, warm, run)
    result = Result(**said, state="healthy", bare=bare, watched=watched)
    result.said = [*_TOLD.findall(watched.end)][:10]
    if watched.exit != 0:
        result.state = "crashed"
        result.why = f"exit {watched.exit} under watch: {watched.end[-300:]}"
    result.bits = _bits(program, checkout, work, bare, watched, warm)
    result.verdict = judged(run, program.timeout_s) if warm is None else warm.judged(run, program.timeout_s)
    result.recorded = bool(result.verdict.get("steps"))
    result.incidents = incidents(run)
    return result


def _bits(program: Program, checkout: Path, work: Path, bare: Arm, watched: Arm, warm: Warm | None) -> str:
    def of(arm: Arm) -> tuple[dict[str, str], list[str]]:
        return arm.digest, arm.losses

    if watched.exit != 0 or of(bare) == ({}, []):
        return "not known"
    if of(bare) == of(watched):
        return "equal"
    alike = all(of(_arm(program, checkout, work / f"again{i}", [], warm, stir=i)) == of(bare) for i in range(2))
    return "differ" if alike else "not deterministic"


def lay_out(program: Program, checkout: Path, folder: Path) -> tuple[Path, Path, str]:
    """A copy of a program in a folder: where it runs, the folder of packages that it finds there, and its script."""
    place = folder / "program"
    _copy(checkout / program.place, place)
    make(place, program.files)
    return place, installed(program, checkout, folder), str(Path(program.path).relative_to(program.place))


def installed(program: Program, checkout: Path, folder: Path) -> Path:
    """A folder in this one, in which the packages of its project are found that a program imports."""
    packages = folder / "site-packages"
    packages.mkdir(parents=True)
    for link in program.links:
        (packages / Path(link).name).symlink_to(checkout / link)
    return packages


def _arm(
    program: Program, checkout: Path, folder: Path, before: Sequence[str], warm: Warm | None = None, record: Path | None = None, stir: int = 0
) -> Arm:
    place, packages, script = lay_out(program, checkout, folder)
    digests = folder / "digest"
    digests.mkdir()
    kind, _, ranks = program.launcher.partition(" ")
    launcher = [sys.executable] if kind == "python" else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks,
    ]  # fmt: skip
    own = {
        "WILD_SHIMS": ",".join(program.shims), "WILD_STEPS": str(program.steps), "WILD_BATCH": str(program.batch),
        "WILD_DIGEST": str(digests), "HOME": str(folder), "WILD_STIR": str(stir),
    }  # fmt: skip
    if warm is not None:
        log = folder / "stdout"
        started, used = time.monotonic(), 0.0
        code = warm.forks.run(
            script, program.arguments, place, log, own, ranks=int(ranks or 1), path=[str(SHIMS), str(packages)],
            record=record, timeout_s=program.timeout_s,
        )  # fmt: skip
        text = log.read_bytes()[-1_000_000:].decode(errors="replace") if log.exists() else ""
        return Arm(
            exit=None if code == 124 else code, wall_s=round(time.monotonic() - started, 1), cpu_s=used,
            digest=_digests(digests), losses=_LOSS.findall(shown(text)), end=text[-3000:],
        )  # fmt: skip
    environment = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("PROCTOR_", "WILD_"))}, **FIXED, **own,
        "PYTHONPATH": os.pathsep.join([str(SHIMS), str(packages)]),
    }  # fmt: skip
    out, err = folder / "stdout", folder / "stderr"
    started, used = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    with out.open("wb") as to_out, err.open("wb") as to_err:
        process = subprocess.Popen(
            [*before, *launcher, script, *program.arguments], cwd=place, env=environment, stdin=subprocess.DEVNULL,
            stdout=to_out, stderr=to_err, start_new_session=True, preexec_fn=_bounded,
        )  # fmt: skip
        code = _wait(process, program.timeout_s)
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    text = out.read_bytes()[-1_000_000:].decode(errors="replace")
    return Arm(
        exit=code,
        wall_s=round(time.monotonic() - started, 1),
        cpu_s=round(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, 1),
        digest=_digests(digests),
        losses=_LOSS.findall(shown(text)),
        end=err.read_bytes()[-3000:].decode(errors="replace"),
    )


def shown(text: str) -> str:
    """What a terminal shows in the end: of each line what was written last behind a carriage return; bars below each other go up by `_UP`."""
    lines, at = [""], 0
    for part in _MOVES.split(text):
        if part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif part == _UP:
            at = max(at - 1, 0)
        elif part not in ("", "\r"):
            lines[at] = part
    return "\n".join(lines)


def _digests(folder: Path) -> dict[str, str]:
    """By rank; the name of a file is `<rank>-<pid>` or `<rank>`."""
    return {p.name: p.read_text().strip() for p in sorted(folder.iterdir())}


def _bounded() -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))


def _wait(process: subprocess.Popen[bytes], seconds: int) -> int | None:
    try:
        code: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        code = None
    with contextlib.suppress(ProcessLookupError):  # what it left behind ends with it
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return code


def _copy(source: Path, target: Path) -> None:
    """A program's folder, so that what it writes never lands in the checkout."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        paths = {n: Path(folder, n) for n in names}
        return {n for n, p in paths.items() if n == ".git" or p.is_symlink() or (p.is_file() and p.stat().st_size > _BIG)}

    shutil.copytree(source, target, ignore=left_out)


def importable(name: str) -> bool:
    """Whether a package is installed; it is not imported."""
    import importlib.util

    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def judged(run: Path, seconds: int) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.wild.judge", str(run)], capture_output=True, text=True, timeout=seconds, cwd=ROOT
        )
        told: dict[str, Any] = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        return {"exit": None, "trouble": [f"check took more than {seconds} s"], "violations": [], "rules": {}}
    except ValueError:
        return {"exit": 101, "trouble": [done.stderr.strip()[-300:]], "violations": [], "rules": {}}
    return told


def incidents(run: Path) -> list[dict[str, Any]]:
    """Those of which people would have been told, as loud as they ever were, with the rules that they began with."""
    try:
        kept = json.loads((run / "verify" / "incidents.json").read_text()).get("incidents", [])
    except (OSError, ValueError):
        return []
    paged = _paged(run)
    return [
        {
            "tier": "page" if i["key"] in paged else i["tier"], "severity": i["severity"], "title": i["title"][:200],
            "state": i["state"], "ended": i.get("why_ended", ""), "rules": [v["id"] for v in i.get("violations", [])],
        }
        for i in kept
        if i.get("state") != "suspected"
    ]  # fmt: skip


def _paged(run: Path) -> set[str]:
    """Keys of incidents that fired as a page at some moment, also those that were taken back."""
    found = set()
    with contextlib.suppress(OSError):
        for line in (run / "verify" / "events.jsonl").read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError, AttributeError):
                event = json.loads(line)
                data = event.get("data", {})
                if event.get("kind") == "incident" and data.get("tier") == "page" and data.get("state") == "firing":
                    found.add(data.get("key", ""))
    return found
