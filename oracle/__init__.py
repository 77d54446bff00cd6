"""The oracle: is a distributed run the same computation as its reference, and if not, which module is wrong?

    proctor.oracle.compare("reference", "candidate")          # two recordings → Verdict
    with proctor.oracle.trace(model, out="candidate"): …       # record from within a program
    proctor.oracle.Plan("dp=2,tp=2").shard(r"layers\\.\\d+\\.fc1\\.weight", tp=0)

Without torch at import.
"""

from __future__ import annotations

from proctor.oracle.judging.verdicts import Verdict
from proctor.oracle.plans.plan import Plan
from proctor.oracle.recording.outcome import compare
from proctor.oracle.recording.tracing import trace, trace_reference

__all__ = ["Plan", "Verdict", "compare", "trace", "trace_reference"]
