"""What `proctor check` says of one recorded run, and how every shipped rule ended there, as JSON.

    python -m benchmarks.wild.judge RUN
    python -m benchmarks.wild.judge         # a line of JSON for each run that a line on stdin names

A process of its own, so that a run that cannot be judged costs its own time limit and nothing else.
Prints {"exit", "trouble", "steps", "ranks", "unknown", "notes", "violations": […], "rules": {id: [relation, end, claim]},
"chances": {id: mode}} (`chances.py`); an end
is `held`, `violated`, `unknown` or `idle` (it did not apply).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def verdicts(run: Path, rules_from: Sequence[Path] = ()) -> dict[str, Any]:
    """What these packs say of a run; those that ship without any.

    Raises:
        ProctorError: the run cannot be read.
    """
    from benchmarks.wild.chances import chances
    from proctor.cli.check import examine
    from proctor.invariants.fit import load_packs
    from proctor.invariants.relations import registry
    from proctor.invariants.trace import Run
    from proctor.verify.checker import judge
    from proctor.verify.coverage import coverage
    from proctor.verify.rules import merge_rules

    report = examine(run, list(rules_from), fail_on="error")
    trace = Run(run).trace
    packs, _ = load_packs(list(rules_from), trace)
    families = defaultdict(list)
    for rule in merge_rules(packs):
        families[rule.relation].append(rule)
    known, seen = registry(), coverage(trace)
    ends: dict[str, tuple[str, str, str]] = {}
    trouble = [n for n in report.result.notes if "could not be evaluated" in n] if report.result else []
    for name, rules in families.items():
        try:
            judged = list(judge(trace, known[name], rules, seen)) if name in known else []
        except Exception as error:  # noqa: BLE001  a relation that fails is a finding of the campaign
            trouble.append(f"{name}: {type(error).__name__}: {error}"[:300])
            continue
        for one in judged:
            end = (
                "idle" if one.met == 0
                else "violated" if one.violation is not None
                else "unknown" if one.undecided == one.met
                else "held"
            )
            ends[one.rule.id] = (name, end, one.rule.text[:160])
    result, could = report.result, chances(trace)
    return {
        "exit": report.exit_code,
        "trouble": trouble,
        "steps": result.steps if result else 0,
        "ranks": result.ranks if result else 0,
        "unknown": result.unknown if result else 0,
        "notes": result.notes[:20] if result else [],
        "violations": [
            {
                "rule": v.id, "relation": v.relation, "severity": str(v.severity), "tier": str(v.tier), "step": v.step,
                "text": v.text[:300], "expected": v.expected[:200], "seen": v.seen[:200], "when": v.when[:200],
                "function": v.function, "variable": v.variable, "count": v.count,
            }
            for v in (result.violations if result else [])
        ],
        "rules": ends,
        "chances": {rule.id: rule.hypothesis["mode"] for rule in (*families["course"], *families["stays"]) if rule.hypothesis["mode"] in could},
    }


def told(run: str) -> str:
    from proctor.errors import ProctorError

    try:
        return json.dumps(verdicts(Path(run)))
    except ProctorError as error:
        return json.dumps({"exit": 2, "trouble": [str(error)[:300]], "violations": [], "rules": {}})


def main() -> int:
    for run in sys.argv[1:] or map(str.strip, sys.stdin):
        print(told(run), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
