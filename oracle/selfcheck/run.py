"""From a command to a report: the first run with its copies of a step, then what runs again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from proctor.errors import OracleError, UsageError
from proctor.oracle.selfcheck import NotApplicable, Unknown
from proctor.oracle.selfcheck.facts import CheckConfig
from proctor.oracle.selfcheck.launch import Launched, launch, why_nothing
from proctor.oracle.selfcheck.outcomes import Outcome, SelfReport, conclude

NAMES: Final = (  # of relations in copies of a step; `test_registry` holds it to what there is
    "accumulation", "causal", "checkpointing", "compile", "foreach", "inputs", "neighbours", "padding", "paired", "parameters", "permutation", "precision", "repeatable", "resume",
    "tied", "workers", "world",
)  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """What the user asked for.

    Attributes:
        command: the program's.
        out: folder for logs and recordings.
        step: update at which relations are checked, counted from 0.
        only, skip: names of relations.
        vary: pairs of arguments.
        timeout_s: of each run.
        budget_s: of all relations at a step.
        to_the_end: let the first run finish.
    """

    command: Sequence[str]
    out: Path
    step: int = 2
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    vary: tuple[tuple[str, str], ...] = ()
    timeout_s: float = 3600.0
    budget_s: float = 900.0
    to_the_end: bool = False


def check(asked: Asked) -> SelfReport:
    """Check a program against itself.

    Raises:
        UsageError: a relation is unknown, or the command cannot be started.
        OracleError: it failed before anything could be checked.
    """
    from proctor.oracle.selfcheck.program import registry

    programs = registry()
    _known(asked, set(NAMES) | set(programs))
    first, notes = _first(asked)
    outcomes = list(first.outcomes) + _skipped(asked, set(NAMES) | set(programs))
    outcomes += _of_program(asked, first)
    return conclude(
        outcomes, command=shlex.join(asked.command), notes=notes, step_s=min((t.step_s for t in first.timings), default=0.0), models_s=max((t.models_s for t in first.timings), default=0.0)
    )


def _known(asked: Asked, names: set[str]) -> None:
    for name in (*asked.only, *asked.skip):
        if name not in names:
            raise UsageError(f"{name[:60]}: no such relation", hint=f"one of {', '.join(sorted(names))}")


def _first(asked: Asked) -> tuple[Launched, list[str]]:
    """The run with copies of a step; once more at an earlier step where the program makes fewer."""
    step, notes = asked.step, []
    while True:
        config = CheckConfig("", step=step, only=asked.only, skip=asked.skip, budget_s=asked.budget_s)
        found = launch(asked.command, asked.out / "step", config, timeout_s=asked.timeout_s, to_the_end=asked.to_the_end)
        if found.outcomes or found.done:
            break
        failed = found.exit_code not in (0, None)
        if not found.begun or failed or step == 0:
            raise OracleError(why_nothing(found), hint=f"its output is in {found.folder / 'output.log'}")
        step = 0
        notes.append(f"the program makes fewer than {asked.step + 1} updates: its first one was checked")
    if found.timings and not found.timings[0].forked:
        notes.append("the process uses CUDA: relations were checked in it, and what they changed was put back")
    return found, notes


def _skipped(asked: Asked, names: set[str]) -> list[Outcome]:
    """What was not asked for is listed as well."""
    left = [n for n in sorted(names) if n in asked.skip or (asked.only and n not in asked.only)]
    if not left or asked.only:
        return []
    return [Outcome(relation=n, verdict="inconclusive", reason="left out (--skip)") for n in left]


def _of_program(asked: Asked, first: Launched) -> list[Outcome]:
    from proctor.oracle.selfcheck.program import Program, registry

    program = Program(asked.command, asked.out, first, asked.timeout_s, asked.vary, asked.step)
    out: list[Outcome] = []
    for name, relation in registry().items():
        if name in asked.skip or (asked.only and name not in asked.only):
            continue
        try:
            out += relation.check(program)
        except NotApplicable as e:
            out.append(Outcome(relation=name, claim=relation.claim, verdict="not-applicable", reason=str(e)))
        except (Unknown, OracleError) as e:
            out.append(Outcome(relation=name, claim=relation.claim, verdict="inconclusive", reason=getattr(e, "message", str(e))))
    return [msgspec.structs.replace(o, claim=o.claim or "") for o in out]
