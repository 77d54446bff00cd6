"""What a plan says about the parameters and modules of a recording or a model, and what it forgets.

Warns of rules that match nothing, parameters that two rules cut in different ways, axes that the mesh does not have.
With --model the plan is also held against what `proctor.parallelize` would do with it: addends that nobody reduces, edges
whose layers disagree, dimensions that cannot be divided. Exit code 2 when it cannot run the model, 1 when there is a warning
and no model.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan, Understanding


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("plan", metavar="PLAN")
    parser.add_argument("recording", metavar="RECORDING", nargs="?", help="of the reference: the names and shapes that the plan is about")
    parser.add_argument(
        "--find", action="store_true",
        help="PLAN and RECORDING are recordings, of a reference and a candidate: print a plan of what parameters are called, fused and transposed, found by their values",
    )
    parser.add_argument("--model", metavar="FILE.py::FUNCTION", help="makes the model, without arguments, on the meta device: can the plan run it?")


def run(args: argparse.Namespace) -> int:
    """Print a table and the warnings."""
    from proctor.oracle.plans.plan_toml import read_plan
    from proctor.oracle.store import Recording
    from proctor.verify import wording
    from proctor.verify.report.formats.terminal import console

    if args.find:
        return _find(args)
    plan = read_plan(Path(args.plan))
    params: dict[str, tuple[int, ...]] = {}
    modules: dict[str, tuple[int, ...]] = {}
    if args.recording:
        for record in Recording(Path(args.recording)).ranks().values():
            for entry in record.entries:
                if entry.kind == "param":
                    params.setdefault(entry.name, entry.shape)
                elif entry.kind == "output":
                    modules.setdefault(entry.name, entry.shape)
    problems: list[str] = []
    if args.model:
        model = _model(args.model)
        problems = _problems(plan, model)
        params = {name: tuple(p.shape) for name, p in model.named_parameters()}
    found = plan.understood(params, modules)
    _show(plan, found)
    out = console()
    # A parameter without a rule is whole on every rank, which a run may mean; what it cannot mean is a problem.
    for line in [f"{'note' if args.model else 'warning'}: {w}" for w in found.warnings] + [f"problem: {p}" for p in problems]:
        out.print(wording.clean(line), markup=False, soft_wrap=True)
    if args.model and not problems:
        out.print("the plan can run this model, as far as is known before a step")
    return 2 if problems else 1 if found.warnings and not args.model else 0


def _find(args: argparse.Namespace) -> int:
    """Print a plan of what was found by content, and what was not as comments."""
    from proctor.oracle.mapping.mapped import Mapped, mapped
    from proctor.oracle.plans.plan_toml import format_plan
    from proctor.oracle.store import Recording

    if args.recording is None or args.model:
        raise UsageError("--find takes two recordings", hint="proctor oracle plan --find REFERENCE CANDIDATE")
    candidate, plan = mapped(Recording(Path(args.plan)), Recording(Path(args.recording)), None)
    unclear = candidate.found.unclear if isinstance(candidate, Mapped) else []
    for line in unclear:
        print(f"# {line}")
    if plan is not None:
        print(format_plan(plan), end="")
    elif not unclear:
        print("# all parameters go by the reference's names")
    return 1 if unclear else 0


def _model(spec: str) -> Any:
    """The model of FILE.py::FUNCTION, on the meta device."""
    import torch

    from proctor.oracle.recording.ranks import load

    file, _, name = spec.rpartition("::")
    if not file or not Path(file).is_file():
        raise UsageError(f"--model {spec[:120]}: there is no such file", hint="write FILE.py::FUNCTION")
    sys.path.insert(0, str(Path(file).resolve().parent))
    try:
        make = load(f"{Path(file).resolve()}::{name}", "__main__", [])
        with torch.device("meta"):
            model = make()
    except Exception as error:  # noqa: BLE001  # the user's own file: whatever it raises is told
        raise UsageError(f"--model {spec[:120]}: {type(error).__name__}: {str(error)[:160]}") from None
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"--model {spec[:120]}: {name} gives {type(model).__name__}, no torch module")
    return model


def _problems(plan: Plan, model: Any) -> list[str]:
    """What stands in the way of running the model."""
    from proctor.oracle.parallel.verify import problems

    return problems(plan, model)


def _show(plan: Plan, found: Understanding) -> None:
    from rich.table import Table

    from proctor.verify import wording
    from proctor.verify.report.formats.terminal import console

    table = Table("", "name", "layout", "rule", box=None, pad_edge=False)
    for row in found.rows:
        table.add_row(*(wording.clean(str(cell)) for cell in (row.kind, row.name, row.layout, row.rule)))
    out = console()
    out.print(f"mesh {plan.mesh}, {plan.mesh.world} ranks")
    if found.rows:
        out.print(table)
    for edge in plan.edges:
        ways = ", ".join(f"{way} ({rule.layout(plan.mesh)})" for way, rule in edge.rules.items())
        more = [f"{key} {value}" for key, value in (("after", edge.after), ("lookup", edge.lookup)) if value]
        out.print(wording.clean(f"{edge.at} of {edge.module or 'the model'}: {', '.join(filter(None, [ways, *more]))}"), markup=False, soft_wrap=True)
    for pending in plan.pendings:
        out.print(wording.clean(f"gradients of {pending.path}: {pending.reduce} over {', '.join(pending.axes)}"), markup=False)
    for shard in plan.shards:
        out.print(wording.clean(f"parameters of {shard.module or 'the model'}: cut over {shard.axis} between their uses"), markup=False)
    for line in plan.pipelines:
        out.print(wording.clean(f"pipeline over {line.axis}, {line.microbatches} microbatches: {'; '.join(f'stage {i} is {one}' for i, one in enumerate(line.stages))}"), markup=False, soft_wrap=True)
    for draw in plan.draws:
        out.print(wording.clean(f"draws of {draw.module or 'the model'}: {draw.rule.layout(plan.mesh)}"), markup=False)
