"""Which few conditions tell passing from failing rows, one after another? A shallow decision tree on yes-or-no columns.

CART with the Gini index (Breiman et al. 1984), as scikit-learn's `DecisionTreeClassifier` does it, for columns of 0 and 1
only: importing that takes 1.1 s, the whole of a usual inference without it 0.5 s. Of equally good columns the first
is taken, so that the order of the columns says which are preferred.

Legend: P passing rows, F failing rows, L columns.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def leaves(passing_PL: Array, failing_FL: Array, depth: int) -> list[Array]:
    """The passing rows of each leaf that holds any, as indices in ascending order.

    Args:
        passing_PL: 0 or 1.
        failing_FL: 0 or 1, in the same columns.
        depth: splits from the root to a leaf at most.
    """
    rows_P, rows_F = np.arange(len(passing_PL)), np.arange(len(failing_FL))
    found: list[Array] = []
    nodes = [(rows_P, rows_F, depth)]
    while nodes:
        of_P, of_F, left = nodes.pop()
        passing, failing = passing_PL[of_P], failing_FL[of_F]
        column = _best(passing, failing) if left and len(of_P) and len(of_F) else None
        if column is not None:
            yes_P, yes_F = passing[:, column] > 0, failing[:, column] > 0
            nodes.append((of_P[yes_P], of_F[yes_F], left - 1))
            nodes.append((of_P[~yes_P], of_F[~yes_F], left - 1))
        elif len(of_P):
            found.append(of_P)
    return found


def _best(passing: Array, failing: Array) -> int | None:
    """The column whose two sides are purest; None if each column says the same of all rows."""
    n_pass, n_fail = len(passing), len(failing)
    pass_L, fail_L = passing.sum(axis=0, dtype=np.float64), failing.sum(axis=0, dtype=np.float64)
    size_L = pass_L + fail_L
    splits_L = (size_L > 0) & (size_L < n_pass + n_fail)
    if not splits_L.any():
        return None
    other_L = n_pass + n_fail - size_L
    with np.errstate(divide="ignore", invalid="ignore"):
        impurity_L = pass_L * fail_L / size_L + (n_pass - pass_L) * (n_fail - fail_L) / other_L
    return int(np.argmin(np.where(splits_L, impurity_L, np.inf)))
