"""Whose line an operation is, and what is remembered of it."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from proctor.oracle.prove.lanes.spread import uncollected
from proctor.oracle.prove.recording.operators import operator, user_frame

_TEXT = "def called(ask):\n    first = ask()\n    return first, ask()\n"


def test_copies_of_a_file_and_lines_of_one_function_are_told_apart(tmp_path: Path) -> None:
    said = []
    for name in ("one.py", "two.py"):
        path = tmp_path / name
        path.write_text(_TEXT)
        found: dict[str, object] = {}
        exec(compile(_TEXT, str(path), "exec"), found)
        for _ in range(2):
            said.append(found["called"](user_frame))  # type: ignore[operator]
    assert said == [tuple(f"{tmp_path / name}:{line} called" for line in (2, 3)) for name in ("one.py", "one.py", "two.py", "two.py")]


def test_an_operator_is_known_by_itself() -> None:
    add, mul = operator(torch.ops.aten.add.Tensor), operator(torch.ops.aten.mul.Tensor)
    assert (add.base, mul.base, add.inner, add.writes) == ("add", "mul", False, False)
    assert operator(torch.ops.aten.add_.Tensor).writes and operator(torch.ops.aten.add.Tensor) is add


def test_the_search_for_cycles_is_as_it_was_afterwards() -> None:
    for there in (True, False):
        (gc.enable if there else gc.disable)()
        try:
            with uncollected():
                assert not gc.isenabled()
            assert gc.isenabled() is there
        finally:
            gc.enable()
