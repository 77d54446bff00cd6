"""A plan that cannot work says so in one line, before anything is changed."""

import pytest
import torch
from helpers.oracle.parallel_gpt import make, plan

from proctor.errors import OracleError
from proctor.oracle import Plan
from proctor.oracle.parallel import parallelize
from proctor.oracle.parallel.verify import problems


def two_layers():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))


def right():
    return Plan("tp=2").style("colwise", "0", "tp").style("rowwise", "2", "tp")


def only(plan, model=None):
    found = problems(plan, model or two_layers())
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize("name", ["gpt.toml", "gpt_sp.toml"])
def test_the_plans_of_the_examples_can_work(name):
    assert problems(plan(name), make(0.1)) == []


def test_a_right_plan_has_no_problems():
    assert problems(right(), two_layers()) == []


def test_a_plan_that_matches_nothing():
    assert "param 'fc1\\\\.weight' matches nothing" in only(right().shard(r"fc1\.weight", tp=0))
    assert only(right().redistribute("encoder", at="output", src={"tp": "partial"})).startswith("redistribute 'encoder' matches nothing")
    assert only(right().draw("drop")) == "draw 'drop' matches nothing"


def test_a_factory_that_is_no_function_of_torch():
    assert only(right().factory("0", "arrange", tp=0)) == "factory '0': 'arrange' is no function that makes tensors; did you mean 'arange'?"


def test_an_axis_that_the_mesh_lacks():
    assert only(right().draw("0", tpp=0)) == "draw '0': the mesh (tp=2) has no axis 'tpp'; did you mean 'tp'?"


def test_a_dimension_that_cannot_be_divided():
    found = problems(Plan("tp=3").style("colwise", "0", "tp"), two_layers())
    assert "0.weight [16, 8]: dimension 0 of 16 is not divisible by 3 (tp:0)" in found


def test_a_dimension_that_is_not_there():
    assert "cuts dimension 2" in problems(Plan("tp=2").shard(r"0\.bias", tp=2), two_layers())[0]


def test_an_addend_that_nobody_reduces():
    rules = Plan("tp=2").style("colwise", "0", "tp").shard(r"2\.weight", tp=1).redistribute("2", at="output", after="bias")
    assert only(rules).startswith("2: its output is an addend over tp that nobody reduces")


def test_an_input_gradient_that_nobody_reduces():
    rules = Plan("tp=2").shard(r"0\.(weight|bias)", tp=0).style("rowwise", "2", "tp")
    assert only(rules).startswith("0: its outputs are cut over tp, so its input's gradient is an addend that nobody reduces")


def test_an_edge_around_the_layer_may_reduce():
    rules = Plan("tp=2").shard(r"0\.(weight|bias)", tp=0).style("rowwise", "2", "tp")
    rules.redistribute("", at="input", grad_src={"tp": "partial"})
    assert problems(rules, two_layers()) == []


def test_an_edge_that_takes_an_addend_for_a_part():
    rules = right()
    rules.redistribute("2", at="output", src={"tp": -1}, dst={})
    assert only(rules) == "2: its output is an addend over tp, and its edge takes it for tp:-1"


def test_an_edge_that_takes_a_part_for_an_addend():
    assert only(right().redistribute("0", at="output", src={"tp": "partial"})) == "0: its output is cut over tp as tp:-1, and its edge takes it for tp:partial"


def test_a_bias_that_is_added_by_every_rank():
    rules = Plan("tp=2").style("colwise", "0", "tp").style("rowwise", "2", "tp", bias=False)
    assert only(rules).startswith("2: its bias is added by each of the 2 ranks along tp")


def test_rows_of_an_embedding_that_nobody_looks_up():
    rules = Plan("tp=2").shard("weight", tp=0).redistribute("", at="output", src={"tp": "partial"})
    assert "no rule looks tokens up" in only(rules, torch.nn.Embedding(8, 4))


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq"])
def test_an_embedding_that_needs_its_whole_table(option):
    rules = Plan("tp=2").style("vocab", "0", "tp")
    assert only(rules, torch.nn.Sequential(torch.nn.Embedding(8, 4, **{option: True}))) == f"0: {option} needs the whole table, and it is cut over tp"


def test_rows_that_are_no_neighbours_cannot_be_looked_up():
    rules = Plan("tp=2").shard("weight", tp="interleaved:0:2").redistribute("", at="input", lookup="tp").redistribute("", at="output", src={"tp": "partial"})
    assert "no block of neighbours" in only(rules, torch.nn.Embedding(8, 4))


def test_data_parallel_gradients_that_nobody_reduces():
    rules = Plan("dp=2").redistribute("", at="input", dst={"dp": 0})
    assert only(rules).startswith("the input is cut over dp, so gradients of 0.weight, 0.bias, 2.weight and 1 more are addends")


def test_tied_parameters_that_are_cut_in_two_ways():
    model = torch.nn.Sequential(torch.nn.Embedding(8, 8), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    rules = Plan("tp=2").style("vocab", "0", "tp").style("rowwise", "1", "tp", bias=False)
    assert any("are one parameter, and the plan cuts it as" in line for line in problems(rules, model))


def test_what_fully_shard_cannot_cut():
    rules = Plan("dp=2,tp=2").fully_shard("0", axis="dp").shard(r"0\.weight", dp=0).pending("2.*", "dp")
    found = problems(rules, two_layers())
    assert "0.weight: the plan cuts it over dp, and so would fully_shard" in found
    assert "0.bias: fully_shard sums its gradient over dp, and no pending says so" in found
    both = Plan("dp=2,tp=2").fully_shard("0", axis="dp").fully_shard("2", axis="tp").pending(".*", "dp")
    assert problems(both, two_layers()) == ["fully_shard: over dp and over tp; give one axis"]
    with pytest.raises(OracleError, match="joint axis"):
        Plan("dp=2,cp=2").fully_shard("0", axis="dp+cp")


def test_attributes_that_cannot_be_divided():
    assert only(Plan("tp=2").size("0", "heads", axis="tp")) == "size: 0.heads is missing"
    assert problems(Plan("tp=3").size("0", "in_features", axis="tp"), two_layers()) == ["size: 0.in_features = 8 is not divisible by tp=3"]


def test_parallelize_refuses_with_the_first_and_changes_nothing():
    model = two_layers()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(OracleError, match=r"the plan cannot work: param 'nothing' matches nothing"):
        parallelize(model, Plan("tp=1").shard("nothing", tp=0))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters())) and not hasattr(model, "_proctor_parallel")
