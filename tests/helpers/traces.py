"""Random small training runs, healthy or not, rich enough that every relation has something to say of some of them.

A run is made from a seed: programs, ranks, sizes and faults are drawn from it, so that a seed names a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

from helpers.loops import BACKWARD, ROOT, STEP, ZERO_GRAD, call, tensor
from helpers.runs import write_run
from proctor.invariants.codec import collective
from proctor.invariants.codec.collective import Group

FAULTS = (
    "", "", "no_clear", "no_step", "diverge", "no_gradient", "eval_mode", "other_dtype", "shorter", "other_argument",
    "repeat_batch", "negative", "no_reduce", "moved",
)  # fmt: skip
_SHUFFLES = "torch.utils.data.DistributedSampler"
_SCHEDULER = {"O": "torch.optim.lr_scheduler.StepLR", "v": "#0~0", "a": {}}
_SCHEDULE = "torch.optim.lr_scheduler.LRScheduler.step"
_LOADER = "torch.utils.data.DataLoader"


def write_random_run(path: Path, seed: int) -> Path:
    """One run; the program is one of three, so that some runs are of one program."""
    random = Random(seed)
    program = random.randrange(3)
    world = random.choice([1, 1, 2, 2, 3])
    fault = random.choice(FAULTS)
    made = Loop(program, world, random.randint(5, 9), fault, random.randrange(1, 4), random.randrange(world))
    return write_run(path, [made.process(rank) for rank in range(world)], program=f"train{program}.py")


class Loop:
    """A training loop of `world` ranks; from step `at` on rank `who` has a fault."""

    def __init__(self, program: int, world: int, steps: int, fault: str, at: int, who: int) -> None:
        self.program, self.world, self.steps = program, world, steps
        self.fault, self.at, self.who = fault, at, who
        self.model = ("__main__.Net", "__main__.Tower", "zoo.vision.Tower")[program]
        self.width = (8, 4, 6)[program]

    def process(self, rank: int) -> dict[str, Any]:
        """Rows of one rank, as `write_run` takes them."""
        rows = _Rows()
        self._begin(rows, rank)
        for step in range(self.steps):
            self._step(rows, rank, step, self.fault if rank == self.who and step >= self.at else "")
        return {"rank": rank, "world": self.world, "calls": rows.calls, "states": rows.states, "values": rows.values}

    def _begin(self, rows: _Rows, rank: int) -> None:
        rows.now(step=-1, phase="init")
        rows.call("torch.manual_seed", 10 + rank)
        for name in ("first", "head"):
            for attr in ("data", "grad"):
                none = {"flags": 1} if attr == "grad" else {"fp": _fp(self.program, name, -1), "norm": 2.0}
                rows.state(self._variable(name, attr), meta=self._meta(name), call=0, **none)
        if self.world > 1 and self.program != 1:
            # A parameter that is cut over the ranks, and frozen.
            own = 0 if self.fault == "no_reduce" else rank
            cut = {**self._meta("wide"), "shape": [16, 8], "placement": "Shard0", "part": str(rank), "requires_grad": False, "optimizer": None, "group": None}
            rows.state(self._variable("wide", "data"), meta=cut, call=0, fp=_fp(self.program, "wide", own), norm=2.0)
        rows.call(_SCHEDULE, _SCHEDULER)

    def _step(self, rows: _Rows, rank: int, step: int, fault: str) -> None:
        rows.now(step=step, phase="train")
        optimizer = {"O": "torch.optim.SGD", "v": "#0", "a": {"momentum": "0.9"}}
        if step % 3 == 0 and self.program == 1:
            rows.call(f"{_SHUFFLES}.set_epoch", {"O": _SHUFFLES, "a": {"shuffle": True}}, 0 if fault == "other_argument" else step // 3)
        batch = 8 if step % 2 else 12
        self._data(rows, step, fault)
        rows.call("zoo.data.collate", {"L": [tensor(3)], "n": batch}, ret=tensor(batch - (fault == "shorter"), 3))
        if fault != "no_clear":
            seq = rows.call(ZERO_GRAD, optimizer)
            for name in ("first", "head"):
                rows.state(self._variable(name, "grad"), meta=self._meta(name), call=seq, flags=1)
        dtype = "bfloat16" if self.program == 1 and fault != "other_dtype" else "float32"
        autocast = {"autocast": "bfloat16", "outer": "bfloat16"} if self.program == 1 else {}
        root = rows.reserve()
        given = {"M": self.model, "p": "", "t": int(fault != "eval_mode")}
        rows.call("torch.nn.functional.linear", tensor(batch, 3), ret=tensor(batch, self.width, dtype=dtype), parent=root, **autocast)
        rows.value(root, "batch", fp=_fp(rank, "batch", 0 if fault == "repeat_batch" else step), meta={"dtype": "float32", "shape": [batch, 3]})
        rows.fill(root, call(f"{self.model}.forward", given, tensor(batch, 3), ret=tensor(batch, self.width, dtype=dtype), flags=ROOT))
        loss = -1.0 if fault == "negative" else 3.0 / (step + 1)
        seq = rows.call("__main__.loss_of", "mean", 0.5 if fault == "other_argument" else 0.1, ret=loss)
        rows.value(seq, "number", place="out", number=loss)
        seq = rows.call(BACKWARD, tensor())
        for name in ("first", "head"):
            if not (fault == "no_gradient" and name == "first"):
                own = rank if self.world > 1 and fault == "no_reduce" else 0
                rows.state(self._variable(name, "grad"), meta=self._meta(name), call=seq, fp=_fp(own, name + "grad", step), norm=1.0)
        self._recompute(rows, step, fault)
        if self.world > 1 and fault != "no_reduce":
            self._collectives(rows, rank, step, fault)
        if self.fault == "negative":  # on all ranks
            rows.state(self._variable("head", "grad"), meta=self._meta("head"), call=0, fp=_fp("edited", step), norm=1.0)
        seq = rows.call("zoo.optim.Engine.step", {"O": "zoo.optim.Engine", "a": {}})
        if fault == "no_step":
            return
        seq = rows.call(STEP, optimizer, parent=seq)
        self._tell(rows, seq, step, fault)
        for name in ("first", "head"):
            if not (fault == "no_gradient" and name == "first"):
                other = rank + 1 if fault in ("diverge", "no_reduce") else 0
                rows.state(self._variable(name, "data"), meta=self._meta(name), call=seq, fp=_fp(other, name, step), norm=2.0)
        for _ in range(2 if fault == "no_clear" else 1):
            rows.call(_SCHEDULE, _SCHEDULER)
        if fault == "moved":
            rows.state(self._variable("head", "data"), meta=self._meta("head"), call=0, fp=_fp(9, "head", step), norm=2.0)

    def _data(self, rows: _Rows, step: int, fault: str) -> None:
        """Passes of three batches, a term of the loss that is looked at twice, and a load in the middle of the run."""
        if step % 3 == 0:
            rows.call(f"{_LOADER}.__iter__", {"O": _LOADER, "a": {}})
            rows.calls[-1]["site"] = "train.py:5"
        for _ in range(1 + (fault == "shorter")):
            rows.call(f"{_LOADER}.__next__", {"O": "Iter", "a": {}})
            rows.calls[-1]["site"] = "train.py:5"
        for look in range(2):
            seq = rows.call("__main__.term", tensor())
            varying = 0.5 + (5 * (2 * step + look) % 17) / 20
            rows.value(seq, "number", place="__main__.term:return", number=0.5 if self.fault == "other_argument" else varying)
        if step == 3:
            seq = rows.call("torch.optim.Optimizer.load_state_dict", {"O": "torch.optim.SGD", "v": "#0", "a": {}})
            for place, number in (("lr", 0.25), ("step", 3.0), ("weight_decay", 0.0)):
                rows.value(seq, "option", place=place, item=0, meta={"when": "given"}, number=number)

    def _tell(self, rows: _Rows, seq: int, step: int, fault: str) -> None:
        """Options of two groups, the count of updates after a load, and a counter."""
        for group in range(2):
            decay = 0.1 if group or fault == "moved" else 0.0
            for place, number in (("lr", 0.25), ("weight_decay", decay)):
                rows.value(seq, "option", place=place, item=group, meta={"when": "update"}, number=number)
        if step == 3:
            rows.value(seq, "option", place="step", item=0, meta={"when": "update"}, number=0.0 if fault == "diverge" else 3.0)
        rows.value(seq, "number", place="__main__.train:epoch", number=0 if fault == "repeat_batch" else step // 2)

    def _recompute(self, rows: _Rows, step: int, fault: str) -> None:
        """A layer that is computed twice; with a fault its second pass draws another mask."""
        for kind in ("first", "again"):
            other = step + 1000 if kind == "again" and fault == "repeat_batch" else step
            seq = rows.call("torch.nn.functional.dropout", tensor(4), ret=tensor(4))
            rows.value(seq, kind, place="torch.nn.functional.dropout", fp=_fp("mask", other), meta={"dtype": "float32", "shape": [4]})

    def _collectives(self, rows: _Rows, rank: int, step: int, fault: str) -> None:
        """A sum and an exchange; with a fault this rank gets something else."""
        ranks = collective.ranks_text(tuple(range(self.world)))
        summed, swapped = (collective.text(fn, Group("0", ranks), op=op) for fn, op in (("all_reduce", "SUM"), ("all_to_all", "")))
        wrong = fault == "diverge"
        seq = rows.call("torch.distributed.all_reduce", tensor(24))
        facts = {"peer": "-1", "dtype": "float32"}
        rows.value(seq, "given", place=summed, item=2 * step, meta=facts, number=rank + 0.5, norm=2.0)
        total = sum(r + 0.5 for r in range(self.world)) + 3 * wrong
        rows.value(seq, "got", place=summed, item=2 * step, meta=facts, number=total, norm=2.0)
        seq = rows.call("torch.distributed.all_to_all", {"L": [tensor(4)], "n": self.world})
        for peer in range(self.world):
            facts = {"peer": str(peer), "dtype": "float32"}
            rows.value(seq, "given", place=swapped, item=2 * step + 1, meta=facts, fp=_fp(rank, peer, step))
            rows.value(seq, "got", place=swapped, item=2 * step + 1, meta=facts, fp=_fp(peer, rank, step + 100 * wrong))

    def _variable(self, name: str, attr: str) -> dict[str, str]:
        position = "first" if name == "first" else "last"
        return {
            "model": self.model, "name": f"{name}.weight", "attr": attr, "module": "torch.nn.Linear", "kind": "weight" if name == "first" else "gain",
            "position": position,
        }  # fmt: skip

    def _meta(self, name: str) -> dict[str, Any]:
        said = {"dtype": "float32", "shape": [self.width, 3], "requires_grad": True, "optimizer": "#0", "group": int(name == "head"), "ndim": 2}
        return {**said, "wrapper": "ddp"} if self.world > 1 else said


class _Rows:
    """Rows of one process in the order in which they happen."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.states: list[dict[str, Any]] = []
        self.values: list[dict[str, Any]] = []
        self.context: dict[str, Any] = {}

    def now(self, **context: Any) -> None:
        self.context = context

    def reserve(self) -> int:
        """The number of a call that is filled in later, when what it contains is known."""
        self.calls.append({})
        return len(self.calls)

    def fill(self, seq: int, row: Mapping[str, Any]) -> None:
        self.calls[seq - 1] = {**row, "seq": seq, **self.context}

    def call(self, fn: str, *args: Any, **more: Any) -> int:
        seq = self.reserve()
        self.fill(seq, call(fn, *args, site=f"train.py:{len(fn)}", **more))
        self.calls[seq - 1].update({k: v for k, v in more.items() if k in ("autocast", "outer")})
        return seq

    def state(self, var: Mapping[str, str], **row: Any) -> None:
        self.states.append({"var": dict(var), "seq": len(self.calls), "edge": 1, **row, **self.context})

    def value(self, seq: int, kind: str, **row: Any) -> None:
        self.values.append({"seq": seq, "kind": kind, **row, **self.context})


def _fp(*parts: object) -> int:
    return 1 + Random(repr(parts)).getrandbits(48)


def runs(folder: Path, seeds: Sequence[int]) -> list[Path]:
    """Runs of these seeds, written once."""
    made = []
    for seed in seeds:
        path = folder / f"run{seed}"
        made.append(path if path.exists() else write_random_run(path, seed))
    return made
