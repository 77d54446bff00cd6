"""What a look at all objects of a program costs, for modules and for copies of a model: native and by the twin, in turn.

    python benchmarks/living.py [--objects 1000000]

Prints for a bare process and for one with a data set of so many tuples, each with a list in it: the objects that the garbage collector knows, milliseconds of
`gc.get_objects()` alone, of a look for modules and for copies of one model (both with that list made before), and the ratios twin / native. The least of seven turns each.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from proctor import native
from proctor.native.twins import living as twin

TURNS = 7
PARAMETERS = 6


def least(*asked: Callable[[], Any]) -> list[float]:
    """Milliseconds of processor, the least of several turns, in turn."""
    found: list[list[float]] = [[] for _ in asked]
    for _ in range(TURNS):
        for times, ask in zip(found, asked, strict=True):
            begin = time.process_time()
            ask()
            times.append(1e3 * (time.process_time() - begin))
    return [min(times) for times in found]


def row() -> str:
    objects = gc.get_objects()
    kinds = (torch.Tensor, nn.Parameter)
    listed, modules, plain_modules, copies, plain_copies = least(
        gc.get_objects,
        lambda: native.living(objects, nn.Module),
        lambda: twin.living(objects, nn.Module),
        lambda: native.holders(objects, PARAMETERS, "0.weight", kinds, OrderedDict),
        lambda: twin.holders(objects, PARAMETERS, "0.weight", kinds, OrderedDict),
    )
    return f"{len(objects):10,} objects: listed {listed:.0f} ms; modules {modules:.1f} ms (twin {plain_modules / modules:.1f} times); copies {copies:.1f} ms (twin {plain_copies / copies:.1f} times)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=int, default=1_000_000)
    args = parser.parse_args()
    print(f"native: {native.ACTIVE}")
    print(row(), flush=True)
    data = [(i, [i]) for i in range(args.objects)]
    print(row())
    del data


if __name__ == "__main__":
    main()
