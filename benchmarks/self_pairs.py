"""Written pairs of a buggy and a clean program for `proctor oracle self`: is the bug found, is the culprit named, is the clean one silent?

    python benchmarks/self_pairs.py [--only NAME] [--jobs N] [--all] [--json FILE]

A pair is one program of `self_pairs_programs/` with and without `--bug NAME`. `compile` and `determinism` cost several seconds each and are checked for
their own pairs only, unless `--all` is given. Exit code 1 if a bug is missed or a clean program is not silent.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

PROGRAMS = Path(__file__).with_name("self_pairs_programs")
COSTLY = ("compile", "determinism")


class Pair(NamedTuple):
    """A bug, the relations that may find it, what the culprit must name (any of these words), and how the clean program is called."""

    program: str
    bug: str
    relations: tuple[str, ...]
    names: tuple[str, ...]
    clean: str = ""
    arguments: tuple[str, ...] = ()
    program_arguments: tuple[str, ...] = ()


PAIRS = [
    Pair("classifier", "norm_of_batch", ("neighbours",), ("norm",)),
    Pair("classifier", "running_by_hand", ("neighbours",), ("norm",)),
    Pair("classifier", "batch_softmax", ("neighbours",), ("softmax",)),
    Pair("classifier", "variance_cancels", ("precision",), ("norm",)),
    Pair("classifier", "half_inside", ("precision",), ("Net", "_to_copy")),
    Pair("classifier", "buffer_not_saved", ("resume",), ("Normed.level",), "buffer"),
    Pair("classifier", "counter", ("repeatable",), ("norm",)),
    Pair("classifier", "dropout_in_evaluation", ("repeatable",), ("bernoulli",)),
    Pair("classifier", "memory", ("repeatable",), ("Net",)),
    Pair("classifier", "branch_detached", ("parameters",), ("fc2",)),
    Pair("classifier", "input_forgotten", ("inputs",), ("Net",)),
    Pair("classifier", "divided_by_batch", ("world",), ("Net", "head", "fc")),
    Pair("classifier", "backward_by_batch", ("world",), ("Net", "fc", "norm", "side")),
    Pair("classifier", "row_weights", ("permutation",), ("Net",)),
    Pair("classifier", "model_replaced", ("parameters",), ("",)),
    Pair("language", "mask_missing", ("causal",), ("attention",)),
    Pair("language", "mask_off_by_one", ("causal",), ("attention",)),
    Pair("language", "heads_mixed", ("causal",), ("attention",)),
    Pair("language", "softmax_axis", ("neighbours",), ("attention",)),
    Pair("language", "conv_sees_ahead", ("causal",), ("mix",)),
    Pair("language", "norm_over_time", ("causal",), ("mean", "LM")),
    Pair("language", "position_of_row", ("permutation",), ("LM", "pos")),
    Pair("language", "ties_broken", ("tied",), ("head", "LM")),
    Pair("language", "not_divided", ("accumulation",), ("backward",)),
    Pair("language", "divided_twice", ("accumulation",), ("cross_entropy",)),
    Pair("language", "uneven_tokens", ("accumulation",), ("cross_entropy",), "tokens"),
    Pair("language", "not_divided", ("vary",), ("",), "", ("--vary", "--batch 8 --accum 1", "--batch 4 --accum 2", "--only", "vary")),
    Pair("encoder", "mask_forgotten", ("padding",), ("attend",)),
    Pair("encoder", "mask_inverted", ("padding",), ("attend",)),
    Pair("encoder", "mask_after_softmax", ("padding",), ("attend",)),
    Pair("encoder", "mean_over_padding", ("padding",), ("pool",)),
    Pair("loaders", "stream_twice", ("workers",), ("Stream",)),
    Pair("loaders", "position_kept", ("workers",), ("Table",), "table"),
    Pair("optimizers", "state_beside", ("resume",), ("Momentum",)),
    Pair("optimizers", "decay_forgotten", ("foreach",), ("Momentum",)),
    Pair("optimizers", "schedule_lost", ("resume",), ("Halving",)),
    Pair("blocks", "counted", ("checkpointing", "repeatable"), ("blocks",)),
    Pair("blocks", "numpy_noise", ("checkpointing", "repeatable"), ("blocks",)),
    Pair("blocks", "masks_drawn_anew", ("checkpointing",), ("blocks", "Net")),
    Pair("blocks", "other_when_compiled", ("compile",), ("Net", "blocks")),
    Pair("blocks", "seed_of_clock", ("determinism",), ("embed", "blocks", "head")),
    Pair("blocks", "order_of_set", ("determinism",), ("Net",)),
    Pair("ranks", "uneven_tokens", ("tokens",), ("loss",)),
    Pair("hugging", "not_divided", ("accumulation",), ("backward",)),
    Pair("hugging", "untied", ("tied",), ("lm_head", "GPT2")),
    Pair("hugging", "sees_ahead", ("causal",), ("transformer", "GPT2", "mean")),
    Pair("hugging", "mask_lost", ("padding",), ("bert", "Bert"), "bert"),
    Pair("configured", "mean_of_means", ("configured",), ("gradient", "GPT2", "loss"), arguments=("--only", "configured")),
    *(
        Pair("torchrun", bug, ("ranks",), (names,), arguments=("--only", "ranks"), program_arguments=("--with", way))
        for way, bug, names in (
            ("ddp", "divided_by_ranks", "gradient"), ("ddp", "no_sampler", "loader"), ("ddp", "one_rank_of_sampler", "loader"), ("ddp", "seeds_of_model", ""), ("ddp", "not_reduced", "gradient"),
            ("hand", "summed", "gradient"), ("hand", "one_forgotten", "head"), ("tokens", "uneven_tokens", "backward"), ("accelerate", "times_ranks", "gradient"),
            ("transformers", "uneven_tokens", ""), ("lightning", "divided_by_ranks", "gradient"),
        )
    ),
    Pair("torchrun", "divided_by_ranks", ("ranks",), ("gradient",), arguments=("--only", "ranks"), program_arguments=("--with", "norm")),
    *(
        Pair("configured", bug, ("configured",), ("gradient",), arguments=("--only", "configured"), program_arguments=("--with", library))
        for library, bug in (("accelerate", "divided_twice"), ("lightning", "divided_twice"), ("deepspeed", "divided_twice"))
    ),
]


def run(program: str, bug: str, relations: tuple[str, ...], arguments: tuple[str, ...], own: tuple[str, ...], *, everything: bool) -> dict[str, Any]:
    """The report of one program; an error stands in `error`."""
    skip = [x for name in COSTLY if name not in relations and not everything for x in ("--skip", name)] if "--only" not in arguments else []
    command = [sys.executable, str(PROGRAMS / f"{program}.py"), *own, *(["--bug", bug] if bug else [])]
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        done = subprocess.run([sys.executable, "-m", "proctor.cli", "oracle", "self", "--format", "json", "-o", f"{folder}/self", *skip, *arguments, "--", *command], capture_output=True, text=True, check=False)
        try:
            report = json.loads(done.stdout)
        except ValueError:
            return {"error": done.stderr.strip()[-300:], "outcomes": [], "verdict": "error", "seconds": time.monotonic() - began}
        return {**report, "seconds": time.monotonic() - began}


def judged(pair: Pair, report: dict[str, Any]) -> dict[str, Any]:
    """Whether the bug is found, and named."""
    broken = [o for o in report["outcomes"] if o["verdict"] == "different"]
    hits = [o for o in broken if o["relation"] in pair.relations]
    texts = [" ".join(map(str, (o["culprit"] or {}).values())) + (" " + o["reason"] if o["relation"] in ("tied", "parameters") else "") for o in hits]
    return {
        "program": pair.program, "bug": pair.bug, "wanted": "/".join(pair.relations), "broken": sorted({o["relation"] for o in broken}), "found": bool(hits),
        "named": any(word in text for text in texts for word in pair.names), "culprit": texts[0].strip() if texts else "", "error": report.get("error", ""), "seconds": round(report["seconds"], 1),
    }  # fmt: skip


def main() -> int:
    """Run all pairs, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], help="programs or bugs")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--all", action="store_true", help="also the costly relations")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pairs = [p for p in PAIRS if not args.only or p.program in args.only or p.bug in args.only]
    cleans: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], set[str]] = {}
    for p in pairs:
        cleans.setdefault((p.program, p.clean, p.arguments, p.program_arguments), set()).update(p.relations)
    with ThreadPoolExecutor(args.jobs) as pool:
        buggy = [pool.submit(lambda p=p: judged(p, run(p.program, p.bug, p.relations, p.arguments, p.program_arguments, everything=args.all))) for p in pairs]
        clean = {key: pool.submit(run, key[0], key[1], tuple(found), key[2], key[3], everything=args.all) for key, found in cleans.items()}
        rows = []
        for job in buggy:
            rows.append(row := job.result())
            print(f"{'ok  ' if row['found'] and row['named'] else 'MISS'} {row['program']:<11}{row['bug']:<22}{','.join(row['broken']):<28}{row['culprit'][:90]}{row['error'][-160:]}  {row['seconds']} s", flush=True)
        silent = {}
        for key, job in clean.items():
            report = job.result()
            broken = [f"{o['relation']}: {o['reason'][:100]}" for o in report["outcomes"] if o["verdict"] == "different"]
            silent[key] = report["verdict"] == "equivalent"
            print(f"{'ok  ' if silent[key] else 'LOUD'} {key[0]:<11}clean {key[1]:<16}{'; '.join(broken)}{report.get('error', '')}  {report['seconds']:.1f} s", flush=True)
    found, named = sum(r["found"] for r in rows), sum(r["found"] and r["named"] for r in rows)
    print(f"{found} of {len(rows)} bugs found, culprit named in {named}; {sum(silent.values())} of {len(silent)} clean programs silent")
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "clean": [{"program": k[0], "variant": k[1], "silent": v} for k, v in silent.items()]}, indent=1))
    return 0 if named == len(rows) and all(silent.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
