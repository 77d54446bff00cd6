"""Reading TrainCheck's traces: what is accepted, what is left out and said, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from helpers.traincheck import Log, tensor, write

from proctor.errors import TraceError, UsageError
from proctor.infer.importers.traincheck import files
from proctor.infer.importers.traincheck.run import import_run
from proctor.invariants.codec import signature
from proctor.invariants.trace import Run, Trace


@pytest.fixture
def log() -> Log:
    log = Log(stage="training")
    with log.inside("torch.f", args={"0": tensor(is_cpu=True)}, kwargs={"p": {"float": 0.5}}, returns=tensor("torch.int64")):
        log.call("torch.g", obj=17)
    log.state("model.fc.weight", data=-5, grad=None, dtype="torch.float32", shape=[3], requires_grad=True)
    log.state("model.fc.weight", data=-5, grad=7, dtype="torch.float32", shape=[3], requires_grad=True)
    return log


def test_calls_states_and_contexts_become_tables(tmp_path: Path, log: Log) -> None:
    import_run(write(tmp_path / "t", log), tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.info["importer"] == "traincheck"
    calls = run.calls.sort("seq")
    assert calls.select("fn", "parent", "step", "phase").rows() == [("torch.f", 0, 0, "train"), ("torch.g", 1, 0, "train")]
    found = signature.features(calls["args"][0])
    assert (found["0.dtype"], found["0.shape[0]"], found["p.value"]) == ("float32", 4, 0.5)
    assert signature.features(calls["ret"][0])["out.dtype"] == "int64"
    states = run.states.select("model", "name", "attr", "fp", "dtype").rows()
    data, grad = (-5) & 0xFFFF_FFFF_FFFF_FFFF, 7
    assert states == [("model", "fc.weight", a, fp, "float32") for a, fp in (("data", data), ("grad", 0), ("grad", grad))]
    assert run.processes[0].pid == 100 and run.processes[0].finished
    assert not run.trace.notes


def test_ranks_are_those_that_the_program_tells(tmp_path: Path) -> None:
    logs = [Log(pid=pid, _DATA_PARALLEL_RANK=rank) for pid, rank in ((200, "1"), (201, "0"))]
    for log in logs:
        log.call("torch.f")
    import_run(write(tmp_path / "t", *logs), tmp_path / "run")
    found = Trace.load([tmp_path / "run"]).processes
    assert {p.pid: (p.rank, p.world, p.coords) for p in found} == {200: (1, 2, {"dp": 1}), 201: (0, 2, {"dp": 0})}


@pytest.mark.parametrize("name", ["trace_API_1_2.log", "trace_VAR.json", "proxy_log.json", "trace_x.jsonl.gz", "mine.jsonl"])
def test_file_names(tmp_path: Path, log: Log, name: str) -> None:
    lines = "".join(json.dumps(r) + "\n" for r in log.records).encode()
    (tmp_path / "t").mkdir()
    (tmp_path / "t" / "notes.txt").write_text("not a trace")
    (tmp_path / "t" / name).write_bytes(gzip.compress(lines) if name.endswith(".gz") else lines)
    assert import_run(tmp_path / "t", tmp_path / "run").records == len(log.records)


def test_oddities_of_lines_are_counted_and_said(tmp_path: Path, log: Log) -> None:
    lines = [json.dumps(r) for r in log.records]
    lines[0] = lines[0].replace('"kwargs"', '"later": {"a": NaN}, "kwargs"')
    lines.insert(2, "what is this")
    lines.insert(3, '{"type": "state_change"}')
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "trace_1.log").write_text("\n".join([*lines, '{"type": "state_ch']))
    done = import_run(folder, tmp_path / "run")
    assert done.records == len(log.records)
    assert done.notes == ["trace_1.log was cut short", "left out lines that are no TrainCheck records: 2"]
    assert not Trace.load([tmp_path / "run"]).processes[0].finished


def test_half_a_surrogate_pair_is_no_text_and_its_line_is_left_out(tmp_path: Path, log: Log) -> None:
    folder = write(tmp_path / "t", log)
    [path] = [p for p in folder.rglob("*") if p.is_file()]
    lines = path.read_text().splitlines()
    spoilt = lines[0].replace("torch.f", "torch.\\ud800f")
    assert spoilt != lines[0]
    path.write_text("\n".join([*lines, spoilt, lines[0].replace("torch.f", "torch.\\ud83d\\ude00")]) + "\n")  # the second is a whole pair
    run = import_run(folder, tmp_path / "run")
    assert run.records == len(lines) + 1


def test_a_time_of_which_no_difference_is_a_number_of_64_bits_is_none(tmp_path: Path, log: Log) -> None:
    log.records[0]["time"] = -(2**63) + 1
    assert import_run(write(tmp_path / "t", log), tmp_path / "run").records < len(log.records)


def test_a_cut_gzip_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    log = Log()
    for i in range(400):
        log.call(f"torch.f{i}")
    folder = tmp_path / "t"
    folder.mkdir()
    blob = gzip.compress("".join(json.dumps(r) + "\n" for r in log.records).encode())
    (folder / "trace_1.log.gz").write_bytes(blob[: len(blob) // 2])
    done = import_run(folder, tmp_path / "run")
    assert 0 < done.records < 800 and done.notes[0] == "trace_1.log.gz was cut short"


def test_a_line_that_is_too_long_is_left_out(tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_LINE_BYTES", 1 << 20)
    log.call("torch.h", kwargs={"x": {"str": "a" * (1 << 21)}})
    done = import_run(write(tmp_path / "t", log), tmp_path / "run")
    assert "left out lines of more than 1 MiB: 1" in done.notes


@pytest.mark.parametrize("content", [None, b"", b"\x00\xff\x01 not json\n", b'{"a": 1}\n', b"[1]\n"])
def test_other_folders_are_refused_in_one_line(tmp_path: Path, content: bytes | None) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    for name in ("x.json", "trace_1.log"):
        if content is not None:
            (folder / name).write_bytes(content)
    with pytest.raises(TraceError) as raised:
        import_run(folder, tmp_path / "run")
    assert "\n" not in str(raised.value) and "traincheck-collect" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["t"], "nothing half done is left behind"


def test_what_lies_at_the_target_is_not_lost(tmp_path: Path, log: Log) -> None:
    trace = write(tmp_path / "t", log)
    with pytest.raises(UsageError, match="not a run directory"):
        import_run(trace, trace, overwrite=True)
    import_run(trace, tmp_path / "run")
    with pytest.raises(UsageError, match="--overwrite"):
        import_run(trace, tmp_path / "run")
    import_run(trace, tmp_path / "run", overwrite=True)


def test_a_name_cannot_leave_the_run_directory(tmp_path: Path) -> None:
    log = Log()
    log.call("../../../escape")
    log.state("../../x", data=1)
    import_run(write(tmp_path / "t", log), tmp_path / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "t"]
