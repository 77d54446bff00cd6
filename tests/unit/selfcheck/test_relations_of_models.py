"""Relations on small models, healthy ones and ones with a planted bug: verdict and culprit."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from helpers.selfchecked import call_of, verdict  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle.selfcheck import NotApplicable, Unknown  # noqa: E402


class Net(nn.Module):
    def __init__(self, body):
        super().__init__()
        torch.manual_seed(3)
        self.one, self.two, self.norm, self.body = nn.Linear(6, 8), nn.Linear(8, 3), nn.BatchNorm1d(8), body

    def forward(self, x):
        return self.two(self.body(self, torch.tanh(self.one(x))))


def batch():
    torch.manual_seed(1)
    return torch.randn(8, 6)


HEALTHY = Net(lambda net, h: F.dropout(net.norm(h), 0.3, training=net.training))


@pytest.mark.parametrize("name", ["neighbours", "permutation", "repeatable", "inputs", "precision", "checkpointing"])
def test_a_healthy_model_keeps_the_relation(name):
    assert verdict(name, call_of(HEALTHY, batch())).verdict == "equivalent"


def _half(net, h):
    return h.half().float()


def _counted(net, h):
    net.count = getattr(net, "count", 0) + 1
    return h * (1 + 0.1 * net.count)


BROKEN = {
    "neighbours": [lambda net, h: h - h.mean(0), lambda net, h: torch.softmax(h, 0), lambda net, h: F.batch_norm(h, None, None, training=True), lambda net, h: h + h[0]],
    "permutation": [lambda net, h: h * torch.arange(len(h)).unsqueeze(1), lambda net, h: h.reshape(4, 2, 8).transpose(0, 1).reshape(8, 8) + h],
    "repeatable": [lambda net, h: F.dropout(h, 0.3), _counted],
    "precision": [_half, lambda net, h: h * ((h + 5000.0).pow(2).mean(1, keepdim=True) - (h + 5000.0).mean(1, keepdim=True).pow(2))],
    "world": [lambda net, h: h / len(h) * 8, lambda net, h: h - h.mean(0)],
    "inputs": [lambda net, h: h * 0],
}


@pytest.mark.parametrize(("name", "number"), [(n, i) for n, bodies in BROKEN.items() for i in range(len(bodies))])
def test_a_planted_bug_breaks_the_relation_and_is_named(name, number):
    call = call_of(Net(BROKEN[name][number]), batch(), targets=[torch.zeros(8)])
    found = verdict(name, call)
    assert found.verdict == "different", found
    assert found.culprit is not None and found.expected and found.seen and found.advice
    if name in ("neighbours", "repeatable"):
        assert "test_relations_of_models.py" in found.culprit.source


def test_gradients_add_up_over_halves_of_the_batch():
    assert verdict("world", call_of(Net(lambda net, h: h), batch())).verdict == "equivalent"


def test_batch_statistics_are_different_by_design_and_named():
    found = verdict("world", call_of(Net(lambda net, h: net.norm(h)), batch()))
    assert found.verdict == "by-design" and "norm" in found.reason


def test_a_bug_beside_a_batch_norm_is_not_excused_by_it():
    assert verdict("world", call_of(Net(lambda net, h: net.norm(h) / len(h) * 8), batch())).verdict == "different"


def test_a_batch_norm_without_running_statistics_is_by_design():
    net = Net(lambda net, h: net.bare(h))
    net.bare = nn.BatchNorm1d(8, track_running_stats=False)
    assert verdict("neighbours", call_of(net, batch())).verdict == "by-design"


def test_noise_of_a_models_own_is_by_design():
    found = verdict("repeatable", call_of(Net(lambda net, h: h + torch.randn_like(h)), batch()))
    assert found.verdict == "by-design" and "randn" in found.culprit.op


@pytest.mark.parametrize("rows", [455, 4096, 20000])
def test_a_sum_over_many_samples_rounds_otherwise_in_halves(rows):
    torch.manual_seed(1)
    assert verdict("world", call_of(nn.Sequential(nn.Linear(30, 1), nn.Sigmoid()), torch.randn(rows, 30) + 1)).verdict == "equivalent"


def test_noise_of_a_models_own_is_no_difference_of_types():
    with pytest.raises(Unknown, match="draws random"):
        verdict("precision", call_of(Net(lambda net, h: h + torch.randn_like(h)), batch(), targets=[torch.zeros(8)]))


NOISES = [
    lambda h: torch.randn_like(h), lambda h: torch.distributions.Normal(h, h.exp()).rsample() - h, lambda h: torch.rand(h.shape), lambda h: torch.bernoulli(torch.full_like(h, 0.4)),
    lambda h: torch.randint(0, 5, h.shape), lambda h: torch.empty_like(h).exponential_(2.0), lambda h: torch.empty_like(h).normal_(1.0, 0.1),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(NOISES)))
def test_a_model_with_noise_of_its_own_is_judged_where_the_noise_is_one_for_all_samples(number):
    healthy = call_of(Net(lambda net, h: h + NOISES[number](h)), batch())
    for name in ("neighbours", "permutation", "world"):
        assert verdict(name, healthy).verdict == "equivalent", name
    assert verdict("repeatable", healthy).verdict in ("by-design", "different")  # `bernoulli` is dropout's own
    mixed = call_of(Net(lambda net, h: h - h.mean(0) + NOISES[number](h)), batch())
    for name in ("neighbours", "world"):
        found = verdict(name, mixed)
        assert found.verdict == "different" and "test_relations_of_models.py" in found.culprit.source, found


def test_an_order_by_chance_is_not_judged():
    with pytest.raises(NotApplicable):
        verdict("neighbours", call_of(Net(lambda net, h: h + h[torch.randperm(len(h))]), batch()))


class Scored(nn.Module):
    """Scores of the next item of each user: arrays come in, and the positions to come are an input, too."""

    def __init__(self, mask=True):
        super().__init__()
        torch.manual_seed(2)
        self.emb, self.attend, self.mask = nn.Embedding(20, 8), nn.MultiheadAttention(8, 1, batch_first=True), mask

    def forward(self, users, seen, following):
        x = self.emb(torch.LongTensor(seen))
        late = torch.ones(x.size(1), x.size(1), dtype=torch.bool).triu(1) if self.mask else None
        x = self.attend(x, x, x, attn_mask=late, need_weights=False)[0]
        return (x * self.emb(torch.LongTensor(following))).sum(-1)


def _items():
    whole = torch.randint(1, 20, (6, 9), generator=torch.Generator().manual_seed(4)).numpy()
    return np.arange(6), whole[:, :-1], whole[:, 1:]


def test_arrays_of_numpy_are_inputs():
    call = call_of(Scored(), *_items())
    for name in ("neighbours", "permutation", "world", "causal"):
        assert verdict(name, call).verdict == "equivalent", name
    assert verdict("inputs", call).verdict == "by-design"  # numbers of the samples


def test_steps_that_are_read_and_have_no_part_are_no_numbers_of_samples():
    class Timeless(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(6, 3)

        def forward(self, x, t):
            return self.fc(x) + 0 * t.unsqueeze(1)

    assert verdict("inputs", call_of(Timeless(), batch(), torch.tensor([5, 1, 7, 3, 9, 2, 8, 4]))).verdict == "different"


def test_a_model_is_causal_whose_other_input_is_one_further():
    found = verdict("causal", call_of(Scored(mask=False), *_items()))
    assert found.verdict == "different" and found.culprit.module == "attend"


def test_samples_are_found_in_what_a_model_returns_in_training_alone():
    class Two(nn.Module):
        def __init__(self, body):
            super().__init__()
            torch.manual_seed(2)
            self.fc, self.body = nn.Linear(6, 3), body

        def forward(self, x):
            h = self.body(self.fc(x))
            return h if self.training else (h, [h * 2])

    assert verdict("world", call_of(Two(torch.tanh), batch())).verdict == "equivalent"
    assert verdict("world", call_of(Two(lambda h: h / len(h)), batch())).verdict == "different"


def test_nodes_of_a_graph_are_no_samples():
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x, adjacency):
            return adjacency @ self.fc(x)

    call = call_of(Graph(), torch.randn(5, 4), torch.rand(5, 5))
    for name in ("neighbours", "permutation", "world"):
        with pytest.raises(NotApplicable):
            verdict(name, call)


def test_an_unbatched_recurrent_model_has_no_samples():
    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(4, 5)

        def forward(self, x):
            return self.rnn(x.view(len(x), 1, -1))[0].squeeze(1)

    with pytest.raises(NotApplicable):
        verdict("neighbours", call_of(Tagger(), torch.randn(7, 4)))


def test_samples_along_the_second_axis_are_found():
    rnn = nn.GRU(4, 5)
    assert verdict("neighbours", call_of(rnn, torch.randn(7, 3, 4))).verdict == "equivalent"


def test_a_model_that_does_not_evaluate_is_not_judged():
    class Moody(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x):
            if not self.training:
                raise RuntimeError("training only")
            return self.fc(x)

    with pytest.raises(Unknown, match="training only"):
        verdict("neighbours", call_of(Moody(), torch.randn(3, 4)))


class Language(nn.Module):
    def __init__(self, diagonal):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.qk, self.v, self.head, self.diagonal = nn.Embedding(20, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 20), diagonal

    def forward(self, ids):
        x = self.embed(ids)
        scores = self.qk(x) @ x.transpose(1, 2)
        t = ids.shape[1]
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(self.diagonal), float("-inf"))
        return self.head(x + torch.softmax(scores, -1) @ self.v(x))


@pytest.mark.parametrize(("diagonal", "wanted"), [(1, "equivalent"), (2, "different"), (30, "different")])
def test_a_mask_that_lets_the_future_through_is_found(diagonal, wanted):
    ids = torch.randint(0, 20, (4, 10), generator=torch.Generator().manual_seed(5))
    call = call_of(Language(diagonal), ids[:, :-1], targets=[ids[:, 1:].reshape(-1)])
    found = verdict("causal", call)
    assert found.verdict == wanted
    if wanted == "different":
        assert "softmax" in found.culprit.op


class Heads(Language):
    """Two heads, so that scores are computed in a shape of as many rows as there are positions: 4 samples, 8 positions."""

    def forward(self, ids):
        x, t = self.embed(ids), ids.shape[1]
        q, k = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in (self.qk(x), x))
        scores = q @ k.transpose(2, 3)
        scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(self.diagonal), float("-inf"))
        return self.head(x + torch.softmax(scores, -1).mean(1) @ self.v(x))


def test_the_softmax_is_named_where_an_axis_is_as_long_as_the_sequence_by_accident():
    ids = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(5))
    found = verdict("causal", call_of(Heads(2), ids[:, :-1], targets=[ids[:, 1:].reshape(-1)]))
    assert found.verdict == "different" and "softmax" in found.culprit.op, found.culprit


class Scoring(nn.Module):
    """Returns its loss alone, of tokens that it cuts itself."""

    def __init__(self, diagonal):
        super().__init__()
        self.inner = Language(diagonal)

    def forward(self, ids):
        return F.cross_entropy(self.inner(ids[:, :-1]).transpose(1, 2), ids[:, 1:])


@pytest.mark.parametrize(("diagonal", "wanted"), [(1, "equivalent"), (2, "different"), (30, "different")])
def test_a_causal_model_that_returns_its_loss_alone_is_judged_by_what_the_loss_is_given(diagonal, wanted):
    ids = torch.randint(0, 20, (4, 10), generator=torch.Generator().manual_seed(5))
    before = F.cross_entropy
    found = verdict("causal", call_of(Scoring(diagonal), ids, targets=[ids[:, 1:].reshape(-1)]))
    assert found.verdict == wanted and F.cross_entropy is before
    assert wanted == "equivalent" or "softmax" in found.culprit.op


def test_a_model_that_is_not_trained_on_the_next_token_is_not_called_causal():
    ids = torch.randint(0, 20, (4, 9))
    with pytest.raises(NotApplicable):
        verdict("causal", call_of(Language(30), ids, targets=[ids.reshape(-1)]))


class Padded(nn.Module):
    def __init__(self, masks):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head, self.masks = nn.Embedding(20, 8), nn.Linear(8, 3), masks

    def forward(self, ids, attention_mask):
        x = self.embed(ids)
        if not self.masks:
            return self.head(x.mean(1))
        return self.head((x * attention_mask.unsqueeze(-1)).sum(1) / attention_mask.sum(1, keepdim=True))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("masks", "wanted"), [(True, "equivalent"), (False, "different")])
def test_what_a_mask_hides_must_not_matter(masks, wanted, padded):
    ids = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(4, 9, dtype=torch.long)
    if padded:
        mask[1, 6:] = 0
    assert verdict("padding", call_of(Padded(masks), ids, mask)).verdict == wanted


def test_checkpointing_finds_a_forward_that_counts():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.calls = nn.Linear(6, 6), 0

        def forward(self, x):
            self.calls += 1
            return torch.sin(self.fc(x) * self.calls)

    found = verdict("checkpointing", call_of(nn.Sequential(Block(), Block()), batch()))
    assert found.verdict == "different" and "0" in found.culprit.module


def test_an_input_that_a_later_part_of_a_model_leaves_alone_is_no_bug():
    class Stage(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(6, 3)

        def forward(self, ids, hidden):
            return self.out(hidden)

    ids, stage = torch.arange(8) % 3, Stage()
    with pytest.raises(NotApplicable, match="later part"):
        verdict("inputs", call_of(stage, ids, batch().requires_grad_()))
    assert verdict("inputs", call_of(stage, ids, batch())).verdict == "different"


class Tagged(Padded):
    def forward(self, ids, attention_mask, labels):
        logits = self.head(self.embed(ids))
        return F.cross_entropy(logits.transpose(1, 2), labels), logits


@pytest.mark.parametrize(("at_padding", "wanted"), [(-100, "equivalent"), (0, "different")])
def test_a_loss_does_not_depend_on_how_far_a_batch_is_padded(at_padding, wanted):
    ids = torch.randint(1, 20, (4, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(4, 9, dtype=torch.long)
    mask[1, 6:] = mask[3, 4:] = 0
    ids, labels = ids * mask, torch.where(mask.bool(), ids % 3, torch.tensor(at_padding))
    found = verdict("padding", call_of(Tagged(True), ids, mask, labels=labels))
    assert found.verdict == wanted and (wanted == "equivalent" or "one position of padding more" in found.reason)
    whole = torch.ones_like(mask)
    assert verdict("padding", call_of(Tagged(True), ids, whole, labels=labels)).verdict == "equivalent"  # nothing is padded: nobody knows with what
