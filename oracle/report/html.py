"""One self-contained HTML page: no network, no script needed to read it, everything from a record escaped."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

import proctor
from proctor.oracle.judging.verdicts import FAILING, TensorVerdict
from proctor.oracle.report import Report, _model, _wording
from proctor.oracle.report._depth import picture
from proctor.verify import report as shared  # its style sheet

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_ROWS: Final = 3000
MAX_REPLICAS: Final = 300
MAX_NOTES: Final = 300
_TONE: Final = {"different": "violated", "equivalent": "clean", "inconclusive": "inconclusive"}


def render(report: Report) -> str:
    """The page."""
    verdict = report.verdict
    style = _asset(Path(shared.__file__).with_name("templates") / "page.css") + _asset(_here() / "oracle.css")
    script = _asset(_here() / "oracle.js")
    table = _wording.by_weight(verdict.tensors)[:MAX_ROWS]
    rows = {t: f"t{i}" for i, t in enumerate(table)}
    return _environment().get_template("page.html.j2").render(
        report=report,
        verdict=verdict,
        first=verdict.first,
        title=_wording.headline(verdict),
        tone=_TONE[verdict.verdict],
        tiles=_tiles(report),
        model=_model.tree(verdict.tensors, verdict.replicas),
        picture=picture(verdict.tensors, verdict.first, rows),
        table=table,
        rows=rows,
        hidden=max(0, len(verdict.tensors) - len(table)),
        failing=FAILING,
        words=[w for w in ("bad", "nonfinite", "missing", "shape", "warn", "no-power", "unmapped", "ok") if any(t.verdict == w for t in table)],
        max_replicas=MAX_REPLICAS,
        max_notes=MAX_NOTES,
        proof=report.proof,
        style=style,
        script=script,
        style_hash=_hash(style),
        script_hash=_hash(script),
        version=proctor.__version__,
    )


def _tiles(report: Report) -> list[tuple[str, str, str]]:
    verdict = report.verdict
    wrong = [t for t in verdict.tensors if t.verdict in FAILING]
    blind = sum(t.verdict == "no-power" for t in verdict.tensors)
    exact = sum(t.verdict in ("ok", "warn") and t.abs_err == 0 for t in verdict.tensors)
    tiles = [("Compared", f"{verdict.checked:,}", f"{exact:,} exactly equal")]
    if wrong:
        tiles.append(("Wrong", f"{len(wrong):,}", f"the first in {_wording.when(wrong[0])}"))
    else:
        sharp: list[TensorVerdict] = [t for t in verdict.tensors if t.verdict in ("ok", "warn")]
        worst = max(sharp, key=lambda t: t.ratio, default=None)
        if worst is not None:
            tiles.append(("Closest", f"{worst.ratio:.0%} of tolerance", _wording.clean(worst.name, 60)))
    if verdict.replicas:
        axes = sorted({r.axis for r in verdict.replicas if r.axis not in ("", "rank")})
        tiles.append(("Replicas", f"{len(verdict.replicas):,} differ", f"along {', '.join(axes[:4])}" if axes else ""))
    tiles.append(("No power", f"{blind:,}", "tolerance too wide to see an error" if blind else "every tolerance can show an error"))
    return tiles


@cache
def _environment() -> Environment:
    """Templates of the page, everything escaped."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    env = Environment(loader=FileSystemLoader(_here()), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    names = ("clean", "kind", "module", "when", "number", "multiple", "rank_list", "error", "conflict", "sentence")
    env.filters |= {name: getattr(_wording, name) for name in names}
    env.globals |= {"count": _wording.count, "heads": _model.HEADS, "columns": _model.COLUMNS, "max_tensors": _model.MAX_TENSORS}
    env.filters |= {"said": _model.said, "opened": _model.opened, "short_kind": _wording.short_kind}
    return env


def _here() -> Path:
    return Path(__file__).with_name("templates")


@cache
def _asset(path: Path) -> str:
    """A style or script of ours, put into the page as it is; nothing of a record is in it."""
    return path.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
