"""Whatever is wrong with recordings, plans and commands: one clear line, exit code 2 or 3, and no traceback."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from helpers.small_net import Net, candidate, program, reference  # noqa: E402

from proctor.cli import main  # noqa: E402

Outcome = tuple[int, str]
Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("healthy")
    reference(folder / "reference")
    candidate(folder / "candidate")
    return folder


@pytest.fixture
def both(healthy: Path, tmp_path: Path) -> Path:
    """A reference and a candidate to be damaged."""
    shutil.copytree(healthy, tmp_path / "both")
    return tmp_path / "both"


@pytest.fixture
def oracle(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """`proctor oracle …` in this process: exit code, and the one line that a person reads."""
    monkeypatch.setenv("COLUMNS", "500")

    def run(*arguments: object) -> Outcome:
        code = main(["oracle", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        if code == 2:
            assert len(err.strip().splitlines()) == 1
        return code, err if code == 2 else out

    return run


def first_rank(recording: Path, run: str = "clean") -> Path:
    return recording / "runs" / run / "rank0"


def test_healthy_recordings_are_equivalent(both: Path, oracle: Run) -> None:
    code, text = oracle("compare", both / "reference", both / "candidate")
    assert code == 0 and "EQUIVALENT" in text


# -- plans


def test_a_plan_that_matches_nothing(both: Path, oracle: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[mesh]\naxes = ["tp"]\nsizes = [1]\n[[param]]\npath = "decoder.*"\nshard = { tp = 0 }\n')
    code, text = oracle("compare", both / "reference", both / "candidate", "--plan", tmp_path / "plan.toml")
    assert code == 2 and "matches nothing" in text and "decoder.*" in text


def test_a_rule_that_matches_nothing_is_said(both: Path, oracle: Run, tmp_path: Path) -> None:
    text = '[mesh]\naxes = ["tp"]\nsizes = [1]\n[[param]]\npath = "decoder.*"\nshard = { tp = 0 }\n[[param]]\npath = "first.weight"\nreplicate = true\n'
    (tmp_path / "plan.toml").write_text(text)
    code, said = oracle("compare", both / "reference", both / "candidate", "--plan", tmp_path / "plan.toml")
    assert code == 0 and "decoder.*" in said


def test_a_mesh_of_another_size(both: Path, oracle: Run, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('[mesh]\naxes = ["dp", "tp"]\nsizes = [2, 2]\n')
    code, text = oracle("compare", both / "reference", both / "candidate", "--plan", tmp_path / "plan.toml")
    assert code == 2 and "4 ranks" in text and "ran with 1" in text


@pytest.mark.parametrize("content", ["[[param]]\npath = '('\nshard = { tp = 0 }", "[mesh", "nothing = 1", "\x00"])
def test_a_plan_that_is_none(both: Path, oracle: Run, tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.toml").write_text(content)
    code, text = oracle("compare", both / "reference", both / "candidate", "--plan", tmp_path / "plan.toml")
    assert code == 2 and "plan.toml" in text


# -- what the runs computed


def test_a_reference_with_nan(oracle: Run, tmp_path: Path) -> None:
    reference(tmp_path / "reference", Net(twist=float("nan")))
    candidate(tmp_path / "candidate")
    code, text = oracle("compare", tmp_path / "reference", tmp_path / "candidate")
    assert code == 3 and "NaN" in text


def test_a_candidate_with_nan_is_different(both: Path, oracle: Run, tmp_path: Path) -> None:
    candidate(tmp_path / "candidate", Net(twist=float("nan")))
    code, text = oracle("compare", both / "reference", tmp_path / "candidate")
    assert code == 1 and "NaN" in text


def test_a_reference_that_is_not_deterministic(oracle: Run, tmp_path: Path) -> None:
    class Unsteady(Net):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Unsteady.calls += 1
            return super().forward(x) * (1.0 + 0.1 * Unsteady.calls)

    reference(tmp_path / "reference", Unsteady())
    candidate(tmp_path / "candidate")
    code, text = oracle("compare", tmp_path / "reference", tmp_path / "candidate")
    assert code == 3 and "not deterministic" in text


def test_another_shape(both: Path, oracle: Run, tmp_path: Path) -> None:
    candidate(tmp_path / "candidate", Net(wide=24))
    code, text = oracle("compare", both / "reference", tmp_path / "candidate")
    assert code == 3 and "first.bias" in text


def test_other_parameters_to_begin_with(both: Path, oracle: Run, tmp_path: Path) -> None:
    net = Net()
    with torch.no_grad():
        net.last.weight.mul_(3.0)
    candidate(tmp_path / "candidate", net)
    code, text = oracle("compare", both / "reference", tmp_path / "candidate")
    assert code == 3 and "last.weight" in text and "--generate" in text


def test_a_reference_without_samples(both: Path, oracle: Run) -> None:
    code, text = oracle("compare", both / "candidate", both / "candidate")
    assert code == 3 and "--samples" in text


# -- files


def test_a_rank_that_is_missing(both: Path, oracle: Run) -> None:
    path = first_rank(both / "candidate") / "process.json"
    path.write_text(path.read_text().replace('"world": 1', '"world": 2'))
    code, text = oracle("compare", both / "reference", both / "candidate")
    assert code == 3 and "rank 1 of 2 missing" in text


def test_a_recording_that_was_cut_off(both: Path, oracle: Run) -> None:
    path = first_rank(both / "candidate") / "process.json"
    path.write_text(path.read_text().replace('"done": true', '"done": false'))
    code, text = oracle("compare", both / "reference", both / "candidate")
    assert code == 3 and "not complete" in text


@pytest.mark.parametrize("keep", [0, 7, 100, -100])
def test_a_damaged_data_file(both: Path, oracle: Run, keep: int) -> None:
    path = first_rank(both / "candidate") / "data-00000.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    code, text = oracle("compare", both / "reference", both / "candidate")
    assert code == 2 and "data-00000.safetensors" in text


@pytest.mark.parametrize("header", [b"{", b"[]", b"{}", b'{"0": 1}', b'{"0": {"dtype": "F32", "shape": "x", "data_offsets": {}}}', b"\xff" * 8])
def test_a_damaged_header(both: Path, oracle: Run, header: bytes) -> None:
    path = first_rank(both / "candidate") / "data-00000.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4096))
    code, text = oracle("compare", both / "reference", both / "candidate")
    assert code == 2 and "data-00000.safetensors" in text


def test_a_header_that_lies_about_places(both: Path, oracle: Run) -> None:
    path = first_rank(both / "candidate") / "data-00000.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for held in header.values():
        if "data_offsets" in held:
            held["data_offsets"] = [held["data_offsets"][0] + 2**62, held["data_offsets"][1] + 2**62]
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])
    code, said = oracle("compare", both / "reference", both / "candidate")
    assert code == 2 and "damaged" in said


def test_an_index_that_was_cut_off(both: Path, oracle: Run) -> None:
    path = first_rank(both / "candidate") / "index.jsonl"
    path.write_bytes(path.read_bytes()[:-30])
    code, _ = oracle("compare", both / "reference", both / "candidate")
    assert code in (0, 1, 3)  # a line less: judged, or said


def test_no_index(both: Path, oracle: Run) -> None:
    (first_rank(both / "candidate") / "index.jsonl").unlink()
    code, _ = oracle("compare", both / "reference", both / "candidate")
    assert code in (1, 3)


@pytest.mark.parametrize("line", [b"{}\n", b"null\n", b"\xff\xfe\n", b'{"step": "x"}\n', b"[" * 100_000 + b"\n"])
def test_an_index_that_is_none(both: Path, oracle: Run, line: bytes) -> None:
    path = first_rank(both / "candidate") / "index.jsonl"
    path.write_bytes(line + path.read_bytes())
    code, text = oracle("compare", both / "reference", both / "candidate")
    assert code == 2 and "index.jsonl:1" in text


@pytest.mark.parametrize("name", ["../../../../reference/runs/clean/rank0/data-00000.safetensors", "/etc/passwd", "data-00000.safetensors/..", ""])
def test_a_path_that_leads_elsewhere(both: Path, oracle: Run, name: str) -> None:
    path = first_rank(both / "candidate") / "index.jsonl"
    path.write_text(path.read_text().replace('"data-00000.safetensors"', json.dumps(name)))
    code, text = oracle("compare", both / "reference", both / "candidate")
    assert code == 2 and "missing" in text


@pytest.mark.parametrize("shape", ["[-1]", "[99999999999, 99999999999]", "[" + ",".join("1" * 70) + "]"])
def test_a_shape_that_cannot_be(both: Path, oracle: Run, shape: str) -> None:
    path = first_rank(both / "candidate") / "index.jsonl"
    path.write_text(re.sub(r'"shape":\[[^]]*\]', f'"shape":{shape}', path.read_text()))
    code, text = oracle("compare", both / "reference", both / "candidate")
    assert code in (2, 3) and (code == 3 or "damaged" in text)  # or no tensor of it could be compared


@pytest.mark.parametrize("content", ["", "{", "[]", '{"schema": 99, "command": [], "program": ""}', '{"schema": "x"}'])
def test_an_oracle_json_that_is_none(both: Path, oracle: Run, content: str) -> None:
    (both / "candidate" / "oracle.json").write_text(content)
    code, text = oracle("compare", both / "reference", both / "candidate")
    assert code == 2 and "oracle.json" in text


def test_no_recording(tmp_path: Path, oracle: Run) -> None:
    code, text = oracle("compare", tmp_path, tmp_path / "absent")
    assert code == 2 and "not a recording" in text


def test_a_page_that_cannot_be_written(both: Path, oracle: Run) -> None:
    code, text = oracle("compare", both / "reference", both / "candidate", "--html", both / "no" / "such" / "page.html")
    assert code == 2 and "page.html" in text


# -- commands


def test_a_command_that_is_not_there(oracle: Run, tmp_path: Path) -> None:
    code, text = oracle("record", "-o", tmp_path / "out", "--", "no-such-command-anywhere")
    assert code == 2 and "command not found" in text
    code, text = oracle("record", "-o", tmp_path / "out")
    assert code == 2 and "no command" in text


def test_a_command_that_fails(oracle: Run, tmp_path: Path) -> None:
    code, text = oracle("record", "-o", tmp_path / "out", "--", sys.executable, "-c", "import sys; sys.exit('there is no data')")
    assert code == 2 and "there is no data" in text and "code 1" in text


def test_a_command_that_never_trains(oracle: Run, tmp_path: Path) -> None:
    code, text = oracle("record", "-o", tmp_path / "out", "--", sys.executable, "-c", "print('done')")
    assert code == 2 and "without training" in text


def test_a_command_that_takes_too_long(oracle: Run, tmp_path: Path) -> None:
    code, text = oracle("record", "-o", tmp_path / "out", "--timeout", "0.5", "--", sys.executable, "-c", "import time; time.sleep(60)")
    assert code == 2 and "--timeout" in text


@pytest.mark.parametrize("option", [("--steps", "0"), ("--samples", "-1"), ("--timeout", "0")])
def test_options_that_make_no_sense(oracle: Run, tmp_path: Path, option: tuple[str, str]) -> None:
    code, text = oracle("record", "-o", tmp_path / "out", *option, "--", "true")
    assert code == 2 and option[0] in text


def test_a_directory_that_is_somebody_elses(oracle: Run, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("…")
    code, text = oracle("record", "-o", tmp_path, "--overwrite", "--", "true")
    assert code == 2 and "not empty" in text
    code, text = oracle("record", "-o", tmp_path / "thesis.tex", "--", "true")
    assert code == 2 and "not a directory" in text


def test_unbalanced_quotes(oracle: Run, both: Path) -> None:
    code, text = oracle("localise", both / "reference", both / "candidate", "--command", 'python "train.py')
    assert code == 2 and "--command" in text


# -- a full disk


@pytest.fixture
def full_disk(tmp_path: Path) -> Path:
    """A file system of 32 KiB."""
    folder = tmp_path / "full"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("needs to mount a file system")
    try:
        yield folder  # type: ignore[misc]
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


WIDE = """
import torch
from torch import nn
torch.set_num_threads(1)
net = nn.Linear(100, 100)
net(torch.ones(1, 100)).sum().backward()
torch.optim.SGD(net.parameters(), lr=0.1).step()
print("the program is through")
"""


def test_a_full_disk(oracle: Run, full_disk: Path, tmp_path: Path) -> None:
    code, text = oracle("record", "-o", full_disk / "out", "--to-the-end", "--", *program(tmp_path, WIDE))
    assert code == 2 and re.search(r"no space left|cannot be written", text, re.IGNORECASE)


def test_a_disk_that_is_full_from_the_start(oracle: Run, full_disk: Path, tmp_path: Path) -> None:
    with open(full_disk / "filler", "wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)):
                pass
        except OSError:
            pass
    code, text = oracle("record", "-o", full_disk / "out", "--", *program(tmp_path, WIDE))
    assert code == 2 and re.search(r"no space left|cannot be written", text, re.IGNORECASE)


def test_a_full_disk_within_the_program(full_disk: Path, tmp_path: Path) -> None:
    from proctor.errors import OracleError

    with pytest.raises(OracleError, match=r"(?i)no space left|cannot be written"):
        reference(full_disk / "out", torch.nn.Sequential(torch.nn.Linear(8, 4000), torch.nn.Linear(4000, 4)))
    assert torch.nn.Module.__call__.__name__ == "_wrapped_call_impl"  # nothing stays behind


@pytest.mark.slow
def test_a_program_that_nobody_seeded(oracle: Run, tmp_path: Path) -> None:
    command = program(tmp_path, "import random, sys\nsys.argv[1:] = [str(random.randrange(10**6)), '1', '1']\n" + _program_text())
    assert oracle("record", "-o", tmp_path / "reference", "--samples", "1", "--", *command)[0] == 0
    code, text = oracle("compare", tmp_path / "reference", tmp_path / "reference")
    assert code == 3 and "not deterministic" in text


def _program_text() -> str:
    from helpers.small_net import PROGRAM

    return PROGRAM


def test_a_broken_pipe_is_no_traceback(both: Path) -> None:
    command = f"{sys.executable} -m proctor.cli oracle compare {both}/reference {both}/candidate --all | head -c 10"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}, check=False)
    assert "Traceback" not in done.stderr
