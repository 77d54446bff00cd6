"""The table: operators by sources of rules, as text and for docs/evaluation.md."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

SOURCES = ("shipped", "own", "others")
TITLES = {"shipped": "shipped packs", "own": "own healthy run, another seed", "others": "two other programs"}


def counted(results: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mutants that count, by operator and program."""
    return sorted((r for r in results if r["state"] == "counts"), key=lambda r: (r["operator"], r["program"], r["id"]))


def render(results: list[dict[str, Any]]) -> str:
    """A Markdown table: totals by source, then one row an operator."""
    mutants = counted(results)
    programs = {r["program"] for r in mutants}
    operators = {r["operator"] for r in mutants}
    lines = [f"{len(mutants)} mutants of {len(programs)} programs by {len(operators)} operators; {len(results) - len(mutants)} others changed nothing,"
             " failed or ran too long.", "", "| rules from | found | named, of those | by the step after | false errors on clean programs |", "|---|---|---|---|---|"]
    for source in SOURCES:
        verdicts = [(r, r["sources"][source]) for r in mutants]
        found = [v for _, v in verdicts if v["found"]]
        false = {r["program"]: v["false"] for r, v in verdicts}
        lines.append(
            f"| {TITLES[source]} | {_share(len(found), len(verdicts))} | {_share(sum(v['named'] for v in found), len(found))} |"
            f" {_share(sum(v['timely'] for v in found), len(found))} | {sum(map(bool, false.values()))} of {len(false)} |"
        )
    lines += ["", "| operator | mutants | shipped | own | others |", "|---|---|---|---|---|"]
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in mutants:
        groups[result["operator"]].append(result)
    for operator, group in sorted(groups.items()):
        cells = (" / ".join(str(sum(r["sources"][s][k] for r in group)) for k in ("found", "named", "timely")) for s in SOURCES)
        lines.append(f"| `{operator}` | {len(group)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", "Cells: found / named / by the step after."])


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole} ({100 * part / whole:.0f} %)" if whole else "–"
