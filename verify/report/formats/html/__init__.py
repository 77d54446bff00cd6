"""One self-contained HTML page: no network, no script needed to read it, everything from a trace escaped."""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import proctor
from proctor.verify import wording
from proctor.verify.report import Report
from proctor.verify.report.beside import Capsule, Followed
from proctor.verify.report.formats.html.excerpt import excerpt
from proctor.verify.report.formats.html.parameters import parameter_map, sides
from proctor.verify.report.formats.html.plots import plots
from proctor.verify.report.formats.html.tiles import tiles
from proctor.verify.report.formats.html.timeline import about, timeline
from proctor.verify.report.formats.terminal import unchecked
from proctor.verify.report.summary import command, started, summarise
from proctor.verify.series import series

if TYPE_CHECKING:
    from jinja2 import Environment

    from proctor.invariants.verdict import Incident, Violation

MAX_ROWS: Final = 1000  # violated rules in the table; the rest are in violations.jsonl
MAX_INCIDENTS: Final = 50
REPLICAS: Final = "PR101"  # the rule about values that are one thing
MAX_ALSO: Final = 40  # further rules unfolded in one incident


@dataclass(frozen=True)
class Frame:
    """What surrounds a report that is served while a run goes on.

    nonce: of the response; the policy is in its headers then.
    above: HTML of ours before the report; nothing of a trace is in it.
    style, script: besides the page's own.
    """

    nonce: str
    above: str
    style: str
    script: str


def render(report: Report, frame: Frame | None = None) -> str:
    """The page; in a frame when it is served."""
    style = _asset("page.css") + (frame.style if frame is not None else "")
    script = _asset("page.js") + (frame.script if frame is not None else "")
    return environment().get_template("page.html.j2").render(
        **_content(report, live=frame is not None),
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        nonce=frame.nonce if frame is not None else "",
        above=frame.above if frame is not None else "",
        version=proctor.__version__,
    )


def body(report: Report) -> str:
    """Header and main part alone, for a page that is open already."""
    return environment().get_template("body.html.j2").render(**_content(report, live=True))


def _content(report: Report, *, live: bool) -> dict[str, Any]:  # Any: what the templates draw
    result, trace = report.result, report.trace
    firing = [f for f in report.beside.followed if f.state == "firing"]
    violations = result.violations if result is not None else [v for f in report.beside.followed for v in f.violations]
    sites = frozenset(trace.sites) if trace is not None else frozenset()
    folder = report.info.get("cwd")
    base = folder if isinstance(folder, str) else ""
    missing = sorted({rank for ranks in report.missing.values() for rank in ranks})
    summary = summarise(trace, report.info) if trace is not None else None
    word = wording.state(result, report.exit_code)
    incidents = result.incidents if result is not None else []
    starts = [i.first_step for i in incidents] or [f.first_step for f in firing]
    first_step = min((s for s in starts if s is not None), default=None)
    map_ = parameter_map(trace, violations, ranks_judged=any(f.code == REPLICAS for f in firing))
    apart = map_.apart if map_ is not None else {}
    steps = trace.steps if trace is not None else 0

    def who(violation: Violation) -> str:
        return sides(apart[violation.id]) if violation.id in apart else wording.at_rank(violation.rank)

    def extent(violation: Violation) -> str:
        return wording.spread(about(violation, apart[violation.id].minority) if violation.id in apart else violation)

    def beside(incident: Incident) -> tuple[Followed | None, list[Capsule]]:
        rules = {v.id for v in incident.violations}
        return report.beside.incident_of(rules), report.beside.capsules_of(rules)

    return {
        "title": _headline(word, report, live=live),
        "word": word,
        "tone": "violated" if result is None and firing else word,
        "result": result,
        "report": report,
        "live": live,
        "violations": violations[:MAX_ROWS],
        "hidden": max(0, len(violations) - MAX_ROWS),
        "incidents": incidents[:MAX_INCIDENTS],
        "more_incidents": max(0, len(incidents) - MAX_INCIDENTS),
        "max_also": MAX_ALSO,
        "max_rows": MAX_ROWS,
        "max_incidents": MAX_INCIDENTS,
        "tally": wording.tally(result) if result is not None else "",
        "tiles": tiles(report, apart),
        "command": command(report.info),
        "started": started(report.info),
        "packs": [_pack(p) for p in report.packs],
        "run": (result.run if result is not None else "") or ", ".join(trace.runs if trace is not None else []),
        "picture": timeline(trace, violations, missing, {v: t.minority for v, t in apart.items()}),
        "map": map_,
        "plots": plots(series(trace), steps, first_step) if trace is not None else [],
        "first_step": first_step if first_step is not None and first_step >= 0 else None,
        "last_step": max(0, steps - 1),
        "summary": summary,
        "notes": unchecked(result) if result is not None else list(report.coverage_notes),
        "excerpt": lambda source: excerpt(source, sites, base),
        "beside": beside,
        "who": who,
        "extent": extent,
    }


def _pack(name: str) -> str:
    """A pack as the user named it; one that we ship by its name alone."""
    path = Path(name)
    shipped = Path(proctor.__file__).parent / "invariants" / "packs"
    return f"{path.stem} (shipped)" if path.parent == shipped or path.parent.parts[-2:] == ("invariants", "packs") else name


def _headline(word: str, report: Report, *, live: bool) -> str:
    result = report.result
    if result is None:
        firing = sum(f.state == "firing" for f in report.beside.followed)
        return f"{wording.count(firing, 'incident')} firing" if firing else "The run so far" if live else "Run summary"
    if word == "violated":
        return f"{wording.count(len(result.incidents), 'incident')}, {wording.count(len(result.violations), 'violated rule')}"
    if word == "inconclusive":
        return "Inconclusive"
    if result.silenced:
        return "No violation to report"
    return "No violations"


@cache
def environment() -> Environment:
    """Templates of the page, everything escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(
        loader=FileSystemLoader(Path(__file__).parents[2].joinpath("templates")),
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
        "state_class": lambda state: state if state in ("firing", "suspected", "resolved") else "",
    }
    env.globals["count"] = wording.count
    return env


@cache
def _asset(name: str) -> str:
    """A style or script of ours, put into the page as it is; nothing of a trace is in it."""
    return Path(__file__).parents[2].joinpath("templates").joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
