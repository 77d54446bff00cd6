"""`proctor pack merge|diff|suppress|stamp|lint|list|show`."""

from __future__ import annotations

import json
from datetime import date, timedelta

import msgspec
import pytest
from helpers.processes import BACK, STEP, ZERO
from helpers.relations import rule

from proctor.invariants.condition import Condition, Kind, Precondition
from proctor.invariants.invariant import (
    Diversity,
    Evidence,
    FalseAlarm,
    Record,
    RunSupport,
    Severity,
    Support,
    Tier,
    hypothesis_id,
)
from proctor.invariants.pack import Pack, Provenance, Refuted, Source, read_pack, write_pack
from proctor.invariants.suppression import Suppression

TRAIN = Precondition(((Condition("phase", Kind.CONSTANT, "train"),),))
EVAL = Precondition(((Condition("phase", Kind.CONSTANT, "eval"),),))
TOMORROW = (date.today() + timedelta(days=1)).isoformat()
YESTERDAY = (date.today() - timedelta(days=1)).isoformat()


def supported(run, passed=10, excluded=0, when=None, **params):
    """A rule of one run."""
    made = rule("test_happens", when, **params) if when is not None else rule("test_happens", **params)
    evidence = Evidence(runs=(RunSupport(run, passed, excluded),))
    return msgspec.structs.replace(made, support=Support(passed, excluded, 1, 1), evidence=evidence)


def save(tmp_path, name, *rules, runs=(), **more):
    path = tmp_path / name
    sources = tuple(Source(r, f"{r}.py", r, (f"family-{r}",), 5) for r in runs)
    origin = Provenance("proctor 1", "2.6", len(runs), [s.program for s in sources], 5 * len(runs), sources)
    write_pack(Pack(list(rules), origin, **more), path)
    return path


# -- merge ----------------------------------------------------------------------------------------------------


def test_equal_rules_are_one_and_their_support_adds_up(proctor, tmp_path):
    a = save(tmp_path, "a.json", supported("r1", first=ZERO, then=BACK), runs=["r1"])
    b = save(tmp_path, "b.json", supported("r2", first=ZERO, then=BACK), supported("r2", first=BACK, then=STEP), runs=["r2"])
    code, out, err = proctor("pack", "merge", a, b, "-o", tmp_path / "c.json")
    assert (code, err) == (0, "")
    assert "2 rules of 3 in 2 packs" in out
    merged = read_pack(tmp_path / "c.json")
    both = next(r for r in merged.invariants if r.hypothesis["first"] == ZERO)
    assert both.support == Support(20, 0, 2, 2)
    assert both.diversity == Diversity(2, 2)
    assert (merged.provenance.runs, merged.provenance.records) == (2, 10)


def test_a_run_that_both_packs_know_counts_once(proctor, tmp_path):
    a = save(tmp_path, "a.json", supported("r1", first=ZERO, then=BACK), runs=["r1"])
    proctor("pack", "merge", a, a, a, "-o", tmp_path / "c.json")
    (merged,) = read_pack(tmp_path / "c.json").invariants
    assert merged.support == Support(10, 0, 1, 1)


def test_preconditions_become_alternatives_while_nothing_failed(proctor, tmp_path):
    a = save(tmp_path, "a.json", supported("r1", when=TRAIN, first=ZERO, then=BACK), runs=["r1"])
    b = save(tmp_path, "b.json", supported("r2", when=EVAL, first=ZERO, then=BACK), runs=["r2"])
    code, _, err = proctor("pack", "merge", a, b, "-o", tmp_path / "c.json")
    assert code == 0
    assert err.startswith("kept: ")
    (merged,) = read_pack(tmp_path / "c.json").invariants
    assert set(merged.precondition.any_of) == {*TRAIN.any_of, *EVAL.any_of}
    assert merged.support.passed == 20


def test_a_rule_is_narrowed_to_where_no_pack_saw_it_fail(proctor, tmp_path):
    a = save(tmp_path, "a.json", supported("r1", first=ZERO, then=BACK), runs=["r1"])
    b = save(tmp_path, "b.json", supported("r2", when=TRAIN, excluded=4, first=ZERO, then=BACK), runs=["r2"])
    code, _, err = proctor("pack", "merge", a, b, "-o", tmp_path / "c.json")
    assert code == 0
    assert err.startswith("narrowed: ")
    (merged,) = read_pack(tmp_path / "c.json").invariants
    assert merged.precondition == TRAIN
    assert merged.support.passed == 10  # of the pack whose rule is left whole


def test_rules_that_contradict_each_other_are_withdrawn_and_stay_so(proctor, tmp_path):
    a = save(tmp_path, "a.json", supported("r1", when=TRAIN, excluded=4, first=ZERO, then=BACK), runs=["r1"])
    b = save(tmp_path, "b.json", supported("r2", when=EVAL, excluded=4, first=ZERO, then=BACK), runs=["r2"])
    c = save(tmp_path, "c.json", supported("r3", first=ZERO, then=BACK), runs=["r3"])
    code, out, err = proctor("pack", "merge", a, b, "-o", tmp_path / "ab.json")
    assert code == 0
    assert "1 rule withdrawn" in out
    assert err.startswith("withdrawn: ")
    proctor("pack", "merge", tmp_path / "ab.json", c, "-o", tmp_path / "abc.json")
    assert read_pack(tmp_path / "abc.json").invariants == []


def test_what_a_pack_refutes_no_other_brings_back(proctor, tmp_path):
    mine = supported("r1", first=ZERO, then=BACK)
    a = save(tmp_path, "a.json", mine, runs=["r1"])
    b = save(tmp_path, "b.json", runs=["r2"], refuted=(Refuted(hypothesis_id(mine.hypothesis)),))
    code, out, err = proctor("pack", "merge", a, b, "-o", tmp_path / "c.json")
    assert code == 0
    assert "0 rules of 1" in out
    assert "refute" in err


def test_merge_of_packs_that_do_not_say_from_which_runs_takes_the_larger_support(proctor, tmp_path):
    a = save(tmp_path, "a.json", rule("test_happens", passed=7, first=ZERO, then=BACK))
    b = save(tmp_path, "b.json", rule("test_happens", passed=9, first=ZERO, then=BACK))
    proctor("pack", "merge", a, b, "-o", tmp_path / "c.json")
    assert read_pack(tmp_path / "c.json").invariants[0].support.passed == 9


def test_reduce_leaves_out_what_is_implied(proctor, tmp_path):
    a = save(tmp_path, "a.json", supported("r1", first=ZERO, then=BACK), supported("r1", when=TRAIN, first=BACK, then=STEP), runs=["r1"])
    assert proctor("pack", "merge", a, "--reduce", "-o", tmp_path / "c.json")[0] == 0
    assert len(read_pack(tmp_path / "c.json").invariants) == 2


def test_a_suppression_follows_its_rule_through_a_merge(proctor, tmp_path):
    mine = supported("r1", first=ZERO, then=BACK)
    a = save(tmp_path, "a.json", mine, runs=["r1"], suppressions=(Suppression(mine.id, "known bug"),))
    b = save(tmp_path, "b.json", supported("r2", when=TRAIN, excluded=4, first=ZERO, then=BACK), runs=["r2"])
    proctor("pack", "merge", a, b, "-o", tmp_path / "c.json")
    merged = read_pack(tmp_path / "c.json")
    assert [(s.rule, s.reason) for s in merged.suppressions] == [(merged.invariants[0].id, "known bug")]


def test_merge_with_bad_input_is_2(proctor, tmp_path, pack):
    assert proctor("pack", "merge", tmp_path / "no.json", "-o", tmp_path / "c.json")[0] == 2
    assert proctor("pack", "merge", pack, "-o", tmp_path)[0] == 2
    assert proctor("pack", "merge", "-o", tmp_path / "c.json")[0] == 2


# -- diff -----------------------------------------------------------------------------------------------------


def test_equal_packs_do_not_differ(proctor, pack):
    assert proctor("pack", "diff", pack, pack)[:2] == (0, "the same rules\n")


def test_diff_says_what_came_went_and_changed(proctor, tmp_path):
    stays = rule("test_happens", first=BACK, then=STEP)
    a = save(tmp_path, "a.json", stays, rule("test_happens", first=ZERO, then=BACK), rule("test_finite", variable="old"))
    louder = msgspec.structs.replace(stays, severity=Severity.CRITICAL, support=Support(130, 0, 4, 2))
    b = save(tmp_path, "b.json", louder, rule("test_happens", TRAIN, first=ZERO, then=BACK), rule("test_finite", variable="new"))
    code, out, _ = proctor("pack", "diff", a, b, "--format", "json")
    tree = json.loads(out)
    assert code == 1
    assert [r["text"] for r in tree["added"]] == ["new is finite"]
    assert [r["text"] for r in tree["removed"]] == ["old is finite"]
    changes = {r["text"]: r["changes"] for r in tree["changed"]}
    assert changes[stays.text] == {"severity": ["error", "critical"], "support.passed": [120, 130], "support.runs": [3, 4]}
    (moved,) = (c for t, c in changes.items() if t != stays.text)
    assert moved == {"precondition": ["always", "phase is train"]}
    code, out, _ = proctor("pack", "diff", a, b)
    assert code == 1
    for words in ("1 rule removed", "1 rule added", "2 rules changed", "severity: error  →  critical", "(was "):
        assert words in out


def test_diff_is_bounded(proctor, tmp_path):
    a = save(tmp_path, "a.json")
    b = save(tmp_path, "b.json", *(rule("test_finite", variable=f"w{i}") for i in range(60)))
    assert "and 10 more: --all" in proctor("pack", "diff", a, b)[1]
    assert "more: --all" not in proctor("pack", "diff", a, b, "--all")[1]


def test_diff_with_bad_input_is_2(proctor, pack, tmp_path):
    assert proctor("pack", "diff", pack)[0] == 2
    assert proctor("pack", "diff", pack, tmp_path / "no.json")[0] == 2


# -- suppress -------------------------------------------------------------------------------------------------


def test_a_suppressed_violation_is_counted_and_shown_with_its_reason(proctor, pack, bad, happens):
    code, out, _ = proctor("pack", "suppress", pack, happens.id[:6], "--reason", "known  bug", "--until", TOMORROW, "--by", "me")
    assert code == 0
    assert f"until {TOMORROW}: known bug" in out
    code, out, _ = proctor("check", bad, "-i", pack)
    assert code == 0
    for words in ("no violation, 1 checked, 1 suppressed", "Not reported", "suppressed by me", TOMORROW, "known bug"):
        assert words in out, words
    (entry,) = json.loads(proctor("check", bad, "-i", pack, "--format", "json")[1])["silenced"]
    assert (entry["why"], entry["reason"], entry["violation"]["id"]) == ("suppressed", "known bug", happens.id)
    page = (bad / "report.html").read_text()
    assert "Found and not reported" in page
    assert "known bug" in page
    assert "all held" not in page


@pytest.mark.parametrize("name", ["s.toml", "s.json"])
def test_a_suppression_may_live_in_a_file_of_its_own(proctor, pack, bad, happens, tmp_path, name):
    before = pack.read_bytes()
    file = tmp_path / name
    assert proctor("pack", "suppress", pack, happens.id, "--reason", "x", "--to", file)[0] == 0
    assert pack.read_bytes() == before
    assert proctor("check", bad, "-i", pack)[0] == 1
    assert proctor("check", bad, "-i", pack, "--suppressions", file)[0] == 0


def test_a_suppression_that_ended_is_reported_and_does_nothing(proctor, pack, bad, happens):
    held = read_pack(pack)
    write_pack(msgspec.structs.replace(held, suppressions=(Suppression(happens.id, "old bug", YESTERDAY),)), pack)
    code, out, _ = proctor("check", bad, "-i", pack)
    assert code == 1
    assert f"(old bug) ended on {YESTERDAY}" in out
    assert f"ended on {YESTERDAY}" in proctor("pack", "lint", pack)[1]


def test_a_suppression_for_another_program_does_nothing(proctor, pack, bad, happens):
    proctor("pack", "suppress", pack, happens.id, "--reason", "x", "--program", "elsewhere.py")
    assert proctor("check", bad, "-i", pack)[0] == 1


def test_a_suppression_can_be_changed_and_taken_back(proctor, pack, bad, happens):
    proctor("pack", "suppress", pack, happens.id, "--reason", "one")
    proctor("pack", "suppress", pack, happens.id, "--reason", "two")
    assert [s.reason for s in read_pack(pack).suppressions] == ["two"]
    assert proctor("pack", "suppress", pack, happens.id, "--remove")[0] == 0
    assert read_pack(pack).suppressions == ()
    assert proctor("pack", "suppress", pack, happens.id, "--remove")[0] == 2


@pytest.mark.parametrize(
    "more",
    [[], ["--reason", " "], ["--reason", "x", "--until", "soon"], ["--reason", "x", "--until", YESTERDAY], ["--reason", "x", "--until", "2999-02-31"]],
)
def test_a_suppression_without_reason_or_with_a_bad_day_is_2(proctor, pack, happens, more):
    assert proctor("pack", "suppress", pack, happens.id, *more)[0] == 2


def test_suppressing_a_rule_that_is_not_there_is_2(proctor, pack):
    assert proctor("pack", "suppress", pack, "ffffffffffff", "--reason", "x")[0] == 2


def test_machines_see_what_is_suppressed(proctor, pack, bad, happens):
    proctor("pack", "suppress", pack, happens.id, "--reason", "known bug")
    (result,) = json.loads(proctor("check", bad, "-i", pack, "--format", "sarif")[1])["runs"][0]["results"]
    assert result["suppressions"] == [{"kind": "external", "justification": "known bug"}]
    junit = proctor("check", bad, "-i", pack, "--format", "junit")[1]
    assert "skipped" in junit
    assert 'failures="0"' in junit


# -- baseline -------------------------------------------------------------------------------------------------


def test_what_a_baseline_knows_does_not_fail_a_check(proctor, pack, bad, tmp_path):
    file = tmp_path / "b.json"
    assert proctor("check", bad, "-i", pack, "--write-baseline", file)[0] == 1
    code, out, _ = proctor("check", bad, "-i", pack, "--baseline", file)
    assert code == 0
    assert "1 known" in out
    assert "in the baseline" in out


def test_a_baseline_that_is_written_again_keeps_what_it_knew(proctor, pack, bad, tmp_path):
    one, two = tmp_path / "1.json", tmp_path / "2.json"
    proctor("check", bad, "-i", pack, "--write-baseline", one)
    proctor("check", bad, "-i", pack, "--baseline", one, "--write-baseline", two)
    assert one.read_bytes() == two.read_bytes()


def test_the_same_claim_of_a_pack_that_was_learned_again_is_known(proctor, pack, bad, tmp_path):
    file, other = tmp_path / "b.json", tmp_path / "again.json"
    proctor("check", bad, "-i", pack, "--write-baseline", file)
    write_pack(Pack([rule("test_happens", Precondition((*TRAIN.any_of, ())), first=ZERO, then=BACK)]), other)
    assert proctor("check", bad, "-i", other)[0] == 1
    assert proctor("check", bad, "-i", other, "--baseline", file)[0] == 0


def test_news_is_reported_beside_what_is_known(proctor, pack, bad, tmp_path):
    file, other = tmp_path / "b.json", tmp_path / "other.json"
    proctor("check", bad, "-i", pack, "--write-baseline", file)
    write_pack(Pack([rule("test_happens", first=ZERO, then=STEP)]), other)
    code, out, _ = proctor("check", bad, "-i", pack, other, "--baseline", file)
    assert code == 1
    assert "1 violated rule, 2 checked, 1 known" in out


def test_a_bad_baseline_or_file_of_suppressions_is_2(proctor, pack, bad, tmp_path):
    (tmp_path / "x").write_text("nonsense")
    for option in ("--baseline", "--suppressions"):
        assert proctor("check", bad, "-i", pack, option, tmp_path / "x")[0] == 2
        assert proctor("check", bad, "-i", pack, option, tmp_path / "no")[0] == 2
    assert proctor("check", bad, "-i", pack, "--write-baseline", tmp_path / "no" / "b.json")[0] == 2


# -- stamp, lint, list, show ----------------------------------------------------------------------------------


def test_a_stamp_says_what_a_pack_is_for(proctor, pack):
    code, _, err = proctor("pack", "stamp", pack, "--requires", "torch>=2.6,<3", "transformers", "--note", "hello", "--measured", "9,36,2240,1")
    assert (code, err) == (0, "")
    assert read_pack(pack).requires == {"torch": ">=2.6,<3", "transformers": ""}
    for action in ("list", "show"):
        out = proctor("pack", action, pack)[1]
        for words in ("torch>=2.6,<3, transformers", "1 of 2,240 checked rules on 36 held-out healthy runs of 9 programs (0.04 %)", "hello"):
            assert words in out, words
    proctor("pack", "stamp", pack, "--note", "bye")
    assert read_pack(pack).requires == {"torch": ">=2.6,<3", "transformers": ""}


def test_a_stamp_writes_down_what_strangers_programs_said(proctor, tmp_path):
    quiet, loud = rule("test_happens", first=ZERO, then=BACK), rule("test_happens", first=ZERO, then=STEP)
    path, records = save(tmp_path, "p.json", quiet, loud), tmp_path / "records.json"
    said = {
        quiet.id: {"tested": 412, "failed": 0, "programs": 96},
        loud.id: {"tested": 412, "failed": 0, "retracted": 1},
        "other": {"tested": 1, "failed": 0},
    }
    records.write_text(json.dumps({"corpus": "wild", "rules": said}))
    code, out, err = proctor("pack", "stamp", path, "--record", records)
    assert (code, err) == (0, "")
    assert "2 of 2 rules with a record" in out
    by_id = {r.id: r for r in read_pack(path).invariants}
    assert by_id[quiet.id].record == Record(412, 0, programs=96, corpus="wild")
    assert (by_id[quiet.id].tier, by_id[loud.id].tier) == (Tier.PAGE, Tier.TICKET)  # one was taken back
    shown = proctor("pack", "show", path, "--tier", "page")[1]
    assert "0 of 412 healthy runs of 96 programs that nobody here wrote" in shown
    assert loud.id not in shown


@pytest.mark.parametrize(
    "text",
    ["[]", "{", '{"rules":{"a":{"tested":3}}}', '{"rules":{"a":{"tested":3,"failed":4}}}', '{"rules":{"a":{"tested":3,"failed":0,"programs":-1}}}'],
)
def test_a_record_that_cannot_be_is_one_line_and_2(proctor, pack, tmp_path, text):
    path = tmp_path / "records.json"
    path.write_text(text)
    before = pack.read_bytes()
    code, _, err = proctor("pack", "stamp", pack, "--record", path)
    assert (code, err.count("\n")) == (2, 1)
    assert "records.json" in err
    assert pack.read_bytes() == before


@pytest.mark.parametrize("more", [[], ["--requires", "torch=2"], ["--measured", "1,2"], ["--measured", "1,2,3,4"]])
def test_a_stamp_that_says_nothing_or_nonsense_is_2(proctor, pack, more):
    assert proctor("pack", "stamp", pack, *more)[0] == 2


def test_lint_warns_and_strict_makes_it_a_problem(proctor, tmp_path):
    lonely = msgspec.structs.replace(rule("test_happens", first=ZERO, then=BACK), support=Support(9, 0, 1, 1))
    narrow = rule("test_happens", TRAIN, first=ZERO, then=BACK)
    failing = msgspec.structs.replace(rule("test_finite", variable="w"), false_alarm=FalseAlarm.of(9, 1))
    path = save(tmp_path, "p.json", lonely, narrow, failing)
    code, out, _ = proctor("pack", "lint", path)
    assert code == 0
    for words in ("2 rules of 3 without a measured rate", "learned from one program", "failed on held-out", f"{narrow.id}: rule {lonely.id} implies it", "no problem, 4 warnings"):
        assert words in out, words
    assert proctor("pack", "lint", "--strict", path)[0] == 1


def test_lint_finds_a_tier_and_a_requirement_that_were_made_up(proctor, tmp_path):
    loud = msgspec.structs.replace(rule("test_happens", first=ZERO, then=BACK), tier=Tier.PAGE)
    path = save(tmp_path, "p.json", loud, requires={"torch": "latest"})
    code, out, _ = proctor("pack", "lint", path)
    assert code == 1
    assert "it says that it may page" in out
    assert "no requirement" in out


def test_show_can_be_limited_to_a_tier(proctor, tmp_path):
    vetted = msgspec.structs.replace(
        rule("test_happens", first=ZERO, then=BACK), false_alarm=FalseAlarm.of(40, 0), record=Record(412, 0, programs=96)
    )
    path = save(tmp_path, "p.json", vetted, rule("test_finite", variable="w"))
    out = proctor("pack", "show", path, "--tier", "page")[1]
    assert "[error, page]" in out
    assert "0 of 40 held-out healthy runs (at most 7.2 % with 95 % confidence)" in out
    assert "is finite" not in out
