"""Learn rules from healthy runs and write them to a pack.

Give it runs that went well; several of different programs make rules that carry over to others:
`proctor infer runs/mnist runs/gpt -o rules.json`

exit code: 0 a pack was written, 2 bad usage or input, 3 nothing was learned, 101 internal error
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from proctor.errors import TraceError, UsageError

if TYPE_CHECKING:
    from rich.console import Console

    from proctor.infer.engine import Progress, Report
    from proctor.invariants.invariant import Invariant
    from proctor.invariants.pack import Provenance
    from proctor.invariants.relations import Relation
    from proctor.invariants.trace import Trace

_EXAMPLES = 3  # rules shown of each relation
_INCONCLUSIVE = 3  # exit code: nothing was learned


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", type=Path, help="a healthy run, as `proctor record` wrote it"
    )
    parser.add_argument("-o", "--output", required=True, metavar="PACK", type=Path, help="the pack to write")
    parser.add_argument(
        "--relations", metavar="A,B", help="learn only these families of rules (default: all)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="relations at a time; each takes memory (default: 1)"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="say nothing but errors")


def run(args: argparse.Namespace) -> int:
    """Learn, write the pack, say what was learned, and return the exit code."""
    if args.jobs < 1:
        raise UsageError(f"--jobs {args.jobs}: expected a number from 1")
    if args.output.is_dir():
        raise UsageError(
            f"{args.output}: is a directory, expected the name of a pack file", hint="-o rules.json"
        )
    chosen = _relations(args.relations)  # before the runs are read, which may take long

    from proctor.infer.engine import infer
    from proctor.invariants.pack import Pack, write_pack
    from proctor.invariants.trace import Trace

    paths = list({path.resolve(): path for path in args.runs}.values())
    trace = Trace.load(paths)
    if not args.quiet:
        _say_trace(trace, repeated=len(args.runs) - len(paths))
    if trace.calls.is_empty() and trace.states.is_empty():
        raise TraceError(
            f"{', '.join(map(str, paths))}: nothing was recorded, so there is nothing to learn",
            hint="proctor record -o RUN -- python train.py",
        )
    with _progress(chosen, quiet=args.quiet) as progress:
        rules, report = infer(trace, chosen, progress=progress, jobs=args.jobs)
    for name, error in report.errors.items():
        print(f"proctor: relation {name} failed, its rules are missing: {error}", file=sys.stderr)
    if rules:
        write_pack(Pack(rules, _provenance(trace)), args.output)
    if not args.quiet:
        _say_report(rules, report, trace, args.output)
    return 0 if rules else _INCONCLUSIVE


def _relations(names: str | None) -> list[Relation]:
    from proctor.invariants.relations import registry

    known = registry()
    if names is None:
        return list(known.values())
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        what = f"unknown relation {', '.join(unknown)}" if unknown else "no relation named"
        raise UsageError(f"--relations {names}: {what}; known are {', '.join(known) or 'none'}")
    return [known[name] for name in wanted]


def _provenance(trace: Trace) -> Provenance:
    import msgspec

    from proctor import __version__
    from proctor.invariants.pack import Provenance

    versions = set()
    for process in trace.processes:
        try:
            info = msgspec.json.decode(
                (Path(process.folder) / "process.json").read_bytes(), type=dict[str, object]
            )
        except (OSError, msgspec.MsgspecError):
            continue  # reading the trace has said so already
        versions.add(str(info.get("torch", "")))
    return Provenance(
        tool=f"proctor {__version__}",
        torch=", ".join(sorted(versions - {""})),
        runs=len(trace.runs),
        programs=sorted(trace.programs),
        records=trace.calls.height + trace.states.height,
    )


# -- what the reader sees ----------------------------------------------------------------------------------------


@contextmanager
def _progress(relations: Sequence[Relation], *, quiet: bool) -> Iterator[Progress | None]:
    """A bar on a terminal, one line a phase elsewhere; both on standard error."""
    if quiet:
        yield None
        return
    from proctor.infer.engine import PHASES

    if not sys.stderr.isatty():

        def line(relation: str, phase: str, amount: int) -> None:
            print(f"{relation}: {_now(phase, amount)}", file=sys.stderr, flush=True)

        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(),
        TextColumn("{task.fields[now]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {
            r.name: bars.add_task(r.name, total=len(PHASES) - 1, now="waiting", start=False)
            for r in relations
        }

        def advance(relation: str, phase: str, amount: int) -> None:
            bars.start_task(tasks[relation])
            bars.update(tasks[relation], completed=PHASES.index(phase), now=_now(phase, amount))

        yield advance


def _now(phase: str, amount: int) -> str:
    match phase:
        case "propose":
            return "proposing hypotheses"
        case "examples":
            return f"collecting examples of {_count(amount, 'hypothesis', 'hypotheses')}"
        case "preconditions":
            return f"finding preconditions from {_count(amount, 'example')}"
        case _:
            return _count(amount, "rule")


def _say_trace(trace: Trace, *, repeated: int) -> None:
    size = f"{trace.calls.height:,} calls, {trace.states.height:,} states"
    who = f"{_count(len(trace.runs), 'run')}, {_count(len(trace.programs), 'program')}, {_count(len(trace.processes), 'process', 'processes')}"
    print(f"learning from {who}: {size}", file=sys.stderr)
    if repeated:
        print(f"note: {_count(repeated, 'run')} given more than once, read once", file=sys.stderr)
    for note in trace.notes:
        print(f"note: {note}", file=sys.stderr)


def _say_report(rules: Sequence[Invariant], report: Report, trace: Trace, pack: Path) -> None:
    from rich.console import Console
    from rich.text import Text

    # A file or a pipe is not cut at 80 columns: there a sentence stays one line.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 1000)
    _say_table(console, report)
    for tally in report.tallies:
        ours = sorted((rule for rule in rules if rule.relation == tally.relation), key=_weight)
        if ours:
            shown = f"{min(_EXAMPLES, len(ours))} of {_count(len(ours), 'rule')}"
            console.print(Text(f"\n{tally.relation}, {shown}:", style="bold"))
        for rule in ours[:_EXAMPLES]:
            _say_rule(console, rule)
    if report.dropped:
        console.print("\nNot learned:")
        for why, count in report.dropped.items():
            console.print(Text(f"  {count:>9,}  {why}"))
    if not rules:
        console.print("\nNothing was learned, so no pack was written. Record more steps, or more runs.")
        return
    if len(trace.runs) == 1:
        console.print(
            "\nAll rules come from one run; more runs make rules more general and fewer of them wrong."
        )
    console.print(Text(f"\n{_count(len(rules), 'rule')} in {pack}"), soft_wrap=True)
    console.print(Text(f"next: proctor check RUN -i {pack}"), soft_wrap=True)


def _say_table(console: Console, report: Report) -> None:
    from rich.table import Table

    table = Table("relation", box=None, pad_edge=False, header_style="bold")
    for heading in ("hypotheses", "examples", "rules", "always", "conditional", "seconds"):
        table.add_column(heading, justify="right")
    for t in report.tallies:
        counts = (t.hypotheses, t.examples, t.rules, t.unconditional, t.conditional)
        name = f"{t.relation} (failed)" if t.error else t.relation
        table.add_row(name, *(f"{n:,}" for n in counts), f"{t.seconds:.1f}")
    console.print(table)


def _say_rule(console: Console, rule: Invariant) -> None:
    from rich.padding import Padding
    from rich.text import Text

    support = rule.support
    seen = f"passed {_count(support.passed, 'time')} in {_count(support.runs, 'run')} of {_count(support.programs, 'program')}"
    if support.excluded:
        seen += f"; the condition explains {_count(support.excluded, 'failure')}"
    said = rule.precondition.say()
    when = said if said == "always" else f"when {said}"
    lines = [(2, rule.text, ""), (6, when, ""), (6, f"{seen}  [{rule.id}]", "dim")]
    for indent, text, style in lines:
        console.print(Padding(Text(text, style=style), (0, 0, 0, indent), expand=False))


def _weight(rule: Invariant) -> tuple[int, int, int, str]:
    """Best supported first."""
    support = rule.support
    return -support.programs, -support.runs, -support.passed, rule.id


def _count(n: int, noun: str, plural: str = "") -> str:
    return f"{n:,} {noun if n == 1 else plural or noun + 's'}"
