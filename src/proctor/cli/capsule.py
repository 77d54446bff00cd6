"""List, show and re-execute capsules: single training steps that were kept because something was wrong with them.

    proctor capsule list RUN
    proctor capsule show CAPSULE [--all]
    proctor capsule replay CAPSULE [--timeout S] [--format json] [-- CMD…]

`replay` starts the recorded command (or CMD) twice, makes its first training step that of the capsule, and compares what
comes out with the record. The program runs up to its first training step, with all that it does until then: give a CMD
that writes elsewhere if it must not touch its earlier results.

exit code of replay: 0 reproduced (the cause is in code or data), 1 differs (the device errs, or the code is not
deterministic), 2 bad usage or input, 3 nothing can be said
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.instrument.replay import Judgement
    from proctor.invariants.capsule import Capsule, Print, Seen

EXIT_CODES: Final = {"reproduced": 0, "differs": 1, "cannot": 3}
_ROWS: Final = 20


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    actions = parser.add_subparsers(metavar="ACTION", dest="action", required=True)
    listing = actions.add_parser("list", help="capsules of a run")
    listing.add_argument("run_dir", metavar="RUN")
    show = actions.add_parser("show", help="what a capsule holds")
    show.add_argument("capsule", metavar="CAPSULE", help="a folder in RUN/capsules")
    show.add_argument("--all", action="store_true", dest="everything", help="every variable")
    again = actions.add_parser("replay", help="do its step again and compare")
    again.add_argument("capsule", metavar="CAPSULE", help="a folder in RUN/capsules")
    _replay_options(again)
    again.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD…", help="run this, not the recorded command")


def _replay_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", metavar="S", type=float, default=600.0, help="for one execution (default 600)")
    parser.add_argument("--format", choices=("terminal", "json"), default="terminal", dest="form")


def run(args: argparse.Namespace) -> int:
    """Carry out one action; returns the exit code."""
    if args.action == "list":
        return _list(Path(args.run_dir))
    if args.action == "show":
        return _show(Path(args.capsule), args.everything)
    return _replay(args)


def _list(folder: Path) -> int:
    from proctor.errors import ProctorError
    from proctor.invariants.capsule import capsules_of, read_capsule

    if not folder.is_dir():
        raise UsageError(f"{folder} is not a directory")
    found = capsules_of(folder)
    if not found:
        print(f"{folder} holds no capsules.")
        return 0
    for path in found:
        try:
            capsule = read_capsule(path)
        except ProctorError as e:
            print(f"{path.name}  unreadable: {e.message}")
            continue
        size = sum(p.stat().st_size for p in path.iterdir())
        about = f"control of step {capsule.control}" if capsule.control is not None else _clean(capsule.key)
        values = "by value" if capsule.by_value else "fingerprints only"
        where = f"step {capsule.step}, rank {capsule.rank} of {capsule.world}"
        print(f"{path}  {where}, {values}, {size / 2**20:.1f} MiB, {capsule.written}  {about}")
    return 0


def _show(path: Path, everything: bool) -> int:
    from proctor.invariants.capsule import read_capsule

    capsule = read_capsule(path)
    print(f"step {capsule.step} of rank {capsule.rank} of {capsule.world}, kept for {_clean(capsule.key)}")
    if capsule.control is not None:
        print(f"control: a step to compare step {capsule.control} with")
    print(f"command   {_clean(' '.join(capsule.command))}")
    print(f"versions  {', '.join(f'{_clean(k)} {_clean(v)}' for k, v in capsule.versions.items())}")
    print(f"devices   {_clean(', '.join(capsule.devices))}")
    names = ", ".join(_clean(g.name) for g in capsule.generators)
    print(f"random    {names or 'nothing'}")
    for batch in capsule.batches:
        print(f"batch {batch.number}" + (" (this step may use it)" if batch.number < capsule.batches_before else ""))
        _values(batch.items)
    for i, call in enumerate(capsule.calls):
        print(f"call {i}: {call.what} {_clean(call.name)}".rstrip())
        _values(call.inputs)
        _values(call.outputs, "→ ")
    _state(capsule, everything)
    for text in capsule.absent:
        print(f"absent    {_clean(text)}")
    return 0


def _values(items: tuple[Seen, ...], mark: str = "") -> None:
    for seen in items[:_ROWS]:
        if seen.dtype:
            what = f"{_clean(seen.dtype)}{list(seen.shape)} {_print(seen.content)}"
            held = "" if seen.key or mark else f" not held: {_clean(seen.note or 'made by the step itself')}"
        else:
            what, held = _clean(repr(seen.value)), ""
        print(f"    {mark}{_clean(seen.place) or 'all':<24} {what}{held}")
    if len(items) > _ROWS:
        print(f"    … and {len(items) - _ROWS} more")


def _state(capsule: Capsule, everything: bool) -> None:
    for role in ("parameter", "buffer", "gradient", "optimizer", "hyper", "scaler"):
        mine = [v for v in capsule.state if v.role == role]
        if not mine:
            continue
        known = [v for v in mine if v.before is not None and v.after is not None]
        changed = [v for v in known if v.before and v.after and not v.before.same(v.after)]
        same = [v for v in known if v not in changed]
        print(f"{role}: {len(mine)}, of these {len(changed)} changed in this step, {len(same)} did not")
        shown = mine if everything else [*same[: _ROWS // 2], *changed[: _ROWS // 2]]
        for v in shown:
            state = "changed  " if v in changed else "unchanged" if v in same else "         "
            content = _print(v.before) if v.dtype or v.before else repr(v.value)
            print(f"    {state} {_clean(v.name):<32} {_clean(v.dtype)}{list(v.shape) if v.dtype else ''} {content}")
    for group in capsule.groups:
        values = ", ".join(f"{_clean(k)} {_clean(str(v))}" for k, v in group.values.items())
        print(f"optimizer {_clean(group.optimizer)} ({_clean(group.kind)}), group {group.index}: {values}")


def _print(content: Print | None) -> str:
    if content is None:
        return "not read"
    return f"{content.fp:016x}" + ("" if content.norm is None else f" norm {content.norm:.6g}")


def _replay(args: argparse.Namespace) -> int:
    from proctor.instrument.replay import judge

    # argparse gives options after the capsule's name to the command, and drops a `--` before it only if none are there.
    command = args.command
    if command[:1] and command[0].startswith("-"):
        at = command.index("--") if "--" in command else len(command)
        options, command = command[:at], command[at + 1 :]
        late = argparse.ArgumentParser(prog="proctor capsule replay CAPSULE")
        _replay_options(late)
        try:
            late.parse_args(options, args)
        except SystemExit:
            raise UsageError("what to run goes after --", hint="proctor capsule replay CAPSULE -- CMD…") from None
    if not args.timeout > 0:
        raise UsageError("--timeout must be positive")

    def tell(text: str) -> None:
        print(f"proctor: {_clean(text)}", file=sys.stderr, flush=True)

    found = judge(Path(args.capsule), command, timeout_s=args.timeout, tell=tell)
    if args.form == "json":
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(found), indent=1).decode())
    else:
        _say(found)
    return EXIT_CODES[found.verdict]


def _say(found: Judgement) -> None:
    print(f"{found.verdict}: {_clean(found.reason)}")
    for d in found.differences:
        print(f"    {d.stage:<12} rank {d.rank}  {_clean(d.name):<40} {_clean(d.left)[:60]} ≠ {_clean(d.right)[:60]}")


def _clean(text: str) -> str:
    """Without control characters: a terminal must not be steered by what a file says."""
    return "".join(c if c.isprintable() else "�" for c in text)
