"""Begin a new part of Proctor from a template that runs: one file and one test, which pass as they are.

    python scripts/new_part.py relation|sink|report|integration|sharding NAME [--root FOLDER]

`make new-relation NAME=monotone` and the like call it. The templates lie in `scripts/new`; tests/unit/test_new_part.py holds
each of them to lint, and runs its test. Nothing else has to be touched: all of these are found by listing their folder.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path
from string import Template
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
# Where the part goes, and its test.
PLACES: Final = {
    "relation": ("invariants/relations/{}.py", "tests/unit/relations/test_{}.py"),
    "sink": ("verify/sinks/{}.py", "tests/unit/paging/test_sink_{}.py"),
    "report": ("verify/report/formats/{}.py", "tests/unit/verify/reports/test_format_{}.py"),
    "integration": ("instrument/integrations/{}.py", "tests/unit/instrument/test_integration_{}.py"),
    "sharding": ("oracle/sharding/{}.py", "tests/unit/oracle/plan/test_sharding_{}.py"),
}
_CODE: Final = re.compile(r'\bcode\b[^=\n]*= "PR(1[0-4]\d)"')


def next_code(root: Path) -> str:
    """The next free code of a relation; those from PR150 on are of imported rules."""
    used = [int(n) for path in (root / "invariants" / "relations").rglob("*.py") for n in _CODE.findall(path.read_text(encoding="utf-8"))]
    return f"PR{max(used, default=100) + 1}"


def write(kind: str, name: str, root: Path) -> list[Path]:
    """Write the part and its test.

    Raises:
        ValueError: the name is no name of a module, or there is such a part already.
    """
    if not name.isidentifier() or keyword.iskeyword(name) or name != name.lower() or name.startswith("_"):
        raise ValueError(f"{name!r}: expected a name of a Python module, in small letters")
    paths = [root / place.format(name) for place in PLACES[kind]]
    for path in paths:
        if path.exists() or path.with_suffix("").is_dir():
            raise ValueError(f"{path}: exists already")
    words = {"name": name, "Name": name.capitalize(), "Class": name.title().replace("_", ""), "option": name.rstrip("_"), "code": next_code(root)}
    for path, template in zip(paths, (f"{kind}.py.txt", f"{kind}_test.py.txt"), strict=True):
        text = Template((ROOT / "scripts" / "new" / template).read_text(encoding="utf-8"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.substitute(words, **{f"Class{s}": words["Class"] + s for s in ("Config",)}), encoding="utf-8")
    return paths


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=PLACES)
    parser.add_argument("name")
    parser.add_argument("--root", type=Path, default=ROOT, help="of the checkout (default: this one)")
    args = parser.parse_args()
    try:
        paths = write(args.kind, args.name, args.root)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(f"wrote {path.relative_to(args.root)}" for path in paths))
    print(f"run it:  .venv/bin/python -m pytest {paths[1].relative_to(args.root)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
