"""What a capsule holds."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Final

from proctor.cli.capsule._text import clean

if TYPE_CHECKING:
    from proctor.invariants.capsule import Capsule, Print, Seen

_ROWS: Final = 20


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("capsule", metavar="CAPSULE", help="a folder in RUN/capsules")
    parser.add_argument("--all", action="store_true", dest="everything", help="every variable")


def run(args: argparse.Namespace) -> int:
    """Batches, calls and state of the step."""
    from proctor.invariants.capsule import read_capsule

    capsule = read_capsule(Path(args.capsule))
    print(f"step {capsule.step} of rank {capsule.rank} of {capsule.world}, kept for {clean(capsule.key)}")
    if capsule.control is not None:
        print(f"control: a step to compare step {capsule.control} with")
    print(f"command   {clean(' '.join(capsule.command))}")
    print(f"versions  {', '.join(f'{clean(k)} {clean(v)}' for k, v in capsule.versions.items())}")
    print(f"devices   {clean(', '.join(capsule.devices))}")
    names = ", ".join(clean(g.name) for g in capsule.generators)
    print(f"random    {names or 'nothing'}")
    for batch in capsule.batches:
        print(f"batch {batch.number}" + (" (this step may use it)" if batch.number < capsule.batches_before else ""))
        _values(batch.items)
    for i, call in enumerate(capsule.calls):
        print(f"call {i}: {call.what} {clean(call.name)}".rstrip())
        _values(call.inputs)
        _values(call.outputs, "→ ")
    _state(capsule, args.everything)
    for text in capsule.absent:
        print(f"absent    {clean(text)}")
    return 0


def _values(items: tuple[Seen, ...], mark: str = "") -> None:
    for seen in items[:_ROWS]:
        if seen.dtype:
            what = f"{clean(seen.dtype)}{list(seen.shape)} {_print(seen.content)}"
            held = "" if seen.key or mark else f" not held: {clean(seen.note or 'made by the step itself')}"
        else:
            what, held = clean(repr(seen.value)), ""
        print(f"    {mark}{clean(seen.place) or 'all':<24} {what}{held}")
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
            print(f"    {state} {clean(v.name):<32} {clean(v.dtype)}{list(v.shape) if v.dtype else ''} {content}")
    for group in capsule.groups:
        values = ", ".join(f"{clean(k)} {clean(str(v))}" for k, v in group.values.items())
        print(f"optimizer {clean(group.optimizer)} ({clean(group.kind)}), group {group.index}: {values}")


def _print(content: Print | None) -> str:
    if content is None:
        return "not read"
    return f"{content.fp:016x}" + ("" if content.norm is None else f" norm {content.norm:.6g}")
