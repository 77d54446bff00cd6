"""Pages of the site that are made from the code: the commands and the Python names. mkdocs calls `on_files`."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.structure.files import File, Files

REPOSITORY_LINK = re.compile(r"\]\((?!https?:|#|mailto:)(?:\.\./)+[^)]*\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    for name, text in (("reference/commands.md", commands()), ("reference/python.md", python())):
        files.append(File.generated(config, name, content=text))
    return files


def commands() -> str:
    """The help of every command, as the command line prints it."""
    from proctor.cli import commands as known

    parts = ["# Commands\n\nAs `proctor COMMAND --help` prints it.\n"]
    for name, module_name in known().items():
        module = importlib.import_module(module_name)
        parser = argparse.ArgumentParser(prog=f"proctor {name}", description=(module.__doc__ or "").strip(),
                                         formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, width=100))
        module.prepare(parser)
        parts.append(f"## {name}\n")
        for one in _with_actions(parser):
            title = one.prog.removeprefix(f"proctor {name}").strip()
            parts.append((f"### {name} {title}\n\n" if title else "") + f"```text\n{one.format_help().rstrip()}\n```\n")
    return "\n".join(parts)


def _with_actions(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                one.formatter_class = parser.formatter_class
                yield one


def python() -> str:
    """What a program may import from `proctor`, with signatures and docstrings."""
    import proctor

    parts = ["# Python\n\n" + inspect.cleandoc(proctor.__doc__ or "") + "\n"]
    for name in proctor.__all__:
        thing = getattr(proctor, name)
        if not callable(thing):
            continue
        parts.append(f"## proctor.{name}\n\n```python\nproctor.{name}{inspect.signature(thing)}\n```\n\n```text\n{inspect.getdoc(thing) or ''}\n```\n")
    return "\n".join(parts)
