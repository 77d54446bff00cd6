"""What two executions and a control say about a step."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("safetensors")
from proctor.cli import main
from proctor.errors import UsageError
from proctor.instrument.replay import again as replay
from proctor.invariants.capsule import Call, Capsule, Print, Seen, Variable, folder_name, write_capsule


def step(
    before: int = 1, *, given: int = 2, out: int = 3, loss: int = 4, grad: int = 5, after: int = 6, control: int | None = None, **more: object
) -> Capsule:
    """One step by fingerprints, in the order in which they come about."""

    def seen(place: str, fp: int) -> tuple[Seen, ...]:
        return (Seen(place, "float32", (1,), "cpu", Print(fp, 0)),)

    return Capsule(
        key="k",
        step=more.pop("step", 3),  # type: ignore[arg-type]
        control=control,
        command=("python", "train.py"),
        by_value=True,
        updates=1,
        calls=(Call("module", "Net", seen("0", given), seen("", out)), Call("backward", "", (), seen("", loss))),
        state=(
            Variable("parameter", "w", "float32", (1,), "cpu", Print(before, 0), Print(after, 0)),
            Variable("gradient", "w", after=Print(grad, 0)),
        ),
        **more,  # type: ignore[arg-type]
    )


def put(run: Path, *steps: Capsule) -> Path:
    folders = [run / "capsules" / folder_name(s.key, s.step, s.rank) for s in steps]
    for folder, made in zip(folders, steps):
        write_capsule(folder, made, [])
    return folders[0]


def judge(path: Path, monkeypatch: pytest.MonkeyPatch, *again: Capsule | str) -> replay.Judgement:
    """With executions that give these steps, in order."""
    results = iter(again)

    def execute(ranks: dict[int, Path], *_: object, **__: object) -> dict[int, Capsule] | str:
        result = next(results)
        return result if isinstance(result, str) else dict.fromkeys(ranks, result)

    monkeypatch.setattr(replay, "execute", execute)
    found = replay.judge(path)
    assert next(results, None) is None
    return found


def test_the_same_twice_is_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judge(put(tmp_path, step()), monkeypatch, step(), step())
    assert found.verdict == "reproduced" and found.compared


def test_executions_that_differ_from_each_other_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judge(put(tmp_path, step()), monkeypatch, step(), step(grad=9, after=9))
    assert found.verdict == "differs" and found.differences[0].stage == "gradient"


def test_a_sound_control_accuses_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, step(grad=9, after=9), step(step=2, control=3))
    found = judge(path, monkeypatch, step(), step(), step(step=2))
    assert (found.verdict, found.control) == ("differs", "reproduced")
    assert "the device erred" in found.reason


def test_a_control_that_fails_too_says_that_something_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path, step(grad=9, after=9), step(step=2, control=3, grad=9))
    found = judge(path, monkeypatch, step(), step(), step(step=2))
    assert (found.verdict, found.control) == ("cannot", "differs")


@pytest.mark.parametrize("stage", ["given", "loss"])
def test_without_a_control_other_inputs_or_targets_accuse_nobody(
    stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = judge(put(tmp_path, step(**{stage: 9}, grad=9)), monkeypatch, step(), step())
    assert (found.verdict, found.control) == ("cannot", "missing")


def test_without_a_control_both_causes_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judge(put(tmp_path, step(out=9)), monkeypatch, step(), step())
    assert found.verdict == "differs" and "no control" in found.reason


def test_a_command_that_fails_says_nothing_about_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judge(put(tmp_path, step()), monkeypatch, "the command ended with 1")
    assert found.verdict == "cannot" and "ended with 1" in found.reason


def test_a_capsule_without_values_is_not_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = Capsule(key="k", step=3, command=("python",), absent=("state by value: 900 MiB",))
    found = judge(put(tmp_path, lacking), monkeypatch)
    assert found.verdict == "cannot" and "900 MiB" in found.reason


def test_missing_ranks_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = judge(put(tmp_path, step(world=3)), monkeypatch)
    assert found.verdict == "cannot" and "1, 2" in found.reason


def test_a_command_of_somebody_else_is_not_run(tmp_path: Path) -> None:
    path = put(tmp_path, step())
    path.chmod(0o777)
    with pytest.raises(UsageError, match="not yours"):
        replay.judge(path)


def test_a_command_that_is_not_there_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, step())
    assert main(["capsule", "replay", str(path), "--", "no-such-program"]) == 2
    assert "command not found" in capsys.readouterr().err


def test_a_program_that_never_trains_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, step())
    assert main(["capsule", "replay", str(path), "--", "sh", "-c", "echo no data here; exit 4"]) == 3
    out = capsys.readouterr().out
    assert "ended with 4" in out and "no data here" in out


def test_time_runs_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path, step())
    assert main(["capsule", "replay", str(path), "--timeout", "0.3", "--", "sleep", "60"]) == 3
    assert "took too long" in capsys.readouterr().out
