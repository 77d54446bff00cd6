from __future__ import annotations

import json

import pytest

from proctor.errors import OracleError
from proctor.oracle.plans.mesh import Cut, Layout, Mesh
from proctor.oracle.plans.plan import Plan


def gpt() -> Plan:
    plan = Plan("pp=2,dp=2,tp=2", groups={"sp": "tp"})
    plan.shard(r"embedding\.word\.weight|output\.weight", tp=0)
    plan.shard(r"layers\.\d+\.attn\.qkv\.(weight|bias)", tp="interleaved:0:3")
    plan.shard(r"layers\.\d+\.attn\.proj\.weight", tp=1)
    plan.replicate(r".*")
    plan.activation(r"layers\.\d+", output={"sp": 0, "dp": 1}, input={"sp": 0, "dp": 1}, transpose="sbh->bsh")
    plan.activation(r"layers\.\d+\.attn\.proj", output={"tp": "partial", "dp": 1})
    plan.rename(r"output\.weight", "embedding.word.weight", where={"pp": 1})
    plan.rename(r"layers\.(\d+)(.*)", r"layers.{g1 + 4*pp}\2")
    return plan


def test_the_first_rule_that_matches_the_whole_name_wins() -> None:
    plan = gpt()
    assert plan.param_layout("layers.3.attn.qkv.bias") == Layout((Cut("tp", "interleaved", 0, (3,)),))
    assert plan.param_layout("layers.3.attn.qkv.bias.extra") == Layout()
    assert plan.param_layout("output.weight") == Layout((Cut("tp", "chunk", 0),))
    assert Plan("tp=2").shard("a", tp=0).param_layout("b") is None


def test_axes_nest_in_mesh_order_unless_another_is_stated() -> None:
    plan = Plan("dp=2,tp=2").shard("a", tp=0, dp=0).shard("b", dims={0: ["tp", "dp"]}).shard("c", dims={0: "tp", -1: "dp:striped"})
    assert plan.param_layout("a") == Layout((Cut("dp"), Cut("tp")))
    assert plan.param_layout("b") == Layout((Cut("tp"), Cut("dp")))
    assert plan.param_layout("c") == Layout((Cut("dp", "striped", -1), Cut("tp")))


def test_activations_and_their_gradients() -> None:
    plan = gpt()
    cut = Layout((Cut("dp", "chunk", 1), Cut("tp", "chunk", 0)))
    assert plan.activation_layout("layers.0", "output") == cut
    assert plan.activation_layout("layers.0", "grad_input") == cut
    assert plan.activation_order("layers.0", "output") == (1, 0, 2)
    assert plan.activation_layout("embedding", "output") is None
    assert plan.activation_order("embedding", "output") is None
    assert plan.activation_layout("layers.0.attn.proj", "output") == Layout((Cut("dp", "chunk", 1), Cut("tp", "partial")))
    assert plan.activation_layout("layers.0.attn.proj", "grad_output") == Layout((Cut("dp", "chunk", 1),))
    assert plan.activation_layout("layers.0.attn.proj", "input") is None
    with pytest.raises(OracleError, match="'inputs' is not one of"):
        plan.activation_layout("layers.0", "inputs")


def test_rules_of_one_module_may_speak_of_different_tensors_and_slots() -> None:
    plan = Plan("dp=2").activation("m", input={"dp": 0}).activation("m", slot="aux", output={}).activation("m", output={"dp": 1})
    assert plan.activation_layout("m", "input") == Layout((Cut("dp", "chunk", 0),))
    assert plan.activation_layout("m", "output", "aux") == Layout()
    assert plan.activation_layout("m", "output", "0") == Layout((Cut("dp", "chunk", 1),))


def test_names_of_the_reference() -> None:
    plan = gpt()
    assert plan.canonical("output.weight", {"pp": 1}) == "embedding.word.weight"
    assert plan.canonical("output.weight", {"pp": 0}) == "output.weight"
    assert plan.canonical("layers.1.attn.proj", {"pp": 1}) == "layers.5.attn.proj"
    virtual = Plan("pp=2").rename(r"(\d+)\.layers\.(\d+)\.(.*)", r"layers.{g2 + 2*(pp + 2*g1)}.\3")
    assert virtual.canonical("1.layers.1.fc", {"pp": 1}) == "layers.7.fc"
    plan = Plan("pp=2,ep=2").rename(r"e\.(?P<n>\d+)\.w", "{n*2 + ep}/w", where={"pp": 0}, kind="param")
    assert plan.canonical("e.3.w", {"ep": 1, "pp": 0}, "param") == "7/w"
    assert plan.canonical("e.3.w", {"ep": 1, "pp": 0}, "activation") == "e.3.w"


@pytest.mark.parametrize(
    ("pattern", "to"),
    [
        ("(", "x"),
        ("a", r"\1"),
        ("a", r"\g<b>"),
        ("a", "{g1}"),
        ("a", "{__import__('os')}"),
        ("a", "{pp.x}"),
        ("a", "{1.5}"),
        ("a", "{2**9}"),
        ("a", "{}"),
        ("a", "{pp if 1 else 2}"),
        ("a" * 3000, "b"),
    ],
)
def test_renames_that_cannot_be_carried_out_are_refused(pattern: str, to: str) -> None:
    with pytest.raises(OracleError):
        Plan().rename(pattern, to)


@pytest.mark.parametrize(("to", "said"), [("{g1}", "not a number"), ("{1 // pp}", "divides by 0"), ("{tp}", "neither a group nor a mesh axis")])
def test_sums_that_have_no_value_are_told(to: str, said: str) -> None:
    with pytest.raises(OracleError, match=said):
        Plan().rename("(.*)", to).canonical("a", {"pp": 0})


def test_rules_that_are_none_are_refused() -> None:
    for wrong in (
        lambda: Plan().shard("(", tp=0),
        lambda: Plan().shard("a", tp="sharded:0"),
        lambda: Plan().shard("a", dims={0: ["tp"], 1: ["tp"]}),
        lambda: Plan().activation("a"),
        lambda: Plan().activation("a", output={"tp": None}),  # type: ignore[dict-item]
        lambda: Plan().activation("a", output={"0": 1}),
        lambda: Plan().activation("a", output={}, transpose="sb>bs"),
        lambda: Plan().activation("a", output={}, transpose="sbb->bsb"),
        lambda: Plan().rename("a", "b", kind="module"),
        lambda: Plan("tp=2", groups={"tp": "dp"}),
        lambda: Plan("tp=2", groups={"x": "a b"}),
    ):
        with pytest.raises(OracleError):
            wrong()


def test_a_plan_survives_json() -> None:
    plan = gpt()
    back = Plan.from_json(plan.to_json())
    assert back.to_json() == plan.to_json()
    assert back.param_layout("layers.3.attn.qkv.bias") == plan.param_layout("layers.3.attn.qkv.bias")
    assert json.loads(plan.to_json())["schema"] == 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": 2}, "schema 2"),
        ({"schema": None}, "schema null"),
        ({"more": 1}, "more"),
        ({"mesh": {"axes": ["tp"], "sizes": [0]}}, "size 0"),
        ({"params": [{"path": "(", "rule": {}}]}, "regular expression"),
        ({"params": [{"path": "a", "rule": {"cuts": [{"axis": "tp", "strategy": "x"}]}}]}, "no sharding strategy"),
        ({"activations": [{"module": "a", "rules": {"out": {}}}]}, "'out'"),
        ({"renames": [{"pattern": "a", "to": "{x()}"}]}, "not a sum"),
    ],
)
def test_a_plan_that_was_tampered_with_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(OracleError, match=said):
        Plan.from_json(json.dumps({**json.loads(gpt().to_json()), **change}))
    with pytest.raises(OracleError):
        Plan.from_json(b"[]")


def test_a_plan_on_another_mesh() -> None:
    plan = gpt().on(Mesh.parse("dp=4"))
    assert plan.param_layout("output.weight") == Layout()
    assert plan.activation_layout("layers.0", "output") == Layout((Cut("dp", "chunk", 1),))


NAMES = {"embedding.word.weight": (8, 4), "layers.0.attn.qkv.weight": (12, 4), "layers.0.attn.proj.weight": (4, 4), "ln.bias": (4,)}


def test_what_was_understood() -> None:
    found = gpt().understood({**NAMES, "output.weight": None}, ["layers.0", "layers.0.attn.proj"])
    assert found.warnings == ()
    rows = {(r.kind, r.name): r for r in found.rows}
    assert rows["param", "layers.0.attn.qkv.weight"].layout == "tp:interleaved:0:3"
    assert rows["param", "ln.bias"].layout == "replicated" and rows["param", "ln.bias"].rule == ".*"
    assert rows["output", "layers.0"].layout == "dp:1 tp:0, sbh->bsh"
    assert ("grad_output", "layers.0") not in rows


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        (Plan("tp=2").shard("ln", tp=0), "'ln' matches nothing; a pattern must match the whole name, e.g. 'ln.bias'"),
        (Plan("tp=2").shard(r"layers\.\d+\.attn\.qvk\.weight", tp=0), "matches nothing; there is 'layers.0.attn.qkv.weight'"),
        (Plan("tp=2").shard(r"ln\..*", tp=0), "3 parameters match no rule and count as replicated: embedding.word.weight"),
        (Plan("tp=2").shard(r".*bias", tp=0).replicate(r"ln\..*"), "both match ln.bias and say different things"),
        (Plan("tp=2").shard(r".*\.bias", tp=0).shard(r"ln\.bias", tp=-1).replicate(".*"), "say different things"),
        (Plan("tp=2").shard(r"ln\..*", tp=0).shard(r"ln\.bias", tp=0), r"'ln\\.bias' never applies"),
        (Plan("tp=2").shard(r"ln\.bias", tp=1), "cuts tp:1, a dimension that ln.bias [4] does not have"),
        (Plan("tp=2").shard(r"ln\.bias", tpp=0), "has no axis 'tpp', it counts as of size 1; did you mean 'tp'?"),
        (Plan("tp=2").rename(r"head\.w", "x", kind="param"), "matches no name"),
    ],
)
def test_what_looks_like_a_mistake_is_told(plan: Plan, said: str) -> None:
    warnings = plan.understood(NAMES).warnings
    assert any(said in w for w in warnings), warnings


def test_a_default_at_the_end_is_no_contradiction() -> None:
    plan = Plan("tp=2").shard(r".*\.weight", tp=0).shard(r"ln\.bias", tp=0).replicate(".*")
    assert plan.understood(NAMES).warnings == ()
