"""Checks all relations of one update, each in a copy of the process, and writes what they say."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from proctor.instrument.observe.mesh import position
from proctor.oracle.selfcheck import ModelRelation, NotApplicable, Relation, Unknown, UpdateRelation, registry
from proctor.oracle.selfcheck.adapters import offered
from proctor.oracle.selfcheck.facts import Facts, Timing
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.watching.fork import can_fork, in_copy, kept
from proctor.oracle.selfcheck.watching.seen.texts import loaded_text_has
from proctor.oracle.selfcheck.watching.step import Call, Update, short

if TYPE_CHECKING:
    from proctor.oracle.selfcheck.watching.watch import Watch

TOGETHER_S: Final = 300.0  # for the relations of one model
MAX_MODELS: Final = 4  # roots of one update that are checked
CHEAP: Final = frozenset({"neighbours", "permutation", "repeatable", "causal", "padding", "inputs", "parameters"})  # of the model alone


def conduct(watch: Watch, update: Update) -> None:
    """Check an update; outcomes are added to `outcomes.jsonl` in the process's folder.

    Args:
        watch: of the process.
        update: that is about to happen.
    """
    began, models_s, where = time.monotonic(), 0.0, position()
    outcomes: list[Outcome] = []
    forks = can_fork()
    together = _together(watch, update) if forks else {}
    models_s = time.monotonic() - began
    for relation, subject, check in _work(watch, update):
        if time.monotonic() - began > watch.config.budget_s:
            outcomes.append(_said(relation, subject, "inconclusive", "the time for checks was over (--budget SECONDS)"))
            continue
        start = time.monotonic()
        done = together.pop((relation.name, subject), None)
        found = done or _run(relation, check, update, forks)
        spent = done.seconds if done is not None else time.monotonic() - start
        if done is None and relation.name in CHEAP:
            models_s += spent
        outcomes.append(msgspec.structs.replace(found, relation=relation.name, claim=relation.claim, subject=subject, seconds=spent, step=update.step, rank=where["rank"]))
    if watch.fresh is not None:
        from proctor.oracle.selfcheck.watching.resume import judge

        start = time.monotonic()
        outcomes.append(msgspec.structs.replace(judge(watch, update), seconds=time.monotonic() - start, step=update.step, rank=where["rank"]))
    timing = Timing(watch.step_s, models_s, time.monotonic() - began, forks)
    facts = Facts(where["rank"], where["world"], [(c.line, c.reduction, c.items, c.ignored, c.weight) for c in update.criteria if c.weight is not None], offered(), makes_groups())
    for name, lines in (("outcomes", outcomes), ("timing", [timing]), ("facts", [facts])):
        with open(watch.folder / f"{name}.jsonl", "ab") as file:
            file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


def _together(watch: Watch, update: Update) -> dict[tuple[str, str], Outcome]:
    """Relations of each model that only evaluate it, in one copy of the process: they share its results on the real batch.

    What is missing afterwards (the copy was ended, or crashed) is checked in copies of its own.
    """
    found: dict[tuple[str, str], Outcome] = {}
    relations = [r for name, r in registry().items() if name in CHEAP and isinstance(r, ModelRelation) and watch.wanted(name)]
    relations.sort(key=lambda r: r.name == "inputs")  # the last: it may evaluate in training mode, which moves running statistics

    def checked(call: Call) -> bytes:
        out = []
        for relation in relations:
            start = time.monotonic()
            outcome = _checked(relation, lambda r=relation: r.check(call))  # type: ignore[misc]
            out.append(msgspec.structs.replace(outcome, seconds=time.monotonic() - start))
        return msgspec.json.encode(out)

    for call in _calls(update.calls)[:MAX_MODELS]:
        made, why = in_copy(lambda call=call: checked(call), TOGETHER_S)  # type: ignore[misc]
        if not why:
            found.update({(o.relation, call.name): o for o in msgspec.json.decode(made, type=list[Outcome])})
    return found


def _work(watch: Watch, update: Update) -> Iterator[tuple[Relation, str, Callable[[], Outcome]]]:
    for name, relation in registry().items():
        if not watch.wanted(name):
            continue
        if isinstance(relation, UpdateRelation):
            yield relation, update.name, lambda r=relation: r.check(update)  # type: ignore[misc]
        elif isinstance(relation, ModelRelation):
            calls = _calls(update.calls)
            for call in calls[:MAX_MODELS]:
                yield relation, call.name, lambda r=relation, c=call: r.check(c)  # type: ignore[misc]
            if not calls:
                yield relation, update.name, _nothing


def _nothing() -> Outcome:
    raise NotApplicable("no model with the optimizer's parameters was called as a whole: the program calls its parts, or works without modules")


def _calls(calls: Sequence[Call]) -> list[Call]:
    """One call of each root: the first to whose results a gradient came back."""
    best: dict[int, Call] = {}
    for call in calls:
        known = best.get(id(call.module))
        if known is None or (not known.gradients and call.gradients):
            best[id(call.module)] = call
    return list(best.values())


def _run(relation: Relation, check: Callable[[], Outcome], update: Update, forks: bool) -> Outcome:
    """The outcome, whatever happens."""
    if forks:
        made, why = in_copy(lambda: msgspec.json.encode(_checked(relation, check)), relation.timeout_s)
        if why:
            return Outcome(relation=relation.name, verdict="inconclusive", reason=f"the check was not finished: {why}")
        return msgspec.json.decode(made, type=Outcome)
    if not relation.safe:
        return Outcome(relation=relation.name, verdict="inconclusive", reason="no copy of this process can be made (CUDA), and the check could not be taken back")
    with kept(update.models, [update.optimizer]):
        return _checked(relation, check)


def _checked(relation: Relation, check: Callable[[], Outcome]) -> Outcome:
    try:
        return check()
    except NotApplicable as e:
        return Outcome(relation=relation.name, verdict="not-applicable", reason=str(e))
    except Unknown as e:
        return Outcome(relation=relation.name, verdict="inconclusive", reason=str(e))
    except Exception as e:  # noqa: BLE001 - a program that nobody foresaw, or a mistake of ours: said, never a verdict
        _trace()
        return Outcome(relation=relation.name, verdict="inconclusive", reason=f"the check failed: {short(e)}")


def _trace() -> None:
    if os.environ.get("PROCTOR_DEBUG", "") not in ("", "0"):
        import traceback

        traceback.print_exc()


def _said(relation: Relation, subject: str, verdict: Any, reason: str) -> Outcome:
    return Outcome(relation=relation.name, claim=relation.claim, subject=subject, verdict=verdict, reason=reason)


def makes_groups() -> bool:
    """Whether anything that is loaded makes process groups: then the program may run on several ranks."""
    return loaded_text_has(b"init_process_group", libraries=True)
