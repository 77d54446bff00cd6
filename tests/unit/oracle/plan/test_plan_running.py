"""What a plan says for a run that it carries out: rules, styles, JSON, TOML."""

import pytest

from proctor.errors import OracleError
from proctor.oracle import Plan
from proctor.oracle.plans.mesh import Cut
from proctor.oracle.plans.plan_toml import format_plan, parse_plan
from proctor.oracle.styles import registry


def everything():
    plan = Plan("dp=2,tp=2", groups={"sp": "tp"})
    plan.style("batch", "", "dp").style("vocab", "wte", "sp", sequence=1).style("colwise", r"h\.\d+\.qkv", "tp", blocks=3, gather=True)
    plan.style("rowwise", r"h\.\d+\.proj", "tp", transposed=True).style("sequence", "norm", "sp")
    return plan.draw("drop", ndim=3, dp=0).size("attn", "heads", "width", axis="sp").pending("x", "dp", "tp", reduce="avg").fully_shard("h", axis="dp")


def test_json_and_toml_give_the_plan_back():
    plan = everything()
    assert Plan.from_json(plan.to_json()).to_json() == plan.to_json()
    again = parse_plan(format_plan(plan))
    assert (again.edges, again.pendings, again.draws, again.sizes, again.params) == (plan.edges, plan.pendings, plan.draws, plan.sizes, plan.params)
    assert again.shards == plan.shards and len(plan.shards) == 1


def test_groups_are_resolved():
    plan = everything()
    assert plan.sizes[0].axis == "tp" and all(axis != "sp" for edge in plan.edges for rule in edge.rules.values() for axis in [c.axis for c in rule.cuts])


def test_a_plan_without_such_rules_is_written_as_before():
    assert b"edges" not in Plan("dp=2").shard("a", dp=0).to_json()


def test_a_gradient_goes_back_the_way_its_tensor_came():
    plan = Plan("tp=2").redistribute("a", at="output", src={"tp": 1}, dst={}).redistribute("b", at="output", src={"tp": "partial"})
    (source, target, back, home), addend = plan.edges[0].layouts(plan.mesh), plan.edges[1].layouts(plan.mesh)
    assert source.cuts == home.cuts == (Cut("tp", "chunk", 1),) and target.cuts == back.cuts == ()
    assert addend[0].cuts == (Cut("tp", "partial"),) and addend[3].cuts == ()


def test_styles_of_a_file_are_expanded():
    text = '[mesh]\naxes = ["tp"]\nsizes = [2]\n[[style]]\nstyle = "rowwise"\nmodule = "fc"\naxis = "tp"\n'
    assert parse_plan(text).edges == Plan("tp=2").style("rowwise", "fc", "tp").edges
    assert set(registry()) == {"batch", "colwise", "rowwise", "sequence", "vocab"}


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ('[[style]]\nstyle = "columns"\nmodule = "a"\naxis = "tp"', "[[style]] 1: 'columns' is no style"),
        ('[[style]]\nstyle = "rowwise"\nmodule = "a"\naxis = "tp"\ngather = true', "style 'rowwise' takes no 'gather'"),
        ('[[redistribute]]\nmodule = "a"\nat = "inside"\nto = {}', "at is 'inside'"),
        ('[[redistribute]]\nmodule = "a"\nat = "input"', "says nothing"),
        ('[[redistribute]]\nmodule = "a"\nat = "input"\nform = {}', "`form` is unknown; did you mean `from`?"),
        ('[[pending]]\npath = "a"\naxes = ["dp"]\nreduce = "max"', "reduce is sum or avg"),
        ('[[pending]]\npath = "a"', "`axes` must be a list of names"),
        ('[[draw]]\nmodule = "a"\nlayout = { tp = "partial" }', "addends cannot be drawn"),
        ('[[size]]\nmodule = "a"\naxis = "tp"\nnames = [3]', "`names` must be a list of names"),
        ('[[draw]]\nmodule = "(a"\nlayout = {}', "is no regular expression"),
    ],
)
def test_bad_tables_are_named(table, said):
    with pytest.raises(OracleError) as caught:
        parse_plan(table)
    assert said in str(caught.value)
