"""A finding of Keras as one stand-alone script: Keras and TensorFlow alone, exit code 1 while the bug is there and 0 once it is gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from proctor.oracle.fuzz.keras.program import IMPORTS, program, replicas
from proctor.oracle.fuzz.program import reference_of
from proctor.oracle.fuzz.search.findings import Finding

DEVICES: Final = (
    "tf.config.set_logical_device_configuration(tf.config.list_physical_devices('CPU')[0], [tf.config.LogicalDeviceConfiguration()] * 4)",
    "FOLDER = tempfile.mkdtemp()",
)
READS: Final = "train(0) is the reference; what stands under `if world` is done under the strategy alone."
Merge = Callable[[Sequence[str], Sequence[str]], list[str]]


def lines_of(finding: Finding, merged: Merge) -> list[str]:
    """Write it, without its head.

    Args:
        finding: with its smallest scenario.
        merged: makes one function of two: lines that differ stand under `if world`.
    """
    scenario, first = finding.scenario, finding.outcome.first
    candidate, reference = program(scenario), program(reference_of(scenario), asked=(first.name,) if first is not None and first.kind == "evaluation" else ())
    ours = replicas(scenario) or -1  # -1: the candidate has no strategy either
    return [
        "import sys, tempfile",
        *IMPORTS,
        *DEVICES,
        *candidate[1],
        *(line for here, there in zip(reference[2:], candidate[2:], strict=True) for line in merged(here, there)),
        *_end(finding, ours),
    ]


def _end(finding: Finding, ours: int) -> list[str]:
    first = finding.outcome.first
    alone = ["world = 0", "want = train(0)  # no strategy: runs", "keras.utils.clear_session()", f"world = {ours}", f"got = train({ours})"]
    if first is None:
        if finding.outcome.verdict == "replicas":
            return [*alone, "parts = [[np.asarray(p) for p in getattr(w.value, 'values', ())] for w in (*net.trainable_weights, *net.optimizer.variables)]",
                    "sys.exit(int(any((p != q[0]).any() for q in parts for p in q)))"]  # fmt: skip
        return alone
    key = f"({first.kind!r}, {first.name!r})"
    if not first.candidate:
        return [*alone, f"got, want = np.shape(got.get({key})), np.shape(want.get({key}))" if "shape" in first.way else f"got, want = {key} in got, {key} in want", "print('expected', want, 'seen', got)", "sys.exit(int(got != want))"]
    return [
        *alone,
        f"got, want = np.asarray(got[{key}], 'float64'), np.asarray(want[{key}], 'float64')",
        "error = np.abs(got - want).max()",
        "at = np.abs(got - want).argmax()", "print(f'expected {want.flatten()[at]:.8g}, seen {got.flatten()[at]:.8g}, off by {error:.3g}')",
        f"sys.exit(int(not error <= {first.allowed:.3g}))",
    ]
