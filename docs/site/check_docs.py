"""Are the commands of README and docs right? `make check-docs` runs them; a test reads all of them.

    python docs/site/check_docs.py [--read] [PAGE…]

A command is a line of an indented block, of a ```sh fence, or after `$ ` in a ```console fence, that begins with a program we know. Each
`proctor` command is read by the command line's own parser, so an option that is gone shows. Then, without --read, commands run page by page,
in order, in an empty folder with the repository's `examples`, and must end with 0.

What a comment in the page says, on the line before a block:

    <!-- exit 1 -->                     the commands of the block end with 1
    <!-- not run: it needs a GPU -->    they are read and not run, for this reason
    <!-- page not run: hours -->        the same for the whole page, anywhere in it

A command with `…`, `<…>` or [options] is a pattern: what is there of it is read, nothing runs.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PROGRAMS: Final = ("proctor", "python", "make", "pip", "openssl", "git", "torchrun", "cat", "cd", "grep")
MARK: Final = re.compile(r"<!--\s*(?:exit (?P<code>\d+)|not run: (?P<why>.+?))\s*-->")
PAGE_MARK: Final = re.compile(r"<!--\s*page not run: (.+?)\s*-->")
PATTERN: Final = re.compile(r"…|<[A-Za-z][^>]*>|\[[^\]]*\]|\b(?:RUN|PACK|FILE|DIR|REF|CAND|CMD|FOLDER|NAME|CAPSULE|SECONDS|ENV)\b|=folder\b|\bfolder\b")
_TIMEOUT_S: Final = 600


@dataclass(frozen=True)
class Command:
    """One command of a page.

    code: that it should end with.
    why: it is not run; "" where it is.
    """

    page: Path
    line: int
    text: str
    code: int = 0
    why: str = ""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}: {self.text}"


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> Iterator[Command]:
    """All commands of a page, in order."""
    text = page.read_text(encoding="utf-8")
    whole = PAGE_MARK.search(text)
    fence, mark, began = "", None, False  # of the present block
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        number, line = at + 1, lines[at]
        at += 1
        if line.startswith("```"):
            fence = "" if fence else line[3:].strip() or "text"
            if not fence:
                mark = None
            continue
        if found := MARK.search(line):
            mark, began = found, False
            continue
        command = _command(line, fence)
        if command is None:
            if not fence and line.strip() and (began or not line.startswith("    ")):
                mark = None  # the block is over
            continue
        began = True
        while command.endswith("\\") and at < len(lines):
            command = f"{command[:-1].rstrip()} {lines[at].strip()}"
            at += 1
        why = whole.group(1) if whole else mark.group("why") if mark and mark.group("why") else ""
        if not why and PATTERN.search(command):
            why = "it is a pattern"
        yield Command(page, number, command, int(mark.group("code")) if mark and mark.group("code") else 0, why)


def _command(line: str, fence: str) -> str | None:
    """The command of a line, without its comment; None where there is none."""
    if fence == "console":
        text = line[2:] if line.startswith("$ ") else ""
    elif fence in ("sh", "bash"):
        text = line
    else:
        text = line.strip() if not fence and line.startswith("    ") else ""
    text = re.sub(r"\s+#\s.*$", "", text).strip()
    words = text.split()
    while words and re.fullmatch(r"[A-Z_]+=\S+", words[0]):
        words = words[1:]
    return text if words and words[0] in PROGRAMS else None


def mistake(command: Command) -> str:
    """What is wrong with a `proctor` command by the parser of the command line; "" where nothing is, and for others."""
    from proctor.cli import _declare
    from proctor.cli import commands as known

    if "[" in command.text or "|" in command.text.replace("||", ""):
        return ""  # a synopsis, or a choice
    for part in re.split(r"&&|;|\|\|", command.text):
        try:
            words = shlex.split(part.replace("…", "").strip())
        except ValueError:
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        if words[:1] != ["proctor"] or len(words) < 2 or words[1].startswith("-"):
            continue
        if words[1] not in known():
            return f"there is no command {words[1]!r}"
        module = importlib.import_module(known()[words[1]])
        parser = argparse.ArgumentParser(prog=f"proctor {words[1]}", exit_on_error=False)
        _declare(parser, module)
        said = io.StringIO()
        options = [w for w in words[2 : words.index("--") if "--" in words else None] if w.startswith("-")]
        if "…" in command.text or PATTERN.search(command.text):
            allowed = _options(parser)
            strange = [o.partition("=")[0] for o in options if o.partition("=")[0] not in allowed and not re.fullmatch(r"-\d.*", o)]
            if strange:
                return f"no option {', '.join(strange)}"
            continue
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                parser.parse_args(words[2:])
        except SystemExit as stop:
            if stop.code:
                return said.getvalue().strip().splitlines()[-1]
        except argparse.ArgumentError as error:
            return str(error)
    return ""


def _options(parser: argparse.ArgumentParser) -> set[str]:
    found = set(parser._option_string_actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= {option for one in action.choices.values() for option in _options(one)}
    return found


def run(page: Path, todo: Sequence[Command]) -> list[str]:
    """Run the commands of a page in a folder of their own; what went wrong."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="proctor-docs-") as folder:
        for name in ("examples", "benchmarks", "tests"):
            (Path(folder) / name).symlink_to(ROOT / name)
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
        for command in todo:
            if command.why:
                continue
            try:
                done = subprocess.run(["bash", "-c", command.text], cwd=folder, env=environment, capture_output=True, text=True,
                                      stdin=subprocess.DEVNULL, timeout=_TIMEOUT_S, check=False)
            except subprocess.TimeoutExpired:
                wrong.append(f"{command}: not over after {_TIMEOUT_S} s")
                continue
            ok = done.returncode == command.code
            print(f"{'ok  ' if ok else 'BAD '} {command}", flush=True)
            if not ok:
                wrong.append(f"{command}: ended with {done.returncode}, not {command.code}\n{done.stdout[-500:]}{done.stderr[-1500:]}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", metavar="PAGE", nargs="*", type=Path)
    parser.add_argument("--read", action="store_true", help="run nothing")
    args = parser.parse_args()
    wrong: list[str] = []
    number = ran = 0
    for page in [p.resolve() for p in args.pages] or pages():
        todo = list(commands(page))
        number += len(todo)
        wrong += [f"{command}: {said}" for command in todo if (said := mistake(command))]
        if not args.read:
            ran += sum(not command.why for command in todo)
            wrong += run(page, todo)
    print(f"{number} commands read, {ran} run, {len(wrong)} wrong")
    for one in wrong:
        print(one)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
