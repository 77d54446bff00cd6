"""What losses are given, what layers compute with, and optimizers that never step: modes of `course` that one wrong line breaks and right manners keep."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.trained import record

pytest.importorskip("torch")
import torch

from proctor.instrument.probes.digits import digits_of
from proctor.instrument.probes.judged import looks
from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import registry
from proctor.invariants.trace import Trace

PROGRAMS = {
    "plain": """
        body, head = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 3)
        model = nn.Sequential(body, nn.ReLU(), head)
        optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (body, head)]
        x = torch.randn(48, 16)
        y = x[:, :3].argmax(1)
        class Kernel(torch.overrides.TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                if func.__name__ == "linear" and args[1].shape[0] == args[1].shape[1]:
                    return func(*(a.bfloat16() for a in args)).float()
                return func(*args, **(kwargs or {}))
        kernel = Kernel() if BUG == "kernel" else torch.enable_grad()
        kernel.__enter__()
        for epoch in range(2):
            for a, b in DataLoader(torch.utils.data.TensorDataset(x, y), 8, shuffle=BUG != "in_order"):
                for optimizer in optimizers:
                    optimizer.zero_grad()
                torch.randint(3, (2,))  # the step's own, and no order of samples
                h = body(a) if BUG == "half" else None
                scores = model(a) if h is None else head(F.relu(h.bfloat16().float()))
                if BUG == "softmax":
                    scores = scores.softmax(-1)
                if BUG == "rolled_for_a_module":
                    loss = nn.CrossEntropyLoss()(model.forward(a), b.roll(1, 0))
                elif BUG == "raw":
                    loss = F.nll_loss(scores, b)
                else:
                    loss = F.cross_entropy(scores, b.roll(1, 0) if BUG == "rolled" else b)
                loss.backward()
                optimizers[0].step()
                if BUG != "one_rests":
                    optimizers[1].step()
            with torch.no_grad():
                F.cross_entropy(model(x), y)
        kernel.__exit__(None, None, None)
    """,
    # Manners that look like one of these faults and are none.
    "manners": """
        class Words(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.out = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
            def forward(self, ids):
                return F.log_softmax(self.out(self.table(ids.t())), -1)  # time first, inside of the model
        ids = torch.randint(20, (48, 6))
        later = torch.randint(20, (48, 6))
        model, features = Words(), nn.Linear(16, 4)
        optimizer, other = torch.optim.Adam(model.parameters()), torch.optim.SGD(features.parameters(), lr=1e-2)
        class Wrapper(torch.optim.Optimizer):  # holds what another one steps
            def __init__(self, inner):
                super().__init__(inner.param_groups, {})
                self.inner = inner
        wrapper = Wrapper(optimizer)
        vectors = torch.randn(48, 16).half().float()  # features that were kept in half
        labels = vectors[:, :4].argmax(1)
        data = torch.utils.data.TensorDataset(ids, later, vectors, labels)
        for i, (a, b, v, y) in enumerate(DataLoader(data, 8, shuffle=True)):
            wrapper.zero_grad()
            other.zero_grad()
            F.nll_loss(model(a).reshape(-1, 20), b.t().reshape(-1)).backward()
            order = torch.argsort(y)  # sorted with its samples
            F.cross_entropy(features(v[order]), y[order]).backward()
            mixed = torch.randperm(len(v))
            scores = features(0.7 * v + 0.3 * v[mixed])
            (0.7 * F.cross_entropy(scores, y) + 0.3 * F.cross_entropy(scores, y[mixed])).backward()
            optimizer.step()
            if i > 3:  # a warm-up
                other.step()
    """,
    # Sequences that are turned round, or whose labels belong to another sample.
    "sequences": """
        table, out = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)
        model = nn.Sequential(table, out)
        optimizer = torch.optim.Adam(model.parameters())
        for a, b in DataLoader(torch.utils.data.TensorDataset(torch.randint(20, (48, 6)), torch.randint(20, (48, 6))), 8):
            optimizer.zero_grad()
            scores = model(a).flatten(0, 1)
            F.cross_entropy(scores, a.flip(1).flatten()).backward()
            F.cross_entropy(model(a).flatten(0, 1), b.roll(1, 0).flatten() if BUG == "rolled_rows" else b.flip(1).flatten()).backward()
            optimizer.step()
    """,
    "autocast": """
        model = nn.Sequential(nn.Linear(16, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for a, in DataLoader(torch.utils.data.TensorDataset(torch.randn(48, 16)), 8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                out = model(a)
            F.mse_loss(out.float(), a[:, :3]).backward()
            optimizer.step()
    """,
    "parts": """
        class Episodes(torch.utils.data.Dataset):
            def __len__(self):
                return 12
            def __getitem__(self, i):
                g = torch.Generator().manual_seed(i)
                shots = torch.ones(8, 12).cumsum(0) if i in (4, 5, 7) else torch.randn(8, 12, generator=g)
                if BUG == "again" and i == 5:
                    g.manual_seed(4)
                return torch.cat([shots, torch.randn(16, 12, generator=g)])
        model = nn.Sequential(nn.Linear(12, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        for episode in DataLoader(Episodes(), batch_size=None):
            shots, queries = model(episode[:8]), model(episode[8:])
            optimizer.zero_grad()
            F.cross_entropy(-torch.cdist(queries, shots), torch.arange(16) % 8).backward()
            optimizer.step()
    """,
}
FAULTS = {  # fault: mode, a word of what was seen
    "rolled": ("aligned", "in another order than the samples"),
    "rolled_for_a_module": ("aligned", "in another order than the samples"),
    "softmax": ("scored", "cross_entropy is given probabilities"),
    "raw": ("scored", "no log-probabilities"),
    "half": ("digits", "no more digits than bfloat16 has"),
    "kernel": ("rounds", "is given the digits of float32 and gives float32 with no more digits than bfloat16 has"),
    "one_rests": ("used", "never steps"),
}
MODES = {mode: Hypothesis.of("course", mode=mode, what="updates") for mode in ("aligned", "scored", "digits", "used", "rounds")}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("judged")
    record(folder, PROGRAMS, [(name, "right", 0, 24, "") for name in PROGRAMS] + [("plain", bug, 0, 24, bug) for bug in [*FAULTS, "in_order"]] + [("sequences", "rolled_rows", 0, 24, "rolled_rows")])
    return folder


def failing(run: Path, mode: str) -> list[dict[str, object]]:
    frame = registry()["course"].examples(Trace.load([run]), [MODES[mode]]).frame
    return frame.filter(~frame["passed"].fill_null(value=True)).sort("step").to_dicts()


@pytest.mark.parametrize("program", PROGRAMS)
def test_right_manners_break_none(runs: Path, program: str) -> None:
    assert {mode: failing(runs / f"{program}-right", mode) for mode in MODES} == {key: [] for key in MODES}


@pytest.mark.parametrize("bug", FAULTS)
def test_one_wrong_line_is_found(runs: Path, bug: str) -> None:
    mode, seen = FAULTS[bug]
    found = failing(runs / f"plain-{bug}", mode)
    assert found
    assert seen in str(found[0]["_seen"])
    assert {other for other in MODES if failing(runs / f"plain-{bug}", other)} == {mode} | ({"digits"} if mode == "rounds" else set())


def test_labels_in_one_line_that_belong_to_another_sample_are_found(runs: Path) -> None:
    found = failing(runs / "sequences-rolled_rows", "aligned")
    assert found and "in another order than the samples" in str(found[0]["_seen"])


def test_what_a_step_draws_is_no_order_of_the_samples(runs: Path) -> None:
    order = Hypothesis.of("fresh", mode="order", what="loader")
    seen = [registry()["fresh"].examples(Trace.load([runs / f"plain-{bug}"]), [order]).frame["passed"].to_list() for bug in ("right", "in_order")]
    assert [set(passed) for passed in seen] == [{True}, {False}]


def test_a_batch_that_the_model_is_given_in_parts_is_another_one_if_any_part_is(tmp_path: Path) -> None:
    """As pictures that are compared, and those that they are compared with, which come again by chance."""
    record(tmp_path, PROGRAMS, [("parts", bug or "right", 0, 24, bug) for bug in ("", "again")])
    rules = [Hypothesis.of("fresh", mode="batch", what="loader"), Hypothesis.of("fresh", mode="another", what="batch"), Hypothesis.of("course", mode="batch", what="updates")]
    for bug, whole in (("right", True), ("again", False)):
        trace = Trace.load([tmp_path / f"parts-{bug}"])
        passed = [registry()[rule.relation].examples(trace, [rule]).frame["passed"].drop_nulls() for rule in rules]
        assert [rows.all() for rows in passed] == [whole] * 3 and all(rows.len() for rows in passed)


def test_a_loss_looks_at_what_came_with_the_samples_only() -> None:
    relation = registry()["course"]
    assert {mode: relation.standing_of(h) for mode, h in MODES.items()} == {m: Standing.LAW if m in ("aligned", "rounds") else Standing.CHOICE for m in MODES}


def test_a_sum_over_rows_knows_no_order_and_a_transposed_batch_is_no_other_order_of_rows() -> None:
    ids = torch.randint(1000, (8, 5))
    (_, rows), (turned, _) = looks(ids)
    assert turned == 2 and next(iter(looks(ids.flip(0)))) == (0, rows) != next(iter(looks(ids.flip(1))))
    assert list(looks(ids.reshape(-1))) == list(looks(ids.t().reshape(-1)))
    assert next(iter(looks(ids.t().contiguous())))[1] != rows
    assert list(looks(ids[:, :1])) == list(looks(ids[:, 0]))


@pytest.mark.parametrize(
    ("values", "digits"),
    [
        (torch.linspace(-3, 3, 256), "float32"), (torch.linspace(-3, 3, 256).bfloat16().float(), "bfloat16"), (torch.linspace(-3, 3, 256).half().float(), "float16"),
        (torch.arange(256.0), "unknown"), (torch.arange(256) / 256, "unknown"), (torch.arange(256) / 255, "float32"), (torch.zeros(64), "unknown"), (torch.eye(8).reshape(-1), "unknown"),
    ],
)  # fmt: skip
def test_digits_of_a_half_type_are_told_from_whole_numbers_and_pixels(values: torch.Tensor, digits: str) -> None:
    assert digits_of(values.numpy())[0] == digits
