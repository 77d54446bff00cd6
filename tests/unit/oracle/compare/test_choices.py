"""oracle/choices, dropouts and masks: which decisions may fall out otherwise, and which may not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from proctor.oracle.judging.choices import FAR, gaps_of

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from proctor.oracle import compare, trace, trace_reference  # noqa: E402
from proctor.oracle.collect.collector import Collector  # noqa: E402
from proctor.oracle.collect.config import CollectConfig  # noqa: E402
from proctor.oracle.judging.check import Comparison  # noqa: E402
from proctor.oracle.judging.choices import digest_of, write_values  # noqa: E402
from proctor.oracle.merging.reference import Reference  # noqa: E402
from proctor.oracle.recording.masks import masks  # noqa: E402
from proctor.oracle.store import SCHEMA, ProcessInfo, Recording, RunInfo, write_json  # noqa: E402
from proctor.oracle.tensors import Draw  # noqa: E402


@pytest.mark.parametrize(
    ("own", "ordered", "gap"),
    [([0, 2], False, -1.0), ([2, 0], False, -1.0), ([2, 0], True, 0.4), ([0, 1], False, 0.1), ([0, 3], False, FAR), ([0, 9], False, FAR)],
)
def test_how_much_a_choice_costs(own: list[int], ordered: bool, gap: float) -> None:
    scores = np.array([[0.9, 0.4, 0.5, -np.inf]])
    assert gaps_of(scores, np.array([own]), np.array([[0, 2]]), ordered=ordered) == pytest.approx([gap])


class Router(nn.Module):
    """One of three experts; the first two are nearly as likely for the first row.

    Args:
        nudge: of the second expert's score.
        worst: the least likely expert is taken.
    """

    def __init__(self, nudge: float = 0.0, k: int = 1, worst: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.nudge, self.k, self.worst = nudge, k, worst
        self.gate, self.experts = nn.Linear(8, 3), nn.Linear(8, 24)
        self.rows = torch.randn(16, 8)
        with torch.no_grad():
            self.gate.weight[1] = self.gate.weight[0]
            self.gate.weight[1, 0] -= 1e-7 / self.rows[0, 0]
            self.gate.bias.copy_(torch.tensor([0.5, 0.5, 0.0]))

    def forward(self, x: Any) -> Any:
        scores = self.gate(x) + torch.tensor([0.0, self.nudge, 0.0])
        weights, chosen = scores.softmax(-1).topk(self.k, largest=not self.worst)
        made = self.experts(x).unflatten(-1, (3, 8)).take_along_dim(chosen[..., None], 1)
        return (made * weights[..., None]).sum(1)


def stepped(model: Any) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(model.rows).square().mean().backward()
        optimizer.step()

    return step


def recorded(out: Path, model: Any) -> Path:
    """A reference with its noise samples."""
    trace_reference(stepped(model), model, out=out)
    return out


@pytest.fixture(scope="module")
def routed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("routed") / "reference", Router())


def candidate(path: Path, model: nn.Module) -> Path:
    with trace(model, path):
        stepped(model)()
    return path


def test_another_choice_within_rounding_is_replayed(routed: Path, tmp_path: Path) -> None:
    model = Router(nudge=3e-7)
    found = compare(routed, candidate(tmp_path / "c", model))
    assert found.verdict == "inconclusive" and "fell out otherwise" in found.reason, found.reason
    recording = Recording(tmp_path / "c")
    comparison = Comparison(Recording(routed), recording)
    assert comparison.prepare() is None and comparison.choices.differ()
    assert write_values(comparison.choices.values(), [0], tmp_path / "choices") == 1
    model = Router(nudge=3e-7)
    again = Collector(CollectConfig(folder=str(tmp_path / "c/runs/replayed"), decisions=str(tmp_path / "choices")))
    again.install()
    again.adopt([model])
    stepped(model)()
    again.end()
    recording.info.replayed = digest_of(comparison.reference)
    write_json(tmp_path / "c/oracle.json", recording.info)
    found = compare(routed, tmp_path / "c")
    assert found.verdict == "equivalent", found.reason
    (choice,) = (t for t in found.tensors if t.kind == "choice")
    assert choice.verdict in ("ok", "warn") and 0 < choice.rel_err < 0.8


@pytest.mark.parametrize(("options", "kind", "words"), [({"k": 2}, "choice", "2 of 3 are chosen"), ({"worst": True}, "choice", "the reference prefers its own"), ({"nudge": 0.1}, "score", "")])
def test_a_wrong_choice_is_named(routed: Path, tmp_path: Path, options: dict[str, Any], kind: str, words: str) -> None:
    found = compare(routed, candidate(tmp_path / "c", Router(**options)))
    assert found.verdict == "different" and found.first is not None
    assert any(t.kind == kind and t.name == "" and words in t.note for t in found.tensors if t.verdict in ("bad", "shape", "unmapped")), found.first


class Drops(nn.Module):
    def __init__(self, p: float = 0.1, inner: float = 0.2, recompute: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.recompute = inner, recompute
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(p))
        self.rows = torch.randn(16, 8)

    def forward(self, x: Any) -> Any:
        x = checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False) if self.recompute else self.block(x)
        return torch.nn.functional.dropout(x, self.inner, self.training)


@pytest.fixture(scope="module")
def dropped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("dropped") / "reference", Drops())


@pytest.mark.parametrize(
    ("options", "name", "words"),
    [
        ({}, "", ""),
        ({"p": 0.12}, "block.1", "it drops with probability 0.12, the reference with 0.1"),
        ({"inner": 0.0}, "", "it drops nothing, the reference with probability 0.2"),
        ({"recompute": True}, "block.1", "recomputation in the backward pass drops other elements"),
    ],
)
def test_dropout_is_compared_by_what_it_would_drop(dropped: Path, tmp_path: Path, options: dict[str, Any], name: str, words: str) -> None:
    found = compare(dropped, candidate(tmp_path / "c", Drops(**options)))
    assert found.verdict == ("different" if options else "equivalent"), found.reason
    wrong = [t for t in found.tensors if t.verdict == "bad"]
    assert all((t.kind, t.name) == ("dropout", name) and words in t.note for t in wrong) and bool(wrong) == bool(options)
    assert "dropout masks of 2 modules" in found.unchecked[0]


@pytest.mark.parametrize("mask", ["", "00"])
def test_replicas_would_drop_the_same_elements(dropped: Path, tmp_path: Path, mask: str) -> None:
    runs = candidate(tmp_path / "c", Drops()) / "runs" / "clean"
    (runs / "rank1").symlink_to(tmp_path / "other")
    (tmp_path / "other").mkdir()
    for path in (runs / "rank0").iterdir():
        (tmp_path / "other" / path.name).write_bytes(path.read_bytes())
    info = msgspec.json.decode((runs / "rank0/process.json").read_bytes(), type=ProcessInfo)
    info.world = 2
    write_json(runs / "rank0/process.json", info)
    info.rank = 1
    info.draws = [Draw(d.step, d.call, d.module, d.slot, d.p, mask or d.mask) for d in info.draws]
    write_json(runs / "rank1/process.json", info)
    found = compare(dropped, tmp_path / "c")
    assert found.verdict == ("different" if mask else "equivalent"), found.reason
    assert not mask or (found.first is not None and found.first.name == "block.1" and "generators" in found.first.note)


def test_masks_of_the_reference_are_replayed(tmp_path: Path) -> None:
    def collected(path: Path, seed: int, **options: Any) -> None:
        model = Drops()
        torch.manual_seed(seed)
        collector = Collector(CollectConfig(folder=str(path), **options))
        collector.install()
        collector.adopt([model])
        stepped(model)()
        collector.end()

    for seed, name, runs in ((1, "r", {"clean": "replay", "placed": "place"}), (2, "c", {"clean": "place"})):
        for run, dropout in runs.items():
            collected(tmp_path / name / "runs" / run, seed, dropout=dropout)
        write_json(tmp_path / name / "oracle.json", RunInfo(SCHEMA, [], "", 1, dropout=runs["clean"]))
    reference, recording = Recording(tmp_path / "r"), Recording(tmp_path / "c")
    comparison = Comparison(reference, recording, run="clean", theirs="placed")
    assert comparison.prepare() is None
    given = list(masks(comparison.assembler, Reference(reference)))
    assert len(given) == 2 and all(0.6 < mask.mean() < 1.0 for _, _, mask in given)
    assert write_values(given, [0], tmp_path / "given") == 2
    collected(tmp_path / "c" / "runs" / "replayed", 2, dropout="replay", decisions=str(tmp_path / "given"))
    theirs, mine = reference.ranks()[0], recording.ranks("replayed")[0]
    for kind, alike in (("output", True), ("main_grad", True), ("mask", False)):  # its own masks are recorded
        pairs = [(theirs.array(a), mine.array(b)) for a, b in zip(theirs.entries, mine.entries, strict=True) if a.kind == kind]
        assert pairs and all(np.array_equal(a, b) for a, b in pairs) == alike
    assert bool((theirs.array(next(e for e in theirs.entries if e.kind == "output" and e.name == "block.1")) == 0).any())


def test_a_recording_that_left_dropout_alone_is_not_compared_with_one_that_did_not(dropped: Path, tmp_path: Path) -> None:
    model = Drops()
    with trace(model, tmp_path / "c", dropout="draw"):
        stepped(model)()
    found = compare(dropped, tmp_path / "c")
    assert found.verdict == "inconclusive" and "--dropout" in found.reason
