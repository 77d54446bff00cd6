"""oracle/merging/padding.py: a vocabulary that the candidate rounds up is compared as far as the reference has it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle import trace, trace_reference  # noqa: E402
from proctor.oracle.collect.finding.generate import full_tensor  # noqa: E402
from proctor.oracle.judging.check import Comparison  # noqa: E402
from proctor.oracle.judging.verdicts import Verdict  # noqa: E402
from proctor.oracle.localising.localise import _write  # noqa: E402
from proctor.oracle.merging.padding import Holder, cropped, filled, own_shape  # noqa: E402
from proctor.oracle.plans.mesh import Cut, Layout, Mesh  # noqa: E402
from proctor.oracle.plans.plan import Plan  # noqa: E402
from proctor.oracle.recording.inputs import generate_inputs  # noqa: E402
from proctor.oracle.store import ProcessInfo, RankWriter, Recording  # noqa: E402
from proctor.oracle.tensors import key_of  # noqa: E402

VOCAB, WIDTH = 100, 8
Change = Callable[[int, dict[str, Any], Any], None]


class Tokens(nn.Module):
    """A language model of one layer, whose vocabulary is padded to `rows`; `counted` takes padding into the softmax."""

    def __init__(self, rows: int, counted: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        whole = torch.randn(256, WIDTH, generator=generator)
        self.word, self.head = nn.Embedding(rows, WIDTH), nn.Linear(WIDTH, rows, bias=False)
        self.padding = torch.arange(rows) >= (rows if counted else VOCAB)
        with torch.no_grad():
            self.word.weight.copy_(whole[:rows])
            self.head.weight.copy_(whole[:rows].flip(1))

    def forward(self, tokens: Any) -> Any:
        logits = self.head(torch.tanh(self.word(tokens)))
        return nn.functional.cross_entropy(logits.masked_fill(self.padding, float("-inf")).flatten(0, 1), tokens.flatten())


def step(model: nn.Module) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad()
        model(torch.arange(48).view(4, 12) * 7 % VOCAB).backward()
        torch.optim.AdamW(model.parameters(), lr=1e-2).step()

    return run


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    folder, model = tmp_path_factory.mktemp("padding") / "reference", Tokens(VOCAB)
    trace_reference(step(model), model, out=folder, samples=2)
    return Recording(folder)


def candidate(folder: Path, rows: int, ranks: int, change: Change = lambda rank, line, values: None, counted: bool = False) -> Recording:
    """One process's recording, with the vocabulary cut over ranks; `change` may alter what a rank holds."""
    model = Tokens(rows, counted)
    with trace(model, folder):
        step(model)()
    alone = folder / "runs" / "clean" / "rank0"
    lines = [json.loads(line) for line in (alone / "index.jsonl").read_text().splitlines()]
    whole = Recording(folder).ranks()[0]
    whole.folder = alone.rename(folder / "alone")
    for rank in range(ranks):
        writer = RankWriter(folder / "runs" / "clean" / f"rank{rank}", save_file)
        for line, entry in zip(lines, whole.entries, strict=True):
            values = torch.from_numpy(np.array(whole.array(entry)))
            for dim in [d for d, n in enumerate(entry.shape) if n == rows]:
                values = values.chunk(ranks, dim)[rank].clone()
            own = {k: v for k, v in line.items() if k not in ("file", "shape", "tensor", "order", "dtype")}
            change(rank, own, values)
            writer.add(values, dtype=entry.dtype, size=values.nbytes, **own)
        writer.close(msgspec.structs.replace(whole.info, rank=rank, world=ranks) if ranks > 1 else ProcessInfo(0, 1, steps=1, done=True))
    return Recording(folder)


def compared(reference: Recording, candidate: Recording, plan: Plan | None = None) -> tuple[Comparison, Verdict]:
    comparison = Comparison(reference, candidate, plan)
    return comparison, comparison.run()


def planned(ranks: int) -> Plan:
    plan = Plan(f"tp={ranks}").shard(r"(word|head)\.weight", padded=True, tp=0)
    return plan.activation("head", output={"tp": -1}, padded=True)


@pytest.mark.parametrize(("rows", "ranks"), [(128, 1), (128, 2), (126, 3)])
@pytest.mark.parametrize("by_plan", [False, True])
def test_padding_is_cropped_and_said(reference: Recording, tmp_path: Path, rows: int, ranks: int, by_plan: bool) -> None:
    _, verdict = compared(reference, candidate(tmp_path / "c", rows, ranks), planned(ranks) if by_plan else None)
    assert (verdict.verdict, verdict.unchecked) == ("equivalent", ())
    more = rows - VOCAB
    said = f"in {more} of {rows // ranks} elements of dimension 0 on rank {ranks - 1}"
    assert [n for n in verdict.notes if "padding" in n] == [f"padding, which the reference has not, is not compared: word.weight, head.weight {said}"]
    assert {t.layout for t in verdict.tensors if t.name == "head" and t.kind == "output"} != {""}


def test_a_rank_that_has_padding_only_needs_a_plan(reference: Recording, tmp_path: Path) -> None:
    made = candidate(tmp_path / "c", 256, 4)
    assert compared(reference, made, planned(4))[1].verdict == "equivalent"
    assert compared(reference, made)[1].verdict == "inconclusive"


@pytest.mark.parametrize(("kind", "name"), [("output", "head"), ("main_grad", "word.weight"), ("opt_state", "head.weight"), ("param_after", "word.weight")])
def test_what_is_not_padding_is_compared(reference: Recording, tmp_path: Path, kind: str, name: str) -> None:
    def change(rank: int, line: dict[str, Any], values: Any) -> None:
        if rank == 1 and (line["kind"], line["name"]) == (kind, name) and values.ndim:
            values *= 1.25

    _, verdict = compared(reference, candidate(tmp_path / "c", 128, 2, change))
    assert verdict.verdict == "different" and verdict.first is not None
    assert (verdict.first.kind, verdict.first.name) == (kind, name)


def test_a_gradient_of_padding_is_said_and_is_no_alarm(reference: Recording, tmp_path: Path) -> None:
    def change(rank: int, line: dict[str, Any], values: Any) -> None:
        if rank == 1 and (line["kind"], line["name"]) == ("main_grad", "head.weight"):
            values[-4:] = 0.25

    _, verdict = compared(reference, candidate(tmp_path / "c", 128, 2, change))
    assert verdict.verdict == "equivalent"
    assert any("first in that of head.weight (its norm is 1.41, step 0)" in n for n in verdict.notes), verdict.notes
    _, counted = compared(reference, candidate(tmp_path / "d", 128, 2, counted=True))
    assert counted.verdict == "different" and any("first in that of the output of head" in n for n in counted.notes)


def test_what_modules_are_given_has_the_shape_of_their_own(reference: Recording, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    comparison, _ = compared(reference, candidate(tmp_path / "c", 128, 2))
    assert _write(comparison, tmp_path)
    given = load_file(str(tmp_path / "rank1.safetensors"))
    theirs = reference.ranks()[0]
    for name, kind, dim in (("head", "grad_output", -1), ("word.weight", "main_grad", 0)):
        entry = next(e for e in theirs.entries if (e.kind, e.name) == (kind, name))
        values = given[key_of(0, kind, name, "", 0)].movedim(dim, 0)
        assert values.shape[0] == 64 and not values[36:].any()
        assert torch.equal(values[:36], torch.from_numpy(np.array(theirs.array(entry))).movedim(dim, 0)[64:])


def test_inputs_can_be_generated_beside_a_padded_vocabulary(reference: Recording, tmp_path: Path) -> None:
    comparison, _ = compared(reference, candidate(tmp_path / "c", 128, 2))
    assert generate_inputs(comparison, 0, tmp_path / "made") == ["input of the model is generated: any row of the embedding"]


def test_generated_rows_do_not_depend_on_padding() -> None:
    for width in ((), (3,)):
        one, other = (full_tensor("w", (rows, *width), 0, torch.arange(6.0)) for rows in (7, 12))
        assert torch.equal(other[:7], one) and one.std() > 0


def test_shapes_and_places() -> None:
    mesh, layout = Mesh(("tp",), (3,)), Layout((Cut("tp", "chunk", -1),), padded=True)
    held = [Holder({"tp": at}, (5, n)) for at, n in enumerate((4, 4, 2))]
    assert own_shape(layout, mesh, (5, 4), held) == (5, 10)
    assert own_shape(layout, mesh, (5, 4), held[:2]) is None
    assert own_shape(layout, mesh, (5, 4), [*held, Holder({"tp": 0}, (5, 3))]) is None
    places, kept = cropped((np.arange(2), np.arange(4, 8)), (2, 6))
    assert kept is not None and [list(i) for i in (*places, *kept)] == [[0, 1], [4, 5], [0, 1], [0, 1]]
    assert cropped((np.arange(2), np.arange(4, 6)), (2, 6))[1] is None
    assert filled(np.full((2, 4), 9.0), kept, np.zeros((2, 2))).tolist() == [[0, 0, 9, 9]] * 2
