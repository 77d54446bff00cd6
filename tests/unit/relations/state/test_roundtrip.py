"""`roundtrip`: what is saved against what was live, what is loaded against what was saved and what is held."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from helpers.loops import call, details, learn, load, violations

from proctor.invariants.invariant import Hypothesis
from proctor.invariants.relations.roundtrip import GIVEN, HELD, LEFT, OWN, UNKNOWN, Roundtrip

RELATION = Roundtrip()
SAVE, LOAD = "torch.save", "torch.load"
MODULE, OPTIMIZER = "torch.nn.Module.load_state_dict", "torch.optim.Optimizer.load_state_dict"
UPDATE = "torch.optim.Optimizer.step"
META = {"dtype": "float32", "shape": "[2,2]", "device": "cpu"}
NAMES = ("a.weight", "b.weight", "c.weight")


class Job:
    """Rows of one process; the value of every parameter at step s is 100 * s and its place."""

    def __init__(self, steps: int = 3, model: str = "__main__.Net") -> None:
        self.calls: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.step, self.model = -1, model
        self.live: dict[str, int] = {}
        self._hold({name: i for i, name in enumerate(NAMES)})
        for _ in range(steps):
            self.update()

    def _hold(self, fps: Mapping[str, int]) -> None:
        self.live |= fps
        for name, fp in fps.items():
            var = {
                "model": self.model,
                "name": name,
                "attr": "data",
                "module": "torch.nn.Linear",
                "kind": "weight",
            }
            self.states.append(
                {
                    "var": var,
                    "meta": META,
                    "step": self.step,
                    "seq": len(self.calls),
                    "call": len(self.calls),
                    "fp": fp,
                }
            )

    def update(self, only: tuple[str, ...] = NAMES) -> None:
        self.step += 1
        self.calls.append(call(UPDATE, {"O": "torch.optim.Adam", "v": "#0", "a": {}}, step=self.step))
        self._hold({name: 100 * (self.step + 1) + i for i, name in enumerate(NAMES) if name in only})

    def _call(self, fn: str) -> int:
        self.calls.append(call(fn, step=self.step))
        return len(self.calls)

    def put(
        self, fn: str, content: Mapping[str, int], *, file: int = 9, path: str = "['model']", **more: Any
    ) -> Job:
        kind, seq = ("saved" if fn == SAVE else "loaded"), self._call(fn)
        rows = {"<file>": file} | {f"{path}['{name}']": fp for name, fp in content.items()}
        self.values += [
            {
                "kind": kind,
                "place": place,
                "fp": fp,
                "seq": seq,
                "step": self.step,
                "meta": META if place != "<file>" else "",
                **more,
            }
            for place, fp in rows.items()
        ]
        return self

    def restore(self, items: Mapping[int, Mapping[str, int]], fn: str = MODULE) -> Job:
        seq = self._call(fn)
        self.values += [
            {
                "kind": "loaded",
                "place": name,
                "item": item,
                "fp": fp,
                "seq": seq,
                "step": self.step,
                "meta": META,
            }
            for item, content in items.items()
            for name, fp in content.items()
        ]
        return self

    def rows(self) -> dict[str, Any]:
        return {"calls": self.calls, "states": self.states, "values": self.values}


def live(job: Job) -> dict[str, int]:
    return dict(job.live)


def saving(**more: Any) -> Job:
    job = Job(**more)
    return job.put(SAVE, live(job))


def rules_of(tmp_path: Path, job: Job, *modes: str) -> list[Any]:
    return [r for r in learn(RELATION, load(tmp_path, [job.rows()])) if r.hypothesis["mode"] in modes]


def test_a_tensor_of_another_time(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, saving(), "moment")
    assert not violations(RELATION, rules, load(tmp_path, [saving(model="__main__.Other").rows()]))
    job = Job(model="__main__.Other")
    job.put(SAVE, live(job) | {"b.weight": 101})
    (detail,) = details(RELATION, rules, load(tmp_path, [job.rows()]))
    assert (detail.variable, detail.function, detail.seen) == ("b.weight", SAVE, "a value of an earlier time")


def test_a_tensor_that_never_was_the_models(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, saving(), "moment")
    job = Job()
    job.put(SAVE, live(job) | {"c.weight": 12345})
    (detail,) = details(RELATION, rules, load(tmp_path, [job.rows()]))
    assert "never held" in detail.seen


def test_an_average_is_another_model(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, saving(), "moment", "now")
    job = Job().put(SAVE, {name: 5000 + i for i, name in enumerate(NAMES)})
    assert not violations(RELATION, rules, load(tmp_path, [job.rows()]))


def test_an_average_beside_the_model_or_that_shares_a_little_with_it_is_another_one(tmp_path: Path) -> None:
    """A norm that has not moved yet is the same in both; an average that was just begun is a copy of an earlier time."""
    rules = rules_of(tmp_path, saving(), "moment")
    apart = Job()
    apart.put(SAVE, {name: 5000 + i for i, name in enumerate(NAMES)} | {"a.weight": 200})
    assert not violations(RELATION, rules, load(tmp_path, [apart.rows()]))
    beside = Job()
    seq = len(beside.calls)
    beside.put(SAVE, live(beside)).put(SAVE, live(beside) | {"b.weight": 101, "c.weight": 12345}, path="['average']")
    for row in beside.values:
        row["seq"] = seq + 1
    assert not violations(RELATION, rules, load(tmp_path, [beside.rows()]))


def test_an_earlier_state_is_whole_and_not_the_live_one(tmp_path: Path) -> None:
    def late(model: str = "__main__.Net", once: bool = False) -> Any:
        """A state is saved an update after it was taken, and again after the next one."""
        job = Job(model=model)
        for _ in range(1 if once else 2):
            kept = live(job)
            job.update()
            job.put(SAVE, kept)
        return load(tmp_path, [job.rows()])

    again = saving()
    again.update()
    again.put(SAVE, live(again))
    now = rules_of(tmp_path, again, "now")
    assert now and not violations(RELATION, rules_of(tmp_path, saving(), "moment"), late())
    assert violations(RELATION, now, late())
    # Elsewhere it may be meant, and so may one that is saved at the end alone: the best so far.
    assert not violations(RELATION, now, late("__main__.Other"))
    assert not violations(RELATION, now, late(once=True))


def test_parameters_of_several_optimizers_are_of_one_time(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, saving(), "moment", "now")
    job = Job(steps=1)
    job.update(NAMES[:1])
    job.update(NAMES[1:])
    assert not violations(RELATION, rules, load(tmp_path, [job.put(SAVE, live(job)).rows()]))


def test_casts_and_shards_are_no_evidence(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, saving(), "moment", "now")
    job = Job()
    job.put(SAVE, dict.fromkeys(NAMES, 1), meta={"dtype": "float16", "shape": "[2,2]"})
    assert not violations(RELATION, rules, load(tmp_path, [job.rows()]))


def test_steps_without_records_hide_what_was_live(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, saving(), "moment")
    job = Job()
    job.put(SAVE, live(job) | {"c.weight": 12345})
    process = job.rows()
    for table in ("calls", "states", "values"):
        for row in process[table]:
            row["step"] += 3 if row["step"] > 0 else 0
    assert not violations(RELATION, rules, load(tmp_path, [process]))


def test_a_file_that_changed(tmp_path: Path) -> None:
    def job(change: int) -> Job:
        made = Job()
        return made.put(SAVE, live(made)).put(LOAD, {n: fp + change for n, fp in made.live.items()})

    rules = rules_of(tmp_path, job(0), "file")
    assert details(RELATION, rules, load(tmp_path, [job(1).rows()]))
    # A file that this run did not write says nothing.
    other = Job()
    other.put(SAVE, live(other)).put(LOAD, dict.fromkeys(NAMES, 1), file=77)
    assert not violations(RELATION, rules, load(tmp_path, [other.rows()]))


def restored(**items: Mapping[str, int]) -> Job:
    codes = {"given": GIVEN, "held": HELD, "own": OWN, "unknown": UNKNOWN, "left": LEFT}
    return Job().restore({codes[k]: v for k, v in items.items()})


FULL = dict.fromkeys(NAMES, 4)


def test_what_is_held_after_a_load(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, restored(given=FULL, held=FULL), "taken")
    assert details(
        RELATION, rules, load(tmp_path, [restored(given=FULL, held=FULL | {"b.weight": 5}).rows()])
    )


def test_a_state_that_was_kept_without_a_copy(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, restored(given=FULL, held=FULL), "own")
    (detail,) = details(
        RELATION, rules, load(tmp_path, [restored(given=FULL, held=FULL, own=dict.fromkeys(NAMES, 0)).rows()])
    )
    assert "deepcopy" in detail.advice


def test_a_part_that_is_put_into_the_own_state(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, restored(given=FULL, held=FULL), "own")
    partly = restored(given=FULL, held=FULL, own={"b.weight": 0})
    assert not violations(RELATION, rules, load(tmp_path, [partly.rows()]))


def test_names_with_another_prefix(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, restored(given=FULL, held=FULL), "known")
    lost = restored(unknown={f"module.{n}": 0 for n in NAMES}, left=dict.fromkeys(NAMES, 0))
    assert violations(RELATION, rules, load(tmp_path, [lost.rows()]))
    partly = restored(
        given={"a.weight": 4}, held={"a.weight": 4}, unknown={"head.weight": 0}, left={"b.weight": 0}
    )
    assert not violations(RELATION, rules, load(tmp_path, [partly.rows()]))
    strict = rules_of(tmp_path, restored(given=FULL, held=FULL), "all", "filled")
    assert len(violations(RELATION, strict, load(tmp_path, [partly.rows()]))) == 2


def resumed(moments: bool) -> Job:
    job = Job()
    state = {"exp_avg": 41}
    for place in ("0", "1", "2"):
        job.put(SAVE, state, path=f"['optimizer']['state'][{place}]")
        job.put(LOAD, state, path=f"['optimizer']['state'][{place}]")
    if moments:
        job.restore({GIVEN: {"state[0]['exp_avg']": 41}, HELD: {"state[0]['exp_avg']": 41}}, OPTIMIZER)
    job.update()
    return job


def test_moments_that_are_not_restored(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, resumed(moments=True), "used", "resumed")
    assert len(rules) == 2
    bad = details(RELATION, rules, load(tmp_path, [resumed(moments=False).rows()]))
    assert {d.variable for d in bad} == {"optimizer"}


def test_runs_do_not_see_each_other(tmp_path: Path) -> None:
    rules = rules_of(tmp_path, saving(), "moment", "now")
    early, late = saving(steps=2).rows(), saving(steps=5).rows()
    assert not violations(RELATION, rules, load(tmp_path, [early], [late]))


def test_an_empty_trace_proposes_nothing(tmp_path: Path) -> None:
    assert RELATION.propose(load(tmp_path, [{"calls": [], "states": []}])) == []


def test_every_rule_says_what_it_needs() -> None:
    for mode in ("moment", "now", "file", "taken", "own", "known", "all", "filled", "used", "resumed"):
        hypothesis = Hypothesis.of("roundtrip", mode=mode, what="module")
        assert RELATION.needs(hypothesis).values
        assert RELATION.say(hypothesis)
