"""What an optimizer's state owes to its gradient.

A moment of the first step is the gradient, or its square, times a constant. A square doubles the gradient's rounding and
weighs it by the largest elements, which four noise samples may all have missed: a gradient at 0.8 of its tolerance put its
second moment at 1.4. So the part of a moment's difference that the candidate's own gradient makes is the gradient's
difference, and judged there.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

POWERS: Final = (1, 2)
FITS: Final = 4.0  # roundings by which a moment may miss the power of its gradient


def owed(state: Any, gradient: Any, own: Any, rounding: float) -> Doubles | None:
    """What a state becomes by another gradient.

    Args:
        state: of the reference, after the step.
        gradient: that it took; of the state's shape.
        own: the candidate's, likewise.
        rounding: unit roundoff of the coarser type of the two.

    Returns:
        the difference that `own` makes, `None` where the state is no multiple of a power of the gradient.
    """
    s, g, h = (np.asarray(x, np.float64) for x in (state, gradient, own))
    size = float(np.linalg.norm(s.ravel()))
    if s.shape != g.shape or g.shape != h.shape or not 0.0 < size < np.inf or not np.isfinite(h).all():
        return None
    for power in POWERS:
        basis = g**power
        square = float(np.vdot(basis, basis))
        if not 0.0 < square < np.inf:
            continue
        factor = float(np.vdot(basis, s)) / square
        if float(np.linalg.norm((s - factor * basis).ravel())) <= FITS * rounding * size:
            return factor * (h**power - basis)
    return None
