"""One self-contained HTML page: no network, no script needed to read it, everything from a trace escaped."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import proctor
from proctor.verify import wording
from proctor.verify.report import Report
from proctor.verify.report._excerpt import excerpt
from proctor.verify.report._timeline import timeline
from proctor.verify.report.summary import command, started, summarise
from proctor.verify.report.terminal import unchecked

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_ROWS: Final = 1000  # violated rules in the table; the rest are in violations.jsonl
MAX_INCIDENTS: Final = 50
MAX_ALSO: Final = 40  # further rules unfolded in one incident
_SPARK: Final = (240, 44)


def render(report: Report) -> str:
    """The page."""
    result, trace = report.result, report.trace
    violations = result.violations if result is not None else []
    sites = frozenset(trace.sites) if trace is not None else frozenset()
    folder = report.info.get("cwd")
    base = folder if isinstance(folder, str) else ""
    missing = sorted({rank for ranks in report.missing.values() for rank in ranks})
    summary = summarise(trace, report.info) if trace is not None else None
    env = _environment()
    style, script = _asset("page.css"), _asset("page.js")
    word = wording.state(result, report.exit_code)
    return env.get_template("page.html.j2").render(
        title=_headline(word, report),
        word=word,
        result=result,
        report=report,
        violations=violations[:MAX_ROWS],
        hidden=max(0, len(violations) - MAX_ROWS),
        incidents=result.incidents[:MAX_INCIDENTS] if result is not None else [],
        more_incidents=max(0, len(result.incidents) - MAX_INCIDENTS) if result is not None else 0,
        max_also=MAX_ALSO,
        max_rows=MAX_ROWS,
        tally=wording.tally(result) if result is not None else "",
        command=command(report.info),
        started=started(report.info),
        run=(result.run if result is not None else "") or ", ".join(trace.runs if trace is not None else []),
        picture=timeline(trace, violations, missing),
        summary=summary,
        spark=_spark(summary.loss) if summary is not None else None,
        notes=unchecked(result) if result is not None else (trace.notes if trace is not None else []),
        excerpt=lambda source: excerpt(source, sites, base),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        version=proctor.__version__,
    )


def _headline(word: str, report: Report) -> str:
    result = report.result
    if result is None:
        return "Run summary"
    if word == "violated":
        return f"{wording.count(len(result.incidents), 'incident')}, {wording.count(len(result.violations), 'violated rule')}"
    if word == "inconclusive":
        return "Inconclusive"
    if result.silenced:
        return "No violation to report"
    return "No violations"


@cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {
        "clean": wording.clean,
        "step": wording.at_step,
        "rank": wording.at_rank,
        "place": wording.place,
        "spread": wording.spread,
        "support": wording.support,
        "when": wording.when,
        "rate": wording.rate,
        "hushed": wording.hushed,
        "held": wording.held,
    }
    env.globals["count"] = wording.count
    return env


@cache
def _asset(name: str) -> str:
    """A style or script of ours, put into the page as it is; nothing of a trace is in it."""
    return Path(__file__).with_name("templates").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"


def _spark(loss: list[tuple[int, float]]) -> dict[str, Any] | None:  # Any: mixed values for the template
    """A small curve of the loss, broken where it is not finite."""
    finite = [v for _, v in loss if v - v == 0]
    if len(finite) < 2:
        return None
    width, height = _SPARK
    low, high = min(finite), max(finite)
    first, last = loss[0][0], loss[-1][0]
    parts: list[str] = []
    pen = "M"
    for step, value in loss[:: max(1, len(loss) // 400)]:
        if value - value != 0:
            pen = "M"
            continue
        x = (step - first) / max(1, last - first) * width
        y = height - (value - low) / ((high - low) or 1.0) * height
        parts.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L"
    return {"path": "".join(parts), "width": width, "height": height, "first": loss[0], "last": loss[-1]}
