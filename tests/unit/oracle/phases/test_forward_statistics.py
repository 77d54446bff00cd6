"""Only forwards and only statistics: weights that an engine rounds, positions that it computes one by one, log-probabilities that nobody could form of sums."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from proctor.oracle import trace, trace_reference  # noqa: E402
from proctor.oracle.collect.config import CollectConfig  # noqa: E402
from proctor.oracle.collect.edges.scored import scores_of  # noqa: E402
from proctor.oracle.judging.verdicts import Verdict, failing  # noqa: E402
from proctor.oracle.phases.evaluation import culprit_of  # noqa: E402
from proctor.oracle.recording.outcome import compare  # noqa: E402
from proctor.oracle.store import Recording, write_json  # noqa: E402

WORDS, WIDTH = 1024, 256
TOKENS = torch.randint(0, WORDS, (2, 8), generator=torch.Generator().manual_seed(1))


class Model(nn.Module):
    """Says something of each token by itself; `last` of a prompt only the last one, as engines do."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.head, self.last = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS), last
        self.requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner(self.words(ids).to(self.inner.weight.dtype)).tanh()
        return self.head(x[:, -1:] if self.last else x)  # type: ignore[no-any-return]


def runs(model: nn.Module, cuts: Sequence[int], *, stale: str = "", rounded: str = "") -> None:
    """Two versions of the weights; each reads all tokens but the last, or all of them in one."""
    current = {name: p.detach().float().clone() for name, p in Model().named_parameters()}
    for version in range(2):
        with torch.inference_mode():
            for begin, end in itertools.pairwise(cuts):
                model(TOKENS[:, begin:end])
        generator = torch.Generator().manual_seed(version)
        for name, p in model.named_parameters():
            current[name] = current[name] + 0.05 * torch.randn(p.shape, generator=generator)
            if name != stale:
                p.data.copy_(current[name].bfloat16() if name == rounded else current[name])


def forwards(out: Path) -> Path:
    info = Recording(out).info
    info.forward = True
    write_json(out / "oracle.json", info)
    return out


@pytest.fixture
def trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("proctor.oracle.recording.tracing.CollectConfig", functools.partial(CollectConfig, forward=True, evaluations=16))
    begun = Model().state_dict()
    model = Model()

    def score() -> None:
        model.load_state_dict(begun)
        runs(model, [0, 8])

    trace_reference(score, model, out=tmp_path / "r", samples=2, steps=2, statistics=True)
    return forwards(tmp_path / "r")


def judged(trusted: Path, model: nn.Module, cuts: Sequence[int], **how: Any) -> Verdict:
    out = trusted.parent / "c"
    with trace(model, out, steps=2, statistics=True):
        runs(model, cuts, **how)
    return compare(trusted, forwards(out))


def size(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def test_an_engine_that_reads_token_by_token_is_its_trainer(trusted: Path) -> None:
    found = judged(trusted, Model(last=True), [0, 4, 5, 6, 7])
    assert found.verdict == "equivalent", found.reason
    held = {(t.kind, t.name) for t in found.tensors if t.phase}
    assert {("weight", "head.weight"), ("output", "inner"), ("output", "head"), ("logprob", "")} <= held
    # A prompt of four gives one token's logits, and each of three that follow is read behind them.
    assert any("log-probabilities of 6 tokens" in note for note in found.notes), found.notes
    assert any("cancels within every tile" in text for text in found.unchecked)
    whole = sum(p.numel() * 4 for p in Model().parameters()) * 2
    assert size(trusted / "clean") < whole / 8, "weights of two versions are small"


def test_log_probabilities_of_whole_sequences(trusted: Path) -> None:
    found = judged(trusted, Model(), [0, 8])
    assert found.verdict == "equivalent" and any("log-probabilities of 14 tokens" in note for note in found.notes)


def test_logits_that_are_scaled_are_found_and_their_log_probabilities(trusted: Path) -> None:
    model = Model()
    model.head.register_forward_hook(lambda _, given, out: out / 1.01)
    found = judged(trusted, model, [0, 8])
    culprit = culprit_of(found)
    assert found.verdict == "different" and culprit is not None and culprit.module == "head"
    assert any(t.kind == "logprob" and failing(t) for t in found.tensors)


def test_a_weight_that_a_synchronisation_leaves_out_is_named(trusted: Path) -> None:
    found = judged(trusted, Model(last=True), [0, 4, 5, 6, 7], stale="inner.weight")
    culprit = culprit_of(found)
    assert found.verdict == "different" and culprit is not None and culprit.module == "inner"
    assert "stale: the value of the version before" in culprit.text
    assert {t.name for t in found.tensors if t.kind == "weight" and failing(t)} == {"inner.weight"}


def test_a_weight_that_was_sent_in_a_shorter_type_is_named(trusted: Path) -> None:
    found = judged(trusted, Model(), [0, 8], rounded="head.weight")
    assert {(t.step, t.name) for t in found.tensors if t.kind == "weight" and failing(t)} == {(1, "head.weight")}


@pytest.mark.parametrize("stale", ["", "inner.weight"])
def test_an_engine_that_keeps_weights_in_bfloat16_has_the_reference_s_rounded(trusted: Path, stale: str) -> None:
    found = judged(trusted, Model().bfloat16(), [0, 8], stale=stale)
    weights = [t for t in found.tensors if t.kind == "weight"]
    assert {t.name for t in weights if failing(t)} == ({stale} if stale else set()), [(t.name, t.note) for t in weights if failing(t)]
    assert not any(t.verdict == "unmapped" for t in weights)


def test_scores_are_log_probabilities_and_what_is_no_token_has_none() -> None:
    logits = torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(0))
    read = torch.randint(0, 8, (2, 300), generator=torch.Generator().manual_seed(1))
    expected = torch.log_softmax(logits.double(), -1).gather(-1, read[..., None])[..., 0]
    assert torch.allclose(scores_of(logits, read), expected, rtol=0, atol=1e-12)
    assert scores_of(logits[:, :1], torch.tensor([[-100], [9]])).tolist() == [[0.0], [0.0]]
