"""Search and findings without ranks: minimal sets, shrinking, signatures, known lists, scripts, journals, verdicts."""

from __future__ import annotations

import ast
import gc
import os
import warnings
from pathlib import Path

import pytest

from proctor.errors import OracleError
from proctor.oracle.fuzz.report import html, jsonout, summary, terminal
from proctor.oracle.fuzz.running.judge import SHAKEN, Difference, Reference, judge
from proctor.oracle.fuzz.running.observe import Seen
from proctor.oracle.fuzz.running.outcome import Outcome, Symptom, outcome_of, refusals
from proctor.oracle.fuzz.running.rank import describe, plain_message, shake, within_library
from proctor.oracle.fuzz.running.worlds import Answer
from proctor.oracle.fuzz.search.attribute import minimal, triggers
from proctor.oracle.fuzz.search.campaign import Pair, Row
from proctor.oracle.fuzz.search.findings import (
    Finding,
    holds,
    needs,
    read_known,
    shipped,
    signature,
    toml,
)
from proctor.oracle.fuzz.search.shrink import shrunk
from proctor.oracle.fuzz.sessions.confirm import confirm
from proctor.oracle.fuzz.sessions.journal import Asked, Journal
from proctor.oracle.fuzz.sessions.script import merged, script_of
from proctor.oracle.fuzz.space import Point
from proctor.oracle.fuzz.spec import Scenario

np = pytest.importorskip("numpy")

SETTING: Point = {"world": 3, "wrapper": "fsdp2", "optimizer": "Adam", "clip": "inf", "accumulate": 2, "resume": "full"}


def a_finding(setting: Point | None = None, first: Difference | None = None) -> Finding:
    found = {"world": 2, "wrapper": "fsdp2", "clip": "inf"} if setting is None else setting
    symptom = Symptom("inconsistent", "gradient") if first is not None else Symptom("crash", "RuntimeError", "cannot", "torch/x.py:f")
    outcome = Outcome(symptom.verdict, symptom, "it fails", first)  # type: ignore[arg-type]
    scenario = Scenario("chain", {"layers": ["mlp"]}, {}, found)
    return Finding(signature(symptom, found), scenario, outcome, found, (), scenario, confirmed="yes")


def test_the_minimal_set_is_an_interaction_where_two_axes_are_needed() -> None:
    asked: list[Point] = []

    def fails(point: Point) -> bool:
        asked.append(point)
        return point.get("wrapper") == "fsdp2" and point.get("clip") == "inf" and point.get("world", 1) != 1

    assert minimal(SETTING, fails) == {"world": 2, "wrapper": "fsdp2", "clip": "inf"}
    assert len(asked) <= 4 * len(SETTING)
    assert triggers({"world": 3, "clip": "inf"}) == ("clip=inf", "world>1")


def test_a_second_switch_alone_is_the_first_one() -> None:
    found = minimal({"world": 2, "wrapper": "ddp", "ddp_also": "static_graph=True"}, lambda p: "static_graph=True" in (p.get("ddp"), p.get("ddp_also")) and "wrapper" in p)
    assert found == {"wrapper": "ddp", "ddp": "static_graph=True"}


def test_an_implementation_is_not_exchanged_for_another_one_which_may_fail_for_a_known_reason() -> None:
    start = Scenario("torchrec", {"tables": 3, "pooling": "MEAN"}, {}, {"precision": "float32", "wrapper": "dmp", "rec_sharding": "mixed", "rec_read": "key by key"})
    small, _ = shrunk(start, lambda s: s.setting.get("rec_sharding") in ("mixed", "data_parallel"))
    assert small.setting["rec_sharding"] == "mixed" and small.setting["rec_read"] != "key by key"


def test_shrinking_keeps_what_the_failure_needs_and_nothing_else() -> None:
    start = Scenario("transformer", {"blocks": 2, "tied": True, "heads": 4}, {"batch": 12, "steps": 3, "seed": 9}, {"world": 4, "wrapper": "hsdp"})
    small, runs = shrunk(start, lambda s: s.template == "transformer" and s.model.get("tied") is True and s.given("batch") != 2)
    assert small.template == "transformer" and small.model == {"tied": True}
    assert small.input == {"batch": 4, "steps": 1} or small.input == {"batch": 4}
    assert runs < 150


def test_any_number_of_ranks_above_one_holds_a_world_trigger() -> None:
    assert holds({"world": 2, "wrapper": "ddp"}, {"world": 4, "wrapper": "ddp", "clip": "2"})
    assert not holds({"world": 2, "wrapper": "ddp"}, {"wrapper": "ddp"})
    assert holds({"wrapper": "ddp"}, {"wrapper": "ddp"})


def test_messages_of_one_cause_are_one_signature() -> None:
    first = plain_message("input has placement (Shard(dim=0),), got [2, 8] at 0x7f3a in /usr/lib/x.py rank 3")
    other = plain_message("input has placement (Replicate(), _NormPartial(2)), got [12] at 0xabc in /home/me/y.py rank 11")
    assert first == other


def test_names_of_parameters_are_no_part_of_a_message() -> None:
    said = "Missing key in checkpoint state_dict: opt.state.{}.step."
    assert plain_message(said.format("experts.0.0.weight")) == plain_message(said.format("unused.weight")) != plain_message("Missing key in checkpoint state_dict: opt.param_groups.")
    assert plain_message("'experts.0.0.weight'") == plain_message("'bags.1.weight'") != plain_message("'weight'")
    assert "aten.pow_.Scalar" in plain_message("aten.pow_.Scalar: in-place operations that require placement changes")


def test_a_known_list_survives_toml_and_knows_its_versions(tmp_path: Path) -> None:
    finding = a_finding()
    file = tmp_path / "known.toml"
    file.write_text(toml([finding.as_known("torch", "2.13.0+cpu", "a reason")]))
    (known,) = read_known(file, {"torch": "2.13.1"})
    assert known.explains(Symptom("crash", "RuntimeError", "cannot", "torch/x.py:f"), {}, frozenset())
    assert not known.explains(Symptom("crash", "ValueError", "cannot", "torch/x.py:f"), {"wrapper": "ddp"}, frozenset())
    assert known.passes({"world": 3, "wrapper": "fsdp2", "clip": "inf"}, frozenset())
    assert not known.passes({"world": 3, "wrapper": "fsdp2"}, frozenset())
    assert read_known(file, {"torch": "2.14.0"}) == []
    file.write_text("[[known]]\nid = 3\n")
    with pytest.raises(OracleError, match="no list of known findings"):
        read_known(file, {"torch": "2.13.0"})


def test_what_is_shipped_can_be_read_and_gives_reasons() -> None:
    assert all(k.reason for k in shipped("2.13.0+cpu"))
    assert all(why and pattern.pattern for pattern, why in refusals())


def test_needs_are_what_is_special_about_a_model() -> None:
    assert needs(Scenario("transformer", {"tied": True})) == ("tied",)
    assert needs(Scenario("dlrm", {"sparse": True})) == ("sparse",)


def test_lines_that_differ_stand_under_world() -> None:
    found = merged(["def f():", "    x = 1", "    a()", "    return x"], ["def f():", "    x = 2", "    a()", "    b()", "    return x"])
    assert found == ["def f():", "    x = (2) if world else (1)", "    a()", "    if world:", "        b()", "    return x"]


@pytest.mark.parametrize("kind", ["gradient", "clipped", "parameter", "state", "output", "evaluation", None])
def test_a_script_is_short_compiles_and_needs_the_library_alone(kind: str | None) -> None:
    first = Difference(0, kind, "layers.0.0.weight" + (":exp_avg" if kind == "state" else ""), 1.0, 1e-8, 1.0, candidate="1", reference="2") if kind else None
    setting: Point = {"world": 2, "wrapper": "ddp", "accumulate": 2, "sync": "last", "optimizer": "Adam", "resume": "full"}
    text = script_of(a_finding(setting, first), "2.13.0")
    tree = ast.parse(text)
    imported = {a.name.partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {str(n.module).partition(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported <= {"os", "sys", "tempfile", "zlib", "copy", "torch", "contextlib", "datetime", "functools"}
    assert len(script_of(a_finding(None, first), "2.13.0").splitlines()) < 60


def test_a_script_of_two_programs_runs_one_after_the_other() -> None:
    first = Difference(1, "parameter", "layers.0.0.weight", 1.0, 1e-8, 1.0, candidate="1", reference="2")
    text = script_of(a_finding({"world": 3, "wrapper": "fsdp2", "disk": "save", "before_world": 2, "before": "ddp"}, first), "2.13.0")
    ast.parse(text)
    assert text.index("'store1')), 2, ") < text.index("'store')), 3, ") and "build1(rank, world)" in text and len(text.splitlines()) < 76


@pytest.mark.parametrize("kind", ["gradient", "parameter", "state", "output"])
def test_a_script_of_flat_parameters_looks_at_the_ranks_part(kind: str) -> None:
    first = Difference(0, kind, "layers.0.0.weight" + (":exp_avg" if kind == "state" else ""), 1.0, 1e-8, 1.0, candidate="1", reference="2")
    text = script_of(a_finding({"world": 2, "wrapper": "fsdp1", "optimizer": "Adam", "clip": "2", "precision": "float32"}, first), "2.13.0")
    ast.parse(text)
    assert "net.clip_grad_norm_(0.5, norm_type=float('2'))" in text and ("piece(net, 'layers.0.0.weight')" in text) == (kind != "output")


def test_a_script_that_is_no_program_confirms_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("for x in y:\nelse: pass\n")
    assert "no program" in confirm(tmp_path / "script.py")[0]


def test_a_script_that_fails_in_another_way_confirms_nothing(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise KeyError('weight')\n")
    assert confirm(tmp_path / "script.py", raises="ValueError")[0] == "its script ends with another exception than ValueError"
    assert confirm(tmp_path / "script.py", raises="KeyError")[0] == confirm(tmp_path / "script.py")[0] == "yes"


def test_a_script_that_met_a_full_disk_is_neither_confirmed_nor_denied(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("raise OSError(28, 'No space left on device')\n")
    with pytest.raises(OracleError, match=r"the disk is full .*--resume"):
        confirm(tmp_path / "script.py", raises="ValueError")
    assert confirm(tmp_path / "script.py", raises="OSError")[0] == "yes", "what the finding is about"


def test_a_finding_whose_script_has_not_run_says_so() -> None:
    waits = a_finding()
    waits.confirmed = ""
    assert waits.denied == "its script has not run yet; --resume runs it"
    waits.confirmed = "yes"
    assert waits.denied == ""
    waits.confirmed = "its script ends with exit code 0"
    assert waits.denied == waits.confirmed


def test_inconsistencies_of_other_models_are_other_findings() -> None:
    symptom, triggers_of = Symptom("inconsistent", "output"), {"world": 2, "wrapper": "megatron"}
    one, two = (signature(symptom, triggers_of, "", needs) for needs in (("smoothed",), ("frozen",)))
    assert one != two and one == signature(Symptom("inconsistent", "parameter"), triggers_of, "", ("smoothed",))
    crash = Symptom("crash", "KeyError", "no", "there")
    assert signature(crash, triggers_of, "", ("frozen",)) == signature(crash, {}, "")


def test_a_rank_that_died_is_told_and_not_those_that_lost_it() -> None:
    lost = {"raised": {"type": "RuntimeError", "message": "Read error [127.0.0.1]:1: Connection reset by peer", "where": "torch/a.py:b", "traceback": ""}, "at": 1.0}
    died = outcome_of(Answer((lost, None), "rank 1 died: signal SIGABRT"), [])
    assert died.symptom is not None and died.symptom.what == "death"
    other = {"raised": {**lost["raised"], "message": "no such key"}, "at": 0.5}  # type: ignore[dict-item]
    first = outcome_of(Answer((lost, other, None), "rank 2 died: signal SIGABRT"), [])
    assert first.symptom is not None and first.symptom.way == "no such key"


def test_a_script_of_a_relative_directory_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "script.py").write_text("raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    assert confirm(Path("here/script.py"))[0] == "yes"


def test_single_precision_is_compared_at_every_step_under_any_optimizer() -> None:
    """What rounding does to an update that divides by what is nearly nothing is in the noise; bfloat16 rounds too much for that."""
    whole = np.linspace(1, 2, 6)
    for floor, told in ((1e-4, True), (0.1, False)):
        reference = Reference({"1/parameter/w": whole}, {"1/parameter/w": 1e-5}, floor, steady=False)
        assert (judge(Seen("parameter", "w", whole * 1.5), 1, reference, 0.0) is not None) is told
    noisy = Reference({"1/parameter/w": whole}, {"1/parameter/w": 0.1}, 1e-4, steady=False)
    assert judge(Seen("parameter", "w", whole * 1.5), 1, noisy, 0.0) is None


def test_a_script_of_a_pipeline_ends_well_on_ranks_without_the_parameter() -> None:
    first = Difference(0, "gradient", "layers.1.bias", 1.0, 1e-8, 1.0, candidate="1", reference="2")
    text = script_of(a_finding({"world": 2, "wrapper": "pipeline", "pipe_schedule": "ScheduleGPipe"}, first), "2.13.0")
    ast.parse(text)
    assert "if p is None: sys.exit(0)" in text and ".get('layers.1.bias')" in text


@pytest.mark.parametrize("message", [
    "RuntimeError: all_reduce does not support\x02on complex tensors", "ValueError: FSDP doesn't support scalar parameters. Change scalar to a 1D tensor with numel equal to 1.",
    "RuntimeError: Cannot shard unevenly distributed tensor: dimension 1 (size 5) is not evenly divisible by mesh dimension 0 (size 2). Please redistribute the tensor before this operation.",
    "AssertionError: num of ranks 4 doesn't divide global batch size 6",
])  # fmt: skip
def test_what_a_library_refuses_in_words_is_known(message: str) -> None:
    from proctor.oracle.fuzz.running.outcome import refusals

    assert any(pattern.search(message) for pattern, _ in refusals())


def test_groups_that_libraries_keep_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    import torch.distributed as dist

    from proctor.oracle.fuzz.running import kept

    class Group:
        pass

    monkeypatch.setattr(dist, "ProcessGroup", Group)
    library = types.ModuleType("a_library")
    library.inner, library.name = Group(), "a"
    monkeypatch.setitem(sys.modules, "a_library", library)
    kept._forget_groups()
    assert library.inner is None and library.name == "a"


def test_what_a_program_says_in_the_environment_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    from proctor.oracle.fuzz.running import rank

    monkeypatch.setenv("BEFORE", "kept")
    with warnings.catch_warnings():
        rank.serve(0, 1, iter([b""]).__next__, lambda said: None)
    gc.enable()
    monkeypatch.setattr(rank, "make_reference", lambda task: os.environ.update(AFTER="left", BEFORE="other") or {})
    assert rank._answer({"make": True}, 0, 1) == {} and os.environ["AFTER"] == "left"
    rank._restore()
    assert os.environ["BEFORE"] == "kept" and "AFTER" not in os.environ


def test_what_each_rank_met_is_told_of_a_checkpoint_that_fails() -> None:
    import torch
    from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

    with pytest.raises(BaseException, match="Checkpoint") as raised:  # noqa: PT012
        try:
            torch.load("/nowhere/at/all")
        except OSError as e:
            raise CheckpointException("write", {1: _wrap_exception(e)}) from None
    told = describe(raised.value)
    assert told["type"] == "FileNotFoundError" and "nowhere" in told["message"] and told["where"].startswith("torch/serialization.py")


def test_frames_of_an_installed_proctor_are_none_of_a_library() -> None:
    assert within_library("/env/lib/python3.11/site-packages/torch/optim/sgd.py") == "torch/optim/sgd.py"
    assert within_library("/env/lib/python3.11/site-packages/proctor/oracle/fuzz/running/rank.py") == within_library("/usr/lib/python3.11/socket.py") == ""


def test_a_tensor_is_judged_by_the_references_own_noise() -> None:
    whole = np.linspace(1.0, 2.0, 8)
    key = "0/parameter/w"
    calm = Reference({key: whole}, {}, 2e-7, steady=True)
    noisy = Reference({key: whole}, {key: 1e-3}, 2e-7, steady=True)
    seen = Seen("parameter", "w", whole[2:5] + 1e-4, (slice(2, 5),), sharded=True)
    assert judge(seen, 0, calm, 0.0) is not None and judge(seen, 0, noisy, 0.0) is None
    assert judge(Seen("parameter", "w", whole[2:5], (slice(2, 5),)), 0, calm, 0.0) is None
    wrong = judge(Seen("parameter", "w", whole[3:6], (slice(2, 5),)), 0, calm, 0.0)
    assert wrong is not None and wrong.error > 0.1
    assert judge(Seen("parameter", "w", whole * np.nan), 0, calm, 0.0) is not None
    doubled = judge(Seen("parameter", "w", 2 * whole), 0, calm, 0.0)
    assert doubled is not None and "scale 2" in doubled.way


def test_noise_turns_signs_that_rounding_made_and_leaves_zeros() -> None:
    torch = pytest.importorskip("torch")
    given = torch.tensor([0.5, -0.25, 0.0, *[3e-18] * 16, 1e-6], dtype=torch.float64)
    turned = torch.zeros(16, dtype=torch.bool)
    for seed in range(4):
        moved = given.clone()
        shake([moved, torch.zeros(0), torch.sparse_coo_tensor(size=(3, 3), check_invariants=True)], torch.Generator().manual_seed(seed), SHAKEN)
        turned |= moved[3:19] < 0
        assert moved[2] == 0
        assert torch.allclose(moved[[0, 1, 19]], given[[0, 1, 19]], rtol=1e-8, atol=0)
    assert turned.sum() > 8
    odd = torch.tensor([float("nan"), 1.0])
    shake([odd], torch.Generator(), 0.1)
    assert odd[1] == 1.0


def test_answers_become_verdicts() -> None:
    fine = {"differences": [], "digests": {"0/parameter/w|": 1}}
    assert outcome_of(Answer((fine, fine)), []).verdict == "ok"
    assert outcome_of(Answer((fine, {**fine, "digests": {"0/parameter/w|": 2}})), []).verdict == "replicas"
    error = {"type": "ValueError", "message": "Expected more than 1 value per channel when training", "where": "", "traceback": ""}
    assert outcome_of(Answer((fine, {"raised": error})), []).verdict == "refused"
    crash = outcome_of(Answer((fine, {"raised": {**error, "message": "oh"}})), [])
    assert crash.symptom == Symptom("crash", "ValueError", "oh", "")
    assert outcome_of(Answer((None, fine), "timeout", ('File "a/site-packages/torch/x.py", line 3 in wait',), 20.0), []).why.endswith("torch/x.py:wait")
    died = outcome_of(Answer((None, fine), "rank 1 died: signal SIGABRT"), [])
    assert died.verdict == "crash" and died.symptom == outcome_of(Answer((fine, None), "rank 0 died: signal SIGABRT"), []).symptom


def test_a_journal_survives_a_torn_line_and_reports_what_it_holds(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "campaign")
    asked = Asked(3, ("torch",), 4, 1, {"torch": "2.13.0"})
    journal.begin(asked)
    with pytest.raises(OracleError, match="there is a campaign already"):
        journal.begin(asked)
    assert journal.asked() == asked
    finding = a_finding()
    journal.put(finding, "print()", "")
    rows = (Row({"world": 2, "wrapper": "fsdp2", "clip": "inf"}, "crash", "it fails", finding.id), Row({"clip": "2"}, "ok"), Row({}, "no program", "why not"))
    journal.add(0, Pair(0, finding.scenario, rows, 2, 0.1))
    with (journal.path / "journal-0.jsonl").open("a") as file:
        file.write('{"number": 7')
    journal.add(0, Pair(1, finding.scenario, rows[1:], 0, 0.1))
    assert [p.number for _, p in journal.pairs()] == [0, 1]
    whole = summary(asked, journal.findings(), [p for _, p in journal.pairs()])
    assert whole.settings == 5 and whole.verdicts == {"ok": 2, "no program": 2, "crash": 1} and whole.matrix["clip"] == {"2": {"ok": 2}, "inf": {"crash": 1}}
    assert "NEW" in terminal.render(whole, "here") and "clip=inf" in terminal.render(whole, "here")
    assert finding.id in html.render(whole, journal) and '"passed": 2' in jsonout.render(whole)


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "campaign")
    journal.begin(Asked(3, ("torch",), 4, 1, {"torch": "2.13.0"}))
    (journal.path / "journal-0.jsonl").symlink_to("/dev/full")
    with pytest.raises(OracleError, match="the disk is full") as caught:
        journal.add(0, Pair(0, Scenario("chain"), (), 0, 0.0))
    assert "--resume" in caught.value.hint


def test_values_that_left_all_bounds_have_a_place_and_no_exception() -> None:
    whole = 1e160 * np.linspace(1.0, 2.0, 12).reshape(4, 3)
    other = whole.copy()
    other[1, 2] *= 1.5
    with np.errstate(over="ignore"):
        found = judge(Seen("parameter", "w", other), 0, Reference({"0/parameter/w": whole}, {"0/parameter/w": 1e155}, 2e-7, steady=True), 0.0)
    assert found is not None and found.error > 1e159
