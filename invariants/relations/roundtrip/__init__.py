"""What is saved is the model, and what is loaded is what was saved.

`moment`: the tensors of a saved state were live together at one time; `now`: at the time of the save. Catches a
checkpoint with tensors of different times or of another model, one taken before the last update, a corrupted copy.
That is of lines that save in several steps: one that saves at the end may save a best state that was kept.
`file`: a file that is loaded holds what was saved to it. `taken`: after `load_state_dict` a module or optimizer holds
what it was given. `own`: what it was given is not all its own memory, as of a "best" state that was kept without a copy.
`known`: it has a place for some of it; `all`: for all of it; `filled`: it has nothing else. `used`: a part of a file
that is loaded reaches `load_state_dict`; `resumed`: so does the state of an optimizer if updates follow. Catches names
with another prefix under `strict=False`, and moments that are not restored.

Saved tensors are compared with live ones by name, dtype and shape; averages, casts and shards are no evidence.
Source: ours; TrainCheck §5.3 (TF-29903) says why a trace of training calls alone does not show such errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.roundtrip import saved as _saved
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.absence import unseen
from proctor.invariants.schema import StateFlag, Value
from proctor.invariants.trace import Trace

SAVES: Final = (
    "torch.save",
    "safetensors.torch.save_file",
    "safetensors.torch.save_model",
    "torch.distributed.checkpoint.save",
)
LOADS: Final = (
    "torch.load",
    "safetensors.torch.load_file",
    "safetensors.torch.load_model",
    "torch.distributed.checkpoint.load",
)
RESTORES: Final = ("torch.nn.Module.load_state_dict", "torch.optim.Optimizer.load_state_dict")
_FLAT: Final = int(StateFlag.NONE | StateFlag.UNHASHED | StateFlag.CONSTANT | StateFlag.ZERO)
_FEW: Final = 8  # tensors of one save or load
GIVEN, HELD, OWN, UNKNOWN, LEFT = range(5)  # `item` at `load_state_dict`: instrument/probes/checkpoints.py
_SAYS: Final[dict[str, str]] = {
    "moment": "the tensors of a saved state were live together at one time",
    "now": "a saved state is the live one",
    "file": "a loaded file holds what was saved to it",
    "taken": "{what} holds what load_state_dict was given",
    "own": "load_state_dict is not given the module's own tensors alone",
    "known": "a module has a place for something of what load_state_dict is given",
    "all": "a module has a place for all that load_state_dict is given",
    "filled": "load_state_dict is given all that the module has",
    "used": "what is loaded under {what} reaches load_state_dict",
    "resumed": "the state of an optimizer that was saved and is loaded before further updates reaches load_state_dict",
}
_ADVICE: Final[dict[str, str]] = {
    "moment": "Some tensors of the checkpoint are of another time or another model than the rest: look at how the state "
    "is put together.",
    "now": "The state was taken before the last update, or from another model.",
    "file": "The file was changed, cut or overwritten between save and load, or its tensors were converted.",
    "taken": "Something writes to the module or optimizer while it loads, or the names were mapped wrongly.",
    "own": "The state was kept without a copy and followed the training: copy.deepcopy(model.state_dict()).",
    "known": "The names have another prefix (module., _orig_mod., model.), and strict=False hid it.",
    "all": "Some names of the checkpoint are not the module's, and strict=False hid it.",
    "filled": "The module has tensors that the checkpoint lacks, and strict=False hid it.",
    "resumed": "The training goes on without the moments of the checkpoint: optimizer.load_state_dict.",
    "used": "This part of the checkpoint is read and dropped: call load_state_dict with it.",
}


def _moments(trace: Trace) -> pl.DataFrame:
    rows = _sightings.sites(trace, _saved.moments(trace))
    at = ["proc", "seq", "group"]
    seen = (
        pl.when("_met")
        .then(pl.lit("a value of an earlier time"))
        .otherwise(pl.lit("a value that the model never held"))
    )
    one = _sightings.example(
        _few(rows, at),
        mode="moment",
        what="state",
        _function=pl.col("function"),
        _variable=pl.col("key"),
        _expected="live when the rest of what is saved was",
        _seen=seen,
    )
    # A line that saves once, at the end, may save the best state, of which a copy was kept: in some runs that is the last one.
    rows = rows.filter(pl.col("step").n_unique().over("proc", "function", "site") > 1)
    rows = rows.with_columns(pl.col("now").alias("passed")).join(
        trace.families, on="proc", how="left", maintain_order="left"
    )
    two = _sightings.example(
        _few(rows, at),
        mode="now",
        what="state",
        _function=pl.col("function"),
        _variable=pl.col("key"),
        _expected="the live value",
        _seen=seen,
    )
    return pl.concat([one, two])


def _few(rows: pl.DataFrame, at: list[str]) -> pl.DataFrame:
    """A few tensors of each save or load."""
    return rows.filter(pl.int_range(pl.len()).over([*at, "passed"]) < _FEW)


def _files(trace: Trace) -> pl.DataFrame:
    """Tensors of loaded files that this run saved: passed if one of the saves had the same content at this path."""
    procs = trace.procs.select("proc", "run")

    def content(kind: Value) -> pl.DataFrame:
        rows = (
            _sightings.sightings(trace, kind)
            .filter(pl.col("item") == -1)
            .join(procs, on="proc", maintain_order="left")
        )
        files = rows.filter(pl.col("text") == _saved.FILE).select("proc", "seq", pl.col("fp").alias("_file"))
        return rows.filter((pl.col("text") != _saved.FILE) & readable).join(
            files, on=["proc", "seq"], maintain_order="left"
        )

    readable = (pl.col("flags") & int(StateFlag.UNHASHED)) == 0
    saves = content(Value.SAVED)
    known = saves.group_by("run", "_file", "text").agg(pl.col("fp").unique().alias("_saved"))
    loads = content(Value.LOADED).join(saves.select("run", "_file").unique(), on=["run", "_file"], how="semi")
    found = loads.join(known, on=["run", "_file", "text"], how="left", maintain_order="left")
    found = found.with_columns(pl.col("fp").is_in(pl.col("_saved")).fill_null(value=False).alias("passed"))
    return _sightings.example(
        _sightings.sites(trace, _few(found, ["proc", "seq"])),
        mode="file",
        what="file",
        _function=pl.col("function"),
        _variable=pl.col("text"),
        _expected="what was saved under this name",
        _seen="another value",
    )


def _restores(trace: Trace) -> pl.DataFrame:
    rows = _sightings.sites(trace, _sightings.sightings(trace, Value.LOADED).filter(pl.col("item") >= 0))
    rows = rows.filter(pl.col("function").is_in(RESTORES)).join(
        _frames.metas(trace, "dtype", "shape"), on="meta", how="left", maintain_order="left"
    )
    at = ["proc", "seq"]
    given, held = (pl.col("item") == i for i in (GIVEN, HELD))
    unread = (pl.col("flags") & int(StateFlag.UNHASHED)) != 0
    names = rows.group_by([*at, "text"], maintain_order=True).agg(
        pl.col("step", "site", "function").first(),
        (given | held).any().alias("_taken"),
        *(
            (pl.col("item") == i).any().alias(name)
            for name, i in (("_own", OWN), ("_unknown", UNKNOWN), ("_left", LEFT))
        ),
        (pl.col("fp").filter(given).first() == pl.col("fp").filter(held).first()).alias("_same"),
        ((pl.col("dtype").n_unique() == 1) & (pl.col("shape").n_unique() == 1) & ~unread.any()).alias(
            "_alike"
        ),
    )
    names = names.join(trace.families, on="proc", how="left", maintain_order="left")
    module = names.filter(pl.col("function") == RESTORES[0])
    owner = (
        pl.when(pl.col("function") == RESTORES[0]).then(pl.lit("a module")).otherwise(pl.lit("an optimizer"))
    )
    none = ~pl.col("_taken").any().over(at)
    # A state that is the module's own but for what was put into it is a way to load a part.
    own = pl.col("_own").all().over(at)
    modes = (
        (
            "taken",
            names.filter(pl.col("_taken") & pl.col("_alike")),
            owner,
            pl.col("_same"),
            "what was given",
            "another value",
        ),
        ("own", module.filter("_taken"), "module", ~own, "a copy", "the module's own tensor"),
        (
            "known",
            module.filter(pl.col("_taken") | none),
            "module",
            pl.col("_taken"),
            "a name of the module",
            "no name of the module, like all others",
        ),
        (
            "all",
            module.filter(~pl.col("_left")),
            "module",
            ~pl.col("_unknown"),
            "a name of the module",
            "no name of the module",
        ),
        ("filled", module.filter(~pl.col("_unknown")), "module", ~pl.col("_left"), "given", "left as it was"),
    )
    parts = []
    for mode, found, what, passed, expected, seen in modes:
        found = _few(found.with_columns(passed.alias("passed")), at)
        if mode not in ("all", "filled"):
            found = found.with_columns(pl.lit(None, dtype=pl.String).alias("family"))
        parts.append(
            _sightings.example(
                found,
                mode=mode,
                what=what,
                _function=pl.col("function"),
                _variable=pl.col("text"),
                _expected=expected,
                _seen=seen,
            )
        )
    return pl.concat(parts)


def _used(trace: Trace) -> pl.DataFrame:
    """Tensors of loaded files, passed if any of their part of the file is given to a `load_state_dict` of the same process."""
    rows = _sightings.sightings(trace, Value.LOADED).filter(
        (pl.col("text") != _saved.FILE) & ((pl.col("flags") & _FLAT) == 0)
    )
    rows = _sightings.sites(trace, rows)
    given = (
        rows.filter(pl.col("function").is_in(RESTORES) & (pl.col("item") == GIVEN))
        .select("proc", "fp")
        .unique()
    )
    read = rows.filter(pl.col("function").is_in(LOADS) & (pl.col("item") == -1))
    read = read.with_columns(
        pl.col("text").str.extract(r"^\['([^']+)'\]\[").fill_null("the file").alias("what")
    )
    read = read.join(
        given.with_columns(pl.lit(value=True).alias("_given")),
        on=["proc", "fp"],
        how="left",
        maintain_order="left",
    )
    part = ["proc", "seq", "what"]
    read = read.with_columns(pl.col("_given").fill_null(value=False).any().over(part).alias("passed"))
    read = read.join(_saved.places(trace), on="place", how="left", maintain_order="left")
    read = read.join(trace.families, on="proc", how="left", maintain_order="left")
    last = _frames.updates(trace).group_by("proc").agg(pl.col("seq").max().alias("_last"))
    moments = pl.col("key").str.starts_with("optimizer:").fill_null(value=False)
    # A file from elsewhere may be a start for another training: what this run saved itself is what it goes on from.
    procs = trace.procs.select("proc", "run")
    kept = _sightings.sightings(trace, Value.SAVED).join(procs, on="proc").select("run", "fp").unique()
    resumed = (
        read.join(procs, on="proc", maintain_order="left")
        .join(kept, on=["run", "fp"], how="semi")
        .join(last, on="proc", maintain_order="left")
        .filter(moments & (pl.col("_last") > pl.col("seq")))
        .with_columns(pl.lit(None, dtype=pl.String).alias("family"), pl.col("what").alias("_part"))
    )
    said = {
        "_function": pl.col("function"),
        "_expected": "given to load_state_dict",
        "_seen": "nothing of it is",
    }
    return pl.concat(
        [
            _sightings.example(_few(read, part), mode="used", _variable=pl.col("what"), **said),
            _sightings.example(
                _few(resumed, part), mode="resumed", what="optimizer", _variable=pl.col("_part"), **said
            ),
        ]
    )


_PARTS: Final[dict[str, Callable[[Trace], pl.DataFrame]]] = {
    "moment": _moments,
    "now": _moments,
    "file": _files,
    "taken": _restores,
    "own": _restores,
    "known": _restores,
    "all": _restores,
    "filled": _restores,
    "used": _used,
    "resumed": _used,
}


@register
class Roundtrip(Relation):
    """Saved states are the model's, loaded states are the saved ones."""

    name = "roundtrip"
    code = "PR108"
    upstream: ClassVar[int] = 6
    ahead: ClassVar[int] = 0
    reads: ClassVar[Reads] = "records"
    absence: ClassVar[bool] = True  # a value that is not among the records may have been live
    reach: ClassVar[int | None] = None  # a state of any earlier step may be saved

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return _sightings.held(self.name, _every(trace, set(_PARTS)))

    def idle(self, trace: Trace) -> bool:
        return unseen(trace, Value.SAVED) and unseen(trace, Value.LOADED)

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _sightings.bound_examples(
            trace, _every(trace, {h.text("mode") for h in hypotheses}), hypotheses
        )

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """What is loaded arrives. What is saved may be an average, and a recipe may give a module its own tensors."""
        law, choice = ("known", "taken"), ("moment", "own", "file")
        mode = hypothesis.text("mode")
        return Standing.LAW if mode in law else Standing.CHOICE if mode in choice else Standing.HABIT

    def needs(self, hypothesis: Hypothesis) -> Needs:
        mode = hypothesis.text("mode")
        if mode in ("moment", "now"):
            return Needs(
                frozenset({*SAVES, _frames.UPDATE}),
                frozenset({"data", "buffer", "optimizer"}),
                frozenset({"saved"}),
            )
        if mode == "file":
            return Needs(frozenset({*SAVES, *LOADS}), values=frozenset({"saved", "loaded"}))
        if mode == "resumed":
            return Needs(
                frozenset({*SAVES, *LOADS, *RESTORES, _frames.UPDATE}), values=frozenset({"saved", "loaded"})
            )
        return Needs(
            frozenset({*RESTORES, *(LOADS if mode in ("used", "resumed") else ())}),
            values=frozenset({"loaded"}),
        )

    def say(self, hypothesis: Hypothesis) -> str:
        return _SAYS[hypothesis.text("mode")].format(what=hypothesis.text("what"))

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return _sightings.detail(example, _ADVICE[hypothesis.text("mode")])


def _every(trace: Trace, modes: set[str]) -> pl.DataFrame:
    """Examples of these modes, whatever the hypothesis."""
    return _sightings.of_parts(
        trace, "roundtrip", {_PARTS[mode].__qualname__: _PARTS[mode] for mode in sorted(modes)}
    )
