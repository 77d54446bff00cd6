"""Commands that have actions, as `proctor pack list` has: a folder, and in it one file an action, found by listing the folder.

The folder's `__init__` holds the help of the command and takes `prepare` and `run` from `actions`. An action file is written as
a command file is (`proctor.cli`). A name that Python or this contract keeps for itself gets an underscore behind it: `self_.py` is `oracle self`, `run_.py` is `oracle run`.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
from collections.abc import Callable, Iterable


def modules_in(package: str, path: Iterable[str]) -> dict[str, str]:
    """Names of commands or actions, and the modules that carry them; files that start with `_` are none."""
    names = (module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_"))
    return {name.rstrip("_").replace("_", "-"): f"{package}.{name}" for name in sorted(names)}


def actions(package: str, path: Iterable[str]) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]:
    """`prepare` and `run` of a command whose actions are the files of a folder."""
    folder = list(path)

    def prepare(parser: argparse.ArgumentParser) -> None:
        """Declare the arguments of all actions."""
        choices = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
        for name, module_name in modules_in(package, folder).items():
            module = importlib.import_module(module_name)
            text = (module.__doc__ or "").strip()
            action = choices.add_parser(
                name, help=text.partition("\n")[0].rstrip("."), description=text, formatter_class=argparse.RawDescriptionHelpFormatter
            )
            module.prepare(action)
            action.set_defaults(act=module.run)

    def run(args: argparse.Namespace) -> int:
        """Carry out the action."""
        code: int = args.act(args)
        return code

    return prepare, run
