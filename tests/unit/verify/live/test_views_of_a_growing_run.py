"""What follows from a run's texts while they grow under a window that has parsed them."""

from __future__ import annotations

import json
from pathlib import Path

from helpers.runs import write_run

from proctor.invariants.relations.views import frames
from proctor.invariants.schema import Name
from proctor.invariants.trace import Run, metas_frame
from proctor.invariants.trace.names import flat_meta


def test_a_window_that_parsed_fewer_texts_leaves_no_old_view_to_the_next(tmp_path: Path) -> None:
    row = {"var": {"name": "fc.weight", "attr": "grad"}, "fp": 1, "meta": {"optimizer": "#0", "rate": "-4"}}
    old = Run(write_run(tmp_path / "run", [{"states": [row]}])).trace
    before = old.metas.height
    new = Run(tmp_path / "run").trace
    new.lasting = old.lasting
    for trace in (old, new):  # one list, as that of a run that goes on
        trace.texts = {**old.texts, Name.META: [*old.texts[Name.META][:before], json.dumps({"optimizer": "#0", "rate": "-5"})]}
    new.__dict__["metas"] = metas_frame([flat_meta(text) for text in new.texts[Name.META]])
    assert frames.metas(old, "optimizer").height == before
    assert frames.metas(new, "optimizer").height == before + 1
