"""oracle/report: the same verdict in every format; names of a record drive neither a terminal nor a page."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from html.parser import HTMLParser

import pytest

from proctor.oracle.judging.verdicts import ReplicaConflict, TensorVerdict, Verdict, conclude
from proctor.oracle.report import FORMATS, Proof, Report, renderer
from proctor.oracle.report._depth import MAX_POINTS, picture
from proctor.oracle.report._model import MAX_NODES, tree
from proctor.oracle.report._wording import multiple, number

EVIL = "layers.0.<script>alert(1)</script>\x1b[31m[bold]\u202e"


def tensor(i: int, kind: str = "output", ratio: float = 0.1, word: str = "ok", name: str = "", step: int = 0) -> TensorVerdict:
    return TensorVerdict(
        step=step, kind=kind, name=name or f"layers.{i}.mlp", cls="MLP", source=f"model.py:{i}", rel_err=ratio * 1e-5, abs_err=ratio, tolerance=1e-5,
        ratio=ratio, verdict=word, ranks=(0, 1), layout="tp: dim 0", order=float(i), note="gradient scale 2" if word == "bad" else "",  # type: ignore[arg-type]
    )  # fmt: skip


def different() -> Verdict:
    rows = [tensor(i) for i in range(5)] + [tensor(9, "main_grad", 512.0, "bad", "layers.4.mlp.weight"), tensor(10, "main_grad", math.inf, "nonfinite")]
    rows += [tensor(11, "param_after", 0.2, "no-power"), tensor(12, "opt_state", math.inf, "missing"), tensor(13, "scalar", math.nan, "bad")]
    conflicts = [ReplicaConflict(kind="main_grad", name="layers.0.norm.weight", axis="tp", ranks=(1,), majority=(0,), rel_err=0.3, note="a sum is missing")]
    return conclude(rows, conflicts, unchecked=["2 tensors of rank 3"], notes=["starts are equal"])


def report(verdict: Verdict) -> Report:
    return Report(verdict, "ref", "cand", "python ref.py", "torchrun cand.py", "tp=2", 2, 4, next_steps=["proctor oracle localise ref cand"])


def test_json_is_the_contract() -> None:
    found = json.loads(renderer("json").render(report(different())), parse_constant=pytest.fail)
    assert (found["schema"], found["verdict"], found["checked"]) == (1, "different", 9)
    assert found["first"]["name"] == "layers.0.mlp" or found["first"]["kind"] in ("scalar", "main_grad")
    assert {"name", "kind", "rel_err", "tolerance", "ratio", "verdict", "ranks", "module", "source"} <= found["tensors"][0].keys()
    bad = next(t for t in found["tensors"] if t["name"] == "layers.4.mlp.weight")
    assert (bad["module"], bad["note"], bad["ranks"]) == ("layers.4.mlp", "gradient scale 2", [0, 1])
    assert next(t for t in found["tensors"] if t["verdict"] == "nonfinite")["ratio"] is None
    assert found["replicas"][0]["axis"] == "tp" and found["replicas"][0]["ranks"] == [1]
    assert found["unchecked"] == ["2 tensors of rank 3"] and found["notes"] == ["starts are equal"]


def test_terminal_says_what_matters_first() -> None:
    text = renderer("terminal").render(report(conclude([tensor(0), tensor(1, "main_grad", 512.0, "bad", "layers.1.mlp.weight")])))
    lines = text.splitlines()
    assert lines[0] == "PROCTOR ORACLE  DIFFERENT"
    for wanted in ("layers.1.mlp.weight", "model.py:1", "512 × the tolerance", "gradient scale 2", "ranks 0–1", "Next: proctor oracle localise ref cand"):
        assert wanted in text
    assert len(lines) < 30
    assert all(len(line) <= 110 for line in lines)


@pytest.mark.parametrize("name", FORMATS)
def test_a_proof_stands_beside_the_comparison(name: str) -> None:
    equivalent = conclude([tensor(0)])
    without = report(equivalent)
    found = dataclasses.replace(without, proof=Proof("DIFFERENT", "a law <b>", "layers.0.attn", ["this shape"]))
    text = renderer(name).render(found)
    for wanted in ("DIFFERENT", "layers.0.attn", "this shape"):
        assert wanted in text and wanted not in renderer(name).render(without)
    assert "<b>" not in text or name != "html"
    assert (without.exit_code, found.exit_code) == (0, 1)


def test_terminal_names_the_ranks_of_replicas() -> None:
    text = renderer("terminal").render(report(different()))
    assert "rank 1 holds another value than rank 0 along tp" in text
    assert "2 tensors of rank 3" in text


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("verdict", [conclude([]), conclude([tensor(0)]), different(), conclude([tensor(0)], inconclusive="no reference")])
def test_every_verdict_has_every_format(name: str, verdict: Verdict) -> None:
    assert verdict.verdict in renderer(name).render(report(verdict)).lower()


class Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_page_loads_nothing_and_escapes_everything() -> None:
    rows = [tensor(0, name=EVIL), tensor(1, "main_grad", 9.0, "bad", EVIL + ".weight")]
    rows = [TensorVerdict(**{f: getattr(t, f) if not isinstance(getattr(t, f), str) or f in ("kind", "verdict") else EVIL for f in t.__struct_fields__}) for t in rows]
    conflicts = [ReplicaConflict(kind=EVIL, name=EVIL, axis=EVIL, ranks=(1,), note=EVIL)]
    found = conclude(rows, conflicts, unchecked=[EVIL], notes=[EVIL])
    made = Report(found, EVIL, EVIL, EVIL, EVIL, EVIL, 2, 4, next_steps=[EVIL], made=EVIL)
    html = renderer("html").render(made)
    page = Page()
    page.feed(html)
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not re.search(r"\x1b|\u202e|alert\(1\)</script>", html)
    assert not [a for _, a in page.tags for k in ("src", "href") if (a.get(k) or "#")[0] not in "#d"]
    assert "default-src 'none'" in html
    text = renderer("terminal").render(made)
    assert "\x1b" not in text and "\u202e" not in text and "[bold]" in text


def test_picture_marks_the_first_and_follows_the_dataflow() -> None:
    verdict = different()
    drawn = picture(verdict.tensors, verdict.first, {})
    assert drawn is not None and drawn.first is not None
    assert {d.series for d in drawn.dots} == {"forward", "gradient", "state", "scalar"}
    ok = [d for d in drawn.dots if d.word == "ok"]
    bad = [d for d in drawn.dots if d.word == "bad"]
    assert max(d.y for d in bad) < drawn.one < min(d.y for d in ok)
    assert all(drawn.left <= d.x <= drawn.right and drawn.top <= d.y <= drawn.bottom for d in drawn.dots)
    assert [b.label for b in drawn.bands if b.label] == ["forward", "parameter gradients", "update"]


def test_picture_of_many_tensors_keeps_the_worst() -> None:
    rows = [tensor(i) for i in range(10 * MAX_POINTS)]
    rows[777] = tensor(777, ratio=40.0, word="bad")
    verdict = conclude(rows)
    drawn = picture(verdict.tensors, verdict.first, {})
    assert drawn is not None and len(drawn.dots) <= MAX_POINTS
    assert sum(d.word == "bad" for d in drawn.dots) == 1 and drawn.first is not None
    assert picture(rows[:1], None, {}) is None


def test_numbers_read_well() -> None:
    assert [multiple(x) for x in (0.0, 0.004, 0.67, 5.43, 351.2, 5400.0, 3e7, math.inf)] == ["0 ×", "4e-03 ×", "0.67 ×", "5.4 ×", "351 ×", "5,400 ×", "3.0e+07 ×", "∞ ×"]
    assert [number(x) for x in (0.0, 3.21e-5, 0.12, math.inf, math.nan)] == ["0", "3.2e-05", "0.12", "∞", "NaN"]


def test_the_model_is_a_tree_that_is_coloured_by_its_worst() -> None:
    rows = [tensor(i) for i in (2, 10)] + [tensor(3, "main_grad", 512.0, "bad", "layers.10.mlp.weight"), tensor(4, "output", 0.0, name="embed")]
    rows.append(tensor(5, "output", math.inf, "missing", "head"))
    root = tree(rows, [ReplicaConflict(kind="main_grad", name="layers.2.mlp.weight", axis="tp", ranks=(1,))])
    assert root is not None
    layers = root.children["layers"]
    assert [n.name for n in layers.ordered] == ["2", "10"] and layers.wrong == 1 and layers.number == 3
    assert layers.cells["gradient"].tone == "worst" and layers.cells["forward"].tone == "little" and root.cells["forward"].tone == "lost"
    assert layers.children["2"].children["mlp"].conflicts and root.children["head"].one_side == "reference" and not layers.one_side
    page = renderer("html").render(report(conclude(rows)))
    assert page.count("<details") == 8 and 'href="#t0"' in page.split("All tensors")[0] and "reference only" in page


def test_names_of_modules_are_text_in_the_tree() -> None:
    page = renderer("html").render(report(conclude([tensor(0, name=EVIL)])))
    assert "<script>alert" not in page and "&lt;script&gt;alert" in page


def test_a_model_of_too_many_modules_has_no_tree() -> None:
    assert tree([tensor(i, name=f"layers.{i}") for i in range(MAX_NODES + 1)]) is None
