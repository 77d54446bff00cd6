"""Whether the compiler made the difference: a compiled candidate runs once more without `torch.compile`.

If it is equivalent then, what the compiler made of the first region that differs is wrong: dynamo's graph, a pass or a
backend. If it differs as well, the cause is in the program, and is looked for in that run.
"""

from __future__ import annotations

from collections.abc import Sequence

from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.verdicts import Culprit, TensorVerdict, Verdict
from proctor.oracle.recording.record import Recorder
from proctor.oracle.store import EAGER, Recording

_DIRECTIONS = {
    "input": "forward", "output": "forward", "grad_output": "backward", "grad_input": "backward", "main_grad": "gradient",
    "opt_state": "update", "param_after": "update",
}  # fmt: skip


def compiles(candidate: Recording) -> bool:
    """Whether anything of it ran compiled."""
    return any(rank.info.compiled for rank in candidate.ranks().values())


def blame_compiler(compiled: Comparison, found: Verdict, again: Recorder) -> tuple[Culprit | None, str, Comparison]:
    """Run the candidate without `torch.compile`, and compare that.

    Args:
        compiled: the comparison, after its `run`; the candidate's recording gets a run `eager`.
        found: what it differs in.
        again: runs the candidate's command.

    Returns:
        the compiled region where the runs part, if the eager run is equivalent; a note for the reader; the comparison of the eager run.

    Raises:
        OracleError: the command failed when it ran again.
    """
    again.once(EAGER, generate=compiled.candidate.info.generate)
    comparison = Comparison(compiled.reference.recording, compiled.candidate, compiled.plan, compiled.mode, run=EAGER)
    eager = comparison.run()
    if eager.verdict != "equivalent":
        return None, f"without torch.compile the candidate is {eager.verdict} as well: {eager.reason}", comparison
    return _region(found, compiled.compiled()), "without torch.compile the candidate is equivalent", comparison


def _region(found: Verdict, regions: Sequence[str]) -> Culprit | None:
    first = found.first
    if first is None:
        return None
    made = first.kind in ("output", "grad_input")  # by the module itself; what it is given is made around it
    module = first.name if made else first.name.rpartition(".")[0]
    around = [r for r in regions if module == r or not r or module.startswith(f"{r}.")]
    region = max(around, key=len) if around else module
    what = f"the compiled region {region}" if region else "the compiled model" if around else f"compiled code in {module or 'the model'}"
    text = f"{what} {_deed(first)}; eager, the candidate is equivalent: what the compiler made of it is wrong"
    return Culprit(region, _DIRECTIONS.get(first.kind, "forward"), first.source, text, first.ratio)


def _deed(first: TensorVerdict) -> str:
    words = {
        "input": f"gives {first.name} another input",
        "output": "gives another result",
        "grad_output": f"gives another gradient of what {first.name} puts out",
        "grad_input": "gives another gradient of its input",
        "main_grad": f"gives another gradient of {first.name}",
    }
    return words.get(first.kind, f"makes another update of {first.name}")
