"""The tables and pictures of the oracle in docs/evaluation.md, after TTrace's Table 3 and Figures 8 and 9.

    python benchmarks/oracle_tables.py OUT [--write] [--only table3,depth,bugs] [--exam DIR] [--layers 64]

* `table3`: what fixed tolerances (`torch.allclose` with the paper's four settings) say of the same tensors: how many
  correct candidates they reject and how many wrong ones they accept. Candidates: programs of `examples/oracle/`, correct
  and with every mistake of `injected.py`, float32 and bfloat16, and the recordings of `oracle_exam.py --work DIR`.
* `depth`: the estimated error of the activations and their gradients along a model of many layers (Figure 8).
* `bugs`: along the depth the error of a mistake, of a correct tensor-parallel candidate, and the estimate (Figure 9).

Errors are relative to the tensor and in units of the roundoff of the tensor's type. Numbers are kept in OUT/tables.json;
`--write` puts the table into docs/evaluation.md and the pictures beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from oracle_sweep import FOLDER, ROOT, Case, Configuration, Sweep, Warm, WarmRecorder, example_cases, mistakes

from proctor.errors import ProctorError
from proctor.oracle.judging.check import Comparison
from proctor.oracle.judging.verdicts import TensorVerdict, Verdict
from proctor.oracle.numbers.difference import compare
from proctor.oracle.numbers.dtypes import as_float, is_floating
from proctor.oracle.numbers.tolerance import UNIT_ROUNDOFF
from proctor.oracle.store import Recording

SETTINGS: Final = ((0.0, 1e-5), (1e-8, 1e-5), (1e-5, 1e-2), (1e-2, 1e-1))  # (atol, rtol) of TTrace's Table 3
DOCS = ROOT / "docs" / "evaluation.md"
PICTURES = ROOT / "docs" / "pictures"
BEGIN, END = "<!-- oracle-tables -->", "<!-- /oracle-tables -->"
DTYPES = ("float32", "bfloat16")
COLOURS = ("#2563eb", "#d97706", "#16a34a", "#dc2626", "#7c3aed", "#64748b")


def rejected(comparison: Comparison, found: Verdict) -> dict[tuple[float, float], int]:
    """How many of the tensors that were judged `allclose` takes for wrong, by its settings."""
    out = dict.fromkeys(SETTINGS, 0)
    for tensor in found.tensors:
        key = (tensor.step, tensor.call, tensor.kind, tensor.name, tensor.slot)
        entry = comparison.reference.entries.get(key)
        merged = comparison.assembler.merge(key) if entry is not None else None
        if tensor.verdict in ("unmapped", "missing", "shape") or entry is None or merged is None or merged.full is None:
            continue
        mine = as_float(merged.full, entry.dtype).astype(np.float64)
        if tensor.kind.startswith("grad_"):
            mine = mine / comparison.assembler.gradient_scale
        theirs = comparison.reference.floats(entry).astype(np.float64)
        for atol, rtol in SETTINGS:
            out[atol, rtol] += not np.allclose(mine, theirs, rtol=rtol, atol=atol, equal_nan=True)
    return out


@dataclass
class Count:
    """Of one criterion: runs that were judged wrongly."""

    correct: int = 0
    rejected: int = 0
    wrong: int = 0
    accepted: int = 0

    def add(self, mistaken: bool, raised: bool) -> None:
        if mistaken:
            self.wrong += 1
            self.accepted += not raised
        else:
            self.correct += 1
            self.rejected += raised


def table3(sweep: Sweep, exam: Path | None, each: int) -> dict[str, Any]:
    """Fixed tolerances and ours on the same recordings."""
    cases = [c for c in example_cases([0], DTYPES) if c.configuration is not None and c.configuration.program != "llama_tp"]
    rng = random.Random(4)
    chosen: list[tuple[Case, str]] = mistakes(cases, each)
    chosen += [(c, "") for c in rng.sample(cases, min(len(cases), len(chosen)))]
    counts: dict[str, Count] = defaultdict(Count)
    for case, mistake in chosen:
        folder = sweep.out / "table3"
        more = ("--bug", mistake) if mistake else ()
        try:
            reference = sweep.reference(case.reference)
            WarmRecorder(sweep.warm, case.world, folder, (*case.candidate, *more), samples=0).record()
            _count(counts, Comparison(reference, Recording(folder)), bool(mistake))
        except ProctorError as e:
            print(f"{mistake} {case.name}: {e}", file=sys.stderr)
    for reference_folder in sorted(exam.glob("*/reference")) if exam is not None else []:
        for side in ("fixed", "buggy"):
            candidate = reference_folder.parent / side
            if (candidate / "oracle.json").exists():
                _count(counts, Comparison(Recording(reference_folder), Recording(candidate)), side == "buggy")
    return {name: vars(count) for name, count in counts.items()}


def _count(counts: dict[str, Count], comparison: Comparison, mistaken: bool) -> None:
    verdict = comparison.run()
    if verdict.verdict == "inconclusive":
        return
    counts["ours"].add(mistaken, verdict.verdict == "different")
    for (atol, rtol), count in rejected(comparison, verdict).items():
        counts[f"{atol:g} {rtol:g}"].add(mistaken, count > 0)


def estimates(recording: Recording) -> dict[tuple[str, str], float]:
    """The estimated relative error of each tensor of a reference, in units of its roundoff: (kind, name) → E / (u·‖R‖)."""
    clean = recording.ranks()[0]
    samples = [recording.ranks(name)[0] for name in recording.noise()]
    keyed = [{(e.call, e.kind, e.name, e.slot): e for e in s.entries if not e.recompute} for s in samples]
    found: dict[tuple[str, str], float] = {}
    for entry in clean.entries:
        if entry.recompute or entry.call or entry.step or not is_floating(entry.dtype):
            continue
        mine = np.ascontiguousarray(clean.array(entry))
        place = (entry.call, entry.kind, entry.name, entry.slot)
        off = [
            compare(np.ascontiguousarray(s.array(k[place])), mine, entry.dtype).error ** 2
            for s, k in zip(samples, keyed, strict=True)
            if place in k
        ]
        size = compare(mine, mine, entry.dtype).size
        if off and size:
            found[entry.kind, entry.name] = math.sqrt(sum(off) / len(off)) / size / UNIT_ROUNDOFF[entry.dtype]
    return found


def depth(sweep: Sweep, layers: int) -> dict[str, Any]:
    """Estimates along the layers of models of 4, 8, … layers."""
    found: dict[str, Any] = {}
    for dtype in DTYPES:
        count = 4
        while count <= layers:
            script = str(FOLDER / "parallel_gpt.py")
            reference = sweep.reference((script, "--layers", str(count), "--dtype", dtype))
            all_of = estimates(reference)
            for kind in ("output", "grad_output"):
                found[f"{dtype} {kind} {count}"] = _along(all_of.get((kind, f"layers.{i}")) for i in range(count))
            gradients = [v for (kind, _), v in all_of.items() if kind == "main_grad"]
            found[f"{dtype} main_grad {count}"] = float(np.median(gradients))
            count *= 2
    return found


def _along(values: Iterable[float | None]) -> list[float | None]:
    return list(values)


def bugs(sweep: Sweep, layers: int) -> dict[str, Any]:
    """Errors along the layers: of a correct candidate, of a mistake, and the estimate."""
    found: dict[str, Any] = {"layers": layers}
    for dtype in DTYPES:
        shared = ("--layers", str(layers), "--dtype", dtype)
        configuration = Configuration("parallel_gpt", ("--mesh", "tp=2"), shared)
        script = str(FOLDER / "parallel_gpt.py")
        reference = sweep.reference((script, *shared))
        all_of = estimates(reference)
        for kind in ("output", "grad_output"):
            found[f"{dtype} {kind} estimate"] = _along(all_of.get((kind, f"layers.{i}")) for i in range(layers))
        for name, kinds in (("", ("output", "grad_output")), ("embedding_mask", ("output",)), ("input_grad_not_reduced", ("grad_output",))):
            folder = sweep.out / "depth"
            more = ("--bug", name) if name else ()
            WarmRecorder(sweep.warm, 2, folder, (script, *configuration.arguments, *more), samples=0).record()
            tensors = Comparison(reference, Recording(folder)).run().tensors
            for kind in kinds:
                errors = {t.name: _error(t, dtype) for t in tensors if t.kind == kind and t.call == 0}
                found[f"{dtype} {kind} {name or 'correct'}"] = _along(errors.get(f"layers.{i}") for i in range(layers))
    return found


def _error(tensor: TensorVerdict, dtype: str) -> float | None:
    return tensor.rel_err / UNIT_ROUNDOFF[dtype] if math.isfinite(tensor.rel_err) else None


def chart(title: str, x_title: str, y_title: str, series: Mapping[str, Sequence[tuple[float, float]]], *, x_log: bool = False) -> str:
    """A line chart with a logarithmic y axis, as SVG."""
    width, height, left, top, right, bottom = 560, 330, 62, 34, 178, 46
    points = [p for line in series.values() for p in line if p[1] > 0]
    x_of: Callable[[float], float] = math.log2 if x_log else float
    xs, ys = [x_of(p[0]) for p in points], [math.log10(p[1]) for p in points]
    x_low, x_high, y_low, y_high = min(xs), max(xs), math.floor(min(ys)), math.ceil(max(ys))
    y_high = max(y_high, y_low + 1)
    inner_w, inner_h = width - left - right, height - top - bottom

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x_of(x) - x_low) / ((x_high - x_low) or 1)
        return left + across * inner_w, top + (y_high - math.log10(y)) / (y_high - y_low) * inner_h

    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{left}" y="18" font-size="13">{title}</text>',
    ]
    for power in range(y_low, y_high + 1):
        y = top + (y_high - power) / (y_high - y_low) * inner_h
        out.append(f'<line x1="{left}" x2="{left + inner_w}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        out.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">10<tspan dy="-4" font-size="8">{power}</tspan></text>')
    ticks = sorted({p[0] for p in points})
    for tick in ticks if len(ticks) <= 8 else ticks[:: max(1, len(ticks) // 8)]:
        x, _ = at(tick, 10.0**y_low)
        out.append(f'<text x="{x:.1f}" y="{height - bottom + 16}" text-anchor="middle">{tick:g}</text>')
    out.append(f'<text x="{left + inner_w / 2}" y="{height - 12}" text-anchor="middle">{x_title}</text>')
    out.append(f'<text transform="translate(14 {top + inner_h / 2}) rotate(-90)" text-anchor="middle">{y_title}</text>')
    for i, (label, line) in enumerate(series.items()):
        colour, dash = COLOURS[i % len(COLOURS)], ' stroke-dasharray="5 3"' if "estimate" in label else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in line if p[1] > 0))
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>')
        y = top + 10 + 17 * i
        out.append(f'<line x1="{width - right + 10}" x2="{width - right + 34}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="1.8"{dash}/>')
        out.append(f'<text x="{width - right + 39}" y="{y + 4}">{label}</text>')
    return "\n".join([*out, "</svg>", ""])


def pictures(found: Mapping[str, Any], folder: Path) -> None:
    """The pictures of what there is."""
    folder.mkdir(parents=True, exist_ok=True)
    if "depth" in found:
        data = found["depth"]
        series: dict[str, list[tuple[float, float]]] = {}
        for dtype in DTYPES:
            counts = sorted({int(k.split()[2]) for k in data if k.startswith(dtype)})
            series[f"{dtype}: last output"] = [(n, data[f"{dtype} output {n}"][-1]) for n in counts]
            series[f"{dtype}: last gradient"] = [(n, data[f"{dtype} grad_output {n}"][0]) for n in counts]
            series[f"{dtype}: weights (median)"] = [(n, data[f"{dtype} main_grad {n}"]) for n in counts]
        text = chart("Estimated error by the depth of the model", "layers", "relative error / u", series, x_log=True)
        (folder / "oracle-depth.svg").write_text(text)
    if "bugs" in found:
        data = found["bugs"]
        for kind, mistake, title in (
            ("output", "embedding_mask", "Forward: wrong mask of the embedding"),
            ("grad_output", "input_grad_not_reduced", "Backward: input gradient not reduced in the middle layer"),
        ):
            series = {}
            for dtype in DTYPES:
                for what in ("estimate", "correct", mistake):
                    line = data.get(f"{dtype} {kind} {what}", [])
                    label = f"{dtype}: {'mistake' if what == mistake else what}"
                    series[label] = [(i, v) for i, v in enumerate(line) if v]
            text = chart(title, "layer", "relative error / u", {k: v for k, v in series.items() if v})
            (folder / f"oracle-bug-{'forward' if kind == 'output' else 'backward'}.svg").write_text(text)


def markdown(found: Mapping[str, Any]) -> str:
    """The text between the markers."""
    out: list[str] = []
    if "table3" in found:
        counts = found["table3"]
        ours = counts["ours"]
        out += [
            f"{ours['correct']} correct candidates and {ours['wrong']} wrong ones, the same tensors for each criterion; a candidate is "
            "rejected when one tensor is.",
            "",
            "| criterion | correct candidates rejected | wrong candidates accepted |",
            "|---|---|---|",
        ]
        for atol, rtol in SETTINGS:
            c = counts[f"{atol:g} {rtol:g}"]
            out.append(f"| `allclose(atol={atol:g}, rtol={rtol:g})` | {c['rejected']} of {c['correct']} | {c['accepted']} of {c['wrong']} |")
        out += [f"| estimated per tensor | {ours['rejected']} of {ours['correct']} | {ours['accepted']} of {ours['wrong']} |", ""]
    if "depth" in found:
        data = found["depth"]
        counts_ = sorted({int(k.split()[2]) for k in data})
        out += ["Estimated relative error in units of the roundoff of the type (`parallel_gpt.py`, width 32):", ""]
        out += ["| | " + " | ".join(f"{n} layers" for n in counts_) + " |", "|---|" + "---|" * len(counts_)]
        for dtype in DTYPES:
            for name, pick in (("output of the last layer", ("output", -1)), ("gradient at the first layer", ("grad_output", 0))):
                values = [data[f"{dtype} {pick[0]} {n}"][pick[1]] for n in counts_]
                out.append(f"| {dtype}, {name} | " + " | ".join(f"{v:.2g}" for v in values) + " |")
            out.append(f"| {dtype}, weight gradients (median) | " + " | ".join(f"{data[f'{dtype} main_grad {n}']:.2g}" for n in counts_) + " |")
        out += ["", "![Estimated error by depth](pictures/oracle-depth.svg)", ""]
    if "bugs" in found:
        data = found["bugs"]
        out += [
            f"A mistake, a correct tensor-parallel candidate and the estimate along {data['layers']} layers, median over the layers in "
            "units of the roundoff:",
            "",
            "| | estimate | correct candidate | mistake |",
            "|---|---|---|---|",
        ]
        for kind, mistake in (("output", "embedding_mask"), ("grad_output", "input_grad_not_reduced")):
            for dtype in DTYPES:
                values = [_median(data.get(f"{dtype} {kind} {what}", [])) for what in ("estimate", "correct", mistake)]
                out.append(f"| {dtype}, {'forward' if kind == 'output' else 'backward'}, `{mistake}` | " + " | ".join(values) + " |")
        out += ["", "![Forward](pictures/oracle-bug-forward.svg) ![Backward](pictures/oracle-bug-backward.svg)", ""]
    return "\n".join(out).strip()


def _median(values: Sequence[float | None]) -> str:
    known = [v for v in values if v]
    return f"{float(np.median(known)):.2g}" if known else "–"


def write(text: str) -> None:
    """Put it between the markers of docs/evaluation.md."""
    page = DOCS.read_text()
    if BEGIN not in page:
        raise SystemExit(f"{DOCS.name} has no {BEGIN}")
    DOCS.write_text(re.sub(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{text}\n{END}", page, flags=re.DOTALL))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default="table3,depth,bugs", help="comma-separated; what is not named comes from OUT/tables.json")
    parser.add_argument("--exam", type=Path, help="recordings that oracle_exam.py --work left")
    parser.add_argument("--layers", type=int, default=64, help="of the deepest model")
    parser.add_argument("--each", type=int, default=1, help="configurations for each mistake in table3")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into docs/evaluation.md")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    kept = args.out / "tables.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    wanted = [w for w in args.only.split(",") if w]
    warm = Warm(args.jobs)
    try:
        sweep = Sweep(args.out, warm)
        for name in wanted:
            if name == "table3":
                found[name] = table3(sweep, args.exam, args.each)
            elif name == "depth":
                found[name] = depth(sweep, args.layers)
            elif name == "bugs":
                found[name] = bugs(sweep, min(args.layers, 32))
            kept.write_text(json.dumps(found, indent=1))
    finally:
        warm.close()
    text = markdown(found)
    print(text)
    pictures(found, PICTURES if args.write else args.out)
    if args.write:
        write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
