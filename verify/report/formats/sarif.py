"""SARIF 2.1.0, for code-scanning views: one result a violated rule, at the user's source line."""

from __future__ import annotations

import json
import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import proctor
from proctor.invariants.invariant import Severity
from proctor.invariants.verdict import CheckResult, Silenced, Violation
from proctor.verify import wording
from proctor.verify.report import Report

SCHEMA: Final = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_LEVEL: Final = {
    Severity.CRITICAL: "error",
    Severity.ERROR: "error",
    Severity.WARNING: "warning",
    Severity.INFO: "note",
}


def render(report: Report) -> str:
    """One SARIF log with one run."""
    result = report.result or CheckResult("", [], 0, 0, 0, [], 0, 0)
    hushed = {s.violation.id: s for s in result.silenced}
    found = [*result.violations, *(s.violation for s in result.silenced)]
    codes = {v.code: v.relation for v in found}
    rules = sorted(codes)
    script = _script(report.info)
    log = {
        "$schema": SCHEMA,
        "version": "2.1.0",
        "runs": [
            {
                "tool": {
                    "driver": {
                        "name": "Proctor",
                        "version": proctor.__version__,
                        "semanticVersion": proctor.__version__,
                        "rules": [
                            {
                                "id": code,
                                "name": codes[code],
                                "shortDescription": {"text": f"{codes[code]}: a learned rule of training was broken"},
                                "help": {"text": f"proctor explain {code}"},
                            }
                            for code in rules
                        ],
                    }
                },
                "invocations": [
                    {
                        "executionSuccessful": True,
                        "exitCode": report.exit_code,
                        "toolExecutionNotifications": [
                            {"level": "note", "message": {"text": wording.clean(n)}} for n in result.notes
                        ],
                    }
                ],
                "columnKind": "unicodeCodePoints",
                "results": [_result(v, rules.index(v.code), hushed.get(v.id), script) for v in found],
                "properties": {
                    "checked": result.checked,
                    "notTriggered": result.not_triggered,
                    "unknown": result.unknown,
                },
            }
        ],
    }
    return json.dumps(log, indent=1, allow_nan=False) + "\n"


def _result(v: Violation, rule: int, silenced: Silenced | None, script: str) -> dict[str, Any]:
    text = f"{v.text}. Expected {v.expected}; seen {v.seen} ({wording.place(v)})."
    out: dict[str, Any] = {
        "ruleId": v.code,
        "ruleIndex": rule,
        "level": _LEVEL[v.severity],
        "message": {"text": wording.clean(text)},
        "partialFingerprints": {"proctorInvariant/v1": v.id},
        "properties": {"step": v.step, "rank": v.rank, "count": v.count, "support": wording.support(v.support), "tier": v.tier.value},
    }
    if silenced is not None:
        out["suppressions"] = [{"kind": "external", "justification": wording.clean(silenced.reason)}]
    location: dict[str, Any] = {}
    file, _, line = v.source.rpartition(":")
    if file and line.isdecimal():
        physical: dict[str, Any] = {"artifactLocation": {"uri": _uri(file)}}
        if int(line) > 0:
            physical["region"] = {"startLine": int(line)}
        location["physicalLocation"] = physical
    elif script:  # code-scanning views refuse a result without a place
        location["physicalLocation"] = {"artifactLocation": {"uri": _uri(script)}, "region": {"startLine": 1}}
    names = [{"fullyQualifiedName": wording.clean(n), "kind": k} for n, k in ((v.function, "function"), (v.variable, "variable")) if n]
    if names:
        location["logicalLocations"] = names
    if location:
        out["locations"] = [location]
    return out


def _script(info: Mapping[str, Any]) -> str:
    """The script that was run, as it was named: where a violation that knows no line is shown."""
    command = info.get("command")
    words = [w for w in command if isinstance(w, str)] if isinstance(command, list) else []
    program = info.get("program")
    named = [w for w in words if w.endswith(".py") and w.isprintable()]
    own = [w for w in named if isinstance(program, str) and os.path.basename(w) == program]
    return (own or named or [""])[0]


def _uri(file: str) -> str:
    if os.path.isabs(file):
        return Path(file).as_uri()
    return quote(os.fsencode(file.replace(os.sep, "/")))
