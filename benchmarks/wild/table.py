"""Tables of a campaign: by project, by relation, by rule; text, JSON, and the section of docs/evaluation.md."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.wild.attempt import Result

BEGIN, END = "<!-- wild -->", "<!-- /wild -->"
RAN: Final = ("healthy", "crashed")


def rules(results: Iterable[Result]) -> dict[str, dict[str, Any]]:
    """Per rule: in how many healthy runs it applied, was unknown and failed. For the decision who may page.

    One run is one program in one configuration. Example:

        {"c9ddc7cd21a4": {"relation": "argument", "claim": "…", "applied": 31, "unknown": 0, "failed": 1, "programs": ["…"]}}
    """
    table: dict[str, dict[str, Any]] = {}
    for result in results:
        for rule, (relation, end, claim) in result.verdict.get("rules", {}).items():
            row = table.setdefault(
                rule, {"relation": relation, "claim": claim, "applied": 0, "unknown": 0, "failed": 0, "programs": []}
            )
            row["applied"] += end in ("held", "violated")
            row["unknown"] += end == "unknown"
            row["failed"] += end == "violated"
            if end == "violated":
                row["programs"].append(result.name)
    return dict(sorted(table.items(), key=lambda item: (-item[1]["failed"], -item[1]["applied"], item[0])))


def records(results: Iterable[Result], corpus: str) -> dict[str, Any]:
    """What `proctor pack stamp --record` takes in (docs/paging.md): of each rule the runs on which it applied, and how they ended."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    programs: dict[str, set[str]] = defaultdict(set)
    for result in results:
        if result.state not in RAN:
            continue
        for rule, (_, end, _) in result.verdict.get("rules", {}).items():
            if end in ("held", "violated"):
                counts[rule].update(tested=1, failed=end == "violated", retracted=rule in result.retracted)
                programs[rule].add(result.name)
    return {
        "corpus": corpus,
        "rules": {
            rule: {**{k: n[k] for k in ("tested", "failed", "retracted")}, "programs": len(programs[rule])}
            for rule, n in sorted(counts.items())
        },
    }


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Figures of some programs, most often of one half or one project."""
    ran = [r for r in results if r.state in RAN]
    ends = Counter(end for r in ran for _, end, _ in r.verdict.get("rules", {}).values())
    return {
        "programs": len(results),
        "healthy": len(ran),
        "not run": sum(r.state not in RAN for r in results),
        "with errors": sum(bool(r.errors) for r in ran),
        "with pages": sum(r.pages > 0 for r in ran),
        "never recorded": sum(not r.recorded for r in ran),
        "crashed": sum(r.state == "crashed" for r in ran),
        "bits differ": sum(r.bits == "differ" for r in ran),
        "bits equal": sum(r.bits == "equal" for r in ran),
        "check failed": sum(bool(r.verdict.get("trouble")) for r in ran),
        "rules checked": ends["held"] + ends["violated"],
        "violated": ends["violated"],
        "unknown": ends["unknown"],
    }


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Everything, for other programs."""
    by_project: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        by_project[result.project].append(result)
    return {
        "halves": {half: summary([r for r in results if r.half == half]) for half in ("first", "second")},
        "projects": {name: summary(of) for name, of in sorted(by_project.items())},
        "relations": _relations(results),
        "rules": rules(r for r in results if r.state in RAN),
    }


def _relations(results: Iterable[Result]) -> dict[str, dict[str, int]]:
    table: dict[str, dict[str, int]] = defaultdict(lambda: {"checked": 0, "violated": 0, "unknown": 0})
    for result in results:
        for relation, end, _ in result.verdict.get("rules", {}).values():
            table[relation]["checked"] += end in ("held", "violated")
            table[relation]["violated"] += end == "violated"
            table[relation]["unknown"] += end == "unknown"
    return {k: v for k, v in sorted(table.items()) if any(v.values())}


def _laws(ran: Sequence[Result]) -> list[str]:
    """For each law of a step the runs in which it could fail, and those in which it did."""
    could: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    for result in ran:
        ends = result.verdict.get("rules", {})
        for rule, mode in result.verdict.get("chances", {}).items():
            could[mode] += 1
            failed[mode] += ends.get(rule, ["", ""])[1] == "violated"
    if not could:
        return []
    return ["Laws of a step (`course`), runs that had something to fail on:", "", *grid(("law", "runs", "failed"), ((m, n, failed[m]) for m, n in sorted(could.items())))]


def _reach(ran: Sequence[Result]) -> list[str]:
    """In how many programs the shipped rules applied: one that applied in none has no figure."""
    applied = [row["applied"] for row in rules(ran).values()]
    if not applied:
        return []
    return [f"Of {len(applied)} shipped rules {sum(n > 0 for n in applied)} applied in a healthy program, {sum(n >= 100 for n in applied)} in 100 or more.", ""]


def _dated(half: str, results: Sequence[Result]) -> str:
    """The half, and the commits of Proctor that its programs ran with, where there are several."""
    of = sorted({r.product for r in results if r.half == half})
    return f"{half} (at {', '.join(of)})" if of and len({r.product for r in results}) > 1 else half


def grid(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a table, and an empty one."""
    return [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(map(str, row))} |" for row in rows), ""]


COLUMNS: Final = (
    "programs", "healthy", "with errors", "with pages", "never recorded", "crashed", "bits equal", "bits differ",
    "rules checked", "violated", "unknown",
)  # fmt: skip


def text(results: Sequence[Result], products: Sequence[str]) -> str:
    """Markdown that is also read well on a terminal."""
    data = as_json(results)
    ran = [r for r in results if r.state in RAN]
    live = sum(r.live for r in ran)
    how = f"{live} ran under `proctor watch`; {len(ran) - live} were recorded and checked, where no page is seen."
    lines = [f"Proctor at {', '.join(products)}; `healthy` ended with 0 without Proctor, so every error is false. {how}", ""]
    lines += grid(("half", *COLUMNS), ((_dated(half, results), *(row[c] for c in COLUMNS)) for half, row in data["halves"].items()))
    lines += grid(("project", *COLUMNS), ((name, *(row[c] for c in COLUMNS)) for name, row in data["projects"].items()))
    lines += grid(
        ("relation", "checked", "violated", "unknown"),
        ((name, *row.values()) for name, row in data["relations"].items()),
    )
    lines += [*_reach(ran), *_laws(ran)]
    first = [r for r in results if r.half == "first"]
    failed = {k: v for k, v in rules(r for r in first if r.state in RAN).items() if v["failed"]}
    if failed:
        lines += ["Rules that failed in the first half:", ""]
        lines += grid(
            ("rule", "relation", "applied", "failed", "claim"),
            ((k, v["relation"], v["applied"], v["failed"], v["claim"].replace("|", "/")) for k, v in failed.items()),
        )
    reasons = Counter(r.state for r in results if r.state not in RAN)
    if reasons:
        lines += ["Not run: " + ", ".join(f"{n} {state}" for state, n in reasons.most_common()) + ".", ""]
    return "\n".join(lines).rstrip() + "\n"


def write_section(document: Path, section: str, marks: tuple[str, str] = (BEGIN, END)) -> None:
    """Put the section between its marks.

    Raises:
        ValueError: the document has no such marks.
    """
    begin, end = marks
    whole = document.read_text(encoding="utf-8")
    before, mark, rest = whole.partition(begin)
    _, close, after = rest.partition(end)
    if not mark or not close:
        raise ValueError(f"{document}: no {begin} … {end} in there")
    document.write_text(f"{before}{begin}\n{section}{end}{after}", encoding="utf-8")
