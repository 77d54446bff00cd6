"""The program on several ranks trains as it does on one with the batches of all: gradients are averaged as the loss is, and nothing is divided twice.

Which programs can is found out: the command starts ranks already, or something that it loaded makes process groups, and then it is tried. What makes the batches alike: a run on the ranks notes which
samples each loader reads, and the run on one rank reads, batch by batch, those of all (`adapters/loaders`). That the batches ARE alike is not believed but looked up, row by row of what the models were
given. Learning rates are those of the ranks in both, batch norms take the statistics of each sample, dropout keeps everything: there several ranks differ by design. Both are recorded and compared
as by `proctor oracle run`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from proctor.oracle.selfcheck import NotApplicable, Unknown
from proctor.oracle.selfcheck.adapters import VARIABLE
from proctor.oracle.selfcheck.adapters.loaders import LIBRARY, notes
from proctor.oracle.selfcheck.facts import DIGESTS, CheckConfig, Line
from proctor.oracle.selfcheck.launch import Launched, alone, launch, lines, on_ranks, unwatched, why_nothing
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.program import Program, ProgramRelation, register
from proctor.oracle.selfcheck.program.vary import compared

RANKS: Final = 2
UPDATES: Final = 1  # after the first, whose batches are looked at
TWICE: Final = 1.5  # a gradient that grows by so much where each sample comes twice is a sum, not a mean


@register
class Ranks(ProgramRelation):
    """Runs on the ranks, on one, compares."""

    name, claim = "ranks", "on several ranks the program trains as on one with the batches of all"

    def check(self, program: Program) -> list[Outcome]:
        """See the class."""
        several, one = _commands(program)
        home = program.out / "ranks"
        told = home / "told"
        told.mkdir(parents=True, exist_ok=True)
        for left in told.glob("rank*.jsonl"):
            left.unlink()
        seen = self._digests(program, several, home / "several", "note", told)
        if len(seen) < RANKS or not all(any(line.get("world", 0) == len(seen) for line in found) for found in notes(told).values()):
            raise NotApplicable("on two ranks the program makes no process group of both: each trains by itself")
        _nothing_drawn(seen)
        alike = self._same_samples(program, seen, told)
        if alike is not None:
            return [alike]
        way = self._way(program, one, home, seen, told)
        if way == "union":
            self._follows_batch(program, one, home, told)
        said = f"one rank with the batches of all against {len(seen)} ranks"
        commands = [["env", f"{VARIABLE}={LIBRARY}:{way} {told.resolve()}", *command] for way, command in ((way, one), ("apart", several))]
        return [compared(self, said, home / "recorded", commands, program.timeout_s)]

    def _way(self, program: Program, one: Sequence[str], home: Path, seen: Mapping[int, list[Line]], told: Path) -> str:
        """How one rank reads what all did: those batches together; or its own, more of them in an update, where the program accumulates more on fewer ranks or cuts its data by itself."""
        read = any("batch" in line for found in notes(told).values() for line in found)
        whys = []
        for way in ("union", "own") if read else ("own",):
            together = self._digests(program, one, home / way, way, told)
            if len(together) != 1:
                raise NotApplicable("the program starts several ranks, however many it is told")
            why = _apart(seen.values(), next(iter(together.values())))
            if not why:
                return way
            whys.append(why)
        raise NotApplicable(whys[0])

    def _digests(self, program: Program, command: Sequence[str], folder: Path, way: str, told: Path) -> dict[int, list[Line]]:
        """What each rank computed with."""
        config = CheckConfig("", step=UPDATES, digest=True, rows=True, seed=0)
        run = launch(command, folder, config, timeout_s=program.timeout_s, environment={VARIABLE: f"{LIBRARY}:{way} {told.resolve()}"})
        found = {int(path.parent.name[4:]): lines(path, Line) for path in sorted(run.folder.glob(f"rank*/{DIGESTS}"))}
        if unwatched(run):
            raise Unknown(unwatched(run))
        if not any(found.values()):
            raise _failed(run, way)
        return found

    def _same_samples(self, program: Program, seen: Mapping[int, list[Line]], told: Path) -> Outcome | None:
        """All ranks are given the same batches: what is said of that."""
        given = [[(x.name, x.digest) for x in found if x.kind == "input" and x.step == 0] for found in seen.values()]
        if any(g != given[0] for g in given) or not given[0]:
            return None
        batches = [[line["batch"] for line in found if isinstance(line.get("batch"), list)][:2] for found in notes(told).values()]
        if len(batches) < len(seen) or any(b != batches[0] for b in batches) or len(batches[0]) < 2 or batches[0][0] == batches[0][1]:
            raise NotApplicable("all ranks compute with the same batch, which no loader with several batches gave")
        source = next((x.source for x in seen[0] if x.kind == "input"), "")
        return Outcome(
            relation=self.name, claim=self.claim, subject="the program", verdict="different", reason=f"all {len(seen)} ranks read the same samples ({', '.join(map(str, batches[0][0][:4]))}, …): more ranks train on no more of them",
            expected="each rank reads samples of its own", seen="the same batch on every rank", culprit=Culprit("the loader", "", source), advice="give the loader a DistributedSampler, or cut the data by rank",
        )  # fmt: skip

    def _follows_batch(self, program: Program, one: Sequence[str], home: Path, told: Path) -> None:
        """The loss must be a mean over the batch that comes: a batch size of the command line stays what it was where batches grow."""
        sizes = []
        for way in ("first", "twice"):
            found = self._digests(program, one, home / way, way, told)
            sizes.append(_size(next(iter(found.values()))))
        if sizes[0] and sizes[1] / sizes[0] > TWICE:
            raise NotApplicable("the loss grows with the batch that comes (it is a sum, or divided by a number that is not taken from the batch): batches of another size mean something else to this program")


def _commands(program: Program) -> tuple[list[str], list[str]]:
    """On several ranks, and on one."""
    command = list(program.command)
    if max((f.world for f in program.first.facts), default=1) > 1:
        one = alone(command)
        if not one:
            raise NotApplicable("the program starts its ranks by itself; no launcher's option for their number is on its command line")
        return command, one
    if not any(f.groups for f in program.first.facts):
        raise NotApplicable("nothing that the program loads makes a process group")
    several = on_ranks(command, RANKS)
    if not several:
        raise NotApplicable("the command is no python that a launcher could start on two ranks")
    return several, command


def _failed(run: Launched, way: str) -> Unknown | NotApplicable:
    why = why_nothing(run)
    return NotApplicable(f"it does not run on two ranks: {why}") if way == "note" else Unknown(f"on one rank with the batches of all: {why}")


def _nothing_drawn(seen: Mapping[int, list[Line]]) -> None:
    """The ranks draw no random numbers in the forward, which would be others on each."""
    drew = next((x for found in seen.values() for x in found if x.kind == "drew"), None)
    if drew is not None:
        raise NotApplicable(f"{drew.name} draws random numbers beside those of dropout, others on each rank")


def _apart(seen: Iterable[list[Line]], one: Sequence[Line]) -> str:
    """Why the batches of the ranks are not that of one, row by row in any order, in each update; "" where they are."""
    parts, whole = [_given(found) for found in seen], _given(one)
    if not whole:
        return "no module is called for training on one rank"
    wrapped = {name for _, name in whole}.isdisjoint(name for _, name in parts[0])  # on several ranks another module is called, around that of one (lightning)
    for (step, name), lines_of_one in whole.items():
        places = [place for place in parts[0] if place[0] == step] if wrapped else [(step, name)]
        if not any(_together([p.get(place, []) for p in parts], lines_of_one) for place in places):
            return f"batches of the ranks are not that of one ({name}, update {step}): data are drawn, augmented, padded or cut otherwise"
    return ""


def _given(found: Iterable[Line]) -> dict[tuple[int, str], list[Line]]:
    """What models were given, by update and name."""
    out: dict[tuple[int, str], list[Line]] = defaultdict(list)
    for line in found:
        if line.kind == "input" and line.step <= UPDATES:
            out[line.step, line.name].append(line)
    return out


def _together(parts: Sequence[Sequence[Line]], whole: Sequence[Line]) -> bool:
    """Whether ranks were given the rows of one, in any order; or the same in each call on all: positions, a mask."""
    if not all(parts):
        return False
    return len({line.digest for found in (*parts, whole) for line in found}) == 1 or any(_rows([x for found in parts for x in found], axis) == _rows(whole, axis) != Counter() for axis in range(2))


def _rows(found: Iterable[Line], axis: int) -> Counter[str]:
    return sum((Counter(line.rows[axis]) for line in found if axis < len(line.rows)), Counter())


def _size(found: Sequence[Line]) -> float:
    """Norm of the first update's gradients, before they were clipped."""
    first = [x for x in found if x.step == 0]
    whole = next((x.size for x in first if x.kind == "norm"), None)
    return whole if whole is not None else sum(x.size**2 for x in first if x.kind == "gradient") ** 0.5

