"""A comparison as one page for a browser; it loads nothing from anywhere, and what a record says is text in it."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import jinja2

import proctor
from proctor.verify.compare import Comparison

_HERE = Path(__file__).parent


def render(found: Comparison) -> str:
    """The page."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    template = environment.from_string((_HERE / "page.html.j2").read_text(encoding="utf-8"))
    return template.render(found=found, style=style, style_hash=f"sha256-{digest}", version=proctor.__version__)
