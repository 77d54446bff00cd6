"""State tracking: found from the optimizer, hashed when it may have changed, recorded when it did."""

from __future__ import annotations

import gc
import json
import weakref
from typing import Any

import pytest

from proctor.instrument.observe import state
from proctor.instrument.observe.state import Look, StateTracker
from proctor.instrument.observe.tracked import _in_order

torch = pytest.importorskip("torch")
nn = torch.nn


class Names:
    """Interns texts as the recorder does."""

    def __init__(self) -> None:
        self.texts: list[str] = [""]

    def __call__(self, kind: int, text: str) -> int:
        if text not in self.texts:
            self.texts.append(text)
        return self.texts.index(text)

    def variable(self, row: tuple[Any, ...]) -> str:
        var = json.loads(self.texts[row[4]])
        return f"{var['name']}.{var['attr']}"


@pytest.fixture
def names() -> Names:
    return Names()


@pytest.fixture
def tracker(names: Names) -> StateTracker:
    return StateTracker(names, lambda attr: True)


def look(tracker: StateTracker, **what: Look) -> list[tuple[Any, ...]]:
    tracker.observe(1, 1, 1, lambda: 1, **what)
    return tracker.take_rows()


def changed(tracker: StateTracker, names: Names, **what: Look) -> set[str]:
    return {names.variable(row) for row in look(tracker, **what)}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.emb.weight


def test_models_are_found_from_the_optimizer_and_named_by_the_root(tracker: StateTracker, names: Names) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    tracker.add_optimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), "#0")
    seen = changed(tracker, names, data=Look.FORCE)
    assert seen == {"0.weight.data", "0.bias.data", "2.weight.data", "2.bias.data"}
    metas = {json.loads(t)["optimizer"] for t in names.texts if t.startswith('{"device"')}
    assert "#0" in metas and None in metas


def test_a_part_that_is_called_by_itself_keeps_its_name_in_the_model(tracker: StateTracker) -> None:
    body = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    tracker.add_model(body)  # before the model that it is in is known
    assert [tracker.names[id(m)] for m in (body, body[0])] == ["", "0"]
    model = nn.ModuleList([body, nn.Linear(3, 1)])
    for _ in range(2):
        tracker.add_model(model)
        tracker.add_model(body)
        assert [tracker.names[id(m)] for m in (model, body, body[0], model[1])] == ["", "0", "0.0", "1"]


def test_tied_weights_are_two_variables_of_one_tensor(tracker: StateTracker, names: Names) -> None:
    model = Tied()
    tracker.add_model(model)
    rows = look(tracker, data=Look.FORCE)
    by_name = {names.variable(r): r for r in rows}
    assert by_name["emb.weight.data"][6] == by_name["head.weight.data"][6]
    assert '"alias":"emb.weight"' in names.texts[by_name["head.weight.data"][4]]


def test_what_did_not_change_leaves_no_row(tracker: StateTracker, names: Names) -> None:
    model = nn.Linear(2, 2)
    tracker.add_model(model)
    assert changed(tracker, names, data=Look.FORCE) == {"weight.data", "bias.data"}
    assert not look(tracker, data=Look.FORCE)
    with torch.no_grad():
        model.bias.add_(1)
    assert changed(tracker, names, data=Look.HINT) == {"bias.data"}


def test_the_hint_saves_the_hash(tracker: StateTracker, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    tracker.add_model(model)
    look(tracker, data=Look.FORCE, grad=Look.FORCE)
    monkeypatch.setattr(state, "fingerprint_all", lambda tensors: pytest.fail("hashed what the hint cleared"))
    assert not look(tracker, data=Look.HINT, grad=Look.HINT, buffers=Look.HINT)


@pytest.mark.parametrize("write", ["data", "numpy", "storage"])
def test_writes_that_escape_version_counters_are_seen_at_the_next_update(write: str, tracker: StateTracker, names: Names) -> None:
    model = nn.Linear(2, 2)
    tracker.add_model(model)
    look(tracker, data=Look.FORCE)
    version = model.weight._version
    if write == "data":
        model.weight.data.add_(1)
    elif write == "numpy":
        model.weight.detach().numpy()[0, 0] += 1
    else:
        model.weight.untyped_storage().fill_(1)
    assert model.weight._version == version
    assert changed(tracker, names, data=Look.FORCE) == {"weight.data"}


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_every_kind_of_optimizer_moves_what_it_holds(options: dict[str, bool], tracker: StateTracker, names: Names) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    tracker.add_optimizer(optimizer, "#0")
    look(tracker, data=Look.FORCE)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    seen = changed(tracker, names, data=Look.FORCE, optimizer=Look.FORCE)
    assert {"weight.data", "bias.data", "weight.exp_avg", "bias.exp_avg_sq"} <= seen


def test_gradients_appear_and_are_cleared_by_any_means(tracker: StateTracker, names: Names) -> None:
    model = nn.Linear(2, 1)
    tracker.add_model(model)
    look(tracker, data=Look.FORCE, grad=Look.HINT)
    model(torch.ones(1, 2)).sum().backward()
    assert changed(tracker, names, grad=Look.FORCE) == {"weight.grad", "bias.grad"}
    for p in model.parameters():
        p.grad = None
    rows = look(tracker, grad=Look.HINT)
    assert {names.variable(r) for r in rows} == {"weight.grad", "bias.grad"} and all(r[8] == 1 for r in rows)
    model(torch.ones(1, 2)).sum().backward()
    look(tracker, grad=Look.FORCE)
    model.zero_grad(set_to_none=False)
    assert all(r[8] & 2 for r in look(tracker, grad=Look.HINT))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_buffers_of_a_scripted_module_are_no_dictionary_and_are_seen(tracker: StateTracker, names: Names) -> None:
    model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    tracker.add_model(model)
    look(tracker, buffers=Look.FORCE)
    model(torch.randn(8, 4))
    assert changed(tracker, names, buffers=Look.FORCE) == {"1.running_mean.data", "1.running_var.data", "1.num_batches_tracked.data"}


def test_statistics_of_batch_norm_are_buffers(tracker: StateTracker, names: Names) -> None:
    model = nn.BatchNorm1d(3)
    tracker.add_model(model)
    look(tracker, buffers=Look.FORCE)
    model(torch.randn(4, 3))
    assert changed(tracker, names, buffers=Look.FORCE) == {
        "running_mean.data", "running_var.data", "num_batches_tracked.data",
    }


def test_freezing_and_python_attributes_are_in_the_meta(tracker: StateTracker, names: Names) -> None:
    model = nn.Linear(2, 2)
    model.weight.tensor_model_parallel = True
    tracker.add_model(model)
    look(tracker, data=Look.FORCE)
    model.bias.requires_grad_(False)
    tracker.rescan(5)
    (row,) = look(tracker, data=Look.FORCE)
    assert json.loads(names.texts[row[5]])["requires_grad"] is False
    assert any('"attr.tensor_model_parallel": true' in t for t in names.texts)


def test_a_parameter_that_takes_the_place_of_one_that_is_gone_is_tracked_at_the_next_step(tracker: StateTracker, names: Names) -> None:
    model = nn.Linear(2, 2)
    tracker.add_model(model)
    look(tracker, data=Look.FORCE)
    tracker.rescan(5)
    model.bias = nn.Parameter(torch.ones(2))
    gc.collect()
    assert changed(tracker, names, data=Look.FORCE) == set()
    tracker.rescan(6)
    assert changed(tracker, names, data=Look.FORCE) == {"bias.data"}


def test_tracking_keeps_nothing_alive(tracker: StateTracker) -> None:
    model = nn.Linear(2, 2)
    tracker.add_optimizer(torch.optim.Adam(model.parameters()), "#0")
    look(tracker, data=Look.FORCE)
    gone = weakref.ref(model.weight)
    del model
    gc.collect()
    assert gone() is None
    assert not look(tracker, data=Look.FORCE, grad=Look.FORCE, optimizer=Look.FORCE)


def test_looking_changes_nothing(tracker: StateTracker) -> None:
    model = Tied()
    optimizer = torch.optim.Adam(model.parameters())
    tracker.add_optimizer(optimizer, "#0")
    before, versions = torch.get_rng_state(), [p._version for p in model.parameters()]
    values = [p.detach().clone() for p in model.parameters()]
    look(tracker, data=Look.FORCE, grad=Look.FORCE, buffers=Look.FORCE, optimizer=Look.FORCE)
    assert torch.equal(before, torch.get_rng_state())
    assert versions == [p._version for p in model.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters()))


@pytest.fixture(autouse=True)
def _collect() -> None:
    gc.collect()  # discovery walks all live modules; those of earlier tests must be gone


def test_a_buffer_that_is_assigned_anew_stays_the_same_variable(tracker: StateTracker, names: Names) -> None:
    model = nn.BatchNorm1d(2)
    tracker.add_model(model)
    assert "running_mean.data" in changed(tracker, names, buffers=Look.FORCE)
    model.running_mean = model.running_mean + 1
    assert changed(tracker, names, buffers=Look.FORCE) == {"running_mean.data"}
    model.running_mean = None
    assert changed(tracker, names, buffers=Look.FORCE) == set()


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 1)


def models_of(names: Names) -> set[tuple[str, str]]:
    return {(var["model"].rpartition(".")[2], var["name"]) for text in names.texts[1:] if "model" in (var := json.loads(text)) and var["role"] == "parameter"}


def test_two_models_of_one_class_are_told_apart(tracker: StateTracker, names: Names) -> None:
    first, second = Critic(), Critic()
    tracker.add_optimizer(torch.optim.SGD([*second.parameters(), *first.parameters()], 0.1), "#0")
    assert models_of(names) == {(m, f"fc.{k}") for m in ("Critic", "Critic#2") for k in ("weight", "bias")}
    assert [tracker.names[id(m)] for m in (second, second.fc, first, first.fc)] == ["", "fc", "", "Critic#2.fc"]  # in signatures
    look(tracker, data=Look.FORCE)
    with torch.no_grad():
        second.fc.weight.add_(1.0)  # the first of the optimizer, however the collector has them
    (row,) = look(tracker, data=Look.FORCE)
    var = json.loads(names.texts[row[4]])
    assert (var["model"].rpartition(".")[2], var["name"]) == ("Critic", "fc.weight")


def test_a_wrapper_is_the_model_that_it_wraps_and_a_new_model_takes_the_place_of_one_that_is_gone(tracker: StateTracker, names: Names) -> None:
    model = Critic()
    tracker.add_model(model)
    tracker.add_model(nn.DataParallel(model))
    assert {m for m, _ in models_of(names)} == {"Critic"}
    del model
    gc.collect()
    fresh = Critic()
    tracker.add_model(fresh)
    assert {m for m, _ in models_of(names)} == {"Critic"}


def test_a_layer_that_two_models_share_belongs_to_the_one_that_has_more_of_the_optimizer_in_whatever_order_they_are_found() -> None:
    encoder = torch.nn.Linear(3, 3)
    actor, critic = torch.nn.Sequential(encoder, torch.nn.Linear(3, 2)), torch.nn.ModuleList([encoder, torch.nn.Linear(3, 1)])
    order = {id(p): i for i, p in enumerate(actor.parameters())}
    assert all([m is actor for m in _in_order(models, order)] == [True, False] for models in ([actor, critic], [critic, actor]))


def test_what_an_optimizer_was_made_with_and_holds_no_more_is_not_its_own(tracker: StateTracker, names: Names) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker.add_optimizer(optimizer, "#0")
    flat = nn.Parameter(torch.cat([p.detach().flatten() for p in model.parameters()]))
    optimizer.param_groups[0]["params"] = [flat]
    tracker.let_go(optimizer)
    rows = look(tracker, data=Look.FORCE)
    assert "optimizer#0.0.data" in {names.variable(row) for row in rows}
    holders = {names.variable(row): json.loads(names.texts[row[5]])["optimizer"] for row in rows}
    assert holders == {"weight.data": None, "bias.data": None, "optimizer#0.0.data": "#0"}
