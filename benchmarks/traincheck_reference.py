"""TrainCheck's own verdict on every invariant of some files, one JSON object a line.

Runs inside an environment that has TrainCheck, not Proctor; `traincheck_verdicts.py` compares the result with ours.

    python benchmarks/traincheck_reference.py TRACE_FOLDER INVARIANTS… > verdicts.jsonl

A line holds the file, the line of the invariant in it, and `failed`, `passed`, `idle` (not triggered) or `crash` with
TrainCheck's exception. Unlike `traincheck-check`, an invariant that crashes the checker does not cost the others.
"""

from __future__ import annotations

import gzip
import json
import shutil
import sys
import tempfile
from pathlib import Path


def main(folder: str, invariant_files: list[str]) -> int:
    """Print a verdict for each invariant; 3 where TrainCheck is not installed."""
    try:
        from traincheck.invariant import read_inv_file
        from traincheck.trace import select_trace_implementation
    except ImportError:
        print("skipped: traincheck is not installed in this environment", file=sys.stderr)
        return 3
    _, read = select_trace_implementation("pandas")
    with tempfile.TemporaryDirectory() as scratch:
        trace = read([str(path) for path in _plain(Path(folder), Path(scratch))])
    for name in invariant_files:
        for number, invariant in enumerate(read_inv_file(name)):
            verdict, why = _verdict(invariant, trace)
            row = {"file": name, "line": number, "relation": invariant.relation.__name__, "verdict": verdict, "why": why}
            print(json.dumps(row), flush=True)
    return 0


def _plain(folder: Path, scratch: Path) -> list[Path]:
    """Trace files of a folder, unpacked where they are compressed, which TrainCheck cannot read."""
    found = []
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(("trace_", "proxy_log.json")):
            continue
        if path.suffix == ".gz":
            target = scratch / path.stem
            with gzip.open(path) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            path = target
        found.append(path)
    return found


def _verdict(invariant: object, trace: object) -> tuple[str, str]:
    try:
        result = invariant.check(trace, False)  # type: ignore[attr-defined]
    except Exception as error:  # noqa: BLE001  whatever it is, the other invariants are still to be judged
        return "crash", f"{type(error).__name__}: {str(error)[:200]}"
    if not result.check_passed:
        return "failed", ""
    return ("passed" if result.triggered else "idle"), ""


if __name__ == "__main__":
    if len(sys.argv) < 3:
        print(__doc__, file=sys.stderr)
        sys.exit(2)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
