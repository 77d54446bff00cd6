"""What constraints ask of a model and its input, besides the template's own traits: shapes of parameters, and rows.

The model is made once on torch's meta device, which has shapes and no numbers. Facts are words, as traits are, so that a `Rule` can name them:
"divides by N" (the last dimensions of all matrices do), "matrix" (there is one), "trains" (something requires a gradient), "wholly cut" (tensor parallelism cuts
every parameter), "rows N" (of the batch), "cut columns by N", "cut rows by N", "cut pairs by N", "cut inner by N" (so many ranks divide what a style of it cuts; the last
one between the layers of pairs alone), "pipeline of N" (parts that make the model one after the other), "pairs" (linear layers of which one follows the other), "sequence" (what lies between layers can stay cut
along rows or tokens), "tokens N" (they are tokens, so many), "numbers" (an input is of floating-point numbers).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import torch

from proctor.oracle.fuzz.axes import ALONE
from proctor.oracle.fuzz.models import template_of
from proctor.oracle.fuzz.program import IMPORTS, model_code
from proctor.oracle.fuzz.spec import Scenario

DIVISORS: Final = (2, 3, 4)


def facts(scenario: Scenario) -> frozenset[str]:
    """Traits and facts of a scenario's model and input."""
    code = model_code(scenario)
    if template_of(scenario.template).library in ALONE:
        return code.traits | {f"steps {scenario.given('steps')}"}
    shapes = _shapes(code.net, code.after, tuple(code.tensor_parallel), code.pairs, frozenset(n for n, k in code.tensor_parallel.items() if k == "embedding"))
    found = {f"rows {scenario.given('batch')}", f"pipeline of {len(code.stages)}"}
    if code.sequence and "" not in code.sequence:
        found.add(f"tokens {code.y[0]}")
    asked = {"pairs": code.pairs, "sequence": code.sequence, "numbers": "torch.rand" in code.x.replace("torch.randint", "")}
    return code.traits | shapes | found | {name for name, there in asked.items() if there}


@lru_cache(256)
def _shapes(net: tuple[str, ...], after: tuple[str, ...], cut: tuple[str, ...], pairs: tuple[tuple[str, str], ...], embeddings: frozenset[str]) -> frozenset[str]:
    names: dict[str, Any] = {"__name__": "fuzzed"}
    try:
        with torch.device("meta"), torch.random.fork_rng():
            exec("\n".join((*IMPORTS, *net, "net = Net()", *after)), names)  # our own text, as a rank executes it
    except Exception:  # noqa: BLE001  what cannot be made says so when it runs
        return frozenset({"matrix", "trains", *(f"divides by {n}" for n in DIVISORS)})
    parameters = dict(names["net"].named_parameters())
    found = {f"divides by {n}" for n in DIVISORS if all(p.shape[-1] % n == 0 for p in parameters.values() if p.ndim > 1)}
    if any(p.ndim == 2 for p in parameters.values()):
        found.add("matrix")
    if any(p.requires_grad for p in parameters.values()):
        found.add("trains")
    if all(name.rpartition(".")[0] in cut for name in parameters):
        found.add("wholly cut")
    widths = {name: parameters[f"{name}.weight"].shape for name in cut if f"{name}.weight" in parameters}
    paired = {name for pair in pairs for name in pair}
    outer = {name: shape[0] for name, shape in widths.items()}
    sides = {
        "columns": list(outer.values()),
        "rows": [shape[0] if name in embeddings else shape[1] for name, shape in widths.items()],
        "pairs": [size for name, size in outer.items() if name not in paired] + [outer[up] for up, _ in pairs if up in outer],
        "inner": [outer[up] for up, _ in pairs if up in outer],
    }
    found |= {f"cut {side} by {n}" for side, sizes in sides.items() for n in DIVISORS if sizes and all(size % n == 0 for size in sizes)}
    return frozenset(found)
