"""Look for bugs in a distributed library: generated models under generated settings, compared with one process.

  proctor oracle fuzz --budget 10m -o DIR     run a campaign; DIR gets report.html, report.json and a script for each finding
  proctor oracle fuzz --resume DIR            go on with it
  proctor oracle fuzz --dask ADDRESS …        on the workers of a dask cluster
  proctor oracle fuzz replay FILE             run one finding's scenario.json once more: 0 it agrees, 1 it fails, 3 it is no program

Exit code 0 nothing new, 1 new findings, 3 nothing could run, 130 interrupted. With --regress a library's CI gets 1 only for signatures
that are neither shipped as known nor in --known FILE (a campaign writes its own as DIR/known.toml).
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proctor.errors import OracleError, UsageError
from proctor.oracle.torch_version import require_torch

if TYPE_CHECKING:
    from proctor.oracle.fuzz.search.findings import Known
    from proctor.oracle.fuzz.sessions.journal import Asked, Journal
    from proctor.oracle.fuzz.sessions.session import Limits, Tell

LIBRARIES: Final = ("torch", "torchrec", "accelerate", "transformers", "deepspeed", "megatron", "keras")
_UNITS: Final = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
EVERY_S: Final = 15.0  # between lines of progress where there is no terminal


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("what", nargs="*", metavar="replay FILE", help="one scenario instead of a campaign")
    parser.add_argument("--budget", default="10m", metavar="TIME", help="end after so long: 90, 30s, 10m, 2h (default 10m)")
    parser.add_argument("--library", default="torch", metavar="NAMES", help=f"whose wrappers and models, with commas: {', '.join(LIBRARIES)} (default torch)")
    parser.add_argument("--models", default="", metavar="NAMES", help="these templates alone, with commas (operator, collective, chain, …; default all of the library)")
    parser.add_argument("--axes", default="", metavar="NAMES", help="draw each setting around one of these, with commas: disk, before_world, wrapper=fsdp1, … (default all)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="models and settings follow from it (default 0)")
    parser.add_argument("--pairs", type=int, metavar="N", help="end after so many models")
    parser.add_argument("--rows", type=int, default=16, metavar="N", help="settings for each model (default 16)")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes, each with worlds of its own (default 1)")
    parser.add_argument("--dask", metavar="ADDRESS", help="run it on the workers of a dask cluster that have the same versions installed (pip install 'proctor[dask]')")
    parser.add_argument("--python", default="", metavar="FILE", help="with --library keras: the interpreter of an environment that has keras and tensorflow (default $PROCTOR_KERAS_PYTHON)")
    parser.add_argument("--timeout", type=float, metavar="S", help="of one setting; then it hangs (default 20, of keras 120)")
    parser.add_argument("--resume", metavar="DIR", help="go on with a campaign")
    parser.add_argument("--known", metavar="FILE", help="findings that are known, besides those that are shipped")
    parser.add_argument("--no-localise", action="store_true", help="do not ask the oracle where the programs of an inconsistency part (20 s each, after the budget)")
    parser.add_argument("--regress", action="store_true", help="say only what is new; for a library's CI")
    parser.add_argument("-o", "--output", metavar="DIR", default=".proctor-fuzz", help="the campaign's directory (default .proctor-fuzz)")


def run(args: argparse.Namespace) -> int:
    """Carry it out."""
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a process with OpenMP's threads cannot be forked
    require_torch("oracle fuzz")
    if args.what:
        if args.what[0] != "replay" or len(args.what) != 2:
            raise UsageError(f"fuzz {' '.join(args.what)}: not understood", hint="proctor oracle fuzz replay FILE, or options only")
        return _replay(Path(args.what[1]), args)
    return _campaign(args)


def seconds(text: str) -> float:
    """A length of time in seconds.

    Raises:
        UsageError: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if found is None or float(found[1]) <= 0:
        raise UsageError(f"--budget {text!r}: no length of time", hint="90, 30s, 10m or 2h")
    return float(found[1]) * _UNITS[found[2]]


def _campaign(args: argparse.Namespace) -> int:
    budget = seconds(args.budget)
    for name in ("rows", "workers"):
        if getattr(args, name) < 1:
            raise UsageError(f"--{name} {getattr(args, name)}: at least 1")
    if args.dask and args.workers != 1:
        raise UsageError("--workers goes without --dask", hint="dask worker ADDRESS --nworkers N --nthreads 1, on each machine")
    from proctor.oracle.fuzz.sessions import session
    from proctor.oracle.fuzz.sessions.culprit import locate
    from proctor.oracle.fuzz.sessions.journal import Journal

    journal = Journal(Path(args.resume or args.output))
    asked = _resumed(journal, args) if args.resume else _asked(args)
    known = _known(args, asked)
    with journal.alone():
        if not args.resume:
            journal.begin(asked)
        teller = _Teller(quiet=args.regress)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks and files go with us
        limits = session.Limits(budget, args.pairs, args.timeout or _timeout(asked.libraries))
        interrupted = _ran(args, journal, asked, limits, known, teller)
        if not interrupted and not args.no_localise:
            try:
                locate(journal, teller)
            except KeyboardInterrupt:
                interrupted = True
        return _reported(journal, asked, interrupted=interrupted, regress=args.regress)


def _ran(args: argparse.Namespace, journal: Journal, asked: Asked, limits: Limits, known: list[Known], teller: Tell) -> bool:
    """Here, or on a cluster; whether it was interrupted."""
    if args.dask:
        from proctor.oracle.fuzz.sessions import cluster

        return cluster.run(journal, asked, limits, known, teller, args.dask)
    from proctor.oracle.fuzz.running.warm import modules_of, warm_up
    from proctor.oracle.fuzz.sessions import session

    teller("importing the libraries")
    if "keras" not in asked.libraries:
        warm_up(modules_of(asked.libraries))
    return session.run(journal, asked, limits, known, teller)


def _asked(args: argparse.Namespace) -> Asked:
    from proctor.oracle.fuzz.sessions.journal import Asked
    from proctor.oracle.fuzz.sessions.session import versions

    libraries = tuple(dict.fromkeys(name.strip() for name in args.library.split(",") if name.strip()))
    unknown = [name for name in libraries if name not in LIBRARIES]
    if unknown or not libraries:
        raise UsageError(f"--library {args.library}: unknown: {', '.join(unknown) or 'nothing'}", hint=f"libraries: {', '.join(LIBRARIES)}")
    if "keras" in libraries and len(libraries) > 1:
        raise UsageError(f"--library {args.library}: keras goes alone", hint="it is in an environment of its own")
    python = _python(args) if "keras" in libraries else ""
    found = versions(libraries, python)
    missing = [name for name in libraries if not found[name]]
    if missing:
        raise UsageError(f"--library {args.library}: {', '.join(missing)} is not installed", hint="docs/fuzz.md, Libraries, says what to install")
    return Asked(args.seed, libraries, args.rows, args.workers, found, models=_models(args.models, libraries), axes=_axes(args.axes), python=python)


def _python(args: argparse.Namespace) -> str:
    found = args.python or os.environ.get("PROCTOR_KERAS_PYTHON", "")
    if not found:
        raise UsageError("--library keras: which interpreter has it?", hint="--python FILE, or PROCTOR_KERAS_PYTHON; docs/fuzz.md, Keras, says how to make one")
    return str(Path(found).absolute())  # not resolved: an environment's interpreter is a link


def _timeout(libraries: tuple[str, ...]) -> float:
    return 120.0 if "keras" in libraries else 20.0


def _models(text: str, libraries: tuple[str, ...]) -> tuple[str, ...]:
    from proctor.oracle.fuzz.models import templates_for

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = {t.name for t in templates_for(libraries)}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--models {text}: unknown: {', '.join(unknown)}", hint=f"models: {', '.join(sorted(known))}")
    return names


def _axes(text: str) -> tuple[str, ...]:
    from proctor.oracle.fuzz.axes import all_axes

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    known = {a.name: [str(v) for v in a.choice.values] for a in all_axes()}
    for name in names:
        axis, equals, value = name.partition("=")
        if axis not in known or (equals and value not in known[axis]):
            raise UsageError(f"--axes {text}: unknown: {name}", hint=f"{axis}: {', '.join(known[axis])}" if axis in known else f"axes: {', '.join(sorted(known))}")
    return names


def _resumed(journal: Journal, args: argparse.Namespace) -> Asked:
    """What the campaign was asked; the interpreter may be another one by now."""
    import msgspec

    from proctor.oracle.fuzz.sessions.session import versions

    asked = journal.asked()
    if args.python and asked.python:
        asked = msgspec.structs.replace(asked, python=_python(args))
    here = versions(asked.libraries, asked.python)
    if here != asked.versions:
        raise OracleError(f"the campaign was of {asked.versions}, here is {here}", hint="begin another with -o")
    return asked


def _known(args: argparse.Namespace, asked: Asked) -> list[Known]:
    from proctor.oracle.fuzz.search.findings import read_known, shipped

    found = [k for library in dict.fromkeys(("torch", *asked.libraries)) for k in shipped(asked.versions[library], (library,))]
    return found + (read_known(Path(args.known), asked.versions) if args.known else [])


def _reported(journal: Journal, asked: Asked, *, interrupted: bool, regress: bool) -> int:
    from proctor.oracle.fuzz.report import html, jsonout, summary, terminal
    from proctor.oracle.fuzz.search import findings
    from proctor.oracle.fuzz.sessions import session

    merged, pairs = session.merged(journal)
    whole = summary(asked, merged, pairs)
    journal.write("report.json", lambda: jsonout.render(whole))
    journal.write("report.html", lambda: html.render(whole, journal))
    entries = [f.as_known(library, asked.versions.get(library, "")) for f in whole.new for library in (findings.library_of(f),)]
    journal.write("known.toml", lambda: findings.toml(entries))
    print(terminal.render(whole, str(journal.path)))
    if not regress:
        print(f"\n{journal.path}/report.html")
    if interrupted:
        print(f"interrupted  →  proctor oracle fuzz --resume {journal.path}", file=sys.stderr)
        return 130
    ran = sum(n for verdict, n in whole.verdicts.items() if verdict != "no program")
    return 1 if whole.new else 0 if ran else 3


def _replay(file: Path, args: argparse.Namespace) -> int:
    from proctor.oracle.fuzz.axes import wrappers
    from proctor.oracle.fuzz.keras import catalogue
    from proctor.oracle.fuzz.keras.client import Server
    from proctor.oracle.fuzz.keras.runner import KerasRunner
    from proctor.oracle.fuzz.models import template_of
    from proctor.oracle.fuzz.running.evaluate import Runner
    from proctor.oracle.fuzz.running.warm import modules_of, warm_up
    from proctor.oracle.fuzz.running.worlds import Worlds
    from proctor.oracle.fuzz.spec import read

    scenario = read(file)
    library = template_of(scenario.template).library
    timeout_s = args.timeout or _timeout((library,))
    if library == "keras":
        with Server(_python(args), timeout_s) as server:
            catalogue.use(server.catalogue())
            outcome = KerasRunner(server).run(scenario)
    else:
        wrapper = wrappers().get(str(scenario.setting.get("wrapper")))
        warm_up(modules_of(tuple(dict.fromkeys([library, *([wrapper.library] if wrapper else [])]))))
        with Worlds(timeout_s=timeout_s) as worlds:
            outcome = Runner(worlds).run(scenario)
    print(f"{outcome.verdict}: {outcome.why}" if outcome.why else outcome.verdict)
    for other in outcome.others:
        print(f"  also {other}")
    return 1 if outcome.failed else 3 if outcome.verdict == "no program" else 0


class _Teller:
    """Shows progress on stderr: in place on a terminal, else now and then a line. Findings always get a line."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet, self._last = quiet, 0.0

    def __call__(self, line: str) -> None:
        import time

        progress = line.startswith(("pair ", "importing"))
        if progress and (self._quiet or (not sys.stderr.isatty() and time.monotonic() - self._last < EVERY_S)):
            return
        if progress:
            self._last = time.monotonic()
        end = "" if progress and sys.stderr.isatty() else "\n"
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""
        print(f"{clear}{line}", end=end, file=sys.stderr, flush=True)
