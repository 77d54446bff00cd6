"""TrainCheck's published traces with its published invariants give its published verdicts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from proctor.infer.importers.traincheck.rules import convert, import_rules
from proctor.infer.importers.traincheck.run import import_run
from proctor.invariants.trace import Trace
from proctor.verify.checker import check

CORPUS = Path(__file__).parents[3] / "shared" / "corpus" / "traincheck"
CASES = sorted(p.name for p in CORPUS.iterdir() if p.is_dir()) if CORPUS.is_dir() else []
FILES = sorted(CORPUS.glob("*_invariants.json"))

pytestmark = pytest.mark.skipif(not CASES, reason="the published artefacts are not here")


@pytest.mark.parametrize("case", CASES)
def test_published_verdicts(case: str, tmp_path: Path) -> None:
    imported = import_run(CORPUS / case, tmp_path / "run")
    assert imported.records and not imported.notes
    rules = import_rules([CORPUS / case / "invariants.json"])
    result = check(Trace.load([tmp_path / "run"]), [rules.pack])
    failed = {convert(row["invariant"]).id for row in _objects(CORPUS / case / "reference_failed.json")}
    assert {v.id for v in result.violations} == failed
    assert result.unknown == 0


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.name)
def test_published_invariants_are_imported_without_loss(file: Path) -> None:
    imported = import_rules([file])
    assert imported.read == len(file.read_text().splitlines()) and not imported.skipped and not imported.twice


def _objects(path: Path) -> list[dict[str, dict[str, object]]]:
    """JSON objects written one after the other."""
    text, decoder, out, at = path.read_text().strip(), json.JSONDecoder(), [], 0
    while at < len(text):
        tree, at = decoder.raw_decode(text, at)
        out += tree if isinstance(tree, list) else [tree]
        at += len(text[at:]) - len(text[at:].lstrip())
    return out
