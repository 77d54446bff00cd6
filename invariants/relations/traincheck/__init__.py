"""TrainCheck's relations, evaluated as TrainCheck evaluates them: rules that `proctor import` brought.

A rule of another tool means what that tool's checker makes of it, down to which calls it looks at. So each family is
a relation of its own here, on the records of an imported run (`records.py`), and none proposes rules: our own
inference has its own relations. Source: Jiang et al., OSDI 2025, §3, and the behaviour of TrainCheck 0.2.0.
"""

from __future__ import annotations

from proctor.invariants.relations.traincheck import consistency, contain, distinct, order, tensors

__all__ = ["consistency", "contain", "distinct", "order", "tensors"]
