"""Collectives of all ranks beside each other: the i-th call of a group, what each member said, who waits for whom.

The relations `agree` and `delivered` ask it. In: calls and values of all ranks of a trace. Out: frames with a row a call of a member: the columns `run`, `group`,
`members` and `item` say which calls belong together.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final, NamedTuple

import polars as pl

from proctor.invariants.codec import collective
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views.absence import alone
from proctor.invariants.schema import CallFlag, Name, StateFlag, Value
from proctor.invariants.trace import Process, Trace, Waiting

SYMMETRIC: Final = (
    "all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "all_gather_into_tensor", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "all_reduce_coalesced", "all_gather_coalesced", "barrier",
    "monitored_barrier", "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list",
)  # fmt: skip
SENDS: Final = ("send", "isend")
RECEIVES: Final = ("recv", "irecv")
FUNCTIONS: Final = frozenset(f"torch.distributed.{n}" for n in (*SYMMETRIC, *SENDS, *RECEIVES))
# What DistributedDataParallel does inside a backward is not seen; that backward itself is.
BACKWARD: Final = frozenset({"torch.nn.parallel.DistributedDataParallel.__init__", "torch.Tensor.backward", "torch.autograd.backward"})
DDP: Final = "backward"
_PLACE: Final = {
    "place": pl.UInt32, "fn": pl.String, "group": pl.String, "members": pl.String, "size": pl.Int32, "op": pl.String,
    "root": pl.Int32, "peer": pl.Int32, "tag": pl.Int64, "caller": pl.String,
}  # fmt: skip


def name_of(fn: str) -> str:
    """The full name of a function of this table."""
    return "torch.Tensor.backward" if fn == DDP else f"torch.distributed.{fn}"


def sent(trace: Trace) -> pl.DataFrame:
    """What every rank gave to collectives, one row a call.

    Columns: proc, run, rank, lossy, seq, step, phase, fn, group (its name), members (text), size, op, root, peer, tag,
    caller, item, dtype, shape, fp, flags, variable (whose value or gradient it is, null where that is not known), site, family.
    """
    return _frames.memo(trace, "sent", _sent, idle=alone)


def _sent(trace: Trace) -> pl.DataFrame:
    rows = trace.values.filter(pl.col("kind") == int(Value.SENT)).join(_places(trace), on="place")
    procs = _frames.replicated_runs(trace).select("proc", "run", "rank", "lossy")
    rows = rows.join(procs, on="proc").join(trace.contexts.select("ctx", "step", "phase"), on="ctx", how="left", maintain_order="left")
    rows = rows.join(_frames.metas(trace, "dtype", "shape"), on="meta", how="left", maintain_order="left")
    rows = rows.join(_sites(trace, rows), on=["proc", "seq"], how="left", maintain_order="left")
    rows = rows.join(trace.families, on="proc", how="left", maintain_order="left")
    rows = rows.join(_variables(trace, rows), on=["proc", "seq", "item"], how="left", maintain_order="left")
    return rows.select(
        "proc", "run", "rank", "lossy", "seq", "step", "phase", *list(_PLACE)[1:], "item", "dtype", "shape", "fp", "flags", "variable",
        pl.col("site").fill_null(0), "family",
    )  # fmt: skip


def _places(trace: Trace) -> pl.DataFrame:
    return _frames.lasting(trace, Name.PLACE, "collective places", _find_places)


def _find_places(trace: Trace) -> pl.DataFrame:
    rows: list[tuple[Any, ...]] = []
    sizes: dict[str, int] = {}
    for code, text in enumerate(trace.places):
        said = collective.parse(text)
        if said is not None:
            ranks = said.group.ranks
            size = sizes.setdefault(ranks, len(collective.ranks_of(ranks)))
            rows.append((code, said.fn, said.group.name, ranks, size, said.op, said.root, said.peer, said.tag, said.caller))
    return pl.DataFrame(rows, schema=_PLACE, orient="row")


_PLAIN: Final = int(StateFlag.NONE | StateFlag.ZERO | StateFlag.CONSTANT | StateFlag.NONFINITE | StateFlag.UNHASHED)


def _variables(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Which parameter's value or gradient these tensors are, told by their content: proc, seq, item, variable."""
    seen = rows.filter((pl.col("fp") != 0) & ((pl.col("flags") & _PLAIN) == 0)).select("proc", "seq", "item", "step", "fp", "shape")
    about = _frames.owned(trace).filter((pl.col("role") == "parameter") & pl.col("attr").is_in(["data", "grad"]))
    label = pl.when(pl.col("attr") == "grad").then(pl.concat_str("name", pl.lit(".grad"))).otherwise("name")
    states = _frames.rows(trace).join(about.select("var", label.alias("variable")), on="var").join(_frames.metas(trace, "shape"), on="meta", how="left")
    states = states.filter(~_frames.has(_PLAIN)).select("proc", "step", "fp", "shape", "variable").unique()
    # Two variables of one content tell nothing.
    states = states.filter(pl.col("variable").n_unique().over("proc", "step", "fp", "shape") == 1)
    return seen.join(states, on=["proc", "step", "fp", "shape"]).select("proc", "seq", "item", "variable")


def _sites(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Lines of the calls of these rows that returned: proc, seq, site."""
    wanted = rows.select("proc", "seq").unique()
    return trace.calls.join(wanted, on=["proc", "seq"], how="semi").select("proc", "seq", "site").unique(["proc", "seq"])


def received(trace: Trace) -> pl.DataFrame:
    """What members held after a collective: proc, run, rank, lossy, seq, step, fn, group, members, size, item, fp."""
    return pieces(trace, Value.RECEIVED)


def pieces(trace: Trace, kind: Value) -> pl.DataFrame:
    """Values of a kind at collectives: the columns of `values`, and those of `sent` but for what tells of a tensor."""
    rows = trace.values.filter(pl.col("kind") == int(kind)).join(_places(trace), on="place")
    procs = _frames.replicated_runs(trace).select("proc", "run", "rank", "lossy")
    rows = rows.join(procs, on="proc").join(trace.contexts.select("ctx", "step", "phase"), on="ctx", how="left", maintain_order="left")
    rows = rows.join(_sites(trace, rows), on=["proc", "seq"], how="left", maintain_order="left")
    return rows.join(trace.families, on="proc", how="left", maintain_order="left")


def axes(trace: Trace, rows: pl.DataFrame) -> pl.DataFrame:
    """Mesh axes along which the members of these groups differ: run, members, axis ("dp", "dp,tp"; null without a mesh)."""
    where = {(p.run, p.rank): p.coords for p in trace.processes}
    found = []
    for run, members in rows.select("run", "members").unique(maintain_order=True).iter_rows():
        coords = [where.get((run, rank), {}) for rank in collective.ranks_of(members)]
        names = sorted({name for at in coords for name in at if len({other.get(name) for other in coords}) > 1})
        found.append((run, members, ",".join(names) or None))
    return pl.DataFrame(found, schema={"run": pl.UInt16, "members": pl.String, "axis": pl.String}, orient="row")


# -- who waits for whom ------------------------------------------------------------------------------------------------

Channel = tuple[Any, ...]


class Stuck(NamedTuple):
    """Ranks that wait for one that does not come."""

    run: int
    culprit: int  # proc that others wait for; of several the one with fewest calls
    calls: int  # calls that it made on the group
    waiting: list[int]  # procs that wait, those that wait longest first
    place: collective.Collective
    item: int
    site: str
    seconds: float
    why: str  # what the culprit does instead: ended, waits elsewhere, busy
    group: str


def stuck(trace: Trace, *, least_s: float, patience_s: float) -> list[Stuck]:
    """Waits that do not end: each with the rank that holds the others up.

    A wait is hopeless when all ways out of it end in a process that has finished or in a circle of waits; then
    `least_s` suffice. Where a rank that is merely busy could end it, `patience_s` are granted.

    Args:
        least_s: shortest wait that is looked at.
        patience_s: longest wait for a busy rank.
    """
    found: list[Stuck] = []
    for run in range(len(trace.runs)):
        ranks = [(p.rank, i) for i, p in enumerate(trace.processes) if p.run == run and p.world > 1]
        procs = dict(ranks)
        if len(ranks) != len(procs) or len(procs) < 2:
            continue
        if any(trace.processes[i].waiting or i in _given_up(trace, least_s) for i in procs.values()):
            found += _stuck_in(trace, run, procs, least_s, patience_s)
    return found


def _given_up(trace: Trace, least_s: float) -> dict[int, list[Waiting]]:
    """Collectives that ended with an exception after a long wait (a timeout), by process."""
    return _frames.memo(trace, f"given up {least_s}", lambda t: _find_given_up(t, least_s))


def _find_given_up(trace: Trace, least_s: float) -> dict[int, list[Waiting]]:
    raised = trace.calls.filter(((pl.col("flags") & int(CallFlag.RAISED)) != 0) & (pl.col("dur") >= int(least_s * 1e9)))
    rows = trace.values.filter(pl.col("kind") == int(Value.SENT)).join(raised.select("proc", "seq", "site", "dur"), on=["proc", "seq"])
    found: dict[int, list[Waiting]] = defaultdict(list)
    for proc, seq, place, item, site, dur in rows.select("proc", "seq", "place", "item", "site", "dur").head(1000).iter_rows():
        found[proc].append(Waiting(trace.places[place], item, dur / 1e9, trace.sites[site], seq))
    return dict(found)


def _stuck_in(trace: Trace, run: int, procs: dict[int, int], least_s: float, patience_s: float) -> list[Stuck]:
    issued = _issued(trace, run)
    given_up = _given_up(trace, least_s)
    waits: dict[int, list[tuple[set[int], collective.Collective, int, float, str]]] = defaultdict(list)
    for proc in procs.values():
        process = trace.processes[proc]
        for one in [*process.waiting, *given_up.get(proc, [])]:
            said = collective.parse(one.place)
            if said is None or one.seconds < least_s:
                continue
            absent = _absent(said, one.item, process, procs, issued)
            if absent:
                waits[proc].append((absent, said, one.item, one.seconds, one.site))
    idle = {i for i in procs.values() if trace.processes[i].finished}
    hopeful = set(procs.values()) - idle - waits.keys()
    grew = True
    while grew:
        more = {p for p, all_ in waits.items() if p not in hopeful and any(absent <= hopeful for absent, *_ in all_)}
        hopeful |= more
        grew = bool(more)
    found: dict[tuple[str, int, int], Stuck] = {}
    for proc, all_ in waits.items():
        for absent, said, item, seconds, site in all_:
            if seconds < (patience_s if proc in hopeful else least_s):
                continue
            channel = _channel(said, trace.processes[proc].rank)
            culprit = min(absent, key=lambda p: (issued.get((channel, p), 0), p))
            key = (said.group.name, culprit, item)
            why = "ended" if culprit in idle else "waits elsewhere" if culprit in waits else "busy"
            known = found.get(key)
            if known is None:
                calls = issued.get((channel, culprit), 0)
                found[key] = Stuck(run, culprit, calls, [proc], said, item, site, seconds, why, said.group.name)
            else:
                longest = max(known.seconds, seconds)
                found[key] = known._replace(waiting=sorted({*known.waiting, proc}), seconds=longest)
    return list(found.values())


def _channel(said: collective.Collective, rank: int) -> Channel:
    """The sequence that a call belongs to; the same for the two ends of a point-to-point call."""
    if said.fn in SENDS:
        return (said.group.name, rank, said.peer, said.tag)
    if said.fn in RECEIVES:
        return (said.group.name, said.peer, rank, said.tag)
    return (said.group.name,)


def _issued(trace: Trace, run: int) -> dict[tuple[Channel, int], int]:
    """How many calls each process has begun on each channel. Point-to-point channels count each end on its own."""
    rows = sent(trace).filter(pl.col("run") == run)
    last = rows.group_by("proc", "rank", "group", "peer", "tag", "fn", "root").agg(pl.col("item").max())
    issued: dict[tuple[Channel, int], int] = {}

    def count(proc: int, said: collective.Collective, item: int) -> None:
        key = (_channel(said, trace.processes[proc].rank), proc)
        issued[key] = max(issued.get(key, 0), item + 1)

    for proc, _, group, peer, tag, fn, root, item in last.iter_rows():
        count(proc, collective.Collective(fn, collective.Group(group, ""), "", root, peer, tag), item)
    for proc, process in enumerate(trace.processes):
        for one in process.waiting if process.run == run else []:
            said = collective.parse(one.place)
            if said is not None:
                count(proc, said, one.item)
    return issued


def _absent(
    said: collective.Collective, item: int, process: Process, procs: dict[int, int], issued: dict[tuple[Channel, int], int]
) -> set[int]:
    """Members that have not begun this call; empty where one of them is not known or lost records."""
    if said.fn in SENDS or said.fn in RECEIVES:
        others: tuple[int, ...] = (said.peer,)
    else:
        others = tuple(r for r in collective.ranks_of(said.group.ranks) if r != process.rank)
    if any(r not in procs for r in others):
        return set()
    channel = _channel(said, process.rank)
    return {procs[r] for r in others if issued.get((channel, procs[r]), 0) <= item}
