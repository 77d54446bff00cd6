"""What a plan says about the parameters and modules of a recording or a model, and what it forgets.

Warns of rules that match nothing, parameters that two rules cut in different ways, axes that the mesh does not have.
With --model the plan is also held against what `proctor.parallelize` would do with it: addends that nobody reduces, edges
whose layers disagree, dimensions that cannot be divided. Exit code 2 when it cannot run the model, 1 when there is a warning
and no model. With --batch the plan also makes one step on threads, which is held against one device's. With --from a plan is made: read off what the model or a program says, completed and judged by one step on threads;
exit code 1 when that step is not the one of one device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from proctor.errors import UsageError

if TYPE_CHECKING:
    from proctor.oracle.plans.plan import Plan, Understanding

_SHOWN: Final = 8


def prepare(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("plan", metavar="PLAN", nargs="?")
    parser.add_argument("recording", metavar="RECORDING", nargs="?", help="of the reference: the names and shapes that the plan is about")
    parser.add_argument(
        "--find", action="store_true",
        help="PLAN and RECORDING are recordings, of a reference and a candidate: print a plan of what parameters are called, fused and transposed, found by their values",
    )
    parser.add_argument("--model", metavar="FILE.py::FUNCTION", help="makes the model, without arguments: can the plan run it? Or, with --from, a plan for it")
    parser.add_argument(
        "--from", metavar="SOURCE", dest="source",
        help="print a plan for --model on --mesh: of `model` (found from a forward), of `tp_plan` (transformers' table), or of FILE.py::FUNCTION, which takes the model and a "
        "device mesh and makes it parallel by torch (parallelize_module, fully_shard, distribute_tensor)",
    )
    parser.add_argument(
        "--batch", metavar="FILE.py::FUNCTION",
        help="gives what the model is called with, a tensor, a tuple of arguments or a dict of them: try the plan with one step on threads (a small model does)",
    )
    parser.add_argument("--mesh", metavar="MESH", help="with --from: axes and ranks, dp=2,tp=2")


def run(args: argparse.Namespace) -> int:
    """Print a table and the warnings."""
    from proctor.oracle.plans.plan_toml import read_plan
    from proctor.oracle.store import Recording
    from proctor.verify import wording
    from proctor.verify.report.formats.terminal import console

    if args.source or args.mesh:
        return _derive(args)
    if args.plan is None:
        raise UsageError("no plan is given", hint="proctor oracle plan PLAN, or --from SOURCE to make one")
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
        if args.batch:
            return _rehearse(args, plan)
        out.print("the plan can run this model, as far as is known before a step")
    return 2 if problems else 1 if found.warnings and not args.model else 0


def _rehearse(args: argparse.Namespace, plan: Plan) -> int:
    """Try one step; the exit code is 1 when it is not the one of one device."""
    from proctor.oracle.parallel.deriving import rehearsed

    batch = _called("--batch", args.batch, _function("--batch", args.batch))
    apart = rehearsed(_made("--model", args.model), batch, plan)
    _judgement(apart, plan, "")
    return 1 if apart else 0


def _judgement(apart: Sequence[str], plan: Plan, comment: str) -> None:
    """What a step on threads said of a plan."""
    from proctor.verify import wording

    for line in apart[:_SHOWN]:
        print(wording.clean(f"{comment}not what one device computes: {line}"))
    if len(apart) > _SHOWN:
        print(f"{comment}and {len(apart) - _SHOWN} more")
    if not apart:
        left_out = " (without fully_shard and stages)" if plan.shards or plan.pipelines else ""
        print(f"{comment}one step on {plan.mesh.world} threads gave the outputs and gradients of one device{left_out}")


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


def _derive(args: argparse.Namespace) -> int:
    """Print a plan that is made, with what is known of it as comments."""
    from proctor.oracle.parallel.deriving import derive
    from proctor.oracle.plans.plan_toml import format_plan

    if args.plan or args.find:
        raise UsageError("--from makes a plan, and takes none")
    for option, given in (("--from", args.source), ("--model", args.model), ("--batch", args.batch), ("--mesh", args.mesh)):
        if not given:
            raise UsageError(f"--from needs --model, --batch and --mesh; {option} is missing", hint="--from model --model FILE.py::make --batch FILE.py::batch --mesh dp=2,tp=2")
    source = _function("--from", args.source) if "::" in args.source else args.source
    model = _made("--model", args.model)
    batch = _called("--batch", args.batch, _function("--batch", args.batch))
    found = derive(model, batch, args.mesh, source=source)
    for line in found.notes:
        print(f"# {line}")
    _judgement(found.apart, found.plan, "# ")
    print(format_plan(found.plan), end="")
    return 1 if found.apart else 0


def _model(spec: str) -> Any:
    """The model of FILE.py::FUNCTION, on the meta device."""
    import torch

    with torch.device("meta"):
        return _made("--model", spec)


def _made(option: str, spec: str) -> Any:
    """The model of FILE.py::FUNCTION."""
    import torch

    model = _called(option, spec, _function(option, spec))
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"{option} {spec[:120]}: {spec.rpartition('::')[2]} gives {type(model).__name__}, no torch module")
    return model


def _function(option: str, spec: str) -> Callable[..., object]:
    from proctor.oracle.recording.ranks import load

    file, _, name = spec.rpartition("::")
    if not file or not Path(file).is_file():
        raise UsageError(f"{option} {spec[:120]}: there is no such file", hint="write FILE.py::FUNCTION")
    sys.path.insert(0, str(Path(file).resolve().parent))
    found: Callable[..., object] = _called(option, spec, lambda: load(f"{Path(file).resolve()}::{name}", "__main__", []))
    return found


def _called(option: str, spec: str, function: Callable[[], Any]) -> Any:
    """What the user's own code gives; whatever it raises is told."""
    try:
        return function()
    except Exception as error:  # noqa: BLE001  # see above
        raise UsageError(f"{option} {spec[:120]}: {type(error).__name__}: {str(error)[:160]}") from None


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
