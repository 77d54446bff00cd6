"""The figures that `make bench` takes: the list can be run and read, and what was taken stands in the page."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import figures

PRINTED = """lm    cpu  bare  11.70 s, watched +8.00 s (+7.80 to +8.70 in 3 rounds)
lm    wall bare  11.60 s, watched +4.90 s (+4.70 to +5.00 in 3 rounds)
offer_us                  1,061.7
chain: 80 settings, 3.00 s wall, 5.00 s processor
dlrm: 80 settings, 4.00 s wall, 5.00 s processor
"""


def test_each_command_is_there_and_each_pattern_finds_one_number() -> None:
    listed = figures.commands()
    names = [figure["name"] for command in listed for figure in command["figure"]]
    assert len(names) == len(set(names)) > 15
    for command in listed:
        source = (figures.HERE / command["run"][0]).read_text()
        assert all(option in source for option in command["run"] if option.startswith("--")), command["run"]
        for figure in command["figure"]:
            assert re.compile(figure["pattern"]).groups == 1
            assert figure.keys() <= {"name", "unit", "pattern", "bar", "of"} and figure.get("of", "mean") in figures.OF


@pytest.mark.parametrize(
    ("pattern", "of", "value"),
    [
        (r"^lm +cpu .*watched \+([\d.]+)", "median", 8.0), (r"^lm +wall .*watched \+([\d.]+)", "median", 4.9), (r"^offer_us +([\d,.]+)", "median", 1061.7),
        (r"^\w+: \d+ settings, ([\d.]+) s wall", "mean", 3.5), (r"^\w+: \d+ settings, ([\d.]+) s wall", "largest", 4.0), ("nothing (.)", "median", None),
    ],
)  # fmt: skip
def test_a_figure_is_what_its_pattern_finds(pattern: str, of: str, value: float | None) -> None:
    assert figures.read({"pattern": pattern, "of": of}, PRINTED) == value


def test_what_was_taken_is_written_beside_its_bar_and_the_time_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, kept = tmp_path / "performance.md", tmp_path / "measured.json"
    page.write_text(f"before\n{figures.MARKS[0]}old\n{figures.MARKS[1]}\nbehind\n")
    monkeypatch.setattr(figures, "PAGE", page)
    monkeypatch.setattr(figures, "KEPT", kept)
    figure = next(figure for command in figures.commands() for figure in command["figure"] if "bar" in figure)
    take = {"commit": "0123abcd", "load": 0.2, "yardstick": 0.25, "note": ""}
    figures.write({figure["name"]: [{"value": figure["bar"], "when": "2026-11-28T10:00", **take}, {"value": 2 * figure["bar"], "when": "2026-11-29T10:00", **take}]})
    row = next(line for line in page.read_text().splitlines() if line.startswith(f"| {figure['name']} |"))
    assert f"**{2 * figure['bar']:g} {figure['unit']}: missed** | 2026-11-29, 0123abcd | load 0.2, 0.25 s | {figure['bar']:g} (2026-11-28) |" in row
    assert "not taken" in page.read_text() and page.read_text().startswith("before\n") and page.read_text().endswith("behind\n") and "old" not in page.read_text()
    assert len(json.loads(kept.read_text())[figure["name"]]) == 2
