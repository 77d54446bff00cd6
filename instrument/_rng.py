"""The states of the process's random generators: read without drawing, and set again.

torch on the CPU and on each CUDA device in use, Python's `random`, numpy's legacy generator.
"""

from __future__ import annotations

import random
import sys
from typing import Any, Final, NamedTuple

from proctor.invariants.capsule import Plain

PYTHON_WORDS: Final = 625  # 624 of the state and the position


class RngState(NamedTuple):
    """One generator: its words (a tensor, array or tuple) and what else its state consists of."""

    name: str
    words: Any
    plain: dict[str, Plain]


def read(everything: bool = True) -> list[RngState]:
    """States now.

    Args:
        everything: also Python's and numpy's; else those that layers draw from.
    """
    import torch

    found = [RngState("torch", torch.default_generator.get_state(), {})]
    if torch.cuda.is_initialized():
        for i, generator in enumerate(torch.cuda.default_generators):
            found.append(RngState(f"cuda:{i}", generator.get_state(), {}))
    if everything:
        _, words, gauss = random.getstate()
        found.append(RngState("python", words, {"gauss": gauss}))
        legacy = _numpy()
        state = legacy.get_state(legacy=False) if legacy is not None else {}
        if state.get("bit_generator") == "MT19937":
            inner = state["state"]
            plain: dict[str, Plain] = {
                "pos": int(inner["pos"]),
                "has_gauss": int(state["has_gauss"]),
                "gauss": float(state["gauss"]),
            }
            found.append(RngState("numpy", inner["key"].copy(), plain))
    return found


def write(state: RngState) -> bool:
    """Set one generator; False where this process has none of that name.

    Raises:
        ValueError, TypeError, RuntimeError: the state is not one of that generator.
    """
    import torch

    if state.name == "torch":
        torch.default_generator.set_state(state.words)
    elif state.name.startswith("cuda:"):
        index = int(state.name.partition(":")[2])
        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            return False
        torch.cuda.init()
        torch.cuda.default_generators[index].set_state(state.words)
    elif state.name == "python":
        gauss = state.plain.get("gauss")
        random.setstate((3, tuple(int(w) for w in state.words), None if gauss is None else float(gauss)))
    elif state.name == "numpy":
        legacy = _numpy()
        if legacy is None:
            return False
        legacy.set_state(
            {
                "bit_generator": "MT19937",
                "state": {"key": state.words, "pos": int(state.plain.get("pos") or 0)},
                "has_gauss": int(state.plain.get("has_gauss") or 0),
                "gauss": float(state.plain.get("gauss") or 0.0),
            }
        )
    else:
        return False
    return True


def _numpy() -> Any:
    module = sys.modules.get("numpy.random")
    return getattr(getattr(module, "mtrand", None), "_rand", None)
