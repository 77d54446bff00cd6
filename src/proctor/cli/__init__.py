"""`proctor`: one file a command, found by listing this folder.

A command file has `prepare(parser)`, which declares its arguments, and `run(args) -> int`, which returns the exit
code. Its docstring is its help; the first line is what `proctor --help` shows. Files that start with `_` are no
commands. Only the command that was asked for is imported, and heavy libraries are imported inside `run`, so that
`proctor record` costs a training job nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Final

from proctor import __version__
from proctor.cli._parts.actions import modules_in
from proctor.errors import ProctorError

EXIT_INTERNAL: Final = 101
EXIT_INTERRUPTED: Final = 130  # 128 + SIGINT
EXIT_PIPE: Final = 141  # 128 + SIGPIPE: the reader of our output went away


def commands() -> dict[str, str]:
    """Command names and the modules that carry them: `import_.py` is `proctor import`."""
    return modules_in(__name__, __path__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns its exit code and never raises."""
    args = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a name that the locale cannot show must not end us
    debug = os.environ.get("PROCTOR_DEBUG", "") not in ("", "0")
    try:
        code = _run(args, debug=debug)
        sys.stdout.flush()
        return code
    except ProctorError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _complain("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else the interpreter complains while it shuts down
        return EXIT_PIPE
    except (SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  the last resort: scripts get the documented exit code, also where native code panics
        if debug:
            import traceback

            traceback.print_exc()
        hint = "" if debug else "  →  PROCTOR_DEBUG=1 shows the traceback"
        _complain(f"internal error: {type(error).__name__}: {error}{hint}")
        return EXIT_INTERNAL


def _run(args: list[str], *, debug: bool) -> int:
    if debug:
        import logging

        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    parser = _parser(args)
    if not args:
        parser.print_help()
        return 0
    try:
        parsed = parser.parse_args(args)
    except SystemExit as stop:  # argparse: 0 after --help and --version, 2 on bad usage
        return stop.code if isinstance(stop.code, int) else 2
    result: int = parsed.run(parsed)
    return result


def _parser(args: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="proctor",
        description="Catches silent errors in PyTorch training: records healthy runs, learns rules, checks other runs.",
        epilog="exit codes of check and report: 0 clean, 1 violations, 2 bad usage or input, 3 inconclusive, 101 internal",
    )
    parser.add_argument("--version", action="version", version=f"proctor {__version__}")
    choices = parser.add_subparsers(metavar="COMMAND", dest="subcommand", required=True)
    known = commands()
    asked = args[0] if args and args[0] in known else None
    for name, module_name in known.items():
        if asked not in (None, name):
            choices.add_parser(name)
            continue
        module = importlib.import_module(module_name)
        _declare(choices.add_parser(name, help=_first_line(module), description=_help(module)), module)
    return parser


def _declare(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    module.prepare(parser)
    parser.set_defaults(run=module.run)


def _help(module: ModuleType) -> str:
    return (module.__doc__ or "").strip()


def _first_line(module: ModuleType) -> str:
    return _help(module).partition("\n")[0].rstrip(".").replace("%", "%%")


def _complain(text: str) -> None:
    print("proctor: " + " ".join(text.split()), file=sys.stderr)
