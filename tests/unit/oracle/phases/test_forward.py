"""Only forwards: weights after each change of them, forwards of an engine that reads token by token, log-probabilities."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from proctor.errors import OracleError  # noqa: E402
from proctor.oracle import trace, trace_reference  # noqa: E402
from proctor.oracle.collect.config import CollectConfig  # noqa: E402
from proctor.oracle.judging.verdicts import Verdict, failing  # noqa: E402
from proctor.oracle.phases.evaluation import culprit_of  # noqa: E402
from proctor.oracle.phases.logprobs import scores  # noqa: E402
from proctor.oracle.recording.outcome import compare  # noqa: E402
from proctor.oracle.store import Recording, write_json  # noqa: E402

TOKENS = torch.randint(0, 32, (2, 6), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Says something of each token by itself; `last` of a prompt only the last one, as engines do."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.head, self.last = nn.Embedding(32, 16), nn.Linear(16, 16), nn.Linear(16, 32), last
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.words(ids)).tanh()
        return self.head(x[:, -1:] if self.last else x)  # type: ignore[no-any-return]


def runs(model: nn.Module, cuts: Sequence[int], *, stale: str = "", scale: float = 1.0) -> None:
    """Two versions of the weights; each reads all tokens but the last, or all of them in one."""
    for version in range(2):
        with torch.inference_mode():
            for begin, end in itertools.pairwise(cuts):
                model(TOKENS[:, begin:end])
        generator = torch.Generator().manual_seed(version)
        for name, p in model.named_parameters():
            new = p + 0.1 * torch.randn(p.shape, generator=generator)
            if name != stale:
                p.data.copy_(new * scale)


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("proctor.oracle.recording.tracing.CollectConfig", functools.partial(CollectConfig, forward=True, evaluations=16))
    begun = Model().state_dict()
    model = Model()

    def score() -> None:
        model.load_state_dict(begun)
        runs(model, [0, 6])

    trace_reference(score, model, out=tmp_path / "r", samples=2, steps=2)
    return forwards(tmp_path / "r")


def forwards(out: Path) -> Path:
    info = Recording(out).info
    info.forward = True
    write_json(out / "oracle.json", info)
    return out


def judged(trusted: Path, model: nn.Module, cuts: Sequence[int], **how: Any) -> Verdict:
    out = trusted.parent / "c"
    with trace(model, out, steps=2):
        runs(model, cuts, **how)
    return compare(trusted, forwards(out))


def test_an_engine_that_reads_token_by_token_is_its_trainer(trusted: Path) -> None:
    found = judged(trusted, Model(last=True), [0, 3, 4, 5])
    assert found.verdict == "equivalent", found.reason
    held = {(t.kind, t.name) for t in found.tensors if t.phase}
    assert {("weight", "head.weight"), ("output", "inner"), ("output", "head"), ("logprob", "")} - held == {("logprob", "")}
    assert "2 versions of the weights" in found.reason


def test_log_probabilities_are_compared_where_all_positions_are_there(trusted: Path) -> None:
    found = judged(trusted, Model(), [0, 6])
    assert found.verdict == "equivalent" and sum(t.kind == "logprob" for t in found.tensors) == 2
    assert any("log-probabilities of 10 tokens" in note for note in found.notes)


def test_a_weight_that_a_synchronisation_leaves_out_is_named(trusted: Path) -> None:
    found = judged(trusted, Model(last=True), [0, 3, 4, 5], stale="inner.weight")
    culprit = culprit_of(found)
    assert found.verdict == "different" and culprit is not None and culprit.module == "inner"
    assert "stale: the value of the version before" in culprit.text
    assert {t.name for t in found.tensors if t.kind == "weight" and failing(t)} == {"inner.weight"}


def test_an_engine_with_other_logits_is_found(trusted: Path) -> None:
    model = Model()
    model.head.register_forward_hook(lambda _, given, out: out / 1.01)
    found = judged(trusted, model, [0, 6])
    culprit = culprit_of(found)
    assert found.verdict == "different" and culprit is not None and culprit.module == "head"
    assert any(t.kind == "logprob" and failing(t) for t in found.tensors)


def test_weights_that_begin_otherwise_are_different_and_not_generated(trusted: Path) -> None:
    model = Model()
    model.inner.bias += 1.0
    found = judged(trusted, model, [0, 6])
    assert found.verdict == "different" and found.alike and found.first is not None and found.first.name == "inner.bias"


def test_forwards_are_not_held_against_training(trusted: Path) -> None:
    out = trusted.parent / "c"
    with trace(Model(), out):
        runs(Model(), [0, 6])
        model = Model()
        model(TOKENS)
    with pytest.raises(OracleError, match="--forward"):
        compare(trusted, out)


def test_scores_are_log_probabilities_of_the_tokens_that_follow() -> None:
    logits = np.random.default_rng(0).normal(size=(2, 4, 8))
    read = np.array([[1, 2, 3, 4], [5, 6, 7, 0]])
    expected = torch.log_softmax(torch.tensor(logits), -1)[:, :-1].gather(-1, torch.tensor(read)[:, 1:, None])[..., 0]
    assert np.allclose(scores(logits, read), expected.numpy())
