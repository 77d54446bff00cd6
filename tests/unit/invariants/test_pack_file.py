"""Packs on disk: both schemas are read, and what somebody else wrote is data."""

from __future__ import annotations

import json

import msgspec
import pytest
from helpers.processes import BACK, ZERO
from helpers.relations import rule

from proctor.errors import PackError
from proctor.invariants.invariant import (
    Diversity,
    Evidence,
    Example,
    FalseAlarm,
    Hypothesis,
    Record,
    RunSupport,
    Severity,
    Standing,
    Tier,
    tier_of,
    upper_bound,
)
from proctor.invariants.pack import Measured, Pack, Provenance, Source, read_pack, write_pack
from proctor.invariants.suppression import (
    Known,
    Suppression,
    read_baseline,
    read_suppressions,
    write_suppressions,
)

CONTRADICTION, REPLICAS, ERROR = Standing.CONTRADICTION, Standing.REPLICAS, Severity.ERROR
WIDE, NARROW, QUIET = Diversity(3, 2), Diversity(1, 1), FalseAlarm.of(29, 0)
RULE = rule("test_happens", first=ZERO, then=BACK)


def test_a_pack_of_schema_1_is_read(tmp_path):
    path = tmp_path / "p.json"
    old = {
        "schema": 1,
        "provenance": {"tool": "proctor 0.1.0", "torch": "2.6", "runs": 2, "programs": ["a.py"], "records": 9},
        "invariants": [
            {
                "id": RULE.id,
                "hypothesis": {"relation": "test_happens", "params": [["first", ZERO], ["then", BACK]]},
                "precondition": {"any_of": [[]]},
                "support": {"passed": 3, "excluded": 0, "runs": 1, "programs": 1},
                "text": "text",
                "severity": "warning",
            }
        ],
    }
    path.write_text(json.dumps(old))
    pack = read_pack(path)
    (found,) = pack.invariants
    assert (found.evidence, found.tier, found.false_alarm) == (Evidence(), Tier.TICKET, None)
    assert (pack.requires, pack.suppressions, pack.provenance.sources) == ({}, (), ())


def test_everything_that_is_written_is_read_again(tmp_path):
    example = Example(3, 0, "a.py", "r1", "f", "a.py:3", "seen", "expected", (("phase", "train"),))


    full = msgspec.structs.replace(
        RULE,
        evidence=Evidence((example,), (example,), (RunSupport("r1", 3, 1),)),
        diversity=Diversity(2, 2),
        false_alarm=FalseAlarm.of(30, 0),
        tier=Tier.PAGE,
    )
    origin = Provenance("proctor", "2.6", 1, ["a.py"], 9, (Source("r1", "a.py", "run", ("f1",), 9),), {"torchvision": ""})
    pack = Pack([full], origin, [], {"torch": ">=2.6,<3"}, (Suppression(full.id, "because", "2030-01-01"),))
    write_pack(pack, tmp_path / "p.json")
    assert read_pack(tmp_path / "p.json") == pack
    write_pack(pack, tmp_path / "p.json", requires={"torch": ""}, note="a note", measured=Measured(1, 2, 30, 0))
    again = read_pack(tmp_path / "p.json")
    assert (again.requires, again.provenance.note, again.provenance.measured) == ({"torch": ""}, "a note", Measured(1, 2, 30, 0))


def test_a_pack_may_suppress_its_own_rules_only(tmp_path):
    write_pack(Pack([RULE], suppressions=(Suppression("0123456789ab", "not yours"),)), tmp_path / "p.json")
    assert read_pack(tmp_path / "p.json").suppressions == ()


@pytest.mark.parametrize(
    "change",
    [
        {"suppressions": [{"rule": "x", "reason": "y", "until": "soon"}]},
        {"suppressions": [{"rule": "x", "reason": "y", "until": "2026-02-30"}]},
        {"requires": ["torch"]},
        {"provenance": {"sources": [{"id": 3}]}},
        {"refuted": 7},
    ],
)
def test_a_malformed_head_is_an_error_and_no_traceback(tmp_path, change):
    path = tmp_path / "p.json"
    write_pack(Pack([RULE]), path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(PackError, match="not a pack"):
        read_pack(path)


def test_a_newer_schema_is_refused(tmp_path):
    (tmp_path / "p.json").write_text('{"schema": 99, "invariants": []}')
    with pytest.raises(PackError, match="schema 99"):
        read_pack(tmp_path / "p.json")


@pytest.mark.parametrize("name", ["s.toml", "s.json"])
def test_suppressions_survive_their_file(tmp_path, name):
    odd = 'quote " backslash \\ newline \n tab \t é 🙂 \x7f \x01'
    held = (Suppression("a" * 12, odd, "2030-12-31", "train.py", "me"), Suppression("b" * 12, "plain"))
    write_suppressions(held, tmp_path / name)
    assert read_suppressions(tmp_path / name) == held


def test_suppressions_written_by_hand_may_have_dates(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('[[suppress]]\nrule = "abc"\nreason = "why"\nuntil = 2030-01-02\n')
    assert read_suppressions(path) == (Suppression("abc", "why", "2030-01-02"),)


@pytest.mark.parametrize("text", ["[[suppress]]\nrule = 3\n", "suppress = 1", "nonsense", "\xff", '[[suppress]]\nrule = "a"\n'])
def test_a_bad_file_of_suppressions_is_an_error(tmp_path, text):
    path = tmp_path / "s.toml"
    path.write_bytes(text.encode("latin1"))
    with pytest.raises(PackError, match="not a file of suppressions"):
        read_suppressions(path)


def test_a_bad_baseline_is_an_error(tmp_path):
    path = tmp_path / "b.json"
    for text, words in (("[]", "not a baseline"), ('{"schema": 9}', "schema 9"), ('{"schema":1,"known":[3]}', "not a baseline")):
        path.write_text(text)
        with pytest.raises(PackError, match=words):
            read_baseline(path)
    with pytest.raises(PackError, match="No such file"):
        read_baseline(tmp_path / "none")
    path.write_text('{"schema":1,"known":[{"rule":"a","program":"p","text":"t"}]}')
    assert read_baseline(path) == {Known("a", "p", "t")}


def test_the_upper_bound_is_that_of_clopper_and_pearson():
    assert upper_bound(0, 0) == 1.0
    assert upper_bound(5, 5) == 1.0
    assert upper_bound(10, 0) == pytest.approx(1 - 0.05 ** (1 / 10), abs=1e-5)
    assert upper_bound(10, 1) == pytest.approx(0.394163, abs=1e-5)
    with pytest.raises(ValueError, match="no rate"):
        upper_bound(1, 2)


@pytest.mark.parametrize(
    ("standing", "severity", "diversity", "false_alarm", "record", "tier"),
    [
        # A contradiction pages with the record of 300 runs of strangers' programs, and with nothing less.
        (CONTRADICTION, ERROR, NARROW, None, Record(300, 0), Tier.PAGE),
        (CONTRADICTION, ERROR, WIDE, QUIET, None, Tier.TICKET),
        (CONTRADICTION, ERROR, WIDE, QUIET, Record(299, 0), Tier.TICKET),
        (CONTRADICTION, ERROR, WIDE, QUIET, Record(5000, 1), Tier.TICKET),
        (CONTRADICTION, ERROR, WIDE, QUIET, Record(5000, 0, retracted=1), Tier.TICKET),
        (CONTRADICTION, ERROR, WIDE, FalseAlarm.of(90, 1), Record(300, 0), Tier.TICKET),
        (CONTRADICTION, Severity.WARNING, WIDE, QUIET, Record(300, 0), Tier.TICKET),
        # Everything else is a ticket, however quiet it was.
        (Standing.LAW, ERROR, WIDE, QUIET, Record(5000, 0), Tier.TICKET),
        (Standing.HABIT, ERROR, WIDE, QUIET, Record(5000, 0), Tier.TICKET),
        # Replicas that part need no record, unless something speaks against the rule.
        (REPLICAS, ERROR, WIDE, FalseAlarm.of(20, 0), None, Tier.PAGE),
        (REPLICAS, ERROR, WIDE, FalseAlarm.of(20, 0), Record(5, 0), Tier.PAGE),
        (REPLICAS, ERROR, NARROW, QUIET, None, Tier.TICKET),
        (REPLICAS, ERROR, WIDE, None, None, Tier.TICKET),
        (REPLICAS, ERROR, WIDE, FalseAlarm.of(90, 1), None, Tier.TICKET),
        (REPLICAS, ERROR, WIDE, QUIET, Record(5, 1), Tier.TICKET),
    ],
)
def test_only_a_vetted_contradiction_may_page(standing, severity, diversity, false_alarm, record, tier):
    assert tier_of(severity, standing, diversity, false_alarm, record) is tier


@pytest.mark.parametrize("params", [{}, {"parent": "a.b"}, {"parent": 3, "child": ["x"], "how": "some"}])
def test_a_rule_that_its_relation_does_not_understand_is_refused(tmp_path, params):
    path = tmp_path / "pack.json"
    write_pack(Pack([msgspec.structs.replace(RULE, hypothesis=Hypothesis.of("contain", parent="a.b", child="c.d"))]), path)
    said = json.loads(path.read_bytes())
    said["invariants"][0]["hypothesis"]["params"] = list(params.items())
    path.write_text(json.dumps(said))
    with pytest.raises(PackError, match=r"invariants\[0\]"):
        read_pack(path, ["contain"])
