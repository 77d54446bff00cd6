"""Is a parallel program the same formula as its single-device form? A proof for all data, beside the measured comparison.

    proctor oracle prove --reference "python train.py" --candidate "torchrun --nproc-per-node 4 train.py --tp 2"

One training step of every rank is recorded as operations below autograd (`recorder.py`, `session.py`), and all ranks are run
together in other numbers (`machine.py`, `domains/`): doubles, a finite field, polynomials. Verdicts: `verdict.py`.
"""

from __future__ import annotations

from proctor.oracle.prove.verdict import Culprit, Verdict

__all__ = ["Culprit", "Verdict"]
