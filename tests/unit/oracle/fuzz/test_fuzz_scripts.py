"""Scripts of findings: what confirms one, how long one is, and that it reads tensors as the campaign did; no ranks."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from proctor.oracle.fuzz.running.judge import Difference
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom
from proctor.oracle.fuzz.search.findings import Finding
from proctor.oracle.fuzz.sessions.confirm import confirm
from proctor.oracle.fuzz.sessions.script import _blocks, script_of
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario


def test_a_script_that_raises_before_it_compares_confirms_no_difference(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise KeyError('layers.0.weight')\n")
    assert confirm(script, compares=True)[0] == "its script raises before it has compared"
    script.write_text("import sys\nprint('rank 0: off by 0.1 [1.0] for [0.9]')\nsys.exit(1)\n")
    assert confirm(script, compares=True)[0] == "yes"
    script.write_text("from torch.multiprocessing import start_processes\ndef main(rank): raise SystemExit(1)\nif __name__ == '__main__': start_processes(main, (), 1, start_method='fork')\n")
    assert confirm(script, compares=True)[0] == "yes"  # a rank that has compared ends by itself, which the launcher raises


def test_what_a_script_leaves_among_temporary_files_goes_with_it(tmp_path: Path) -> None:
    """The launcher of torch leaves a file for each rank that raises; a campaign of an hour had left dozens."""
    script = tmp_path / "script.py"
    script.write_text("import sys, tempfile\nprint(tempfile.mkdtemp())\nsys.exit(1)\n")
    said, output = confirm(script)
    assert said == "yes" and output.strip() and not Path(output.strip()).exists() and not Path(output.strip()).parent.exists()


def test_a_block_of_one_statement_stands_on_the_line_of_its_head_and_others_as_they_were() -> None:
    text = ["for layer in layers:", "    x = layer(x)", "if world:", "    a = 1", "else:", "    a = 2", "for x in y:", "    one(x)", "    two(x)", "if a:", "    if b:", "        c()", "return x"]
    assert _blocks(text, 80) == ["for layer in layers: x = layer(x)", "if world: a = 1", "else: a = 2", *text[6:9], "if a:", "    if b: c()", "return x"]


@pytest.mark.parametrize("setting", [{"world": 2, "wrapper": "fsdp1", "accumulate": 2}, {"world": 2, "wrapper": "fsdp1", "optimizer": "Adam", "fsdp1_orig": True, "fsdp1_state": "FULL_STATE_DICT"}])
def test_a_script_of_fsdp1_is_short(setting: Point) -> None:
    lines = _script("stack", {"layers": ["prelu"]}, setting, "gradient", "layers.0.weight").splitlines()
    assert len(lines) < 60 and max(map(len, lines)) < 300


def test_a_table_is_read_from_the_state_dictionary_as_the_campaign_reads_it() -> None:
    """TorchRec's parameters are views of a part of a table, or another rank's: by name the script found none, and ended with 1 for that."""
    pytest.importorskip("torchrec")
    setting: Point = {"precision": "float32", "wrapper": "dmp", "rec_sharding": "column_wise", "rec_sharder": "bag"}
    text = _script("torchrec", {}, setting, "parameter", "bags.embedding_bags.t0.weight")
    assert "net.state_dict().get('bags.embedding_bags.t0.weight')" in text and "named_parameters())['bags" not in text
    assert len(text.splitlines()) < 60


def _script(template: str, model: Point, setting: Point, kind: str, name: str) -> str:
    scenario = Scenario(template, model, {"steps": 1}, setting)
    first = Difference(0, kind, name, 1.0, 1e-8, 1.0, candidate="1", reference="2")
    text = script_of(Finding("x", scenario, Outcome("inconsistent", Symptom("inconsistent", kind), "it differs", first), setting, (), scenario), "2.13.0")
    ast.parse(text)
    return text
