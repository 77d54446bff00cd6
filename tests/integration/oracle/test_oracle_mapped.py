"""What is wrong in a candidate with other names is named: its modules are fed the reference's values through the mapping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from helpers.oracle import renamed
from helpers.warm import python

from proctor.cli import main

PROGRAM = Path(renamed.__file__)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mapped")  # `oracle run` keeps the reference's recording there


@pytest.mark.parametrize(
    ("mistake", "module", "side", "own"),
    [
        ("", "", "", ""),
        ("activation", "layers.1.mlp", "forward", "h.1.ffn"),
        ("epsilon", "layers.1.norm", "forward", "h.1.ln"),
        ("detached", "layers.1.mlp", "backward", "h.1.ffn"),
        ("doubled", "layers.1.mlp.gate_proj", "gradient", "h.1.ffn.fc1"),
    ],
)
def test_a_mistake_under_other_names_is_named(
    folder: Path, mistake: str, module: str, side: str, own: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    commands = [f"{python()} {PROGRAM} theirs", f"{python()} {PROGRAM} fused {mistake}"]
    code = main(["oracle", "run", "--samples", "2", "--format", "json", "--reference", commands[0], "--candidate", commands[1]])
    said: dict[str, Any] = json.loads(capsys.readouterr().out)
    if not mistake:
        assert code == 0 and any("mapped by content" in n for n in said["notes"])
        return
    found = said["culprit"]
    assert code == 1 and (found["module"], found["direction"]) == (module, side), found
    assert f"the candidate calls it {own}" in found["text"]
    assert "no such operation" not in found["text"]  # code that is written otherwise has other operations
    if mistake == "epsilon":
        assert "native_layer_norm" in found["operation"]
