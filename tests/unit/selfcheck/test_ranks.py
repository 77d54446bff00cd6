"""Batches of several ranks on one: noted, read again, held row by row; what a launcher's command is on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

import torch

from proctor.oracle.selfcheck import NotApplicable
from proctor.oracle.selfcheck.adapters.loaders import LoadersAdapter, Noted, Numbers, Read, notes
from proctor.oracle.selfcheck.facts import CheckConfig, Facts, Line
from proctor.oracle.selfcheck.launch import Launched, alone, on_ranks, unwatched
from proctor.oracle.selfcheck.program import Program
from proctor.oracle.selfcheck.program.ranks import Ranks, _apart, _size
from proctor.oracle.selfcheck.watching.watch import Watch


def told(folder: Path, *ranks: list[list[int] | int]) -> Path:
    for rank, batches in enumerate(ranks):
        (folder / f"rank{rank}.jsonl").write_text("".join(json.dumps({"loader": 0, "batch": b}) + "\n" for b in batches))
    return folder


def read(folder: Path, way: str, own: list[list[int]]) -> list[list[int]]:
    return list(Numbers(own, Read(folder, way), alone=False))


def test_one_rank_reads_the_batches_of_all_in_the_order_of_ranks_and_then_its_own(tmp_path: Path) -> None:
    folder = told(tmp_path, [[0, 2], [4, 6]], [[1, 3], [5, 7]])
    own = [[9, 9], [8, 8], [7, 7]]
    assert read(folder, "union", own) == [[0, 2, 1, 3], [4, 6, 5, 7], [7, 7]]
    assert read(folder, "first", own) == [[0, 2], [4, 6], [7, 7]]
    assert read(folder, "twice", own) == [[0, 2, 0, 2], [4, 6, 4, 6], [7, 7]]
    assert read(folder, "apart", own) == [[0, 2], [4, 6], [7, 7]]  # this process is rank 0


def test_samples_of_a_stream_have_no_numbers_and_come_in_the_same_number(tmp_path: Path) -> None:
    assert read(told(tmp_path, [2, 2], [2, 1]), "union", [[None, None]] * 3) == [[None] * 4, [None] * 3, [None, None]]


def test_what_loaders_read_is_written_down_by_the_order_in_which_they_begin(tmp_path: Path) -> None:
    noted = Noted(tmp_path)
    late, early = Numbers([[5]], noted, alone=False), Numbers([[1, 2], [3]], noted, alone=False)
    assert list(early) == [[1, 2], [3]] and list(late) == [[5]]
    assert [(x["loader"], x["batch"]) for x in notes(tmp_path)[0]] == [(0, [1, 2]), (0, [3]), (1, [5])]
    assert len(early) == 2


def test_the_length_of_one_rank_is_that_of_each_of_several(tmp_path: Path) -> None:
    folder = told(tmp_path, [[0]], [[1]])
    assert len(Numbers([[0]] * 7, Read(folder, "union"), alone=False)) == 4
    assert len(Numbers([[0]] * 7, Read(folder, "apart"), alone=False)) == 7


def test_damaged_notes_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "rank0.jsonl").write_bytes(b'{"loader": 0, "batch": [1]}\n\xff\xfe{\n[]\n{"loader": 0, "batch": "x"}\n')
    (tmp_path / "rankx.jsonl").write_text("{}\n")
    assert read(tmp_path, "union", [[7]]) == [[1]]
    assert set(notes(tmp_path)) == {0}


def test_learning_rates_are_those_of_the_ranks(tmp_path: Path) -> None:
    Noted(tmp_path).rates(0, 1, [{"lr": 0.2}, {}, {"lr": 0.4}])
    groups: list[dict[str, object]] = [{"lr": 0.1}, {}, {"lr": 0.1}]
    Read(tmp_path, "union").rates(0, 0, groups)
    assert groups[0]["lr"] == 0.1
    Read(tmp_path, "union").rates(0, 1, groups)
    assert [g.get("lr") for g in groups] == [0.2, None, 0.4]


def line(rows: list[str], name: str = "Net 0", axis: int = 0) -> Line:
    return Line("+".join(rows), "input", name, 0, "", [rows] if axis == 0 else [["?"], rows])


@given(st.lists(st.text(alphabet="abc", min_size=1, max_size=2), min_size=2, max_size=8), st.data())
def test_the_ranks_batches_are_one_in_any_order_and_nothing_else_is(rows: list[str], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(rows) - 1))
    parts = [[line(rows[:cut])], [line(rows[cut:])]]
    assert not _apart(parts, [line(data.draw(st.permutations(rows)))])
    assert not _apart(parts, [line(rows[:cut]), line(rows[cut:])])  # one rank accumulates what two compute at once
    assert "not that of one" in _apart(parts, [line([*rows[:-1], "other"])])


def test_batches_along_the_second_axis_and_what_all_ranks_have_alike() -> None:
    both = line(["pos"], "Net 1")
    assert not _apart([[line(["a"], axis=1), both], [line(["b"], axis=1), both]], [line(["b", "a"], axis=1), both])
    assert _apart([[line(["a"])], [line(["b"])]], [line(["a"]), line(["b"]), line(["c"])])
    assert _apart([[line(["a"])], []], [line(["a"])])
    assert "no module" in _apart([[line(["a"])], [line(["b"])]], [])


def test_a_module_around_the_model_may_be_called_on_several_ranks() -> None:
    around = [[line([str(rank)], "Lit 0"), line([f"label {rank}"], "Lit 1")] for rank in (0, 1)]
    assert not _apart(around, [line(["1", "0"])])
    assert "not that of one" in _apart(around, [line(["1", "2"])])


def test_a_gradient_is_measured_before_it_is_clipped() -> None:
    gradients = [Line("", "gradient", "w", 0, "", [], 3.0), Line("", "gradient", "b", 0, "", [], 4.0), Line("", "gradient", "b", 1, "", [], 9.0)]
    assert _size(gradients) == 5.0
    assert _size([Line("", "norm", "", 0, "", [], 8.0), *gradients]) == 8.0


@pytest.mark.parametrize(
    ("command", "one"),
    [
        ("torchrun --nproc-per-node 4 train.py --batch 8", "torchrun --nproc-per-node 1 train.py --batch 8"),
        ("python -m torch.distributed.run --nproc_per_node=2 train.py", "python -m torch.distributed.run --nproc_per_node=1 train.py"),
        ("accelerate launch --num_processes 2 train.py", "accelerate launch --num_processes 1 train.py"),
        ("torchrun --nproc-per-node gpu train.py", ""),
        ("python spawns.py --ranks 2", ""),
    ],
)
def test_a_launchers_command_on_one_rank(command: str, one: str) -> None:
    assert " ".join(alone(command.split())) == one


def test_only_pythons_command_goes_to_a_launcher() -> None:
    assert on_ranks(["/usr/bin/python3.11", "a.py"], 2)[:4] == ["/usr/bin/python3.11", "-m", "torch.distributed.run", "--standalone"]
    assert on_ranks(["./run.sh"], 2) == []


def test_a_program_without_process_groups_is_not_started_again(tmp_path: Path) -> None:
    first = Launched(tmp_path, facts=[Facts(0, 1, [])])
    with pytest.raises(NotApplicable, match="process group"):
        Ranks().check(Program(["python", "a.py"], tmp_path, first, 1.0))
    with pytest.raises(NotApplicable, match="by itself"):
        Ranks().check(Program(["python", "a.py"], tmp_path, Launched(tmp_path, facts=[Facts(0, 2, [])]), 1.0))


def test_a_batch_norm_takes_the_statistics_of_each_sample() -> None:
    from proctor.oracle.selfcheck.adapters import loaders

    forward = torch.nn.modules.batchnorm._BatchNorm.forward
    try:
        loaders._by_sample()
        norm, x = torch.nn.BatchNorm2d(4), torch.randn(6, 4, 3, 3)
        both = torch.cat([norm(x[:3]), norm(x[3:])])
        torch.testing.assert_close(norm(x), both)
        assert torch.equal(norm.running_mean, torch.zeros(4))
        norm.eval()
        torch.testing.assert_close(norm(x), x, rtol=1e-4, atol=1e-4)
    finally:
        torch.nn.modules.batchnorm._BatchNorm.forward = forward


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="no way"):
        LoadersAdapter().change("else /nowhere")


def test_a_backward_that_hands_nothing_on_ends_no_watching_and_what_ends_it_is_said(tmp_path: Path) -> None:
    watch = Watch(CheckConfig(str(tmp_path), digest=True))
    watch.guarded(watch._returned)(None, "logits", None)
    assert not watch.over
    watch.folder, watch._begun = tmp_path / "rank1", True
    watch.folder.mkdir()
    watch.fail(ValueError("strange"))
    assert watch.over
    assert unwatched(Launched(tmp_path)) == "rank1 could not be watched any longer: ValueError: strange"


def test_a_loader_that_is_read_again_begins_again(tmp_path: Path) -> None:
    noted = Numbers([[1], [2]], Noted(tmp_path), alone=False)
    assert next(iter(noted)) == [1]  # a look at the first batch, before the epoch
    assert list(noted) == [[1], [2]]
    again = Numbers([[8], [9]], Read(tmp_path, "first"), alone=False)
    assert next(iter(again)) == [1] and list(again) == [[1], [2]]
