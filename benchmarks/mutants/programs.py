"""The programs: read from `programs.toml`, copied from their checkouts into a scratch folder, and run."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.forks import Forks

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Program:
    """One healthy program, as `programs.toml` describes it."""

    name: str
    repository: str
    root: str
    script: str
    arguments: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    edits: list[list[str]] = field(default_factory=list)
    prepare: str = ""
    ranks: int = 1
    standin: bool = False

    @property
    def files(self) -> list[str]:
        return self.sources or [self.script]


def read(path: Path) -> list[Program]:
    """The programs of a manifest."""
    return [Program(**entry) for entry in tomllib.loads(path.read_text())["program"]]


def prepare(program: Program, checkouts: Path, target: Path) -> None:
    """Copy a program's folder, make its data, bring its sources into the form that operators work on, and edit them.

    Raises:
        FileNotFoundError: the checkout is not there.
        ValueError: an edit does not fit the source, or the data were not made.
    """
    origin = checkouts / program.repository.replace("/", "+") / program.root
    if not origin.is_dir():
        raise FileNotFoundError(f"{origin}: no checkout of {program.repository}")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(origin, target, ignore=shutil.ignore_patterns(".git"))
    if program.prepare:
        made = subprocess.run([sys.executable, "-c", program.prepare], cwd=target, capture_output=True, text=True, timeout=240)
        if made.returncode:
            raise ValueError(f"{program.name}: its data were not made: {made.stderr[-500:]}")
    for name in program.files:
        text = ast.unparse(ast.parse((target / name).read_text()))
        for file, old, new in program.edits:
            if file == name:
                if old not in text:
                    raise ValueError(f"{program.name}: {file} has no {old!r}")
                text = text.replace(old, new)
        (target / name).write_text(text + "\n")


class Warm:
    """Runs programs with the start-up hook of mutants (`start/`), in forks of one process."""

    def __init__(self, *, timeout_s: float, memory_mib: int) -> None:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("MUTANTS_")}
        clean |= {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "MPLBACKEND": "agg"}
        self._forks = Forks(HERE / "start" / "sitecustomize.py", clean, timeout_s=timeout_s, memory_mib=memory_mib)

    def run(
        self, program: Program, folder: Path, seed: int, *, digest: Path | None = None, operator: str = "", record: Path | None = None
    ) -> tuple[int, str]:
        """Run a program in this folder; gives its exit code and the end of what it said.

        Args:
            seed: moves every seed that the program sets.
            digest: where each process writes what it computed.
            operator: the process operator to plant.
            record: the run directory to record into.
        """
        told = {"MUTANTS_SEED": str(seed), "MUTANTS_STANDIN": "1" if program.standin else "", "MUTANTS_PLANT": operator}
        if digest is not None:
            shutil.rmtree(digest, ignore_errors=True)
            digest.mkdir(parents=True)
            told["MUTANTS_DIGEST"] = str(digest)
        log = folder.parent / f"{folder.name}.log"
        code = self._forks.run(program.script, program.arguments, folder, log, told, ranks=program.ranks, record=record)
        return code, log.read_text(errors="replace")[-3000:] if log.exists() else ""

    def close(self) -> None:
        """End the process."""
        self._forks.close()
