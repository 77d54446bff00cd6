"""The head of a finding's script: what a maintainer of the library reads first, who has never seen this tool.

What is switched on, in the library's words; what was expected and what was seen; the versions; how the rest of the text is to be read. `script` puts it first.
"""

from __future__ import annotations

import platform
import textwrap
from typing import Final

from proctor.oracle.fuzz.axes import axis_of, wrappers
from proctor.oracle.fuzz.program import model_code
from proctor.oracle.fuzz.running.judge import MISSING, OWN, Difference
from proctor.oracle.fuzz.search.findings import Finding
from proctor.oracle.fuzz.space import Value

WIDTH: Final = 150
MOST: Final = 420  # characters of an exception's message, or of a trigger set
ITSELF: Final = ("optimizer", "keras_optimizer", "precision")  # axes whose value says what it is
WORDS: Final = {
    "world": "ranks", "option": "an argument of the optimizer", "clip": "how gradients are clipped", "hand_call": "the collective", "exchange_call": "the collective", "form": "what the training step does", "init": "how the last matrix is set once the model is wrapped", "resume": "how the state is saved and loaded again",
    "fsdp1_state": "saved and loaded by FSDP1's own state dictionaries", "rec_sharder": "the sharder",
}  # fmt: skip  of axes whose own first sentence is of the whole axis
MODELS: Final = {"unused": "a layer that is not used", "sometimes unused": "layers that a batch may not use", "frozen": "a frozen layer", "tied": "tied weights", "sparse": "sparse gradients", "unused rows": "rows that are not used"}


def head(finding: Finding, versions: str, *, reads: str, brief: bool = False) -> list[str]:
    """The lines of a docstring.

    Args:
        finding: with its smallest scenario.
        versions: of the library, and of what it stands on.
        reads: how the text below is to be read.
        brief: without what the axes of the trigger set are, where the script would be long.
    """
    said = [
        f"Expected: {_expected(finding)}.",
        f"Seen: {_seen(finding)}.",
        f"Trigger set (without any of it, all is well): {_triggers(finding, brief=brief)}.",
        f"{versions}; {_machine(finding)}. Exit code 1 while it is so, 0 once it is mended. {reads}",
    ]
    plain = [" ".join(part.split()).replace("\\", "/").replace('"', "'") for part in said]
    lines = [line for number, part in enumerate(plain) for line in textwrap.wrap(f'"""{part}' if not number else part, WIDTH, break_on_hyphens=False)]
    return [*lines[:-1], f'{lines[-1]}"""']


def _expected(finding: Finding) -> str:
    first = finding.outcome.first
    if first is None:
        return {"hang": "every rank ends", "replicas": "replicas that are the same in every bit"}.get(finding.outcome.verdict, "no exception; the reference raises none")
    value = first.reference if first.candidate else "the reference's"
    allowed = f", give or take {max(first.allowed, OWN * first.noise):.2g}" if first.candidate else ""
    return f"{_named(first)} is {value}{allowed}"


def _seen(finding: Finding) -> str:
    first = finding.outcome.first
    if first is None:
        return _cut(finding.outcome.why)
    way = f" ({first.way})" if first.way and first.candidate else ""
    off = f", off by {first.error:.3g}" if first.error < MISSING else ""
    return f"{first.candidate or first.way}{off}{way}, on rank {first.rank}; nothing is raised"


def _named(first: Difference) -> str:
    plain, _, key = first.name.partition(":")
    what = {"output": "the model's output", "evaluation": f"what the trained model gives{f' ({plain})' if plain else ''}", "gradient": f"the gradient of {plain}", "clipped": f"the clipped gradient of {plain}"}
    more = {"state": f"the optimizer's {key} of {plain}", "parameter": f"the updated parameter {plain}", "buffer": f"the buffer {plain}"}
    return f"{what.get(first.kind) or more.get(first.kind, f'{first.kind} {first.name}')} in step {first.step}"


def _triggers(finding: Finding, *, brief: bool) -> str:
    named = [f"{name}={value}{'' if brief else _says(name, value)}" for name, value in finding.triggers.items()]
    subject = model_code(finding.scenario).subject
    special = [f"the expression {need}" if need == subject else f"a model with {MODELS.get(need, need)}" for need in finding.needs]
    return _cut(", ".join([*named, *special]) or "any setting")


def _says(name: str, value: Value) -> str:
    """An axis in words: what it stands for in the library."""
    if name in ITSELF:
        return ""
    about = wrappers().get(str(value)) if name == "wrapper" else axis_of(name)
    text = WORDS.get(name) or (type(about).__doc__ or "").strip().split("\n")[0]
    words = text.partition(";")[0].partition(": ")[0].rstrip(".")
    return f" ({words[:1].lower()}{words[1:]})" if words else ""


def _cut(text: str) -> str:
    return text if len(text) <= MOST else f"{text[:MOST]} …"


def _machine(finding: Finding) -> str:
    if any(name.startswith("keras") for name in finding.scenario.setting) or finding.scenario.template.startswith("keras"):
        return f"CPU, {platform.system()} {platform.machine()}"
    return f"gloo on the CPU, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
