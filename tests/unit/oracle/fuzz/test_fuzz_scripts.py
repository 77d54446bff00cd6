"""Scripts of findings: what confirms one, how long one is, and that it reads tensors as the campaign did; no ranks."""

from __future__ import annotations

import ast
import platform
import re
from pathlib import Path

import pytest

from proctor.oracle.fuzz.axes import why_invalid
from proctor.oracle.fuzz.facts import facts
from proctor.oracle.fuzz.program import program
from proctor.oracle.fuzz.running.judge import MISSING, Difference
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


def test_a_script_whose_ranks_die_confirms_no_difference(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nsys.exit('not what the reference has: process 0 terminated with signal SIGSEGV')\n")
    assert confirm(script, compares=True)[0] == "its ranks die before they have compared"


def test_a_hang_is_confirmed_by_a_collective_that_waited_in_vain_or_by_no_end(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("raise RuntimeError('Timed out waiting 60000ms for send operation to complete')")
    assert confirm(script, hangs=True)[0] == "yes"
    script.write_text("import time; time.sleep(60)")
    assert confirm(script, 1.0, hangs=True)[0] == "yes" and "does not end" in confirm(script, 1.0)[0]
    script.write_text("raise ValueError('another thing')")
    assert confirm(script, hangs=True)[0] == "its script ends with 1, and no collective waited in vain"
    script.write_text("pass")
    assert confirm(script, hangs=True)[0] == "its script ends with exit code 0"


def test_a_context_that_the_reference_has_not_is_chosen_and_what_stands_in_its_place_is_imported() -> None:
    text = _script("operator", {"expression": "F.cross_entropy(a, b.softmax(1))"}, {"world": 2, "wrapper": "dtensor", "dt_a": "S1", "dt_loss": "loss_parallel"}, "gradient", "a")
    assert "with (loss_parallel()) if world else nullcontext():" in text and "from contextlib import nullcontext" in text


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


def _head(text: str) -> list[str]:
    said = ast.get_docstring(ast.parse(text))
    assert said is not None
    return [" ".join(part.split()) for part in re.split(r"\n(?=Seen: |Trigger set |torch )", said)]


def test_a_script_begins_with_what_was_expected_what_was_seen_what_it_takes_and_where() -> None:
    """What a maintainer of the library reads first; axes are said in its own words."""
    scenario = Scenario("operator", {"expression": "F.huber_loss(a, b)"}, {}, {"world": 2, "wrapper": "dtensor", "dt_a": "S0"})
    first = Difference(0, "gradient", "a", 0.0274, 5.5e-9, 1.0, "gradient scale 2", candidate="-0.0548", reference="-0.0274", rank=1, noise=3e-9)
    finding = Finding("x", scenario, Outcome("inconsistent", Symptom("inconsistent", "gradient"), "it differs", first), scenario.setting, ("F.huber_loss(a, b)",), scenario)
    expected, seen, triggers, machine = _head(script_of(finding, "2.13.0+cpu"))
    assert expected == "Expected: the gradient of a in step 0 is -0.0274, give or take 1.2e-08."
    assert seen == "Seen: -0.0548, off by 0.0274 (gradient scale 2), on rank 1; nothing is raised."
    assert triggers.endswith(": world=2 (ranks), wrapper=dtensor (every tensor of the model is a DTensor), dt_a=S0 (how `a` and its mask are cut), the expression F.huber_loss(a, b).")
    assert machine.startswith(f"torch 2.13.0+cpu; gloo on the CPU, Python {platform.python_version()}, ") and "Exit code 1 while it is so, 0 once it is mended." in machine
    assert "train(0, 0) is the reference" in machine and "under `if world`" in machine


RAISED = Outcome("crash", Symptom("crash", "KeyError"), "KeyError: '\"\"\"C:\\x' (torch/x.py:f)")
HUNG = Outcome("hang", Symptom("hang", "timeout"), "no answer within 60 s; the ranks wait in torch/x.py:f")
LACKS = Outcome("inconsistent", Symptom("inconsistent", "gradient"), "", Difference(0, "gradient", "w", MISSING, 0.0, 0.0, "no gradient"))
NOT_FINITE = Outcome("inconsistent", Symptom("inconsistent", "state"), "", Difference(1, "state", "w:step", MISSING, 0.1, 1.0, "NaN", candidate="nan", reference="1"))


@pytest.mark.parametrize(
    ("outcome", "expected", "seen"),
    [
        (RAISED, "no exception; the reference raises none", "KeyError: ''''C:/x' (torch/x.py:f)"),
        (HUNG, "every rank ends", "no answer within 60 s; the ranks wait in torch/x.py:f"),
        (LACKS, "the gradient of w in step 0 is the reference's", "no gradient, on rank 0; nothing is raised"),
        (NOT_FINITE, "the optimizer's step of w in step 1 is 1, give or take 0.1", "nan (NaN), on rank 0; nothing is raised"),
    ],
)
def test_a_script_says_how_it_fails(outcome: Outcome, expected: str, seen: str) -> None:
    scenario = Scenario("chain", {"layers": ["mlp"]}, {}, {"world": 2, "wrapper": "ddp", "optimizer": "Adam"})
    said = _head(script_of(Finding("x", scenario, outcome, scenario.setting, ("frozen",), scenario), "2.13.0"))
    assert said[:2] == [f"Expected: {expected}.", f"Seen: {seen}."]
    assert said[2].endswith("wrapper=ddp (the model on each rank, gradients averaged), optimizer=Adam, a model with a frozen layer.")


def test_a_long_script_says_less_of_its_axes() -> None:
    setting: Point = {"world": 2, "wrapper": "fsdp1", "optimizer": "Adam", "fsdp1_orig": True, "fsdp1_state": "FULL_STATE_DICT"}
    text = _script("stack", {"layers": ["prelu"]}, setting, "state", "layers.0.weight:exp_avg")
    assert "wrapper=fsdp1, " in text and len(text.splitlines()) < 60
    assert "wrapper=fsdp1 (parameters of each unit" in _script("stack", {"layers": ["prelu"]}, {"world": 2, "wrapper": "fsdp1"}, "output", "")


def test_a_script_of_an_expression_makes_only_what_it_names() -> None:
    text = _script("operator", {"expression": "a.norm(float('inf'))"}, {"world": 2, "wrapper": "dtensor", "dt_a": "S0"}, "gradient", "a")
    assert "self.a = nn.Parameter" in text and "cuts = {'a': [Shard(0)]}" in text
    assert not any(f"self.{name} = nn.Parameter" in text for name in "bv") and "register_buffer" not in text
    masked = Scenario("operator", {"expression": "a.masked_fill(m, 0.5)"}, {}, {"world": 2, "wrapper": "dtensor", "dt_a": "S0"})
    assert "cuts = {'a': [Shard(0)], 'm': [Shard(0)]}" in program(masked).text()
    assert why_invalid({"world": 2, "wrapper": "dtensor", "dt_b": "S0"}, facts(masked)) == "the expression has no such tensor"
