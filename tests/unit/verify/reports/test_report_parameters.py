"""The parameter map: what diverged, broke or stood still, on which ranks, and the rest folded away."""

from __future__ import annotations

import msgspec
import pytest
from helpers.relations import rule
from helpers.runs import write_run

from proctor.invariants.invariant import Severity
from proctor.invariants.trace import Run, Trace
from proctor.invariants.verdict import Violation
from proctor.verify.report import Report
from proctor.verify.report.formats import html
from proctor.verify.report.formats.html.parameters import MAX_ROWS, parameter_map
from proctor.verify.report.formats.html.tensors import tensors

NAMES = ["tok.weight", *(f"blocks.{b}.{t}" for b in range(4) for t in ("ln.weight", "fc.weight", "fc.bias"))]


def replicas(world=4, steps=6, value=lambda name, step, rank: (name, step), names=NAMES, **more):
    """Ranks whose tensors have these values: equal texts are equal bits."""
    made = []
    for rank in range(world):
        states = []
        for step in range(-1, steps):
            for name in names:
                said = value(name, step, rank)
                if said is not None:
                    states.append({"var": {"name": name, "module": "torch.nn.Linear"}, "step": step, "fp": abs(hash(said)), "norm": 1.0, "meta": {"shape": [2, 3]}})
        made.append({"rank": rank, "world": world, "states": states, **more})
    return made


def read(tmp_path, processes):
    return Trace.load([write_run(tmp_path / f"run{len(list(tmp_path.iterdir()))}", processes)])


def test_the_rank_that_differs_is_named_with_the_step(tmp_path):
    trace = read(tmp_path, replicas(value=lambda n, s, r: (n, s, r if r == 2 and s >= 3 and n.startswith("blocks.1") else 0)))
    found = tensors(trace).found
    assert {(t.name, t.differs, tuple(t.minority), t.majority) for t in found.values() if t.differs is not None} == {
        (f"blocks.1.{t}", 3, (2,), True) for t in ("ln.weight", "fc.weight", "fc.bias")
    }
    made = parameter_map(trace, [])
    assert made is not None
    assert made.summary == "Replicas differ from step 3, rank 2 against the others (3 of 13 tensors at once)"
    (row,) = [r for r in made.rows if r.notes and not r.opened]
    assert (row.label, row.first, row.level) == ("1", 3, "warn")
    assert row.notes == ["rank 2 differs"]
    assert {s.kind for s in row.strips} == {"changed", "apart"}
    judged = parameter_map(trace, [], ranks_judged=True)
    assert judged is not None
    assert {r.level for r in judged.rows} == {"bad", "quiet"}


def test_a_rank_that_stops_changing_differs_and_two_ranks_have_no_majority(tmp_path):
    trace = read(tmp_path, replicas(2, value=lambda n, s, r: None if r == 1 and s >= 2 and n == "tok.weight" else (n, s)))
    found = [t for t in tensors(trace).found.values() if t.differs is not None]
    assert [(t.name, t.differs, t.minority, t.majority) for t in found] == [("tok.weight", 2, [0, 1], False)]


def test_shards_and_ranks_that_began_different_are_not_compared(tmp_path):
    shards = read(tmp_path, replicas(value=lambda n, s, r: (n, s, r)))
    assert tensors(shards).replicas == 0
    pairs = read(tmp_path, replicas(value=lambda n, s, r: (n, s, r % 2, r if r == 3 and s == 4 else 0)))
    found = [t for t in tensors(pairs).found.values() if t.differs is not None]
    assert {tuple(t.minority) for t in found} == {(1, 3)}
    assert {t.differs for t in found} == {4}


def test_replicas_that_are_not_over_yet_are_not_taken_to_differ(tmp_path):
    running = replicas(2, steps=6, value=lambda n, s, r: (n, s) if s < 5 or r == 0 else None, finished=False)
    assert all(t.differs is None for t in tensors(read(tmp_path, running)).found.values())


def test_the_first_value_that_is_not_finite_and_what_never_moves(tmp_path):
    states = []
    for s in range(-1, 5):
        states += [{"var": {"name": "a.weight"}, "step": s, "fp": 7 + s, "norm": 1.0, "flags": 4 if s >= 3 else 0}]
        states += [{"var": {"name": "a.weight", "attr": "grad"}, "step": s, "fp": 9 + s, "norm": 1.0, "flags": 4 if s >= 2 else 0}]
        states += [{"var": {"name": "b.weight", "attr": "grad"}, "step": s, "fp": 9 + s, "norm": 1.0}] if s >= 0 else [{"var": {"name": "b.weight"}, "step": s, "fp": 5, "norm": 1.0}]
    made = parameter_map(read(tmp_path, [{"states": states}]), [])
    assert made is not None
    said = {r.label: r.notes for r in made.rows}
    assert said["a.weight"] == ["NaN or infinity in the gradient, rank 0"]
    assert said["b.weight"] == ["has a gradient and never changed"]


def test_a_quiet_map_is_short_and_says_so(tmp_path):
    names = [f"layers.{i}.w{j}" for i in range(40) for j in range(10)]
    made = parameter_map(read(tmp_path, replicas(2, 3, names=names)), [])
    assert made is not None
    assert made.summary == "400 tensors: nothing diverged, nothing turned non-finite; replicas are equal on all ranks"
    assert len(made.rows) <= 3
    assert made.rows[-1].about.endswith("400 tensors")


def test_a_map_is_bounded_and_deep_names_are_no_trouble(tmp_path):
    names = [".".join(["x"] * 3000), *(f"m{i}.w" for i in range(500)), "", "..", "a", "a.b"]
    made = parameter_map(read(tmp_path, replicas(2, 4, names=names, value=lambda n, s, r: (n, s, r if s >= len(n) % 3 else 0))), [])
    assert made is not None
    assert len(made.rows) <= MAX_ROWS
    assert made.hidden > 0


def test_a_rule_is_shown_at_the_tensor_that_it_names(tmp_path):
    trace = read(tmp_path, replicas(1))
    found = Violation(
        id="i", code="PR103", relation="sequence", severity=Severity.ERROR, text="t", when="", step=2, rank=0, function="", variable="blocks.2.fc.bias grad",
        module="", source="", expected="", seen="", support=rule("test_finite", variable="x").support, confirmed=True, advice="", places=[(2, 0), (4, 0), (99, 0)],
    )  # fmt: skip
    made = parameter_map(trace, [found])
    assert made is not None
    (row,) = [r for r in made.rows if r.notes and not r.opened]
    assert (row.label, row.level, row.notes) == ("bias", "bad", ["violates PR103"])
    assert [s.tip for s in row.strips if s.kind == "named"] == ["steps 2–2: violates a rule", "steps 4–4: violates a rule"]
    assert parameter_map(trace, [msgspec.structs.replace(found, variable="elsewhere")]) is not None


@pytest.mark.parametrize("nasty", ["<script>alert(1)</script>", "\"><img src=x>", "javascript:alert(1)", "\u202egnp.exe", "\0\x1b[2J", "{{ 1234 * 5678 }}", "a" * 5000])
def test_names_are_shown_and_do_nothing(tmp_path, nasty):
    processes = replicas(2, 3, names=[nasty, f"{nasty}.{nasty}"], value=lambda n, s, r: (n, s, r if s > 1 else 0))
    for p in processes:
        for row in p["states"]:
            row["var"] |= {"model": nasty, "module": nasty}
        p["values"] = [{"kind": "number", "place": f"{nasty}:backward[0]", "number": 1.0 + s, "step": s} for s in range(3)]
        p["calls"] = [{"fn": nasty, "step": s, "site": f"{nasty}.py:3"} for s in range(3)]
    opened = Run(write_run(tmp_path / "r", processes, program=nasty, command=["python", nasty]))
    (tmp_path / "r" / "verify").mkdir()
    said = {"key": f"proctor:{nasty}:i:x", "title": nasty, "state": nasty, "ranks": nasty, "axis": nasty, "began": 1e9, "code": nasty, "capsule": nasty, "not_kept": nasty}
    (tmp_path / "r" / "verify" / "incidents.json").write_bytes(msgspec.json.encode({"incidents": [said]}))
    from proctor.verify.report.beside import read_beside

    text = html.render(Report(None, opened.trace, opened.info, beside=read_beside(tmp_path / "r")))
    assert text.count("<script") == 1
    assert "<img" not in text
    assert "\u202e" not in text
    assert "\x1b" not in text
    assert "\0" not in text
    assert "7006652" not in text or nasty != "{{ 1234 * 5678 }}"
    assert 'href="javascript' not in text.lower()
