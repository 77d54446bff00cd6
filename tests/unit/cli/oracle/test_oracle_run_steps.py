"""cli/_oracle_run.py: the step in which runs part is recorded again in full, on both sides."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.small_net import Net, reference, step  # noqa: E402

from proctor.cli import main  # noqa: E402
from proctor.oracle import trace  # noqa: E402
from proctor.oracle.collect.config import CollectConfig  # noqa: E402
from proctor.oracle.store import Recording, write_json  # noqa: E402


def test_the_step_that_departs_is_recorded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made: list[tuple[str, int]] = []

    def record(args: Any, out: Path, command: list[str], *, whole: int = 0, **more: Any) -> None:
        made.append((command[-1], whole))
        monkeypatch.setattr("proctor.oracle.recording.tracing.CollectConfig", functools.partial(CollectConfig, whole=(0, whole)))
        if command[-1] == "reference":
            reference(out, steps=args.steps)
        else:
            net = Net()
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            with trace(net, out, steps=args.steps):
                for number in range(args.steps):
                    step(net, optimizer, 3.0 if number == 2 else 1.0)
        info = Recording(out).info
        info.whole = sorted({0, whole})
        write_json(out / "oracle.json", info)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("proctor.cli.oracle.record.record", record)
    asked = ["oracle", "run", "--steps", "3", "--no-localise", "--reference", "python reference", "--candidate", "python candidate"]
    assert main(asked) == 1
    said = capsys.readouterr().out
    assert made == [("reference", 0), ("candidate", 0), ("reference", 2), ("candidate", 2)]
    assert "3 of 3 recorded steps compared" in " ".join(said.split())
    assert "gradient of the output" in said or "gradient of the input" in said  # of step 2, which the first recording had not
