"""How the cost of a proof grows with layers, ranks and microbatches.

    python benchmarks/prove_table.py [--proof S] [--rows N …]

One step (forward, backward, reduction, clipping, AdamW) of `examples/oracle/parallel_gpt.py`, tiny, cut by DTensor and DDP on a fake process
group. Each row is recorded and proved as a whole: nothing is composed, so a row says nothing of larger ones.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings

import prove_mistakes

TINY = "--width 8 --heads 4 --vocab 8 --context 4 --steps 1 --rows 4".split()
ROWS = [
    "--layers 1 --mesh tp=2", "--layers 2 --mesh tp=2", "--layers 4 --mesh tp=2", "--layers 8 --mesh tp=2", "--layers 1 --mesh tp=4",
    "--layers 1 --mesh dp=2", "--layers 1 --mesh dp=4", "--layers 1 --mesh dp=2 --microbatches 2", "--layers 1 --mesh dp=2 --microbatches 4",
    "--layers 1 --mesh dp=2,tp=2",
]  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proof", type=float, default=600.0, metavar="S", help="seconds for each proof")
    parser.add_argument("--rows", type=int, nargs="*", default=range(len(ROWS)))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    prove_mistakes.SMALL = TINY
    for row in args.rows:
        began = time.process_time()
        verdict = prove_mistakes.judge("parallel_gpt", ROWS[row].split(), None, args.proof)
        print(json.dumps({"row": ROWS[row], "verdict": verdict.verdict, "operations": verdict.operations, "outputs": verdict.outputs, "cpu_s": round(time.process_time() - began, 1)}), flush=True)


if __name__ == "__main__":
    main()
