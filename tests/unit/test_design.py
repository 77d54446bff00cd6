"""Every file and folder that docs/design.md and CONTRIBUTING.md name exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("instrument", "invariants", "infer", "verify", "oracle", "native", "src", "tests", "benchmarks", "docs", "examples", "scripts")
# In backticks: a path with an ending, or a folder with a slash behind it. What is in capitals, <…> or … is a placeholder.
NAMED = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:py|h|cpp|md|toml|json|txt)|(?:[\w-]+/)+)`")
OF_A_RUN = {"page.toml", "process.json", "run.json", "activation.json", "case.json", "check.json", "watch.json", "verdict.json", "sitecustomize.py"}


def named(page: str) -> set[str]:
    text = (ROOT / page).read_text(encoding="utf-8")
    found = set(NAMED.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)))
    return {name for name in found if name not in OF_A_RUN and "<" not in name and not name.startswith(("RUN/", "boot/"))}


def there(name: str, everything: list[str]) -> bool:
    """As it is, or as the end of a path: `live/memo.py` is `verify/live/memo.py`."""
    return any(("/" + path).endswith("/" + name) or f"/{name}" in "/" + path + "/" for path in everything)


@pytest.mark.parametrize("page", ["docs/design.md", "CONTRIBUTING.md"])
def test_what_it_names_exists(page: str) -> None:
    everything = [str(p.relative_to(ROOT)) for room in ROOMS for p in (ROOT / room).rglob("*") if "__pycache__" not in p.parts]
    everything += [p.name for p in ROOT.iterdir()]
    names = named(page)
    assert len(names) > 10
    assert sorted(name for name in names if not there(name.rstrip("/"), everything)) == []
