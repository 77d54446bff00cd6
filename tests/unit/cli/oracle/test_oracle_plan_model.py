"""`proctor oracle plan --model`: can the plan run the model?"""

from pathlib import Path

import pytest

from proctor.cli import main

PLANS = Path(__file__).parents[4] / "examples" / "parallel"
MODEL = """
import sys
sys.path.insert(0, {folder!r})
import gpt

def model():
    return gpt.GPT(64, 32, 4, 2, 16)

def number():
    return 3
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "models.py"
    path.write_text(MODEL.format(folder=str(PLANS.parent / "oracle")))
    return path


@pytest.mark.parametrize("name", ["gpt.toml", "gpt_sp.toml"])
def test_a_plan_that_can_run_the_model(model, capsys, name):
    assert main(["oracle", "plan", str(PLANS / name), "--model", f"{model}::model"]) == 0
    said = capsys.readouterr().out
    assert "the plan can run this model" in said
    assert "gradients of .*: sum over dp" in said


def test_problems_are_one_line_each(model, tmp_path, capsys):
    plan = tmp_path / "plan.toml"
    text = (PLANS / "gpt.toml").read_text()
    plan.write_text(text.replace('style = "rowwise"', 'style = "rowwise"\nbias = false').replace("sizes = [2, 2]", "sizes = [2, 3]"))
    assert main(["oracle", "plan", str(plan), "--model", f"{model}::model"]) == 2
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert any("layers.0.attention.proj: its bias is added by each of the 3 ranks along tp" in line for line in lines)
    assert any("embedding.word.weight [64, 32]: dimension 0 of 64 is not divisible by 3" in line for line in lines)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("style = \"vocab\"", "style = \"colwise\"", "embedding.word: its output is an addend over tp that nobody reduces"),
        ("gather = true", "gather = true\n[[redistribute]]\nmodule = 'layers\\.0\\.mlp\\.fc1'\nat = \"output\"\nfrom = { tp = \"partial\" }", "layers.0.mlp.fc1: its output is cut over tp as tp:-1, and its edge takes it for tp:partial"),
        ("module = 'head'", "module = 'haed'", "matches nothing; there is 'head'"),
        ("sizes = [2, 2]", "sizes = [2, 3]", "layers.0.mlp.fc1.weight [128, 32]: dimension 0 of 128 is not divisible by 3"),
        ("layout = { dp = 0, tp = 1 }", "layout = { dp = 0, pt = 1 }", "the mesh (dp=2,tp=2) has no axis 'pt'"),
    ],
    ids=["partial", "edge", "nothing", "uneven", "axis"],
)
def test_what_cannot_work_is_said_before_anything_runs(model, tmp_path, capsys, old, new, said):
    plan = tmp_path / "plan.toml"
    text = (PLANS / "gpt.toml").read_text()
    assert old in text
    plan.write_text(text.replace(old, new))
    code = main(["oracle", "plan", str(plan), "--model", f"{model}::model"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("problem: ")]
    assert code == 2 and any(said in line for line in lines), lines


@pytest.mark.parametrize(("spec", "said"), [("nowhere.py::model", "no such file"), ("{}::absent", "has no attribute"), ("{}::number", "gives int, no torch module")])
def test_what_is_no_model_is_one_line(model, capsys, spec, said):
    assert main(["oracle", "plan", str(PLANS / "gpt.toml"), "--model", spec.format(model)]) == 2
    assert said in capsys.readouterr().err


PROGRAM = """
from helpers.oracle import torch_native
from helpers.oracle.torch_native import batch, distributed_tensors, forgotten_gather, make
"""


def test_a_plan_is_made_and_can_run_the_model(tmp_path, capsys):
    program = tmp_path / "native.py"
    program.write_text(PROGRAM)
    given = ["--model", f"{program}::make", "--batch", f"{program}::batch", "--mesh", "dp=2,tp=2"]
    assert main(["oracle", "plan", "--from", f"{program}::distributed_tensors", *given]) == 0
    said = capsys.readouterr().out
    assert "# one step on 4 threads gave the outputs and gradients of one device" in said
    (tmp_path / "plan.toml").write_text(said)
    assert main(["oracle", "plan", str(tmp_path / "plan.toml"), "--model", f"{program}::make"]) == 0
    capsys.readouterr()
    assert main(["oracle", "plan", "--from", f"{program}::forgotten_gather", *given]) == 1
    assert "# not what one device computes: output the model is [4, 12, 32]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new", "code", "said"),
    [
        ("", "", 0, "one step on 4 threads gave the outputs and gradients of one device"),
        ('layout = { "dp" = 0, "tp" = 1 }', 'layout = { "dp" = 0 }', 1, "not what one device computes: output the model differs by"),
        ('shard = { "tp" = 0 }', 'shard = { "dp" = 0 }', 2, "problem: "),
    ],
    ids=["right", "masks", "static"],
)
def test_a_plan_is_tried_with_a_batch(tmp_path, capsys, old, new, code, said):
    program = tmp_path / "native.py"
    program.write_text(PROGRAM)
    given = ["--model", f"{program}::make", "--batch", f"{program}::batch"]
    main(["oracle", "plan", "--from", "model", "--mesh", "dp=2,tp=2", *given])
    text = capsys.readouterr().out
    assert old in text
    (tmp_path / "plan.toml").write_text(text.replace(old, new))
    assert main(["oracle", "plan", str(tmp_path / "plan.toml"), *given]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "no plan is given"),
        (["--from", "model"], "--model is missing"),
        (["plan.toml", "--from", "model"], "--from makes a plan, and takes none"),
        (["--from", "nowhere.py::f", "--model", "m.py::f", "--batch", "b.py::f", "--mesh", "tp=2"], "there is no such file"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(capsys, arguments, said):
    assert main(["oracle", "plan", *arguments]) == 2
    shown = capsys.readouterr().err
    assert said in shown and "Traceback" not in shown
