"""The programs of examples/oracle/: configurations with their references, the mistakes that fit them, and a fast runner.

As a script it runs many of them in forks of one process that has torch loaded, so a run takes well under a second:

    python oracle_programs.py < '[["parallel_gpt", "--mesh", "dp=2"], …]'

prints a JSON line a run: its RESULT, or null when it failed. Where a command is wanted (for `proctor oracle record`)
there is `Configuration.command`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "oracle"
TEARDOWN_TRIES = 3  # see tests/helpers/ranks.py


@dataclass(frozen=True)
class Configuration:
    """A program and its arguments; `own` are those that make it parallel, `shared` are the reference's too."""

    program: str
    own: tuple[str, ...]
    shared: tuple[str, ...] = ()

    @property
    def arguments(self) -> list[str]:
        return [*self.own, *self.shared]

    @property
    def reference(self) -> Configuration:
        return Configuration(self.program, (), self.shared)

    def command(self, *more: str, interpreter: str = sys.executable) -> list[str]:
        """Runs it with its own ranks, started by itself."""
        return [interpreter, str(FOLDER / f"{self.program}.py"), *self.arguments, *more]

    def parse(self) -> Namespace:
        with _importable() as module:
            return module(self.program).arguments(self.arguments)  # type: ignore[no-any-return]

    def mistakes(self) -> list[str]:
        """Names of the mistakes of injected.py that change what it computes."""
        arguments = self.parse()
        with _importable() as module:
            injected = module("injected")
            return [name for name in injected.MISTAKES if injected.fits(name, arguments)]

    def blamed(self, mistake: str) -> list[str]:
        """Regular expressions, one of which the name that a checker gives should match."""
        arguments = self.parse()
        with _importable() as module:
            return list(module("injected").blamed(mistake, arguments))

    def __str__(self) -> str:
        return " ".join([self.program, *self.arguments])


def _gpt(own: str, shared: str = "") -> Configuration:
    return Configuration("parallel_gpt", tuple(own.split()), tuple(shared.split()))


def _pipeline(ranks: int, schedule: str, shared: str = "") -> Configuration:
    return Configuration(
        "pipeline_gpt", ("--nprocs", str(ranks), "--schedule", schedule), tuple(shared.split())
    )


# Every way to use up to four ranks, each once as it is and once with the options that change what is computed.
MESHES = (
    "--mesh dp=2", "--mesh dp=4", "--mesh dp=2 --zero", "--mesh dp=4 --zero", "--mesh dp=2 --fsdp", "--mesh dp=4 --fsdp",
    "--mesh tp=2", "--mesh tp=4", "--mesh tp=2 --sp", "--mesh tp=4 --sp",
    "--mesh dp=2,tp=2", "--mesh dp=2,tp=2 --sp", "--mesh dp=2,tp=2 --fsdp", "--mesh dp=2,tp=2 --fsdp --sp",
)  # fmt: skip
OPTIONS = "--tied --recompute --microbatches 2"
CONFIGURATIONS = (
    *(_gpt(mesh, shared) for mesh in MESHES for shared in ("", OPTIONS)),
    *(
        _pipeline(ranks, schedule, shared)
        for ranks, schedule in ((2, "gpipe"), (2, "1f1b"), (2, "interleaved"), (4, "gpipe"), (4, "1f1b"))
        for shared in ("", "--tied --recompute")
    ),
    _pipeline(4, "interleaved", "--layers 8"),
    *(
        Configuration("switch_moe", ("--nprocs", str(ranks)), tuple(shared.split()))
        for ranks in (2, 4)
        for shared in ("", OPTIONS)
    ),
    Configuration("llama_tp", ("--nprocs", "2")),
    Configuration("llama_tp", ("--nprocs", "2"), ("--recompute", "--microbatches", "2")),
)


@contextlib.contextmanager
def _importable() -> Iterator[Any]:
    """The programs import one another by bare name."""
    sys.path.insert(0, str(FOLDER))

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    try:
        yield load
    finally:
        sys.path.remove(str(FOLDER))


def run_all(
    configurations: Sequence[Configuration], *more: str, timeout_s: float = 600, interpreter: str = sys.executable
) -> list[dict[str, Any] | None]:
    """Run them one after another in forks of one warm process; None for a run that failed."""
    asked = [[c.program, *c.arguments, *more] for c in configurations]
    done = subprocess.run(
        [interpreter, "-W", "ignore", __file__],
        input=json.dumps(asked),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=timeout_s,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _world(program: str, arguments: list[str]) -> int:
    with _importable() as module:
        parsed = module(program).arguments(arguments)
    return int(parsed.mesh["dp"] * parsed.mesh["tp"] if program == "parallel_gpt" else parsed.nprocs)


def _rank(rank: int, program: str, arguments: list[str], output: Path) -> int:
    script = str(FOLDER / f"{program}.py")
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(FOLDER))
    try:
        with output.open("w") as file, contextlib.redirect_stdout(file):
            runpy.run_path(script, run_name="__main__")
    except BaseException:  # noqa: BLE001 — a fork must end here, whatever happens
        traceback.print_exc()
        return 1
    return 0


def _run(program: str, arguments: list[str]) -> Any:
    world = _world(program, arguments)
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        os.environ.update(WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        children = []
        for rank in range(world):
            child = os.fork()
            if child == 0:
                code = _rank(rank, program, arguments, Path(folder, str(rank)))
                sys.stderr.flush()
                os._exit(code)
            children.append(child)
        failed = [child for child in children if os.waitpid(child, 0)[1] != 0]
        lines = Path(folder, "0").read_text().splitlines()
    results = [json.loads(line.removeprefix("RESULT ")) for line in lines if line.startswith("RESULT ")]
    return None if failed or not results else results[0]


def main() -> None:
    for program, *arguments in json.load(sys.stdin):
        for _ in range(TEARDOWN_TRIES):
            result = _run(program, arguments)
            if result is not None:
                break
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
