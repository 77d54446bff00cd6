"""Relations of updates: parameters that nothing reaches, ties, weights of samples, paths of optimizers, loaders."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset  # noqa: E402

from proctor.oracle.selfcheck import NotApplicable, Unknown, registry  # noqa: E402
from proctor.oracle.selfcheck.watching.seen.moved import Moved  # noqa: E402
from proctor.oracle.selfcheck.watching.step import Backward, Criterion, Update  # noqa: E402


def update_of(model, optimizer, **more):
    held = [p for g in optimizer.param_groups for p in g["params"]]
    given = {
        "calls": [], "criteria": [], "backwards": [Backward(("a.py:1",))], "moved": {id(p): p.grad is not None and bool(p.grad.any()) for p in held},
        "called": frozenset(id(m) for m in model.modules()), "models": [model],
    }  # fmt: skip
    return Update(optimizer, type(optimizer).__name__, 2, **{**given, **more})


def trained(model):
    torch.manual_seed(0)
    model(torch.randn(5, 4)).pow(2).mean().backward()
    return model


class Cut(nn.Module):
    def __init__(self, cut):
        super().__init__()
        self.one, self.two, self.cut = nn.Linear(4, 4), nn.Linear(4, 4), cut

    def forward(self, x):
        return self.two(self.one(x).detach() if self.cut else self.one(x))


@pytest.mark.parametrize(("cut", "wanted"), [(False, "equivalent"), (True, "different")])
def test_a_graph_that_is_cut_is_found(cut, wanted):
    model = trained(Cut(cut))
    found = registry()["parameters"].check(update_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert found.verdict == wanted
    if cut:
        assert found.culprit.module == "one"


def test_parameters_of_a_module_that_never_ran_are_no_failure():
    model = Cut(False)
    model.spare = nn.Linear(2, 2)
    trained(model)
    called = frozenset(id(m) for m in model.modules() if m is not model.spare)
    found = registry()["parameters"].check(update_of(model, torch.optim.SGD(model.parameters(), lr=0.1), called=called))
    assert found.verdict == "by-design" and "spare" in found.reason


def test_a_bias_whose_gradient_cancels_is_no_failure():
    model = nn.Linear(4, 1)
    torch.manual_seed(0)
    (model(torch.randn(5, 4)).sum() - model(torch.randn(5, 4)).sum()).backward()
    found = registry()["parameters"].check(update_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert found.verdict == "by-design" and "bias" in found.reason


def test_an_optimizer_of_another_model_is_found():
    model, other = trained(Cut(False)), Cut(False)
    found = registry()["parameters"].check(update_of(model, torch.optim.SGD(other.parameters(), lr=0.1)))
    assert found.verdict == "different" and "another model" in found.reason


@pytest.mark.parametrize(("follows", "wanted"), [(True, "by-design"), (False, "different")])
def test_a_target_that_an_optimizer_holds_is_moved_by_the_program(follows, wanted):
    model, target = Cut(False), Cut(False)
    optimizer = torch.optim.SGD([*model.parameters(), *target.parameters()], lr=0.1)
    seen = Moved()
    for _ in range(3):
        optimizer.zero_grad()
        trained(model)
        for parameter in [*model.parameters(), *target.parameters()]:
            seen.look(parameter)
        optimizer.step()
        for mine, theirs in zip(model.parameters(), target.parameters(), strict=True) if follows else ():
            theirs.data.lerp_(mine.data, 0.1)
    found = registry()["parameters"].check(update_of(model, optimizer, moved=seen.graded, by_hand=seen.by_hand))
    assert found.verdict == wanted and ("a target" in found.reason) is follows


@pytest.mark.parametrize("take", ["none", "zero"])
@pytest.mark.parametrize(("cut", "wanted"), [(False, "by-design"), (True, "different")])
def test_a_gradient_that_the_program_takes_away_was_given(take, cut, wanted):
    """A layer that is to rest for the first epoch; one that the graph does not reach is told all the same."""
    model = Cut(cut)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = Moved()
    for _ in range(3):
        optimizer.zero_grad()
        trained(model)
        seen.gave([optimizer])
        for parameter in model.one.parameters():
            parameter.grad = None if take == "none" or cut else torch.zeros_like(parameter)
        for parameter in model.parameters():
            seen.look(parameter)
        optimizer.step()
    found = registry()["parameters"].check(update_of(model, optimizer, moved=seen.graded, by_hand=seen.by_hand, taken=seen.taken))
    assert found.verdict == wanted and ("took away" in found.reason) is not cut


def test_a_gradient_of_another_backward_is_none_of_this_update():
    """A part that only another loss reaches, whose gradient is cleared before the backward of this one."""
    model, whole = Cut(True), Cut(False)
    whole.one = model.one
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = Moved()
    for _ in range(3):
        trained(whole)
        seen.gave([optimizer])
        optimizer.zero_grad()
        trained(model)
        seen.gave([optimizer])
        for parameter in model.parameters():
            seen.look(parameter)
        optimizer.step()
    found = registry()["parameters"].check(update_of(model, optimizer, moved=seen.graded, by_hand=seen.by_hand, taken=seen.taken))
    assert found.verdict == "different" and found.culprit.module == "one"


class Tying(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        if tied:
            self.tie_weights()

    def tie_weights(self):
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(("tied", "wanted"), [(True, "equivalent"), (False, "different")])
def test_ties_that_are_broken_are_found(tied, wanted):
    model = Tying(tied)
    found = registry()["tied"].check(update_of(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    assert found.verdict == wanted


def accumulated(weights, items, reduction="mean", ignored=0, stacks=None):
    model = nn.Linear(4, 4)
    criteria = [Criterion("cross_entropy", reduction, n, ignored, "train.py:9", w, i) for i, (w, n) in enumerate(zip(weights, items, strict=True))]
    passes = [Backward((s,)) for s in (stacks or ["train.py:10"] * len(weights))]
    return registry()["accumulation"].check(update_of(model, torch.optim.SGD(model.parameters(), lr=0.1), criteria=criteria, backwards=passes))


def test_microbatches_that_share_the_weight_are_equivalent():
    assert accumulated([0.25] * 4, [8] * 4).verdict == "equivalent"


def test_a_loss_that_is_not_divided_is_found_with_its_factor():
    found = accumulated([1.0] * 4, [8] * 4)
    assert found.verdict == "different" and "gradient scale 4" in found.reason and found.culprit.source == "train.py:10"


def test_a_loss_that_is_divided_twice_is_found():
    assert accumulated([0.0625] * 4, [8] * 4).verdict == "different"


def test_uneven_tokens_are_found_and_uneven_batches_are_by_design():
    assert accumulated([0.5, 0.5], [10, 5], ignored=3).verdict == "different"
    assert accumulated([0.5, 0.5], [10, 5]).verdict == "by-design"


def test_sums_over_all_tokens_are_equivalent():
    assert accumulated([1 / 15, 1 / 15], [10, 5], "sum", ignored=3).verdict == "equivalent"


def test_backward_passes_of_several_lines_are_no_microbatches():
    with pytest.raises(NotApplicable):
        accumulated([1.0, 1.0], [8, 8], stacks=["train.py:10", "train.py:20"])


def test_losses_of_ones_own_are_not_judged():
    model = nn.Linear(4, 4)
    with pytest.raises(Unknown):
        registry()["accumulation"].check(update_of(model, torch.optim.SGD(model.parameters(), lr=0.1), backwards=[Backward(("a:1",))] * 2))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_torchs_optimizers_make_one_update_along_all_paths_and_nothing_stays_changed(kind):
    model = trained(Cut(False))
    optimizer = kind(model.parameters(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    assert registry()["foreach"].check(update_of(model, optimizer)).verdict == "equivalent"
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_path_that_does_something_else_is_found():
    class Own(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"] * (1.01 if group["foreach"] else 1.0))

    model = trained(Cut(False))
    found = registry()["foreach"].check(update_of(model, Own(model.parameters(), lr=0.1)))
    assert found.verdict == "different" and found.culprit.op == "foreach" and "test_relations_of_updates" in found.culprit.source


class Stream(IterableDataset):
    def __iter__(self):
        yield from torch.arange(40.0).split(1)


class Moving(Dataset):
    """Keeps a position."""

    at = 0

    def __len__(self):
        return 40

    def __getitem__(self, i):
        self.at += 1
        return torch.tensor([float(i + self.at)])


@pytest.mark.parametrize(("data", "wanted"), [(TensorDataset(torch.arange(40.0)), "equivalent"), (Stream(), "different"), (Moving(), "different")])
def test_workers_give_the_batches_of_none(data, wanted):
    model = nn.Linear(4, 4)
    loader = DataLoader(data, batch_size=4, shuffle=not isinstance(data, IterableDataset))
    found = registry()["workers"].check(update_of(model, torch.optim.SGD(model.parameters(), lr=0.1), loaders=[loader]))
    assert found.verdict == wanted


def test_a_sum_of_means_is_at_the_programs_own_line_where_a_library_goes_back():
    model = trained(nn.Linear(4, 1))
    stack = ("/x/site-packages/accelerate/accelerator.py:9", "train.py:70")
    parts = [Criterion("cross_entropy", "mean", 8, 0, "train.py:12", 1.0, i) for i in range(2)]
    found = registry()["accumulation"].check(update_of(model, torch.optim.SGD(model.parameters(), lr=0.1), backwards=[Backward(stack)] * 2, criteria=parts))
    assert found.verdict == "different" and found.culprit.source == "train.py:12"


@pytest.mark.parametrize(("weights", "verdict"), [((0.5, 0.5), "equivalent"), ((0.25, 0.75), "equivalent"), ((0.01, 0.01), "unknown"), ((1.0, 1.0), "different")])
def test_weights_that_no_division_explains_are_undecided(weights, verdict):
    model = trained(nn.Linear(4, 1))
    items = (2, 6) if weights == (0.25, 0.75) else (4, 4)
    parts = [Criterion("mse_loss", "mean", n, 0, "train.py:12", w, i) for i, (n, w) in enumerate(zip(items, weights, strict=True))]
    update = update_of(model, torch.optim.SGD(model.parameters(), lr=0.1), backwards=[Backward(("train.py:70",))] * 2, criteria=parts)
    if verdict == "unknown":
        with pytest.raises(Unknown, match="not 1/2"):
            registry()["accumulation"].check(update)
    else:
        assert registry()["accumulation"].check(update).verdict == verdict
