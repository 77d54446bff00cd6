"""What is read off Megatron's own state, with stand-ins for it; the real one is in tests/integration/oracle/test_megatron.py."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from proctor.oracle.frameworks import megatron, megatron_activations
from proctor.oracle.plans.mesh import Cut, Layout, Mesh

torch = pytest.importorskip("torch")
nn = torch.nn


class Group:
    def __init__(self, ranks: list[int], me: int) -> None:
        self.ranks, self.me = ranks, me

    def size(self) -> int:
        return len(self.ranks)

    def rank(self) -> int:
        return self.ranks.index(self.me)


def job(monkeypatch: pytest.MonkeyPatch, order: str, sizes: dict[str, int], me: int, *, etp: int = 0, ep: int = 0) -> None:
    """Process groups as Megatron makes them: `order` names the axes fast → slow, as its own argument does."""
    mesh = Mesh(tuple(reversed(order.split("-"))), tuple(sizes.get(a, 1) for a in reversed(order.split("-"))))
    here = mesh.coords(me)

    def group(axis: str) -> Group:
        return Group([mesh.rank(here | {axis: at}) for at in range(mesh.size(axis))], me)

    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_pipeline_model_parallel_group=lambda: group("pp"),
        get_data_parallel_group=lambda: group("dp"),
        get_context_parallel_group=lambda: group("cp"),
        get_tensor_model_parallel_group=lambda: group("tp"),
        get_expert_tensor_parallel_world_size=lambda: etp or sizes.get("tp", 1),
        get_expert_model_parallel_rank=lambda: ep,
    )
    monkeypatch.setitem(sys.modules, megatron.STATE, state)  # type: ignore[arg-type]
    monkeypatch.setattr("torch.distributed.get_process_group_ranks", lambda group: group.ranks)


@pytest.mark.parametrize("order", ["tp-cp-dp-pp", "tp-cp-pp-dp", "cp-tp-dp-pp"])
def test_the_mesh_follows_the_order_in_which_megatron_laid_out_its_ranks(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    for me in range(16):
        job(monkeypatch, order, {"tp": 2, "cp": 2, "dp": 2, "pp": 2}, me)
        assert megatron.mesh().axes == tuple(reversed(order.split("-")))
        assert megatron.mesh().rank(megatron.coords()) == me


def test_experts_that_fewer_ranks_cut_split_the_tensor_parallel_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = SimpleNamespace(tensor_model_parallel=True, partition_dim=0, partition_stride=1)
    expert = SimpleNamespace(**vars(weight), allreduce=False)
    for me in range(8):
        job(monkeypatch, "tp-cp-dp-pp", {"tp": 4, "dp": 2}, me, etp=2)
        assert megatron.mesh().size("tp_outer+etp") == 4
        assert megatron.mesh().rank(megatron.coords()) == me
        assert megatron.layout_of(weight) == Layout((Cut("tp_outer+etp", "chunk", 0),))
        assert megatron.layout_of(expert) == Layout((Cut("etp", "chunk", 0),))
    job(monkeypatch, "tp-cp-dp-pp", {"tp": 4, "dp": 2}, 0, etp=1)
    assert megatron.layout_of(expert) == Layout()
    assert megatron.layout_of(weight) == Layout((Cut("tp", "chunk", 0),))


def test_a_parameter_is_cut_as_its_attributes_say(monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, "tp-cp-dp-pp", {"tp": 2}, 0)
    gated = SimpleNamespace(tensor_model_parallel=True, partition_dim=0, partition_stride=2)
    assert megatron.layout_of(gated) == Layout((Cut("tp", "interleaved", 0, (2,)),))
    assert megatron.layout_of(SimpleNamespace()) == Layout()
    assert megatron.layout_of(gated, type("GroupedMLP", (), {})()) is None


class Layer(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.fc = nn.Linear(2, 2)


class Grouped(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.num_gemms = 2
        self.weight0, self.weight1 = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))


class Float16Module(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module


class Stage(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.pre_process, self.post_process = False, True
        self.share_embeddings_and_output_weights = True
        self.layers = nn.ModuleList([Layer(3), Layer(4)])
        self.experts = Grouped()
        self.output_layer = nn.Linear(2, 2, bias=False)


def test_layers_experts_and_tied_embeddings_have_the_names_of_the_whole_model(monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, "tp-cp-dp-pp", {"dp": 2}, 1, ep=1)
    names = megatron.canonical_names(Float16Module(Stage()))
    assert names["module.layers.1.fc.weight"] == "layers.3.fc.weight"
    assert names["module.layers.0"] == "layers.2"
    assert names["module.experts.weight1"] == "experts.weight3"
    assert names["module.output_layer.weight"] == "embedding.word_embeddings.weight"
    assert names["module.output_layer"] == "output_layer"
    assert names[""] == names["module"] == ""


class VocabParallelEmbedding(nn.Embedding):  # type: ignore[misc, name-defined]
    pass


class ColumnParallelLinear(nn.Linear):  # type: ignore[misc, name-defined]
    pass


def test_a_vocabulary_may_be_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, "tp-cp-dp-pp", {"tp": 2}, 0)
    model = nn.Module()
    model.config = SimpleNamespace(sequence_parallel=False)
    model.embedding, model.fc, model.output_layer = VocabParallelEmbedding(8, 2), ColumnParallelLinear(2, 8), ColumnParallelLinear(2, 8)
    for parameter in model.parameters():
        parameter.tensor_model_parallel, parameter.partition_dim = True, 0
    plan = megatron_activations.plan_of([model])
    layouts = {n: plan.param_layout(f"{n}.weight") for n in ("embedding", "fc", "output_layer")}
    assert {n: str(layout) for n, layout in layouts.items()} == {"embedding": "tp:0, padded", "fc": "tp:0", "output_layer": "tp:0, padded"}
    logits = plan.activation_layout("output_layer", "grad_output", "0")
    assert str(logits) == "tp:-1, padded" and str(plan.activation_layout("fc", "output", "0")) == "tp:-1"


def test_what_goes_into_a_later_stage_is_no_input_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    job(monkeypatch, "tp-cp-dp-pp", {"pp": 2}, 1)
    assert megatron_activations.left_out(Float16Module(Stage())) == {"": frozenset({"input"})}


def test_nothing_is_there_where_megatron_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, megatron.STATE, raising=False)
    monkeypatch.delitem(sys.modules, megatron.OPTIMIZERS, raising=False)
    assert not megatron.present()
    assert not megatron.is_model(nn.Linear(1, 1))
    assert megatron.optimizer_classes() == []
