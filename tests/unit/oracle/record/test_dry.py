"""oracle/store/dry.py: calls that nobody trained on are no microbatches."""

from __future__ import annotations

from proctor.oracle.store.dry import without_dry_runs
from proctor.oracle.tensors import Entry


def entry(kind: str, call: int, name: str = "a", *, step: int = 0, recompute: bool = False) -> Entry:
    return Entry(step, call, kind, name, "", "", "", "float32", (2,), "data-00000.safetensors", "0", call, recompute=recompute)


def calls(entries: list[Entry]) -> list[tuple[str, str, int]]:
    return [(e.name, e.kind, e.call) for e in entries]


def test_first_calls_without_a_gradient_are_taken_out_and_the_others_counted_anew() -> None:
    found, dry = without_dry_runs([
        entry("param", 0), *(entry(kind, call, name) for name in "ab" for call in range(3) for kind in ("input", "output")),
        *(entry("grad_output", call, name) for name in "ba" for call in (1, 2)), entry("output", 0, recompute=True),
    ])  # fmt: skip
    assert dry == {0: 1}
    assert calls(found)[:5] == [("a", "param", 0), ("a", "input", 0), ("a", "output", 0), ("a", "input", 1), ("a", "output", 1)]
    assert calls(found)[-3:] == [("a", "grad_output", 0), ("a", "grad_output", 1), ("a", "output", 0)]
    assert len(found) == 1 + 8 + 4 + 1


def test_calls_that_one_module_trains_on_are_nobodys_trial() -> None:
    entries = [entry("output", 0), entry("output", 1), entry("output", 0, "b"), entry("output", 1, "b")]
    entries += [entry("grad_output", 0, "b"), entry("grad_output", 1, "b"), entry("grad_output", 1)]
    assert without_dry_runs(entries) == (entries, {})


def test_steps_are_looked_at_each_for_itself_and_one_without_gradients_is_left() -> None:
    trial = [entry("output", 0), entry("output", 1), entry("grad_output", 1)]
    later = [entry("output", 0, step=1), entry("grad_output", 0, step=1)]
    assert without_dry_runs([*trial, *later])[1] == {0: 1}
    alone = [entry("output", 0), entry("output", 1)]
    assert without_dry_runs(alone) == (alone, {})
