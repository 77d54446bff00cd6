"""Manners that calls tell: arguments that are given, switches, calls of each step, modes of layers, random states of ranks."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

import polars as pl

from proctor.invariants.codec.signature import Plain
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import habits as _habits
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.calls import (
    ENOUGH,
    calls_of,
    circumstances_of,
    distinct_of,
    is_torch,
    open_calls,
    text_of,
)
from proctor.invariants.schema import Value
from proctor.invariants.trace import Trace

BY: Final = " > "  # caller and function
OF: Final = ": "  # subject, and what is said of it
SCRIPT: Final = "the script"  # a caller that is no function
_CALLS: Final = 4  # fewer show no manner
_TORCH: Final = re.compile(r"torch\.(nn\.(?!init|Module\.)|distributed\.(?!new_group|init|destroy|barrier)|utils\.checkpoint\.)")
_STEPS: Final = 6  # fewer show no manner of steps
_FIRST: Final = {"0", "1"}  # what torch's functions cannot do without
# Where torch's functions, that reduce or join, have their dimension.
_DIMENSIONS: Final = {
    **dict.fromkeys(("softmax", "log_softmax", "logsumexp", "sum", "mean", "std", "var", "cumsum", "argmax", "stack", "cat", "gather", "index_select"), "1"),
    **dict.fromkeys(("norm", "normalize"), "2"),
}  # fmt: skip
_PHASES: Final = {"train": " while the model trains", "eval": " while the model is evaluated"}
_SWITCHES: Final = r"^[^\[\].]+\.value$"
_LAYERS: Final = re.compile(r"torch\.nn\.(\w*BatchNorm\w*|InstanceNorm\w+|\w*Dropout\w*)\.forward")


def _finish(trace: Trace, rows: list[dict[str, Any]], mode: str) -> pl.DataFrame:
    """Examples of one mode; of each subject and verdict the first few."""
    schema = {"proc": pl.UInt16, "step": pl.Int32, "seq": pl.UInt32, "site": pl.UInt32, "what": pl.String, "passed": pl.Boolean, "_seen": pl.String, "_function": pl.String, "_variable": pl.String}
    found = pl.DataFrame(rows, schema=schema).sort("proc", "seq", maintain_order=True)
    found = found.filter(pl.int_range(pl.len()).over("proc", "what", "passed", _frames.news(trace)) < _sightings.MANY)
    return _sightings.example(_habits.with_family(trace, found), mode=mode)


def _subject(function: str, caller: str) -> str:
    """What a rule on a call's arguments speaks of: a function of the program, or one of torch where a function of the program calls it; "" for others."""
    if not is_torch(function):
        return function
    return f"{caller}{BY}{function}" if caller and not is_torch(caller) else ""


def _row(row: Mapping[str, Any], what: str, passed: bool | None, seen: str, function: str, variable: str = "") -> dict[str, Any]:
    place = {name: row[name] for name in ("proc", "step", "seq", "site")}
    return place | {"what": what, "passed": passed, "_seen": "" if passed else seen, "_function": function, "_variable": variable}


def _subjects(trace: Trace, kinds: re.Pattern[str], asked: Collection[str] | None = None) -> list[tuple[str, str, list[dict[str, Any]]]]:
    """Calls by subject: the subject, its function, and distinct calls of one process and step number from 0 on; those of which there are enough.

    Args:
        asked: subjects of rules; if they are named, a function of the program that several others call is a subject with each of these, too.
    """
    names = trace.functions
    found: dict[tuple[int, str], tuple[str, list[dict[str, Any]]]] = {}
    wanted = [code for code, name in enumerate(names) if name and (kinds.match(name) or not is_torch(name))]
    calls = distinct_of(trace).filter(pl.col("fn").is_in(wanted) & (pl.col("step") >= 0))
    callers = dict(calls.group_by("fn").agg(pl.col("pfn").n_unique()).iter_rows())
    for row in calls.iter_rows(named=True):
        function, caller = names[row["fn"]], names[row["pfn"]] or ""
        subjects = [_subject(function, caller)]
        if asked is not None and not is_torch(function) and not (caller and is_torch(caller)):
            called = f"{caller or SCRIPT}{BY}{function}"
            subjects += [called] if callers[row["fn"]] > 1 or called in asked else []
        for subject in filter(None, subjects):
            found.setdefault((row["proc"], subject), (function, []))[1].append(row)
    # What looks like an earlier call is an example, too; three are enough for a rule.
    return [(subject, function, [row for row in rows for _ in range(min(row["calls"], ENOUGH))]) for (_, subject), (function, rows) in found.items() if sum(row["calls"] for row in rows) >= _CALLS]


def _given(features: Mapping[str, Plain]) -> set[str] | None:
    """Positions and keywords at which a call was given something; `None` where its signature does not tell."""
    if "out.type" in features:
        return None
    return {re.split(r"[.\[]", name, maxsplit=1)[0] for name, value in features.items() if name.endswith(".type") and value != "NoneType"}


def _by_subject(wanted: Iterable[str]) -> dict[str, set[str]]:
    """What rules say, by their subject."""
    found: dict[str, set[str]] = {}
    for what in wanted:
        subject, _, said = what.partition(OF)
        found.setdefault(subject, set()).add(said)
    return found


def given(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a subject, argument and distinct call: passed if the argument was given, and is not None."""
    asked, rows, always = _by_subject(wanted), [], dict[str, set[str]]()
    for subject, function, calls in _subjects(trace, _TORCH, asked):
        places = [(row, _given(trace.features[row["args"]])) for row in calls]
        sets = [place for _, place in places if place is not None]
        every = set().union(*sets) - (_FIRST if is_torch(function) else {"0"})
        if subject == function:
            always[function] = set.intersection(*sets) if sets else set()
        elif not is_torch(function):  # what all callers give is said of the function alone, which comes first
            every -= always.get(function, set())
        every |= {said.removeprefix("argument ") for said in asked.get(subject, ())}
        for row, place in places:
            if place is not None:
                rows += [_row(row, f"{subject}{OF}argument {name}", name in place, f"argument {name} is None or not given", function, name) for name in sorted(every)]
    return _finish(trace, rows, "given")


def _switches(function: str, features: Mapping[str, Plain]) -> dict[str, str]:
    """Words, truth values and dimensions that a call of torch's function was given."""
    found = {name: value for name, value in features.items() if re.match(_SWITCHES, name) and isinstance(value, bool | str)}
    place = _DIMENSIONS.get(function.rpartition(".")[2])
    for name in ("dim.value", f"{place}.value") if place else ():
        value = features.get(name)
        if isinstance(value, int):
            found["dim"] = str(value)
    return {name.removesuffix(".value"): text_of(value) for name, value in found.items()}


def told(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a subject, switch and distinct call of a function of torch: passed if the switch is given as it says. `training` follows the phase."""
    rows = []
    asked = _by_subject(wanted)
    phases = {circ: _PHASES.get(phase, "") for circ, phase in circumstances_of(trace).select("circ", "phase").iter_rows()}
    kinds = re.compile(rf"{_TORCH.pattern}|torch\.({'|'.join(_DIMENSIONS)})$")
    for subject, function, calls in _subjects(trace, kinds):
        if not is_torch(function) or function.endswith(".forward"):
            continue
        every = [(row, _switches(function, trace.features[row["args"]])) for row in calls if _given(trace.features[row["args"]]) is not None]
        said = {(name, value, phases[row["circ"]] if name == "training" else "") for row, switches in every for name, value in switches.items()}
        said |= {(name, *_phased(value)) for one in asked.get(subject, ()) for name, _, value in [one.partition("=")]}
        for row, switches in every:
            for name, value, phase in sorted(said):
                if phase in ("", phases[row["circ"]]):
                    seen = f"{name} is {switches.get(name, 'not given')}{phase}"
                    rows.append(_row(row, f"{subject}{OF}{name}={value}{phase}", switches.get(name) == value, seen, function, name))
    return _finish(trace, rows, "told")


def _phased(value: str) -> tuple[str, str]:
    """A switch's value, and the words for a phase behind it."""
    phase = next((words for words in _PHASES.values() if value.endswith(words)), "")
    return value.removesuffix(phase), phase


def each(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a function of the program, or collective that it calls, and whole step: passed if the step calls it."""
    names = trace.functions
    kinds = [code for code, name in enumerate(names) if name and (not is_torch(name) or name.startswith("torch.distributed.")) and not name.endswith(".__init__")]
    steps = _frames.whole_steps(trace).filter(pl.col("step") >= 0)
    # A step of many passes that trains nothing, or whose records were thinned, is none.
    steps = steps.join(_frames.updates(trace).select("proc", "step", "seq", "site").unique(["proc", "step"], keep="last", maintain_order=True), on=["proc", "step"], how="inner", maintain_order="left")
    count = steps.group_by("proc").len().filter(pl.col("len") >= _STEPS)
    steps = steps.join(count.select("proc"), on="proc", how="semi", maintain_order="left").sort("proc", "step")
    lossy = {i for i, p in enumerate(trace.processes) if p.dropped > 0}
    begun = set(open_calls(trace).iter_rows())  # steps that may have called what has no row
    made = calls_of(trace).filter(pl.col("fn").is_in(kinds) & (pl.col("step") >= 0))
    # A collective that torch or a library calls is its own affair.
    own = {code for code, name in enumerate(names) if name and not is_torch(name)} | {0}
    made = made.filter(~pl.col("fn").is_in([c for c in kinds if is_torch(names[c])]) | pl.col("pfn").is_in(sorted(own)))
    called = {(proc, names[fn]): set(of) for proc, fn, of in made.group_by("proc", "fn").agg(pl.col("step").unique()).iter_rows()}
    rows = []
    for proc, of in steps.group_by("proc", maintain_order=True):
        code = proc[0]
        every = list(of.iter_rows(named=True))
        for name in sorted({n for p, n in called if p == code} | set(wanted)):
            there = called.get((int(str(code)), name), set())
            if code in lossy or (len(there) < len(every) // 2 and name not in wanted):
                continue
            told = [row for row in every if row["step"] in there or (code, row["step"]) not in begun]
            rows += [_row(row, name, row["step"] in there, f"step {row['step']} does not call it", name) for row in told]
    return _finish(trace, rows, "each")


def layer_of(subject: str) -> str:
    """The function of a layer, from the subject of a rule on its mode."""
    return f"{subject.rpartition('(')[2].rstrip(')')}.forward"


def mode(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a layer that drops out or normalises, and call with gradients in a training forward: passed if it trains, or evaluates."""
    names, rows = trace.functions, []
    layers = [code for code, name in enumerate(names) if name and _LAYERS.fullmatch(name)]
    training = circumstances_of(trace).filter((pl.col("grad") == "true") & (pl.col("phase") == "train") & (pl.col("recompute") == "false"))["circ"]
    calls = distinct_of(trace).filter(pl.col("fn").is_in(layers) & (pl.col("step") >= 0) & pl.col("circ").is_in(training.implode()))
    for row in calls.iter_rows(named=True):
        features = trace.features[row["args"]]
        flag, path = features.get("0.training"), str(features.get("0.path", ""))
        if not isinstance(flag, bool) or not path:
            continue
        place = ".".join("*" if part.isdigit() else part for part in path.split("."))
        subject = f"{place} ({names[row['fn']].removesuffix('.forward')})"
        seen = f"{path} is in {'training' if flag else 'evaluation'} mode"
        once = [_row(row, f"{subject}{OF}{word}", flag == (word == "trains"), seen, names[row["fn"]], path) for word in ("trains", "evaluates")]
        rows += once * min(row["calls"], ENOUGH)
    return _finish(trace, rows, "mode")


def ranks(trace: Trace, wanted: Collection[str]) -> pl.DataFrame:
    """One row a random generator and step of several ranks: passed if its states differ on all ranks; of generators that are drawn from."""
    states = _sightings.sightings(trace, Value.RNG).filter(pl.col("text").str.starts_with("step ") & (pl.col("step") > 0) & (pl.col("item") == -1))
    states = states.join(trace.procs.filter(pl.col("world") > 1).select("proc", "run", "world"), on="proc", how="inner", maintain_order="left").sort("proc", "step", maintain_order=True)
    states = states.unique(["proc", "text", "step"], keep="first", maintain_order=True).with_columns((pl.col("fp") != pl.col("fp").shift(1)).over("proc", "text").alias("_drawn"))
    by = ["run", "text", "step"]
    rows = states.with_columns(pl.col("fp").n_unique().over(by).alias("_values"), pl.col("proc").n_unique().over(by).alias("_ranks"), pl.col("_drawn").all().over(by))
    rows = rows.filter((pl.col("_ranks") == pl.col("world")) & pl.col("_drawn").fill_null(value=False)).sort("run", "step", "proc").unique(by, keep="first", maintain_order=True)
    found = [
        _row(row | {"site": 0}, str(row["text"]).removeprefix("step "), row["_values"] == row["_ranks"], f"{row['_values']} different state(s) on {row['_ranks']} ranks", "torch.manual_seed")
        for row in rows.iter_rows(named=True)
    ]
    return _finish(trace, found, "ranks")
