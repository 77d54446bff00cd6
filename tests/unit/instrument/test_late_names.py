"""Coming after a program's imports: its names for our functions are tapped, and what escapes is known to escape."""

from __future__ import annotations

import sys
import types
from pathlib import Path

from helpers.runs import write_run

from proctor.instrument.patch.patches import METHOD, Patches
from proctor.instrument.probes import _looks
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.trace import open_run
from proctor.native import Recorder, is_tap
from proctor.verify.coverage import coverage


def module(name: str, **members: object) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(members)
    return made


def test_names_bound_before_are_tapped_and_put_back(monkeypatch) -> None:
    def save(path: str) -> str:
        return path

    class Accelerator:
        def gather(self) -> int:
            return 7

    library = module("late_library", save=save, Accelerator=Accelerator)
    program = module("late_program", save_it=save, held=Accelerator().gather, other=len)
    for one in (library, program):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    patches = Patches(Recorder())
    patches.tap(library, "save", "library.save")
    patches.tap(Accelerator, "gather", "library.Accelerator.gather", kind=METHOD)

    assert patches.reach_names() == ["library.Accelerator.gather"]
    assert is_tap(program.save_it) and program.save_it("x") == "x" and program.held() == 7
    assert program.other is len
    patches.remove()
    assert program.save_it is save and library.save is save


def test_absence_of_a_function_that_is_not_observed_is_unknown(tmp_path: Path) -> None:
    import polars as pl

    write_run(tmp_path / "run", processes=[{"rank": 0, "world": 1, "unobserved": ["user.metrics"], "calls": [{"fn": "f", "step": 0}]}])
    seen = coverage(open_run(tmp_path / "run").trace)
    hypotheses = [Hypothesis.of("contain", parent="f", child=child) for child in ("user.metrics", "user.other")]
    frame = pl.DataFrame({"hyp": [0, 0, 1, 1], "proc": [0] * 4, "step": [0] * 4, "passed": [False, True] * 2})
    judged = seen.doubt(frame, across_ranks=False, runs=[0], hypotheses=hypotheses)
    assert judged["passed"].to_list() == [None, True, False, True]


class _Within:
    def __private(self) -> types.FrameType:
        return sys._getframe()

    def plain(self) -> types.FrameType:
        return sys._getframe()

    def told(self) -> list[types.FrameType]:
        return [self.__private(), self.plain()]


def test_a_running_method_with_two_underscores_has_the_name_that_it_is_tapped_by() -> None:
    private, plain = _Within().told()
    assert hasattr(_Within, "_Within__private")
    assert _looks._called(private.f_code, private) == f"{__name__}._Within._Within__private"
    assert _looks._called(plain.f_code, plain) == f"{__name__}._Within.plain"
