"""Laws that every relation obeys, whoever wrote it: they are what makes shards, chunks and lost records harmless."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import permutations
from pathlib import Path
from random import Random
from tempfile import mkdtemp
from typing import Any
from zlib import crc32

import msgspec
import polars as pl
import pytest
from helpers.live.flushes import Flush, flushes
from helpers.traces import runs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proctor.infer import shards
from proctor.infer.engine import Options, infer
from proctor.infer.preconditions.compress import COUNT
from proctor.infer.shards.partial import PLACE, RANK, SITE, Partial, count, merge
from proctor.invariants.codec.signature import outline
from proctor.invariants.invariant import Hypothesis, Invariant
from proctor.invariants.pack import Pack
from proctor.invariants.relations import Relation, registry
from proctor.invariants.schema import Name
from proctor.invariants.trace import Trace
from proctor.verify.checker import check, judge
from proctor.verify.coverage import coverage
from proctor.verify.live.online import OnlineChecker

NAMES = sorted(registry())
EXAMPLES = int(os.environ.get("PROCTOR_LAW_EXAMPLES", "0"))  # of each law and relation; 0: a few, always the same, of few runs
SEEDS = st.integers(0, 39 if EXAMPLES else 11)
FEW = settings(max_examples=EXAMPLES or 3, deadline=None, suppress_health_check=list(HealthCheck), derandomize=not EXAMPLES)
FEWER = settings(FEW, max_examples=EXAMPLES or 1)  # of those that cost most
pytestmark = pytest.mark.filterwarnings("ignore")


@cache
def folder() -> Path:
    return Path(mkdtemp(prefix="laws-"))


@cache
def run(seed: int) -> Path:
    return runs(folder(), [seed])[0]


@cache
def trace(*seeds: int) -> Trace:
    """Kept, so that all relations share its views."""
    return Trace.load([run(seed) for seed in seeds])


@cache
def rules(name: str, seeds: tuple[int, ...]) -> tuple[Invariant, ...]:
    """What a relation learns from some runs, faults included: they may have rules of any kind."""
    found, _ = infer(trace(*seeds), [registry()[name]], options=Options(strict=True, validate=False, min_support=1))
    return tuple(found)


@cache
def survey(name: str, seed: int) -> pl.DataFrame:
    return registry()[name].survey(trace(seed))


def hypotheses(relation: Relation, seeds: Sequence[int]) -> list[Hypothesis]:
    surveys = [survey(relation.name, seed) for seed in seeds]
    return sorted(set(relation.settle(relation.merge(surveys))), key=msgspec.json.encode)


def same(a: Partial, b: Partial) -> bool:
    """Equal but for the order of rows and columns, and for columns without a value."""
    frames = []
    for partial in (a, b):
        frame = partial.frame.drop(SITE)
        frame = frame.select(sorted(c for c in frame.columns if c.endswith("~") or frame[c].null_count() < frame.height or frame.is_empty()))
        frames.append(frame.select(pl.exclude("^.*~$")).sort(pl.all(), nulls_last=True))
    return frames[0].equals(frames[1]) and a.examples == b.examples


# -- merging -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(seeds=st.lists(SEEDS, min_size=3, max_size=3, unique=True))
@FEW
def test_surveys_merge_in_any_order_and_grouping(name: str, seeds: list[int]) -> None:
    relation = registry()[name]
    a, b, c = (survey(name, seed) for seed in seeds)
    whole = relation.merge([a, b, c])
    assert relation.merge([a]).equals(relation.merge([relation.merge([a])]))
    for x, y, z in permutations((a, b, c)):
        assert relation.merge([relation.merge([x, y]), z]).equals(whole)
        assert relation.merge([x, relation.merge([y, z])]).equals(whole)


@pytest.mark.parametrize("name", NAMES)
@given(seeds=st.lists(SEEDS, min_size=3, max_size=3, unique=True))
@FEW
def test_partials_merge_in_any_order_and_grouping(name: str, seeds: list[int]) -> None:
    relation = registry()[name]
    asked = hypotheses(relation, seeds)
    parts = [count(relation.examples(trace(seed), asked), trace(seed)).of_runs([i]) for i, seed in enumerate(seeds)]
    whole = merge(parts)
    for x, y, z in permutations(parts):
        assert same(merge([merge([x, y]), z]), whole)
        assert same(merge([x, merge([y, z])]), whole)


@pytest.mark.parametrize("name", NAMES)
@given(seeds=st.lists(SEEDS, min_size=2, max_size=3, unique=True))
@FEW
def test_shards_give_what_the_whole_gives(name: str, seeds: list[int]) -> None:
    relation = registry()[name]
    whole = trace(*seeds)
    asked = hypotheses(relation, seeds)
    assert asked == sorted(set(relation.propose(whole)), key=msgspec.json.encode)
    parts = [count(relation.examples(trace(seed), asked), trace(seed)).of_runs([i]) for i, seed in enumerate(seeds)]
    assert same(merge(parts), count(relation.examples(whole, asked), whole))


@pytest.mark.parametrize("name", NAMES)
@given(seeds=st.lists(SEEDS, min_size=2, max_size=4, unique=True))
@FEWER
def test_inference_does_not_depend_on_how_runs_are_sharded(name: str, seeds: list[int]) -> None:
    paths = [run(seed) for seed in seeds]
    options = Options(strict=True, min_support=1)
    alone, _ = infer(shards.of_runs(paths), [registry()[name]], options=options)
    together, _ = infer(shards.of_runs(paths[::-1], group_bytes=1 << 30), [registry()[name]], options=options)
    told = [{r.id: (r.support, r.false_alarm) for r in found} for found in (alone, together)]
    assert told[0] == told[1]


@pytest.mark.parametrize("name", NAMES)
@given(seeds=st.lists(SEEDS, min_size=2, max_size=2, unique=True))
@FEW
def test_where_a_relation_is_idle_it_has_no_examples(name: str, seeds: list[int]) -> None:
    relation, of = registry()[name], trace(seeds[1])
    known = [r.hypothesis for r in rules(name, (seeds[0],))]
    if known and relation.idle(of):
        assert relation.examples(of, known).frame.is_empty()


# -- checking ----------------------------------------------------------------------------------------------------


def verdicts(relation: Relation, learned: Sequence[Invariant], of: Trace) -> dict[str, str]:
    seen = coverage(of)
    found = {}
    for judged in judge(of, relation, learned, seen):
        decided = judged.met - judged.undecided
        found[judged.rule.id] = "violated" if judged.failed else "holds" if decided else "unknown" if judged.met else "idle"
    return found


def shuffled(path: Path, random: Random) -> Iterator[Flush]:
    """What the processes of a run let go of, cut into smaller pieces and in any order of the processes."""
    waiting: dict[str, list[Flush]] = {}
    for process, part, info, reached in flushes(path):
        pieces = waiting.setdefault(process, [])
        pieces.append((process, {t: part[t] for t in ("names", "context") if t in part}, info, reached - 1))
        for table in ("calls", "states", "values"):
            size = random.randint(0, part[table].num_rows)
            pieces += [(process, {table: part[table].slice(*cut)}, info, reached - 1) for cut in ((0, size), (size,))]
        pieces.append((process, {}, info, reached))
    while waiting:
        process = random.choice(sorted(waiting))
        yield waiting[process].pop(0)
        if not waiting[process]:
            del waiting[process]


def live(pack: Pack, known: Mapping[str, Relation], seed: int, chunks: Iterable[Flush]) -> set[str]:
    """Rules that are violated while the run goes on."""
    checker = OnlineChecker([pack], run=str(run(seed)), program=f"train{seed}.py", relations=known, together=False)
    found = {v.id for chunk in chunks for v in checker.feed(*chunk)}
    found |= {v.id for round_ in checker.finish() for v in round_.violations}
    assert not checker.errors
    return found


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, others=st.lists(SEEDS, min_size=2, max_size=2, unique=True), order=st.integers(0, 1 << 16))
@FEWER
def test_online_finds_the_same_for_any_chunking_and_nothing_that_offline_does_not(
    name: str, seed: int, others: list[int], order: int
) -> None:
    pack = Pack(list(rules(name, tuple(sorted(others)))))
    known = {name: registry()[name]}
    plain = live(pack, known, seed, flushes(run(seed)))
    assert plain == live(pack, known, seed, shuffled(run(seed), Random(order)))
    assert plain <= {v.id for v in check(trace(seed), [pack], relations=known).violations}


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, others=st.lists(SEEDS, min_size=2, max_size=2, unique=True))
@FEW
def test_order_of_ranks_does_not_change_a_verdict(name: str, seed: int, others: list[int]) -> None:
    relation = registry()[name]
    learned = rules(name, tuple(sorted(others)))
    assert verdicts(relation, learned, trace(seed)) == verdicts(relation, learned, reordered(seed))


@cache
def reordered(seed: int) -> Trace:
    """The same run with its processes the other way round."""
    given_ = trace(seed)
    last = len(given_.processes) - 1

    def turned(frame: pl.DataFrame) -> pl.DataFrame:
        return frame.with_columns((last - pl.col("proc")).cast(pl.UInt16).alias("proc")).sort("proc", maintain_order=True)

    tables = {t: turned(getattr(given_, t)) for t in ("calls", "states", "values", "contexts")}
    return Trace(processes=given_.processes[::-1], runs=given_.runs, texts=given_.texts, notes=given_.notes, **tables)


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, others=st.lists(SEEDS, min_size=2, max_size=2, unique=True), which=st.integers(0, 7))
@FEW
def test_dropped_records_never_make_a_violation(name: str, seed: int, others: list[int], which: int) -> None:
    relation = registry()[name]
    learned = rules(name, tuple(sorted(others)))
    before, after = verdicts(relation, learned, trace(seed)), verdicts(relation, learned, thinned(seed, which))
    new = {rule for rule, verdict in after.items() if verdict == "violated" and before[rule] != "violated"}
    assert not [(rule.text, before[rule.id]) for rule in learned if rule.id in new]


@cache
def thinned(seed: int, which: int) -> Trace:
    """The same run with a part of one process's records lost, and known to be lost."""
    given_, random = trace(seed), Random(which)
    victim = random.randrange(len(given_.processes))
    share = random.choice([0.05, 0.2, 0.6])

    def thin(frame: pl.DataFrame) -> pl.DataFrame:
        kept = [p != victim or random.random() > share for p in frame["proc"].to_list()]
        return frame.filter(pl.Series(kept, dtype=pl.Boolean))

    processes = [
        msgspec.structs.replace(p, dropped=17) if i == victim else p for i, p in enumerate(given_.processes)
    ]
    tables = {t: thin(getattr(given_, t)) for t in ("calls", "states", "values")}
    return Trace(processes=processes, runs=given_.runs, texts=given_.texts, contexts=given_.contexts, **tables)


@pytest.mark.parametrize("name", NAMES)
@given(seed=SEEDS, others=st.lists(SEEDS, min_size=2, max_size=2, unique=True), salt=st.integers(1, 9))
@FEW
def test_numbers_that_a_relation_does_not_measure_change_no_verdict(name: str, seed: int, others: list[int], salt: int) -> None:
    """A verifier takes windows for alike that differ in these."""
    relation = registry()[name]
    if relation.reads == "numbers" and type(relation).reads_of is Relation.reads_of:
        return  # all of its rules read them
    learned = [rule for rule in rules(name, (*sorted(others), seed)) if relation.reads_of(rule.hypothesis) != "numbers"]
    measured = frozenset[str]().union(*(relation.measures(rule.hypothesis) for rule in learned))
    before, after = ({j.rule.id: (j.met, j.failed, j.undecided) for j in judge(of, relation, learned, coverage(of))}
                     for of in (trace(seed), renumbered(seed, measured, salt)))
    assert before == after


@cache
def renumbered(seed: int, measured: frozenset[str], salt: int) -> Trace:
    """The same run, where functions other than these were given other numbers and gave back others."""
    given_ = trace(seed)
    codes = [given_.function_code[name] for name in measured if name in given_.function_code]
    theirs = given_.calls.filter(pl.col("fn").is_in(codes))
    kept = {*theirs["args"], *theirs["ret"]}
    old = given_.texts[Name.SIGNATURE]
    new = [text if code in kept or not text else json.dumps(other_numbers(json.loads(text), salt + crc32(text.encode()) % 5)) for code, text in enumerate(old)]
    assert [outline(text) for text in new] == [outline(text) for text in old]
    tables = {t: getattr(given_, t) for t in ("calls", "states", "values", "contexts")}
    return Trace(processes=given_.processes, runs=given_.runs, texts={**given_.texts, Name.SIGNATURE: new}, **tables)


def other_numbers(leaf: Any, salt: int) -> Any:
    """The same signature but for plain numbers, sizes of tensors and numbers that are attributes."""
    if isinstance(leaf, bool) or leaf is None or isinstance(leaf, str):
        return leaf
    if isinstance(leaf, int | float):
        other = type(leaf)(-salt) if salt % 3 == 0 else leaf * 2 + salt
        return other if leaf and other else leaf
    if isinstance(leaf, list):
        return [other_numbers(item, salt) for item in leaf]
    flags = ("n", "g", "t")
    return {key: value if key in flags and isinstance(value, int) else other_numbers(value, salt) for key, value in leaf.items()}


def test_the_runs_have_something_to_say() -> None:
    """Laws about nothing would hold, too."""
    for name in (
        "apart", "applied", "argument", "consistent", "contain", "delivered", "input_output", "option", "output", "paced", "recomputed", "resumed", "sequence", "varies",
    ):  # fmt: skip
        assert rules(name, tuple(range(12))), name
    assert {COUNT, PLACE, RANK} <= set(merge([count(registry()["contain"].examples(trace(0), []), trace(0))]).frame.columns)
