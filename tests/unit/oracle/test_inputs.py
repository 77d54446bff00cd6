"""oracle/recording/inputs.py: generated data for both sides, and which mistakes only they show."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.warm import python

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402
from torch import nn  # noqa: E402

from proctor.cli import main  # noqa: E402
from proctor.errors import OracleError  # noqa: E402
from proctor.oracle import trace, trace_reference  # noqa: E402
from proctor.oracle.collect.collector import Collector  # noqa: E402
from proctor.oracle.judging.check import Comparison  # noqa: E402
from proctor.oracle.recording.inputs import generate_inputs  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402
from proctor.oracle.tensors import key_of  # noqa: E402

Given = Callable[[Path | None], None]
ROWS, TIME, VOCAB = 4, 6, 11


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Has recordings made with the values of a folder; `None` for the programs' own."""

    def use(folder: Path | None) -> None:
        def made(config: Any) -> Collector:
            return Collector(msgspec.structs.replace(config, given=str(folder or "")))

        monkeypatch.setattr(sys.modules["proctor.oracle.recording.tracing"], "_collector", made)

    return use


class Tokens(nn.Module):
    """`reverse` looks at the tokens from the end."""

    def __init__(self, reverse: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.word, self.position, self.mix = nn.Embedding(VOCAB, 8), nn.Embedding(TIME, 8), nn.Linear(8, 8)
        self.reverse = reverse

    def forward(self, tokens: Any, positions: Any, mask: Any, features: Any, labels: Any) -> Any:
        x = torch.tanh(self.word(tokens.flip(1) if self.reverse else tokens) + self.position(positions))
        return (self.mix(x) * mask[..., None]).sum((1, 2)) + (features.square()).sum(1) - labels


def data(tokens: Any) -> tuple[Any, ...]:
    rows = tokens.shape[0]
    features = torch.linspace(0.25, 0.75, rows * 3).view(rows, 3)
    return tokens, torch.arange(TIME).expand(rows, TIME), torch.ones(rows, TIME), features, torch.arange(rows)


def train(model: nn.Module, batches: list[tuple[Any, ...]]) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        for batch in batches:
            (model(*batch).square().mean() / len(batches)).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()

    return step


def recorded(folder: Path, batches: list[tuple[Any, ...]], mine: list[tuple[Any, ...]], **wrong: Any) -> Comparison:
    model, other = Tokens(), Tokens(**wrong)
    trace_reference(train(model, batches), model, out=folder / "reference", samples=2)
    with trace(other, folder / "candidate"):
        train(other, mine)()
    comparison = Comparison(Recording(folder / "reference"), Recording(folder / "candidate"))
    comparison.verdict = comparison.run()  # type: ignore[attr-defined]
    return comparison


def test_parts_of_the_candidate_are_parts_of_the_whole(tmp_path: Path) -> None:
    batch = data(torch.arange(ROWS * TIME).view(ROWS, TIME) % 7)
    halves = [tuple(t[:2] for t in batch), tuple(t[2:] for t in batch)]
    said = generate_inputs(recorded(tmp_path, [batch], halves), 0, tmp_path / "made")
    whole = load_file(str(tmp_path / "made" / "reference" / "rank0.safetensors"))
    parts = load_file(str(tmp_path / "made" / "candidate" / "rank0.safetensors"))
    assert {key for key in whole} == {key_of(0, "input", "", "0", 0), key_of(0, "input", "", "3", 0)}, said
    for slot in ("0", "3"):
        full = whole[key_of(0, "input", "", slot, 0)]
        assert torch.equal(torch.cat([parts[key_of(0, "input", "", slot, call)] for call in (0, 1)]), full)
    tokens, features = whole[key_of(0, "input", "", "0", 0)], whole[key_of(0, "input", "", "3", 0)]
    assert tokens.dtype is torch.int64 and 7 <= int(tokens.max()) < VOCAB and int(tokens.min()) >= 0
    assert 0.25 <= float(features.min()) < float(features.max()) <= 0.75 and features.dtype is torch.float32
    assert sum("the program's own" in s for s in said) == 3


def test_a_mistake_that_equal_tokens_hide(tmp_path: Path, given: Given) -> None:
    batch = data(torch.full((ROWS, TIME), 3))
    for name, wrong, found in (("right", {}, "equivalent"), ("wrong", {"reverse": True}, "different")):
        given(None)
        own = recorded(tmp_path / name, [batch], [batch], **wrong)
        assert own.verdict.verdict == "equivalent"  # type: ignore[attr-defined]
        generate_inputs(own, 0, tmp_path / name / "made", gradients=True)
        model, other = Tokens(), Tokens(**wrong)
        given(tmp_path / name / "made" / "reference")
        trace_reference(train(model, [batch]), model, out=tmp_path / name / "r", samples=2)
        given(tmp_path / name / "made" / "candidate")
        with trace(other, tmp_path / name / "c"):
            train(other, [batch])()
        comparison = Comparison(Recording(tmp_path / name / "r"), Recording(tmp_path / name / "c"))
        assert comparison.run().verdict == found
        gradient = next(e for e in comparison.ranks[0].entries if e.kind == "grad_output" and e.name == "")
        made = load_file(str(tmp_path / name / "made" / "candidate" / "rank0.safetensors"))
        assert torch.equal(torch.from_numpy(comparison.ranks[0].array(gradient).copy()), made[key_of(0, "grad_output", "", "", 0)])


def test_rows_that_nothing_tells_apart_stay(tmp_path: Path) -> None:
    batch = tuple(t[:1].expand(ROWS, *t.shape[1:]).contiguous() for t in data(torch.full((ROWS, TIME), 3)))
    halves = [tuple(t[:2] for t in batch), tuple(t[2:] for t in batch)]
    with pytest.raises(OracleError, match="do not tell which part"):
        generate_inputs(recorded(tmp_path, [batch], halves), 0, tmp_path / "made")


def test_tokens_that_are_labels_too_stay_equal(tmp_path: Path) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.word, self.head = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)

        def forward(self, tokens: Any, labels: Any) -> Any:
            return nn.functional.cross_entropy(self.head(self.word(tokens)).flatten(0, 1), labels.flatten())[None]

    tokens, model = torch.arange(ROWS * TIME).view(ROWS, TIME) % 7, Both()
    trace_reference(train(model, [(tokens, tokens)]), model, out=tmp_path / "r", samples=1)
    comparison = Comparison(Recording(tmp_path / "r"), Recording(tmp_path / "r"))
    comparison.run()
    generate_inputs(comparison, 0, tmp_path / "made")
    made = load_file(str(tmp_path / "made" / "candidate" / "rank0.safetensors"))
    assert torch.equal(made[key_of(0, "input", "", "0", 0)], made[key_of(0, "input", "", "1", 0)])


def test_options_that_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["oracle", "run", "--reference", "true", "--candidate", "true"]
    for wrong in (["--generate-inputs", "--keep-inputs"], ["--generate-gradients"]):
        assert main([*run, *wrong]) == 2
        assert capsys.readouterr().err.startswith("proctor: PR-E100")


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(0)
net = model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
images, labels = torch.zeros(8, 6), torch.arange(8) % 3
if "ranks" in sys.argv:
    dist.init_process_group("gloo")
    if "wrong" in sys.argv:  # its gradient is not averaged over ranks
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, ["0.weight"])
    model = nn.parallel.DistributedDataParallel(net)
    images, labels = (t.chunk(2)[dist.get_rank()] for t in (images, labels))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
nn.functional.cross_entropy(model(images), labels).backward()
optimizer.step()
"""


@pytest.mark.slow
def test_black_images_hide_a_gradient_that_is_not_reduced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM)
    ranks = f"{python()} -m torch.distributed.run --nproc-per-node 2 {script} ranks wrong"
    run = ["oracle", "run", "--cache", str(tmp_path / "c"), "--samples", "2", "--reference", f"{python()} {script}", "--candidate", ranks]
    assert main([*run, "--generate-inputs", "7", "--format", "json"]) == 1
    report = msgspec.json.decode(capsys.readouterr().out)
    assert any("own data the runs are equivalent" in note for note in report["notes"])
    assert (report["first"]["name"], report["culprit"]["direction"]) == ("0.weight", "gradient")
