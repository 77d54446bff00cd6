"""`proctor check`, `proctor report`: exit codes, files beside the run, and inputs that are not what they should be."""

from __future__ import annotations

import json
import os
import shutil
from xml.etree import ElementTree as ET

import pytest
from helpers.processes import BACK, ZERO, process
from helpers.relations import rule
from helpers.runs import write_run

from proctor.invariants.invariant import Severity
from proctor.invariants.pack import Pack, write_pack
from proctor.invariants.schema import CALLS, TABLES


def one_line(err: str) -> bool:
    return err.startswith("proctor: PR-E") and err.count("\n") == 1


# -- exit codes -----------------------------------------------------------------------------------------------


def test_clean_run_is_0(proctor, good, pack):
    code, out, err = proctor("check", good, "-i", pack)
    assert (code, err) == (0, "")
    assert out.startswith("PROCTOR  no violation, 1 checked\n")


def test_violated_run_is_1(proctor, bad, pack):
    code, out, _ = proctor("check", bad, "-i", pack)
    assert code == 1
    assert out.startswith("PROCTOR  1 incident, 1 violated rule, 1 checked\n")
    assert "step 2, rank 0" in out


@pytest.mark.parametrize(
    ("severity", "fail_on", "code"),
    [("warning", "error", 0), ("warning", "warning", 1), ("critical", "error", 1), ("critical", "never", 0), ("info", "info", 1)],
)
def test_fail_on_decides_what_counts(proctor, tmp_path, bad, severity, fail_on, code):
    path = tmp_path / "p.json"
    write_pack(Pack([rule("test_happens", severity=Severity(severity), first=ZERO, then=BACK)]), path)
    assert proctor("check", bad, "-i", path, "--fail-on", fail_on)[0] == code


def test_nothing_checked_is_3(proctor, good, tmp_path):
    path = tmp_path / "p.json"
    write_pack(Pack([rule("test_finite", variable="absent")]), path)
    code, out, _ = proctor("check", good, "-i", path)
    assert code == 3
    assert "INCONCLUSIVE" in out


def test_missing_rank_is_3_unless_something_is_violated(proctor, tmp_path, pack):
    healthy = write_run(tmp_path / "h", [process(0, 2)])
    broken = write_run(tmp_path / "b", [process(0, 2, lost_from=2)])
    assert proctor("check", healthy, "-i", pack)[0] == 3
    assert proctor("check", broken, "-i", pack)[0] == 1


def test_pack_may_be_named_before_the_run(proctor, bad, pack):
    assert proctor("check", "-i", pack, bad)[0] == 1
    assert proctor("check", "-i", pack, "-i", pack, "--", bad)[0] == 1


def test_equal_rules_of_two_packs_count_once(proctor, bad, pack):
    shutil.copy(pack, pack.with_name("again.json"))
    _, out, _ = proctor("check", bad, "-i", pack, pack.with_name("again.json"), "--format", "json")
    assert json.loads(out)["checked"] == 1


# -- outputs --------------------------------------------------------------------------------------------------


def test_json_is_the_only_thing_on_stdout(proctor, bad, pack):
    code, out, err = proctor("check", bad, "-i", pack, "--format", "json")
    tree = json.loads(out)
    assert (code, err) == (1, "")
    assert (tree["violations"][0]["step"], tree["checked"]) == (2, 1)


def test_reports_are_written_beside_the_run(proctor, bad, pack):
    proctor("check", bad, "-i", pack)
    assert "1 incident, 1 violated rule" in (bad / "report.html").read_text()
    (line,) = (bad / "violations.jsonl").read_text().splitlines()
    assert json.loads(line)["code"] == "PR190"
    assert not [p for p in bad.iterdir() if p.name.endswith(".tmp")]


def test_a_later_clean_check_empties_the_violations(proctor, bad, pack, tmp_path):
    proctor("check", bad, "-i", pack)
    other = tmp_path / "other.json"
    write_pack(Pack([rule("test_happens", first=BACK, then=BACK)]), other)
    assert proctor("check", bad, "-i", other)[0] == 0
    assert (bad / "violations.jsonl").read_text() == ""


@pytest.mark.parametrize("name", ["terminal", "json", "sarif", "junit", "html"])
def test_output_file_takes_the_report(proctor, bad, pack, tmp_path, name):
    target = tmp_path / "out file"
    code, out, err = proctor("check", bad, "-i", pack, "--format", name, "-o", target)
    text = target.read_text()
    assert (code, out) == (1, "")
    assert str(target) in err
    if name in ("json", "sarif"):
        json.loads(text)
    elif name == "junit":
        ET.fromstring(text.encode())
    else:
        assert "PROCTOR" in text.upper()


def test_html_without_a_file_goes_beside_the_run(proctor, bad, pack):
    code, out, err = proctor("check", bad, "-i", pack, "--format", "html")
    assert (code, out) == (1, "")
    assert "report.html" in err


@pytest.mark.parametrize("name", ["no/x.json", "."])
def test_output_that_cannot_be_written_is_2(proctor, bad, pack, tmp_path, name):
    code, _, err = proctor("check", bad, "-i", pack, "--format", "json", "-o", tmp_path / name)
    assert code == 2
    assert one_line(err)


def test_run_that_cannot_be_written_is_still_checked(proctor, bad, pack, monkeypatch):
    from proctor.verify.report import keep

    def refuse(path, text, **more):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(keep, "write_text", refuse)
    code, out, err = proctor("check", bad, "-i", pack, "--format", "json")
    assert code == 1
    assert json.loads(out)["checked"] == 1
    assert "violations.jsonl was not written: Permission denied" in err
    code, _, err = proctor("check", bad, "-i", pack, "--format", "html")
    assert code == 2


# -- inputs ---------------------------------------------------------------------------------------------------


def test_run_that_is_not_there_is_2(proctor, pack, tmp_path):
    code, out, err = proctor("check", tmp_path / "absent", "-i", pack)
    assert (code, out) == (2, "")
    assert one_line(err)
    assert "no such directory" in err


def test_run_that_is_a_file_is_2(proctor, pack):
    code, _, err = proctor("check", pack, "-i", pack)
    assert code == 2
    assert "not a directory" in err
    assert one_line(err)


def test_folder_that_is_no_run_is_2(proctor, pack, tmp_path):
    assert proctor("check", tmp_path, "-i", pack)[0] == 2


def test_no_run_is_2(proctor, pack):
    code, _, err = proctor("check", "-i", pack)
    assert code == 2
    assert "no run directory" in err


def test_no_pack_is_2_when_none_is_shipped(proctor, good, monkeypatch):
    from proctor.invariants import fit

    monkeypatch.setattr(fit, "shipped", list)
    code, _, err = proctor("check", good)
    assert code == 2
    assert "name a pack with -i" in err
    assert one_line(err)


def test_shipped_packs_are_the_default(proctor, bad, pack, monkeypatch):
    from proctor.invariants import fit

    monkeypatch.setattr(fit, "shipped", lambda: [pack])
    assert proctor("check", bad)[0] == 1


def calls_file(run):
    (path,) = run.glob("procs/*/calls.arrow")
    return path


@pytest.mark.parametrize("blob", [b"garbage" * 99, b"\xff\xff\xff\xff\x10\x00\x00\x00" + b"\0" * 64, b"ARROW1\0\0" + b"x" * 64])
def test_garbage_instead_of_a_stream_is_2(proctor, good, pack, blob):
    calls_file(good).write_bytes(blob)
    code, out, err = proctor("check", good, "-i", pack)
    assert (code, out) == (2, "")
    assert one_line(err)
    assert "calls.arrow" in err


def test_truncated_stream_is_read_up_to_the_cut_and_noted(proctor, tmp_path, pack):
    from helpers import runs

    run = write_run(tmp_path / "r", [process(steps=40, finished=False)])
    path = calls_file(run)
    from pyarrow import ipc

    rows = ipc.open_stream(path.read_bytes()).read_all().to_pylist()
    runs.write_table(path, CALLS, rows, batch=30)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) * 2 // 3])
    code, out, _ = proctor("check", run, "-i", pack)
    assert code == 0
    assert "cut or damaged after" in out


@pytest.mark.parametrize(("table", "column"), [("calls", "fn"), ("calls", "seq"), ("calls", "ctx"), ("context", "step"), ("names", "text")])
def test_a_value_that_is_missing_is_damage_from_there_on(proctor, good, pack, table, column):
    from helpers import runs
    from pyarrow import ipc

    path = calls_file(good).with_name(f"{table}.arrow")
    rows = ipc.open_stream(path.read_bytes()).read_all().to_pylist()
    assert len(rows) > 1
    rows[-1][column] = None
    runs.write_table(path, TABLES[table], rows, batch=len(rows) - 1)
    code, out, err = proctor("check", good, "-i", pack)
    assert code in (0, 3)
    assert err == ""
    assert f"{table}.arrow: cut or damaged after {len(rows) - 1} row" in out
    assert "a value is missing" in out


def test_table_that_is_missing_is_noted(proctor, good, pack):
    calls_file(good).unlink()
    code, out, _ = proctor("check", good, "-i", pack)
    assert code == 3
    assert "calls.arrow: missing" in out


def test_newer_trace_is_2(proctor, tmp_path, pack):
    code, _, err = proctor("check", write_run(tmp_path / "r", [process()], schema=99), "-i", pack)
    assert code == 2
    assert "trace schema 99" in err


def edited(pack, change):
    tree = json.loads(pack.read_text())
    change(tree)
    path = pack.with_name("edited.json")
    path.write_text(json.dumps(tree))
    return path


def test_newer_pack_is_2(proctor, good, pack):
    code, _, err = proctor("check", good, "-i", edited(pack, lambda t: t.update(schema=99)))
    assert code == 2
    assert "pack schema 99" in err
    assert one_line(err)


def test_pack_of_wrong_types_names_the_place(proctor, good, pack):
    def change(tree):
        tree["invariants"] = [*tree["invariants"] * 3, tree["invariants"][0] | {"support": "x"}]

    code, _, err = proctor("check", good, "-i", edited(pack, change))
    assert code == 2
    assert "$.invariants[3].support" in err
    assert one_line(err)


def test_unknown_relation_in_a_pack_is_skipped_and_counted(proctor, bad, pack):
    def change(tree):
        rule_ = json.loads(json.dumps(tree["invariants"][0]))
        rule_["id"] = "feedfeedfeed"
        rule_["hypothesis"]["relation"] = "from_the_future"
        tree["invariants"].append(rule_)

    code, out, _ = proctor("check", bad, "-i", edited(pack, change), "--format", "json")
    tree = json.loads(out)
    assert (code, tree["checked"], tree["unknown"]) == (1, 1, 1)
    assert any("from_the_future" in n for n in tree["notes"])


@pytest.mark.parametrize("text", ["", "[]", "{", "null", '{"schema":"1"}', "\ufeff{}"])
def test_what_is_no_pack_is_2(proctor, good, tmp_path, text):
    path = tmp_path / "p.json"
    path.write_text(text, encoding="utf-8")
    code, _, err = proctor("check", good, "-i", path)
    assert code == 2
    assert one_line(err)


def test_absent_pack_is_2(proctor, good, tmp_path):
    assert proctor("check", good, "-i", tmp_path / "no.json")[0] == 2


# -- report ---------------------------------------------------------------------------------------------------


def test_report_of_an_unchecked_run_sums_it_up(proctor, good):
    code, out, _ = proctor("report", good)
    assert code == 0
    for words in ("python train.py", "1 process, rank 0 of 1; 1 finished", "6; last step 5", "18 calls, 0 states", "train 18", "Optimizer.zero_grad", "not checked"):
        assert words in out, words
    assert "Run summary" in (good / "report.html").read_text()


def test_report_keeps_the_result_of_an_earlier_check(proctor, bad, pack, tmp_path):
    proctor("check", bad, "-i", pack)
    page = tmp_path / "page.html"
    code, out, _ = proctor("report", bad, "-o", page)
    assert code == 1
    assert "1 incident, 1 violated rule, 1 checked" in out
    assert "never ran before" in page.read_text()


def test_report_checks_when_a_pack_is_named(proctor, bad, good, pack):
    assert proctor("report", bad, "-i", pack)[0] == 1
    assert proctor("report", "-i", pack, good)[0] == 0


def test_report_of_a_run_without_records_or_ranks_is_3(proctor, tmp_path):
    assert proctor("report", write_run(tmp_path / "a", []))[0] == 3
    assert proctor("report", write_run(tmp_path / "b", [process(0, 2)]))[0] == 3


def test_report_of_what_is_no_run_is_2(proctor, tmp_path):
    assert proctor("report", tmp_path)[0] == 2
    assert proctor("report")[0] == 2


def test_report_names_losses(proctor, tmp_path):
    run = write_run(tmp_path / "r", [process(dropped=7, finished=False, notes=["the disk was full"])])
    _, out, _ = proctor("report", run)
    assert "7 records" in out
    assert "0 finished" in out


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_report_of_a_read_only_run_says_so(proctor, good):
    good.chmod(0o500)
    code, out, _ = proctor("report", good)
    assert code == 0
    assert "The page was not written" in out
