"""`proctor.toml`: the defaults of a project, read from the folder in which a command is started.

    [watch]
    budget = "1%"
    packs = ["rules/ours.json"]
    page = "page.toml"
    capsules = false

`watch` and `check` call `set_defaults` when they declare their arguments: what stands on the command line counts, then the file, then what
Proctor does by itself. Names of files are relative to the folder of `proctor.toml`. `proctor init` writes one with all keys.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from proctor.cli._parts.budget import DEFAULT, share_of
from proctor.errors import ConfigError

NAME: Final = "proctor.toml"
Level = Literal["info", "warning", "error", "critical", "never"]


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """`[watch]`; each key is the option of that name.

    Args:
        budget: share of the time of training; "none": no limit.
        packs: files of rules; none: the shipped ones that fit.
        page: who is told; "": nobody.
        capsules: keep the last steps for a replay.
        job: what pages call it; "": after the run.
        every, warmup: watch every n-th step, and the first ones always: 10 when left out, with a budget 200 and five minutes.
        fail_on: wait for the verdict; "": do not wait.
        metrics: `[HOST:]PORT`; "": none.
        suppressions: files of violations that are expected.
    """

    budget: str = DEFAULT
    packs: list[str] = []
    page: str = ""
    capsules: bool = True
    job: str = ""
    every: int = 1
    warmup: int | None = None
    fail_on: Level | Literal[""] = ""
    metrics: str = ""
    suppressions: list[str] = []

    def __post_init__(self) -> None:
        from proctor.errors import UsageError

        try:
            share_of(self.budget)
        except UsageError as error:
            raise ValueError(f"`budget`: {str(error.args[0]).partition(': ')[2]}") from None
        if self.every < 1:
            raise ValueError("`every` must be at least 1")
        if self.warmup is not None and self.warmup < 0:
            raise ValueError("`warmup` must be at least 0")


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """`[check]`.

    Args:
        packs, suppressions: as for `[watch]`.
        fail_on: least severity that makes the exit code 1.
        baseline: file of violations that are no news; "": none.
    """

    packs: list[str] = []
    suppressions: list[str] = []
    fail_on: Level = "error"
    baseline: str = ""


_SECTIONS: Final[dict[str, type[Watch | Check]]] = {"watch": Watch, "check": Check}
_FILES: Final = frozenset({"packs", "suppressions", "page", "baseline"})


class _Default(list[str]):
    """A list of the file; what stands on the command line replaces it and is not added to it (argparse copies a default)."""

    def __copy__(self) -> list[str]:
        return []


def set_defaults(parser: argparse.ArgumentParser, command: str, folder: Path | None = None) -> None:
    """Let the keys of a command in `proctor.toml` be its defaults, where there is such a file.

    Args:
        parser: of the command, with its arguments.
        command: "watch" or "check".
        folder: where the file lies; the present one when left out.

    Raises:
        ConfigError: the file cannot be read, or a key of it is unknown or cannot be; names the key and its line.
    """
    path = (folder or Path()) / NAME
    if not path.exists() and not path.is_symlink():
        return
    found = read(path, command)
    parser.set_defaults(**found, of_project=found)


def leave_out(args: argparse.Namespace, options: Iterable[str]) -> None:
    """Take back what the file says of these options, where the command line says nothing: it is for another host."""
    said: dict[str, Any] = getattr(args, "of_project", {})
    for option in options:
        if option in said and getattr(args, option) is said[option]:
            setattr(args, option, [] if isinstance(said[option], list) else None)


def read(path: Path, command: str) -> dict[str, Any]:
    """Defaults of the arguments of a command, by the name of the argument; those that the file gives.

    Raises:
        ConfigError: as above. All sections are read, so that a mistake shows at the first command.
    """
    from proctor.verify.paging._toml import Document

    doc = Document(path)
    doc.known((), doc.table, _SECTIONS)
    found: dict[str, Any] = {}
    for section, cls in _SECTIONS.items():
        table = doc.table.get(section, {})
        settings = doc.decode(cls, (section,), table)
        if section == command:
            found = {key: _located(path.parent, key, getattr(settings, key)) for key in table}
    for key in ("budget", "page", "job", "fail_on", "metrics", "baseline"):
        if found.get(key) == "":
            del found[key]
    if "capsules" in found:
        found["no_capsules"] = not found.pop("capsules")
    return found


def _located(folder: Path, key: str, value: Any) -> Any:
    """A file's name as seen from here."""
    if isinstance(value, list):
        return _Default(str(folder / one) if key in _FILES else one for one in value)
    return str(folder / value) if key in _FILES and value else value


def text_of(*, page: str = "") -> str:
    """A commented `proctor.toml` with every key at its default.

    Args:
        page: file that says who is told; with "" the line is a comment.
    """
    name = f'page = "{page}"' if page else '# page = "page.toml"'
    return _TEXT.replace("@page", name)


_TEXT: Final = """\
# Defaults of Proctor in this folder. An option on the command line counts more. Files are named relative to this one.
# What each key does: docs/watch.md, docs/paging.md. What is a comment is not set.

[watch]
# Share of the time of training that being watched may cost, after the first 200 steps and five minutes; what is left out is unknown.
# budget = "1%"             # the default; "none": everything is looked at

# Files of rules; an empty list means the shipped packs that fit the job. `proctor infer RUN… -o ours.json` makes your own.
packs = []                  # ["ours.json"]

# Who is told of an incident: PagerDuty, Alertmanager, Slack, a webhook, mail. Secrets are not in that file either.
@page

# Keep the last steps in memory, and write them when something is wrong with one. They may hold training data.
capsules = true

# What pages and metrics call the job; without it the run's name.
# job = "pretraining"

# Watch every n-th step after the first ones; these are 10, with a budget 200 and five minutes, when nothing is said.
every = 1
# warmup = 10

# Wait for the verdict, and turn exit code 0 into 1 when something of this severity was found: info, warning, error, critical;
# "never" only waits.
# fail_on = "error"

# Prometheus metrics, PORT or HOST:PORT.
# metrics = "9109"

# Files of violations that are expected (`proctor pack suppress`).
suppressions = []

[check]
packs = []
suppressions = []
fail_on = "error"           # least severity that makes the exit code 1
# baseline = "known.json"   # violations that are no news
"""


def write(path: Path, *, overwrite: bool, page: str) -> None:
    """Write the file.

    Raises:
        ConfigError: it is there already, or cannot be written.
    """
    from proctor.invariants.files import replace_file

    if path.exists() and not overwrite:
        raise ConfigError(f"{path} is there already", hint="--overwrite, or edit it")
    try:
        replace_file(path, text_of(page=page).encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
