"""Plans that are read off a model or a program compute what one device computes; what they cannot say is said."""

import functools

import pytest
import torch
from helpers.oracle import parallel_gpt
from helpers.oracle import torch_native as native
from torch import nn

from proctor.errors import OracleError
from proctor.oracle.parallel import parallelize, run_threads
from proctor.oracle.parallel.deriving import derive
from proctor.oracle.parallel.deriving.flow import follow
from proctor.oracle.parallel.deriving.patterns import glob, joined, pattern_of
from proctor.oracle.parallel.deriving.rehearsal import Batch
from proctor.oracle.plans.names import compiled
from proctor.oracle.plans.plan_toml import format_plan, parse_plan

PROGRAMS = {"model": "model", "styles": native.tensor_parallel, "sequence": native.sequence_parallel, "dtensors": native.distributed_tensors}


def test_a_number_of_equal_siblings_is_any_number():
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)])})
    assert pattern_of("layers.0.0.weight", model) == r"layers\.\d+\.0\.weight"
    assert pattern_of("", model) == ""


def test_joined_patterns_match_what_each_matched():
    assert joined([r"layers\.\d+\.fc1\.weight", r"layers\.\d+\.fc2\.weight"]) == r"layers\.\d+\.(fc1|fc2)\.weight"
    assert joined([r"a\.b", r"a\.b"]) == r"a\.b"
    both = joined([r"a\.b", r"a\.b\.c", "d"])
    assert all(compiled(both).fullmatch(name) for name in ("a.b", "a.b.c", "d"))
    assert glob("layers.*.q_proj") == r"layers\.\d+\.q_proj"


@pytest.mark.parametrize("source", list(PROGRAMS))
def test_a_plan_of_each_source_trains_what_one_device_trains(source):
    found = derive(native.make(), native.batch(), "dp=2,tp=2", source=PROGRAMS[source])
    assert found.notes == () and found.apart == ()
    plan = parse_plan(format_plan(found.plan))  # as a file has it
    assert plan.to_json() == found.plan.to_json()
    plan.shards.clear()

    models = [native.make() for _ in range(5)]  # here: torch's generator is one for all threads

    def losses(rules):
        model = parallelize(models.pop(), rules, seed=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        said = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(native.batch()).square().mean()
            loss.backward()
            optimizer.step()
            said.append(loss.item())
        return said

    one = losses(plan.on(type(plan.mesh)(("dp", "tp"), (1, 1))))
    for found in run_threads(lambda rank: losses(plan), 4):
        assert found == pytest.approx(one, abs=1e-5)


def test_what_a_program_says_is_in_the_plan():
    plan = derive(native.make(), native.batch(), "dp=2,tp=2", source=native.sequence_parallel).plan
    assert [(rule.module, rule.names) for rule in plan.sizes] == [(r"layers\.\d+\.attention", ("n_heads",))]
    assert [(rule.module, rule.axis) for rule in plan.shards] == [(r"layers\.\d+", "dp")]
    assert any(rule.axes == ("tp",) and compiled(rule.path).fullmatch("layers.1.ffn_norm.weight") for rule in plan.pendings)


def test_a_program_that_forgets_to_gather_is_named():
    found = derive(native.make(), native.batch(), "tp=2", source=native.forgotten_gather)
    assert "output the model is [4, 12, 32], on one device [4, 12, 64]" in found.apart[0]


class Modulated(nn.Module):
    """A residual stream that another layer scales, a fused projection, a table that is tied to the head, a norm of each head."""

    def __init__(self):
        super().__init__()
        self.words, self.scale = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.heads, self.qkv, self.out = 4, nn.Linear(32, 96), nn.Linear(32, 32)
        self.norm, self.drop = nn.LayerNorm(8), nn.Dropout(0.1)
        self.head = nn.Linear(32, 64, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        x = self.words(tokens)
        shift, scale = self.scale(x.mean(1)).chunk(2, -1)
        x = x * (1 + scale[:, None]) + shift[:, None]
        q, k, v = (t.view(*t.shape[:2], self.heads, 8).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = self.drop(torch.softmax(self.norm(q) @ k.transpose(-1, -2), -1)) @ v
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def test_what_must_stay_whole_is_found():
    torch.manual_seed(0)
    assert follow(Modulated(), Batch.of(native.batch())).whole == {"scale"}
    flow = follow(Modulated(), Batch.of(native.batch()), {"scale"})
    assert not flow.whole and flow.leaves == {"head"}
    assert flow.feeds["out"] == {"qkv"} and flow.pieces["qkv"] == 3
    assert set(flow.waiting) == {"norm.weight", "norm.bias"}
    found = derive(Modulated(), native.batch(), "dp=2,tp=2")
    assert found.notes == () and found.apart == ()
    assert str(found.plan.param_layout("qkv.weight")) == "tp:interleaved:0:3"
    assert [(rule.module, rule.names) for rule in found.plan.sizes] == [("", ("heads",))]
    assert found.plan.param_layout("words.weight") == found.plan.param_layout("head.weight")
    assert found.plan.param_layout("scale.weight") is None
    assert {str(rule.rule.layout(found.plan.mesh)) for rule in found.plan.draws} == {"dp:0 tp:1"}


def test_the_gpt_of_the_examples():
    found = derive(parallel_gpt.make(0.1), parallel_gpt.batches(1)[0][:, :-1], "dp=2,tp=4")
    assert found.notes == () and found.apart == ()
    assert len(found.plan.params) <= 6


class Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x, extra):
        y = self.fc(x) + extra
        return {"sum": y.sum(), "mean": y.mean(), "rows": y, "one": self.fc.weight.sum(), "std": y.std()}


def test_outputs_of_rows_are_measured():
    generator = torch.Generator().manual_seed(0)
    found = derive(Sum(), {"x": torch.randn(4, 8, generator=generator), "extra": torch.randn(8, generator=generator)}, "dp=2")
    said = {rule.slot: str(rule.rules["from"].layout(found.plan.mesh)) for rule in found.plan.edges if rule.at == "output"}
    assert said == {"sum": "dp:partial", "mean": "dp:partial-avg", "rows": "dp:0"}
    assert any("output std" in note for note in found.notes)
    assert [rule.slot for rule in found.plan.edges if rule.at == "input"] == ["x"]
    assert any("output std" in line for line in found.apart)


@pytest.mark.parametrize(
    ("mesh", "source", "batch", "said"),
    [
        ("dp=3", "model", native.batch(), "the batch has 4 rows, and dp has 3 ranks"),
        ("pp=2", "model", native.batch(), "the axis 'pp' is neither that of data"),
        ("tp=1", "model", native.batch(), "a mesh of 1 ranks"),
        ("tp=2", "modle", native.batch(), "'modle' is no source of a plan"),
        ("tp=2", "tp_plan", native.batch(), "no configuration in it has base_model_tp_plan"),
        ("dp=2", "model", "tokens", "the batch holds no tensor with rows"),
        ("tp=2", lambda model, mesh: 1 / 0, native.batch(), "the program that makes the model parallel stopped: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_derived_is_one_line(mesh, source, batch, said):
    with pytest.raises(OracleError) as caught:
        derive(native.make(), batch, mesh, source=source)
    assert said in caught.value.message and "\n" not in caught.value.message
    assert not torch.distributed.is_initialized()


def test_a_model_is_left_as_it_was():
    model = native.make().eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    derive(model, native.batch(), "tp=2", source=functools.partial(native.tensor_parallel))
    assert not model.training and model.layers[0].attention.n_heads == 4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters()) and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Folded(nn.Module):
    """Attention as fairseq has it, rows and heads in one dimension; gives its logits and its loss, as nanoGPT does."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, time, _ = x.shape
        q, k, v = (one(x).view(rows, time, self.num_heads, -1).transpose(1, 2).reshape(rows * self.num_heads, time, -1) for one in (self.q, self.k, self.v))
        mixed = nn.functional.dropout((q @ k.mT).softmax(-1), 0.3, self.training) @ v
        out = self.out(mixed.view(rows, self.num_heads, time, -1).transpose(1, 2).flatten(2))
        return out, out.square().mean()


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2"])
def test_draws_of_rows_times_heads_and_a_tuple_of_rows_and_their_mean(mesh):
    torch.manual_seed(0)
    found = derive(Folded(), torch.randn(4, 6, 16), mesh)
    assert not found.apart and not found.notes
    assert [rule.fold for rule in found.plan.draws] == ([(0, 4)] if "tp" in mesh else [()])
