"""The end of a campaign as one self-contained HTML page: findings with their scripts, and a matrix of settings × verdicts."""

from __future__ import annotations

from pathlib import Path

import proctor
from proctor.oracle.fuzz.report import Summary
from proctor.oracle.fuzz.running.outcome import VERDICTS
from proctor.oracle.fuzz.sessions.journal import Journal
from proctor.oracle.fuzz.sessions.session import setting_words


def render(summary: Summary, journal: Journal) -> str:
    """The page.

    Args:
        summary: of the campaign.
        journal: whose scripts are shown.
    """
    from jinja2 import Environment, FileSystemLoader

    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    findings = [
        {
            "id": f.id,
            "mark": "known" if f.known else "new" if f.confirmed == "yes" else "not confirmed",
            "triggers": setting_words(f),
            "why": f.outcome.why,
            "culprit": f.culprit,
            "others": f.outcome.others,
            "count": f.count,
            "known": f.known,
            "denied": f.denied,
            "perhaps": f.perhaps,
            "trace": f.outcome.trace,
            "script": _text(journal, f.id, "script.py"),
            "output": _text(journal, f.id, "output.txt"),
        }
        for f in summary.findings
    ]
    used = [v for v in VERDICTS if v in summary.verdicts]
    return environment.get_template("page.html.j2").render(summary=summary, findings=findings, verdicts=used, version=proctor.__version__)


def _text(journal: Journal, finding: str, name: str) -> str:
    path = journal.path / "findings" / finding / name
    return path.read_text(errors="replace") if path.exists() else ""
