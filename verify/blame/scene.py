"""What the ranks did in the step in which they part, laid side by side: the evidence that the explanations of this folder ask for.

In: a trace, a step and the ranks that are compared. Out: the calls and states of that step, each with its rank, in the order in which they were seen.
All of it follows from records: a function that was not observed says nothing by being absent (`observed`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import polars as pl

from proctor.invariants.relations.views import collectives, frames
from proctor.invariants.schema import CallFlag, StateFlag, Value
from proctor.invariants.trace import Trace
from proctor.verify.wording import short_name

BACKWARD: Final = ("torch.Tensor.backward", "torch.autograd.backward")
UPDATE: Final = "torch.optim.Optimizer.step"
REPLICATED: Final = "torch.nn.parallel.DistributedDataParallel"
_DEEPEST: Final = 64  # enclosing calls looked through


@dataclass(frozen=True)
class Call:
    """A call of one rank.

    function: what was called. owner: the user's function that called it, "" where no record tells. source: file:line of that.
    """

    rank: int
    seq: int
    function: str
    owner: str
    source: str

    @property
    def blamed(self) -> str:
        return self.owner or self.function

    def __str__(self) -> str:
        """`Tensor.backward at train.py:31 (in Trainer.train_epoch)`."""
        where = f" at {self.source.rpartition('/')[2]}" if self.source else ""
        return f"{short_name(self.function)}{where}{f' (in {_own_name(self.owner)})' if self.owner else ''}"


@dataclass(frozen=True)
class Scene:
    """Ranks that part in a step.

    procs: number of the process, by rank.
    odd: ranks that are unlike most others; where no side has most of them, the highest of them.
    variable: the parameter or buffer (not its gradient) that parts, "" of none. model: that it belongs to.
    """

    trace: Trace
    step: int
    procs: Mapping[int, int]
    odd: tuple[int, ...]
    variable: str = ""
    model: str = ""

    def observed(self, function: str) -> bool:
        """Whether a call of this function would have been recorded on all of these ranks."""
        return function in self.trace.function_code and not any(function in self.trace.processes[p].unobserved for p in self.procs.values())

    @cached_property
    def calls(self) -> pl.DataFrame:
        """Calls of the step: rank, seq, parent, fn, site (texts), flags, args; by rank, then in order."""
        rows = frames.memo(self.trace, f"blame calls {self.step}", lambda t: _of_step(t, t.calls, self.step))
        names = pl.Series(self.trace.functions, dtype=pl.String), pl.Series(self.trace.sites, dtype=pl.String)
        rows = self._ranked(rows)
        return rows.with_columns(names[0].gather(rows["fn"]).alias("fn"), names[1].gather(rows["site"]).alias("site")).sort("rank", "seq")

    @cached_property
    def states(self) -> pl.DataFrame:
        """States of variables in the step: rank, model ("" of an optimizer's), name, attr, role, seq, call, edge, fp, flags, in order."""
        rows = frames.memo(self.trace, f"blame states {self.step}", lambda t: _of_step(t, t.states, self.step))
        about = self.trace.variables.filter(pl.col("alias") == "").select("var", "model", "name", "attr", "role")
        rows = rows.filter(~frames.has(int(StateFlag.UNHASHED))).join(about, on="var")
        return self._ranked(rows).sort("rank", "seq", "call", "edge", maintain_order=True)

    @cached_property
    def sent(self) -> pl.DataFrame:
        """What collectives of the step were given (`views.collectives.sent`)."""
        rows = collectives.sent(self.trace)
        return rows.filter((pl.col("step") == self.step) & pl.col("proc").is_in(list(self.procs.values())))

    @cached_property
    def mine(self) -> pl.DataFrame:
        """What the variable itself held in the step: as `states`."""
        here = (pl.col("model") == self.model) & (pl.col("name") == self.variable) & (pl.col("attr") == "data")
        return self.states.filter(here & ~frames.has(int(StateFlag.NONE)))

    def parting(self) -> Call | None:
        """The call after which the variable is seen to differ between the ranks first in the step."""
        values = {rank: self.mine.filter(pl.col("rank") == rank).select("fp", "call", "seq").rows() for rank in self.procs}
        if len({len(rows) for rows in values.values()}) != 1:
            return None
        rank = self.odd[0]
        for k, (_, call, seq) in enumerate(values[rank]):
            if len({rows[k][0] for rows in values.values()}) > 1:
                return self.call(rank, call or seq)
        return None

    def gradients(self, model: str, name: str) -> dict[int, list[tuple[int, int, int]]]:
        """Values that a gradient had before the last update of the step, by rank: fp, call after which it was seen, seq."""
        updated = {rank: self.last(rank, UPDATE) for rank in self.procs}
        here = (pl.col("model") == model) & (pl.col("name") == name) & (pl.col("attr") == "grad")
        rows = self.states.filter(here & ~frames.has(int(StateFlag.NONE)))
        found: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in self.procs}
        for rank, seq, call, fp in rows.select("rank", "seq", "call", "fp").iter_rows():
            last = updated[rank]
            if last is None or call < last.seq or (call == last.seq and seq <= last.seq):
                found[rank].append((fp, call or seq, seq))
        return found

    def call(self, rank: int, seq: int) -> Call | None:
        """The call of this number, in the step."""
        row = self._by_seq[rank].get(seq)
        return None if row is None else Call(rank, seq, row["fn"], self._owner(rank, row), row["site"])

    def last(self, rank: int, *functions: str, before: int | None = None) -> Call | None:
        """The last call of one of these functions in the step, or before a call."""
        seqs = [seq for seq, row in self._by_seq[rank].items() if row["fn"] in functions and (before is None or seq < before)]
        return self.call(rank, max(seqs)) if seqs else None

    def roots(self, rank: int) -> list[Call]:
        """Outermost calls of models."""
        found = [seq for seq, row in self._by_seq[rank].items() if row["flags"] & CallFlag.ROOT and row["fn"].endswith(".forward")]
        return [one for seq in found if (one := self.call(rank, seq)) is not None]

    def said(self, ranks: tuple[int, ...]) -> str:
        """`rank 1`, `ranks 2, 3`."""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{' …' if len(ranks) > 8 else ''}"

    def _ranked(self, rows: pl.DataFrame) -> pl.DataFrame:
        ranks = pl.DataFrame({"proc": list(self.procs.values()), "rank": list(self.procs)}, schema={"proc": pl.UInt16, "rank": pl.Int32})
        return rows.join(ranks, on="proc", maintain_order="left")

    @cached_property
    def _by_seq(self) -> dict[int, dict[int, dict[str, Any]]]:
        found: dict[int, dict[int, dict[str, Any]]] = {rank: {} for rank in self.procs}
        for row in self.calls.select("rank", "seq", "parent", "fn", "site", "flags", "args").iter_rows(named=True):
            found[row["rank"]][row["seq"]] = row
        return found

    def _owner(self, rank: int, row: Mapping[str, Any]) -> str:
        """The user's function that makes a call: the nearest enclosing one, else the one whose own numbers were read there."""
        above = row
        for _ in range(_DEEPEST):
            if not above["parent"]:
                break
            found = self._by_seq[rank].get(above["parent"])
            if found is None:
                return ""
            if not found["fn"].startswith("torch.") and found["site"] and _file(found["site"]):
                return str(found["fn"])
            above = found
        return self._outer.get(_file(row["site"]), "") if not above["parent"] else ""

    @cached_property
    def _outer(self) -> dict[str, str]:
        """By file, the function that makes the outermost calls of a step, where one is known: that whose numbers were read at them."""
        places = self.trace.places
        told = self.trace.values.filter(pl.col("kind") == int(Value.NUMBER)).join(
            self._numbered, on=["proc", "seq"], how="semi"
        )
        by_call: dict[tuple[int, int], str] = {}
        for proc, seq, place in told.select("proc", "seq", "place").unique().iter_rows():
            name, colon, _ = places[place].partition(":")
            if colon and "." in name:
                by_call[proc, seq] = name
        found: dict[str, set[str]] = {}
        for proc, seq, site in self._numbered.select("proc", "seq", "site").iter_rows():
            if (proc, seq) in by_call:
                found.setdefault(_file(site), set()).add(by_call[proc, seq])
        return {file: next(iter(names)) for file, names in found.items() if len(names) == 1}

    @cached_property
    def _numbered(self) -> pl.DataFrame:
        outermost = self.calls.filter((pl.col("parent") == 0) & pl.col("fn").is_in([UPDATE, *BACKWARD]))
        procs = pl.DataFrame({"rank": list(self.procs), "proc": list(self.procs.values())}, schema={"rank": pl.Int32, "proc": pl.UInt16})
        return outermost.drop("proc").join(procs, on="rank").select("proc", "seq", "site")


def _own_name(function: str) -> str:
    return short_name(function).removeprefix("__main__.")


def _file(site: str) -> str:
    return site.rpartition(":")[0]


def _of_step(trace: Trace, table: pl.DataFrame, step: int) -> pl.DataFrame:
    contexts = trace.contexts.filter(pl.col("step") == step)["ctx"]
    return table.filter(pl.col("ctx").is_in(contexts.implode()))
