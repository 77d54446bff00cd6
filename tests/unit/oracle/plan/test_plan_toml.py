from __future__ import annotations

from pathlib import Path

import pytest

from proctor.errors import OracleError
from proctor.oracle.plans import plan_toml
from proctor.oracle.plans.mesh import Cut, Layout
from proctor.oracle.plans.plan_toml import format_plan, parse_plan, read_plan

DESIGN = r"""
[mesh]
axes = ["pp", "dp", "cp", "tp"]
sizes = [1, 2, 1, 2]
groups = { sp = "tp" }
[[param]]
path = 'layers\.\d+\.attn\.qkv\.(weight|bias)'
shard = { tp = "interleaved:0:3" }
[[param]]
path = 'fsdp'
dims = { "0" = ["tp", "dp"], "-1" = "cp" }
[[param]]
path = 'whole'
replicate = true
[[param]]
path = 'addend'
partial = ["tp"]
[[activation]]
module = 'layers\.\d+'
input = { tp = 0, dp = 1 }
output = { sp = 0, dp = 1 }
layout = "sbh->bsh"
[[activation]]
module = 'head'
output = true
dims = { "1" = ["dp"], "2" = [] }
padded = true
[[rename]]
from = 'output\.weight'
to = 'embedding.weight'
where = { pp = 0 }
kind = "param"
"""


def test_the_plan_of_the_design() -> None:
    plan = parse_plan(DESIGN)
    assert plan.mesh.world == 4
    assert plan.param_layout("layers.0.attn.qkv.bias") == Layout((Cut("tp", "interleaved", 0, (3,)),))
    assert plan.param_layout("fsdp") == Layout((Cut("tp"), Cut("dp"), Cut("cp", "chunk", -1)))
    assert plan.param_layout("whole") == Layout()
    assert plan.param_layout("addend") == Layout((Cut("tp", "partial"),))
    assert plan.activation_layout("layers.0", "output") == plan.activation_layout("layers.0", "input")
    assert plan.activation_order("layers.0", "input") == (1, 0, 2)
    assert plan.activation_layout("head", "output") == Layout((Cut("dp", "chunk", 1),), padded=True)
    assert plan.canonical("output.weight", {"pp": 0}, "param") == "embedding.weight"


def test_the_example_in_the_docstring_is_one() -> None:
    text = (plan_toml.__doc__ or "").partition("\n\n")[2]
    plan = parse_plan(text)
    assert plan.canonical("layers.1.fc", {"pp": 1}) == "layers.5.fc"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = [", "is not TOML"),
        ("", "says nothing"),
        ("[mehs]", "`mehs` is unknown; did you mean `mesh`"),
        ("schema = 2", "schema = 2"),
        ("mesh = 1", r"\[mesh\] must be a table"),
        ("[mesh]\naxes = 'tp'", r"\[mesh\]: `axes` must be a list"),
        ("[mesh]\naxes = ['tp']\nsizes = ['2']", r"\[mesh\]: `sizes` must be"),
        ("[mesh]\naxes = ['tp']\nsizes = [true]", r"\[mesh\]: `sizes` must be"),
        ("[mesh]\naxes = ['tp']", r"\[mesh\]: a mesh of 1 axes"),
        ("[mesh]\ngroups = { sp = 1 }", r"\[mesh\]: `groups` must name axes"),
        ("[param]\npath = 'a'", r"write \[\[param\]\]"),
        ("[[param]]", r"\[\[param\]\] 1: `path` is missing"),
        ("[[param]]\npath = 1", "`path` must be a text"),
        ("[[param]]\npath = 'a'", "says nothing of the layout"),
        ("[[param]]\npath = 'a'\nshrad = { tp = 0 }", "`shrad` is unknown; did you mean `shard`.*allowed: path, shard"),
        ("[[param]]\npath = 'a'\nshard = 0", "`shard` must be a table"),
        ("[[param]]\npath = 'a'\nshard = { tp = 'x' }", "`shard`: axis 'tp': 'x' is not a dimension"),
        ("[[param]]\npath = 'a'\nshard = { tp = 0 }\npartial = ['tp']", "`partial` names 'tp'"),
        ("[[param]]\npath = 'a'\nshard = { tp = 0 }\nreplicate = true", "`replicate` contradicts"),
        ("[[param]]\npath = 'a'\nreplicate = 'yes'", "`replicate` must be true or false"),
        ("[[param]]\npath = 'a'\ndims = { '0' = 1 }", "`dims`: dimension 0"),
        ("[[param]]\npath = 'a'\ndims = { '0' = [1] }", "`dims`: dimension 0"),
        ("[[param]]\npath = '('\nreplicate = true", r"\[\[param\]\] 1: .* is no regular expression"),
        ("[[param]]\npath = 'a'\nreplicate = true\n[[param]]\npath = 'b'\nshard = { tp = 0 }\ndims = { '1' = ['tp'] }", r"\[\[param\]\] 2: axis 'tp' is named twice"),
        ("[[activation]]\nmodule = 'a'", "says nothing of a tensor"),
        ("[[activation]]\nmodule = 'a'\noutput = 0", "`output` must be a table"),
        ("[[activation]]\nmodule = 'a'\noutput = { tp = 0 }\ndims = {}", "both say"),
        ("[[activation]]\nmodule = 'a'\noutput = {}\nlayout = 'sbh'", r"\[\[activation\]\] 1: 'sbh' is not a change"),
        ("[[rename]]\nfrom = 'a'\nto = 'b'\nwhere = { pp = 'x' }", "`where` must give a coordinate"),
        ("[[rename]]\nfrom = 'a'\nto = 'b'\nkind = 'x'", r"\[\[rename\]\] 1: .*kind 'x'"),
    ],
)
def test_errors_name_the_table_and_the_key(text: str, said: str) -> None:
    with pytest.raises(OracleError, match=said) as caught:
        parse_plan(text, "plan.toml")
    assert "plan.toml" in caught.value.message and "\n" not in str(caught.value)


def test_files(tmp_path: Path) -> None:
    toml, as_json = tmp_path / "plan.toml", tmp_path / "plan.json"
    toml.write_text(DESIGN)
    as_json.write_bytes(read_plan(toml).to_json())
    assert read_plan(as_json).to_json() == as_json.read_bytes()
    for name, blob in (("bad.json", b"{"), ("bad.toml", b"\xff"), ("large.toml", b"#" * (1 << 20) + b"##")):
        (tmp_path / name).write_bytes(blob)
        with pytest.raises(OracleError, match=name):
            read_plan(tmp_path / name)
    with pytest.raises(OracleError, match=r"none\.toml: No such file"):
        read_plan(tmp_path / "none.toml")
    with pytest.raises(OracleError):
        read_plan(tmp_path)


def test_a_plan_is_written_as_it_is_read() -> None:
    plan = parse_plan(DESIGN + "[[activation]]\nmodule = 'it''s'\nslot = 'a'\noutput = { '0' = ['tp:striped:2', 'dp'], cp = 'partial-avg', pp = 1 }\n".replace("''s", "s"))
    plan.shard('quote "\'\x7f', tp="interleaved:-1:[2,1]", padded=True).replicate("").rename("a", "{dp}", where={"dp": 1})
    back = parse_plan(format_plan(plan))
    assert format_plan(back) == format_plan(plan)
    for ours, theirs in zip(plan.params, back.params, strict=True):
        assert ours.path == theirs.path and ours.rule.layout(plan.mesh) == theirs.rule.layout(back.mesh)
    for mine, other in zip(plan.activations, back.activations, strict=True):
        assert set(mine.rules) == set(other.rules) and (mine.slot, mine.transpose) == (other.slot, other.transpose)
        assert all(set(mine.rules[w].cuts) == set(other.rules[w].cuts) for w in mine.rules)
    assert back.renames == plan.renames
