"""The end of a campaign, for a terminal."""

from __future__ import annotations

from typing import Final

from proctor.oracle.fuzz.report import Summary
from proctor.oracle.fuzz.sessions.session import setting_words

SHOWN: Final = 8  # differences by rounding


def render(summary: Summary, folder: str) -> str:
    """Text.

    Args:
        summary: of the campaign.
        folder: where its files are.
    """
    versions = ", ".join(f"{k} {v}" for k, v in summary.asked.versions.items() if v)
    verdicts = ", ".join(f"{n:,} {v}" for v, n in summary.verdicts.items())
    lines = [f"{summary.pairs:,} pairs of model and input, {summary.settings:,} settings ({versions}, seed {summary.asked.seed}): {verdicts or 'nothing ran'}"]
    if summary.passed:
        lines.append(f"{summary.passed:,} settings passed over: a finding explains them")
    if summary.rounding:
        lines.append(f"{len(summary.rounding):,} differ by what the program's own rounding makes, and are no findings:")
        lines += [f"    {said}" for said in summary.rounding[:SHOWN]]
        if len(summary.rounding) > SHOWN:
            lines.append("    the others are in the other reports")
    for finding in summary.findings:
        mark = "known" if finding.known else "NEW" if finding.confirmed == "yes" else "not confirmed"
        lines.append(f"\n{mark}  {finding.id}  {setting_words(finding)}  ({finding.count} times)")
        lines.append(f"    {finding.outcome.why}")
        if finding.culprit:
            lines.append(f"    {finding.culprit}")
        if finding.known:
            lines.append(f"    known as {finding.known}")
        elif finding.denied:
            lines.append(f"    {finding.denied}")
        if finding.perhaps:
            lines.append(f"    perhaps {finding.perhaps}, which explains a smaller setting that fails alike")
        lines.append(f"    {folder}/findings/{finding.id}/script.py")
    if not summary.findings:
        lines.append("nothing found")
    return "\n".join(lines)
