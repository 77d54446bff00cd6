"""What people are told of an incident: one line, some lines, and facts in order. Bounded, and without values of tensors."""

from __future__ import annotations

import hashlib
from typing import Final

from proctor.verify.lifecycle.record import TrackedIncident
from proctor.verify.notice import Action, Notice
from proctor.verify.wording import at_step, blamed, clean, count, rate, support, when

MAX_KEY: Final = 255  # bytes, PagerDuty Events v2
_SHOWN_BESIDE: Final = 5  # rules named besides the first
_DIGEST: Final = 32  # hexadecimal digits of a hash that stands for what was cut


def dedup_key(job: str, rule: str, scope: str) -> str:
    """`proctor:<job>:<rule>:<scope>`, at most 255 bytes: what is longer is cut and ends with its hash."""
    job, rule, scope = clean(job), clean(rule).replace(":", "_"), clean(scope).replace(":", "_")
    key = f"proctor:{job}:{rule}:{scope}"
    if len(key.encode(errors="replace")) <= MAX_KEY:
        return key
    digest = hashlib.sha256(key.encode(errors="replace")).hexdigest()[:_DIGEST]
    short = (text.encode("ascii", "replace").decode()[:limit] for text, limit in ((job, 100), (rule, 48), (scope, 48)))
    return f"proctor:{':'.join(short)}~{digest}"


def notice(incident: TrackedIncident, action: Action, *, job: str, host: str, at: float, run: str) -> Notice:
    """An incident as it is now, to be sent.

    Args:
        incident: of which people are told.
        action: `trigger` or `resolve`.
        job, host: whose it is and where.
        at: epoch seconds.
        run: the run directory as commands should name it.
    """
    head = incident.violations[0] if incident.violations else None
    return Notice(
        action=action,
        key=incident.key,
        tier=incident.tier,
        severity=incident.severity,
        title=incident.title,
        text="\n".join(_lines(incident, action, run)),
        job=job,
        source=f"{job}@{host}",
        code=incident.code,
        component=clean(head.module or head.variable, 200) if head else "",
        group=incident.axis,
        step=incident.first_step,
        began=incident.began,
        at=at,
        details=details(incident, run),
    )


def details(incident: TrackedIncident, run: str) -> dict[str, str]:
    """Facts about an incident, the most telling first; nothing that is not known."""
    found = dict(incident.facts)
    if incident.violations:
        head = incident.violations[0]
        found |= {
            "expected": head.expected,
            "seen": head.seen,
            "since": at_step(incident.first_step),
            "ranks": "; ".join(p for p in (incident.ranks, f"axis {incident.axis}" if incident.axis else "") if p),
            "source": head.source,
            "to blame": blamed(head),
            "support": support(head.support),
            "false alarms": rate(head.false_alarm),
        }
    rules = len(incident.violations) + incident.beside
    found |= {
        "rules beside": f"{rules - 1:,}" if rules > 1 else "",
        "came back": count(incident.flaps, "time") if incident.flaps else "",
        "capsule": incident.capsule or incident.not_kept,
        "next": _command(incident, run),
    }
    return {name: clean(text, 1000) for name, text in found.items() if text}


def _lines(incident: TrackedIncident, action: Action, run: str) -> list[str]:
    lines = [incident.title]
    if action is Action.RESOLVE:
        return [*lines, f"Over: {incident.why_ended}" if incident.why_ended else "Over."]
    if incident.flaps:
        lines.append(f"It came back ({count(incident.flaps, 'time')} so far).")
    if not incident.violations:
        return lines + [f"{name[0].upper()}{name[1:]}: {text}" for name, text in incident.facts.items() if text]
    head, *others = incident.violations
    lines.append(f"Rule {head.code}: {head.text}{' ' + when(head.when) if head.when not in ('', 'always') else ''}")
    lines += [f"Expected: {head.expected}", f"Seen: {head.seen}"]
    if incident.ranks:
        lines.append(f"Ranks: {incident.ranks}" + (f", along mesh axis {incident.axis}" if incident.axis else ""))
    if head.source:
        lines.append(f"At: {head.source}")
    if head.cause is not None:
        lines.append(f"Most likely to blame: {blamed(head)}")
    beside = len(others) + incident.beside
    if beside:
        lines.append(f"With it {count(beside, 'more rule')} failed:")
        lines += [f"- {v.code} {clean(v.text, 160)} ({at_step(v.step)})" for v in others[:_SHOWN_BESIDE]]
    if head.advice:
        lines.append(head.advice)
    return [*lines, f"Next: {_command(incident, run)}"]


def _command(incident: TrackedIncident, run: str) -> str:
    return f"proctor explain {incident.violations[0].id} --run {run}" if incident.violations else ""
