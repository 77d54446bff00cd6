"""Count the product's lines by room: what is code, and what is documentation, imports and blank.

    python scripts/lines.py [REVISION] [--without ROOM ...]

Python and C++ of the rooms, tests not among them; `--without oracle/prove` leaves a room out. Without a revision the working tree's tracked
files are counted. `docs/design.md` quotes it; tests/unit/test_house.py holds the sizes of files, classes and folders.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
ROOMS: Final = ("infer", "instrument", "invariants", "native", "oracle", "src", "verify")
COLUMNS: Final = ("code", "docs", "imports", "blank")


def kinds(text: str, *, python: bool) -> Counter[str]:
    """Lines of a file by kind; a comment on a line of its own is documentation."""
    docs: set[int] = set()
    imports: set[int] = set()
    for node in ast.walk(ast.parse(text)) if python else ():
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    found: Counter[str] = Counter()
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        comment = bare.startswith("#" if python else "//")
        imported = number in imports or (not python and bare.startswith("#include"))
        found["docs" if number in docs or comment else "blank" if not bare else "imports" if imported else "code"] += 1
    return found


def count(revision: str, without: list[str]) -> dict[str, Counter[str]]:
    """Lines by room, and by folder of `oracle`, which has several rooms."""
    command = ["git", "ls-tree", "-r", "--name-only", revision] if revision else ["git", "ls-files"]
    rooms: dict[str, Counter[str]] = {}
    for name in subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        path = Path(name)
        if path.suffix not in (".py", ".cpp", ".h") or path.parts[0] not in ROOMS or any(name.startswith(room + "/") for room in without):
            continue
        if revision:
            text = subprocess.run(["git", "show", f"{revision}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        elif (ROOT / path).exists():
            text = (ROOT / path).read_text(encoding="utf-8")
        else:
            continue
        room = "/".join(path.parts[:2]) if path.parts[0] == "oracle" and len(path.parts) > 2 else path.parts[0]
        rooms.setdefault(room, Counter()).update(kinds(text, python=path.suffix == ".py"))
    return rooms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="", help="of git (default: the working tree)")
    parser.add_argument("--without", nargs="*", default=[], metavar="ROOM")
    args = parser.parse_args()
    rooms = count(args.revision, args.without)
    rooms["all"] = sum(rooms.values(), Counter())
    print(f"{'room':24}{'lines':>9}" + "".join(f"{column:>9}" for column in COLUMNS))
    for room, found in sorted(rooms.items(), key=lambda item: -item[1].total()):
        print(f"{room:24}{found.total():9,}" + "".join(f"{found[column]:9,}" for column in COLUMNS))


if __name__ == "__main__":
    main()
