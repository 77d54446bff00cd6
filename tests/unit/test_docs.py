"""What README and docs say can be typed, and the figures on the page that asks to be believed are measured ones."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_docs", ROOT / "docs" / "site" / "check_docs.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["check_docs"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_command_is_understood_by_the_command_line(docs: ModuleType) -> None:
    found = [command for page in docs.pages() for command in docs.commands(page)]
    assert len(found) > 90
    assert [f"{c}: {said}" for c in found if (said := docs.mistake(c))] == []


PAGE = """
<!-- not run: it needs a GPU -->

    proctor watch --no-such-option -- python train.py

Text.

    proctor chek runs/a
    proctor record -o RUN \\
        --evry 3 -- python train.py

<!-- exit 3 -->

```console
$ proctor check runs/a      # nothing
PROCTOR  INCONCLUSIVE
```

    proctor doctor
"""


def test_mistakes_are_found_and_marks_hold_for_one_block(docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    found = list(docs.commands(tmp_path / "page.md"))
    assert [(c.line, c.code, bool(c.why)) for c in found] == [(4, 0, True), (8, 0, False), (9, 0, True), (15, 3, False), (19, 0, False)]
    assert [bool(docs.mistake(c)) for c in found] == [True, True, True, False, False]


def test_what_runs_badly_is_said(docs: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text("    cat nothing-there\n\n<!-- exit 1 -->\n\n    cat nothing-there\n\nText.\n\n    python -c pass\n")
    wrong = docs.run(tmp_path / "page.md", list(docs.commands(tmp_path / "page.md")))
    assert len(wrong) == 1 and "page.md:1" in wrong[0]


def test_figures_that_ask_to_be_believed_are_those_that_were_measured() -> None:
    said, measured = ((ROOT / "docs" / name).read_text() for name in ("believe.md", "evaluation.md"))
    rows = {row[0].split(" (at")[0]: row for row in (re.split(r"\s*\|\s*", line.strip("| ")) for line in measured.splitlines() if line.startswith("|"))}
    first, second, across = rows["first"], rows["second"], rows["cross-class"]
    assert f"{first[2]} healthy programs, {first[3]} with errors, {first[4]} with pages" in said
    assert f"{second[2]} healthy programs, {second[3]} with errors, {second[4]} with pages" in said
    assert f"{across[3]} false alarms in {across[2]} checked rules" in said
    assert f"{second[7]} programs of the second half could be compared" in said and second[8] == "0"
    # The table that the command writes: the latest, of programs of the held half.
    held = measured.split("<!-- mutants -->")[1]
    planted = [found for source in ("shipped packs", "own healthy run, another seed", "two other programs") for found in re.findall(rf"^\| {source} \| (\d+ of \d+ \(\d+ %\)) ", held, re.M)[:1]]
    told = "the shipped rules find {}, rules of the program's own healthy run with another seed {}, rules of two other programs {}."
    assert told.format(*planted) in said
    for figure in ("36 of 36", "6 of 9"):
        assert figure in said and figure in measured
    # Rounds of bugs planted by hand, one row each; those marked ° by somebody who had read no rule's code.
    hand = [row for name, row in rows.items() if re.fullmatch(r"H\d+[°\\*]*", name) and int(row[4])]
    programs, bugs, shipped, own = (sum(int(re.match(r"\d+", row[k])[0]) for row in hand) for k in (3, 4, 5, 6))  # type: ignore[index]
    blind = [sum(int(re.match(r"\d+", row[k])[0]) for row in hand if "°" in row[0]) for k in (5, 4)]  # type: ignore[index]
    assert f"{programs} public programs that nobody had looked at" in said and f"shipped rules find {shipped} of {bugs}" in said and f"runs {own} of {bugs}" in said
    assert f"{blind[0]} of {blind[1]}, half of them by warnings alone" in said and f"**{shipped} of {bugs} told**" in measured
    share = 100 * (1 - 0.05 ** (1 / int(second[2])))
    assert f"up to {share:.1f} % of such programs" in said
