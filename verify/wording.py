"""How counts, places and names of a check are put into words; every report uses the same ones."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from proctor.invariants.invariant import Example, FalseAlarm, Record, Support
    from proctor.invariants.pack import Measured
    from proctor.invariants.verdict import CheckResult, Silenced, Violation

# Control characters and bidirectional overrides: a name in a trace must not drive a terminal or reorder a line.
_UNSAFE: Final = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")

EXIT_CLEAN: Final = 0
EXIT_VIOLATED: Final = 1
EXIT_INCONCLUSIVE: Final = 3


def clean(text: object, limit: int = 0) -> str:
    """One printable line: control characters become visible escapes; cut in the middle beyond `limit`."""
    line = _UNSAFE.sub(_visible, str(text))
    if limit and len(line) > limit:
        head = (limit * 2) // 3
        line = f"{line[:head]}…{line[len(line) - (limit - head - 1) :]}"
    return line


def _visible(match: re.Match[str]) -> str:
    code = ord(match.group())
    if code in (9, 10, 13):
        return " "
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def count(n: int, noun: str, plural: str = "") -> str:
    """`1 rule`, `1,200 rules`."""
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"


def ranges(numbers: Iterable[int], limit: int = 12) -> str:
    """`0–3, 7`: sorted numbers with runs folded; at most `limit` parts."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    shown = [str(a) if a == b else f"{a}–{b}" for a, b in parts[:limit]]
    return ", ".join(shown) + (", …" if len(parts) > limit else "")


def short_name(function: str) -> str:
    """`Optimizer.zero_grad` of `torch.optim.Optimizer.zero_grad`: what a person calls it."""
    return ".".join(function.split(".")[-2:])


def at_step(step: int | None) -> str:
    if step is None:
        return "at no particular step"
    return "before the first step" if step < 0 else f"step {step}"


def at_rank(rank: int | None) -> str:
    return "all ranks" if rank is None else f"rank {rank}"


def place(violation: Violation) -> str:
    """Where it was seen first: step, rank, function or else variable, source line."""
    subject = violation.function or violation.variable
    parts = [at_step(violation.step), at_rank(violation.rank), subject, violation.source]
    return clean(", ".join(p for p in parts if p))


def blamed(violation: Violation) -> str:
    """The function and line most likely to blame, and why; "" where nothing is known of that."""
    cause = violation.cause
    return "" if cause is None else f"{', '.join(p for p in (cause.function, cause.source) if p)}: {cause.text}"


def spread(violation: Violation) -> str:
    """How far it went: `37 failing examples, steps 1–40, ranks 0–3`."""
    steps = [s for s, _ in violation.places if s is not None and s >= 0]
    ranks = {r for _, r in violation.places if r is not None}
    parts = [count(violation.count, "failing example")]
    if steps:
        first, last = min(steps), max(steps)
        parts.append(f"step {first}" if first == last else f"steps {first}–{last}")
    if ranks:
        parts.append(f"{'rank' if len(ranks) == 1 else 'ranks'} {ranges(ranks)}")
    return ", ".join(parts)


def support(s: Support) -> str:
    """`held in 120 examples of 3 runs, 2 programs`."""
    text = f"held in {count(s.passed, 'example')} of {count(s.runs, 'run')}, {count(s.programs, 'program')}"
    if s.excluded:
        text += f"; {count(s.excluded, 'example')} outside its precondition failed"
    return text


def rate(measured: FalseAlarm | None) -> str:
    """`0 of 36 held-out healthy runs (at most 8.0 % with 95 % confidence)`."""
    if measured is None:
        return "not measured"
    runs = f"{measured.failed:,} of {count(measured.tested, 'held-out healthy run')}"
    return f"{runs} (at most {100 * measured.upper:.1f} % with 95 % confidence)" if measured.tested else "never tested: it applied in no held-out run"


def record(r: Record) -> str:
    """`0 of 412 healthy runs of 96 programs that nobody here wrote`."""
    of = f" of {count(r.programs, 'program')}" if r.programs else ""
    back = f"; {r.retracted:,} more while the run went on" if r.retracted else ""
    where = f" ({r.corpus})" if r.corpus else ""
    return f"{r.failed:,} of {count(r.tested, 'healthy run')}{of} that nobody here wrote{back}{where}"


def measured(m: Measured) -> str:
    """`0 of 2,240 checked rules on 36 held-out healthy runs of 9 programs (0.00 %)`."""
    share = f" ({100 * m.failed / m.checked:.2f} %)" if m.checked else ""
    runs = f"{count(m.runs, 'held-out healthy run')} of {count(m.programs, 'program')}"
    return f"{m.failed:,} of {count(m.checked, 'checked rule')} on {runs}{share}"


def held(example: Example) -> str:
    """`vae.py, step 3, rank 0, examples/vae.py:50`: where a rule held when it was learned."""
    parts = [example.program, at_step(example.step), at_rank(example.rank), example.source]
    return clean(", ".join(p for p in parts if p), 300)


def hushed(silenced: Silenced) -> str:
    """A violation that is not reported, in one line."""
    v = silenced.violation
    who = f" by {silenced.by}" if silenced.by else ""
    end = f", until {silenced.until}" if silenced.until else ""
    return f"{v.text} ({at_step(v.step)}, {at_rank(v.rank)}; {v.code} {v.id}): {silenced.why}{who}{end}: {silenced.reason}"


def when(text: str) -> str:
    """A precondition as part of a sentence."""
    return text if text in ("", "always") else f"when {text}"


def tally(result: CheckResult) -> str:
    """`1 incident, 7 violated rules, 412 checked, 3 not triggered, 2 unknown`."""
    violated = len(result.violations)
    parts = [count(len(result.incidents), "incident"), count(violated, "violated rule")] if violated else ["no violation"]
    parts.append(f"{result.checked:,} checked")
    if result.not_triggered:
        parts.append(f"{result.not_triggered:,} not triggered")
    if result.unknown:
        parts.append(f"{result.unknown:,} unknown")
    for why in ("suppressed", "known"):
        hushed = sum(s.why == why for s in result.silenced)
        if hushed:
            parts.append(f"{hushed:,} {why}")
    return ", ".join(parts)


def state(result: CheckResult | None, exit_code: int) -> str:
    """The verdict in one word: violated, clean, inconclusive, unchecked."""
    if result is None:
        return "unchecked"
    if result.incidents:
        return "violated"
    return "inconclusive" if exit_code == EXIT_INCONCLUSIVE else "clean"


def fold(notes: Sequence[str], limit: int) -> list[str]:
    """The first `limit` notes, then how many more."""
    if len(notes) <= limit:
        return list(notes)
    return [*notes[:limit], f"and {len(notes) - limit:,} more of this kind"]
