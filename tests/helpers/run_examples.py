"""Run scripts one after another in this process and print, after each, a digest of what it leaves behind.

    python run_examples.py ITERS SCRIPT…

One line a script: its RESULT, and hashes of the random states of torch, random and numpy.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import random
import runpy
import sys
from pathlib import Path

import numpy as np
import torch


def digest() -> str:
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    state.update(repr(random.getstate()).encode())
    state.update(np.random.get_state()[1].tobytes())  # type: ignore[union-attr]
    return state.hexdigest()


def main() -> None:
    iters, scripts = sys.argv[1], sys.argv[2:]
    for script in scripts:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        sys.argv = [script, "--iters", iters]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            runpy.run_path(script, run_name="__main__")
        result = [line for line in output.getvalue().splitlines() if line.startswith("RESULT ")]
        print("DIGEST " + json.dumps([Path(script).stem, result, digest()]), flush=True)


if __name__ == "__main__":
    main()
