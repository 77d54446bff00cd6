"""From tapes to a verdict: refute first, then prove."""

from __future__ import annotations

import time
from collections.abc import Sequence

from proctor.oracle.plans.plan import Plan
from proctor.oracle.prove import judge
from proctor.oracle.prove.cache import Cache, key_of
from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.domains.field import Field, P
from proctor.oracle.prove.judge import Output, Runs
from proctor.oracle.prove.leaves import Alignment, align
from proctor.oracle.prove.locate import Observed, locate
from proctor.oracle.prove.machine import Stuck
from proctor.oracle.prove.made_up import relied_on
from proctor.oracle.prove.proofs import attempt
from proctor.oracle.prove.tape import ABSENT, MARK, READ, Node, Tape, collective, numbers
from proctor.oracle.prove.verdict import Culprit, Verdict

ATTEMPTS = 3


def decide(reference: Tape, candidate: Sequence[Tape], plan: Plan | None = None, *, proof_s: float = 120.0, cache: Cache | None = None) -> Verdict:
    """Judge tapes.

    Args:
        reference: of one rank.
        candidate: of all ranks, in order.
        plan: where the layout of parameters is not to be found by content.
        proof_s: seconds of CPU that a proof may take; 0 for none.
        cache: of verdicts on the same programs.
    """
    if cache is None:
        return _decided(reference, candidate, plan, proof_s)
    began = time.monotonic()
    key = key_of(reference, candidate, align(reference, candidate, plan))
    verdict = cache.find(key, proof_s)
    if verdict is None:
        verdict = _decided(reference, candidate, plan, proof_s)
        cache.keep(key, verdict, proof_s)
    else:
        verdict.seconds = {"from the cache": time.monotonic() - began}
    return verdict


def _decided(reference: Tape, candidate: Sequence[Tape], plan: Plan | None, proof_s: float) -> Verdict:
    began = time.monotonic()
    alignment = align(reference, candidate, plan)
    verdict = Verdict("UNPROVED", ranks=len(candidate), operations=sum(len(t.nodes) for t in (reference, *candidate)))
    if said := relied_on(candidate):
        verdict.why = said
        verdict.seconds["refutation"] = time.monotonic() - began
        return verdict
    try:
        observed, doubles = _judge(verdict, reference, candidate, alignment)
        if verdict.verdict in ("EQUAL", "CLOSE") and proof_s > 0:
            verdict.seconds["refutation"] = time.monotonic() - began
            _prove(verdict, reference, candidate, alignment, (observed, doubles), proof_s)
            return verdict
    except Stuck as stuck:
        counted = [(tape, *one) for tape in candidate for one in tape.counted]
        if counted:  # they may have gone other ways for integers that are made up
            verdict.why = _of_others(counted[0][0].nodes[counted[0][1]], counted[0][2])
            verdict.seconds["refutation"] = time.monotonic() - began
            return verdict
        verdict.verdict, verdict.why = "DIFFERENT", stuck.why
        places = [text.rpartition(" at ")[2] for text in stuck.where.values() if " at " in text]
        verdict.culprit = Culprit(stuck.kind, place=next((p for p in places if p), ""), said=str(stuck)[:400])
    except NotImplementedError as error:
        verdict.why = str(error)
    verdict.seconds["refutation"] = time.monotonic() - began
    return verdict


def _judge(verdict: Verdict, reference: Tape, candidate: Sequence[Tape], alignment: Alignment) -> tuple[list[Observed], Observed]:
    told = Observed(reference, candidate)
    doubles = Runs.of(F64(), reference, candidate, alignment, (told.reference, told.candidate))
    outputs = judge.compared_doubles(doubles, alignment, judge.starting_values(reference))
    observed, fields = _in_fields(reference, candidate, alignment)
    for output in outputs:
        output.field = all(f[output.what, output.name, output.rank] for f in fields)
    runs = observed[-1].runs
    assert runs is not None
    opaque = {**doubles.reference.opaque, **doubles.candidate.opaque, **runs.reference.opaque, **runs.candidate.opaque}
    verdict.opaque = [f"{op} at {place}" for op, place in opaque.items()]
    verdict.outputs = len(outputs)
    verdict.assumed = [*_assumed(reference, candidate, alignment), *_decisions(reference, candidate, observed)]
    missing = judge.not_covered(reference, doubles, alignment)
    wrong = [o for o in outputs if not o.field and not o.doubles]
    used = [(candidate[r].nodes[at], place) for r, at in sorted(doubles.candidate.untrue) for node, place in candidate[r].counted if node == at]
    if used:
        verdict.why = _of_others(*used[0])
        return observed, told
    if alignment.strange:
        verdict.why = f"the ranks do not begin with the reference's parameters: {alignment.strange[0]}{_more(alignment.strange)}"
        if wrong or missing:
            _different(verdict, wrong, missing)
            verdict.culprit = Culprit("initial values", said=f"{alignment.strange[0]} holds values that the reference's parameters do not have")
        return observed, told
    if alignment.unplaced and not wrong:
        verdict.why = f"initial values do not tell which parameter of the reference {alignment.unplaced[0]}{_more(alignment.unplaced)} is: give it random values, or the reference's name"
    elif not outputs:
        verdict.why = "no output of the candidate has a counterpart in the reference"
    elif wrong and opaque:
        verdict.why = f"outputs differ, but {len(opaque)} operators have no meaning here"
    elif wrong and (imagined := _imagined(candidate, doubles.candidate.untrue)):
        verdict.why = f"outputs differ, but numbers such as a routing were computed from what other ranks send, which a fake process group does not carry ({imagined[0]}): judge it as a command with real ranks"
    elif wrong or missing:
        _different(verdict, wrong, missing)
        if wrong:
            verdict.culprit = locate(observed, alignment, doubles, wrong)
        if missing:
            then = f"; {verdict.culprit.said}" if verdict.culprit is not None else ""
            said = f"no rank holds the whole of {missing[0]}{_more(missing)}{then}"
            verdict.culprit = Culprit("missing part", missing[0].rpartition(".")[0], said=said, parameter=missing[0])
    else:
        _agree(verdict, outputs, opaque)
        law = [o for o in outputs if not o.field]
        if law:
            verdict.culprit = locate(observed, alignment, doubles, law)
    return observed, told


def _of_others(node: Node, place: str) -> str:
    return f"integers of {node.op} at {node.place or node.module} are used at {place or 'no line'}, and a fake process group does not carry what other ranks send: judge it as a command with real ranks"


def _imagined(candidate: Sequence[Tape], untrue: set[tuple[int, int]]) -> list[str]:
    """Where numbers that are made up became integers from which an output is made, or were read and may have been computed with."""
    integers = [tape.nodes[k].place for r, tape in enumerate(candidate) for k in tape.imagined if (r, k) in untrue and _matters(tape, k)]
    return integers + [tape.nodes[k].place for r, tape in enumerate(candidate) for k in _read_alone(tape) if (r, k) in untrue]


def _matters(tape: Tape, at: int) -> bool:
    """Whether a result may go into an output, to another rank, or into a number that the program reads; a count of right answers for a log does not."""
    made = {w.storage for w in tape.nodes[at].outs if w is not None}
    for node in tape.nodes[at + 1 :]:
        if any(w.storage in made for w in node.ins):
            if node.op in (MARK, READ) or collective(node.op):
                return True
            made |= {w.storage for w in node.outs if w is not None}
    return False


def _read_alone(tape: Tape) -> list[int]:
    """Where the program reads a float that others have a part in, and does not use it as it is: it may compute with it."""
    last = max((k for k, node in enumerate(tape.nodes) if node.op not in (MARK, READ)), default=0)
    read = [k for k, node in enumerate(tape.nodes) if node.op == READ and node.detail == ABSENT and k < last]
    if not read:
        return []
    as_it_is = {n for node in tape.nodes for n in numbers([node.args, node.kwargs])}
    return [k for k in read if k not in as_it_is]


def _prove(verdict: Verdict, reference: Tape, candidate: Sequence[Tape], alignment: Alignment, runs: tuple[list[Observed], Observed], proof_s: float) -> None:
    began = time.monotonic()
    proof = attempt(reference, candidate, alignment, *runs, budget_s=proof_s)
    verdict.cuts, verdict.lemmas, verdict.local = proof.cuts, proof.lemmas, proof.local
    verdict.seconds["proof"] = time.monotonic() - began
    if proof.why or proof.open or verdict.opaque:
        what, name, rank = proof.open[0] if proof.open else ("", "", 0)
        why = proof.why or (f"not proved: {len(proof.open)} outputs, such as {what} {name} of rank {rank}, need a law{proof.parts}" if proof.open else "not proved: there are operators without a meaning")
        verdict.why += f"; {why}"
        return
    verdict.verdict, verdict.probability, verdict.culprit = "PROVED", 0.0, None
    how = f"{proof.shown} lemmas, used {proof.used} times" if proof.local else f"{proof.polynomials} polynomials in {proof.atoms} atoms"
    verdict.why = f"all {verdict.outputs} outputs are the same formulas ({how}), for all real parameters"


def _in_fields(reference: Tape, candidate: Sequence[Tape], alignment: Alignment) -> tuple[list[Observed], list[dict[tuple[str, str, int], bool]]]:
    """Both fields' runs, once more where only one of them says that an output differs: two elements may meet by chance."""
    for again in range(ATTEMPTS):
        observed, fields = [], []
        for seed in judge.SEEDS:
            seen = Observed(reference, candidate)
            seen.keep(Runs.of(Field(seed + 100 * again), reference, candidate, alignment, (seen.reference, seen.candidate)))
            observed.append(seen)
            assert seen.runs is not None
            fields.append(judge.compared_field(seen.runs, alignment))
        if fields[0] == fields[1]:
            break
    return observed, fields


def _different(verdict: Verdict, wrong: list[Output], missing: list[str]) -> None:
    verdict.verdict = "DIFFERENT"
    verdict.wrong = [f"{o.what} {o.name} of rank {o.rank}" for o in wrong] + [f"{name} is on no rank as a whole" for name in missing]
    if not wrong:
        verdict.why = f"no rank has all of {missing[0]}{_more(missing)}"
        return
    names = sorted({o.name for o in wrong})
    grads = [o for o in wrong if o.what == "grad"]
    verdict.why = f"{len(wrong)} of {verdict.outputs} outputs differ: {'the gradient' if grads else 'the update'} of {(grads or wrong)[0].name}{_more(names)}"
    for o in (grads or wrong)[:3]:
        if o.example is not None:
            scale = f", a factor of {o.factor:.6g} everywhere" if o.factor else ""
            verdict.examples.append(f"{o.what} {o.name}[{o.example[0]}]: {o.example[1]:.9g} in the reference, {o.example[2]:.9g} on rank {o.rank}{scale}")


def _agree(verdict: Verdict, outputs: list[Output], opaque: dict[str, str]) -> None:
    apart = [o for o in outputs if not o.doubles]
    law = [o for o in outputs if not o.field]
    if apart:
        verdict.why = f"{apart[0].what} {apart[0].name} of rank {apart[0].rank} differs in doubles by {apart[0].error:.2g} and is equal in the field: it may be chaotic, or a meaning is wrong"
    elif law and opaque:
        verdict.why = f"{len(law)} of {len(outputs)} outputs are not equal as formulas, and {len(opaque)} operators have no meaning here"
    elif law:
        verdict.verdict = "CLOSE"
        verdict.why = f"{len(law)} of {len(outputs)} outputs are equal in double precision but not as formulas ({law[0].what} {law[0].name}): a law of exp, log or order is missing"
    else:
        verdict.verdict = "EQUAL"
        verdict.probability = (judge.DEGREE / P) ** len(judge.SEEDS)
        verdict.why = f"all {len(outputs)} outputs are equal as formulas at random points of a finite field (wrong with a probability of at most {verdict.probability:.0e})"


def _assumed(reference: Tape, candidate: Sequence[Tape], alignment: Alignment) -> list[str]:
    found = ["real numbers for floats, this shape, and data that lead to the same integers (routing, masks, order)"]
    if alignment.merged:
        names = sorted(alignment.merged)
        found.append(f"equal initial values within {names[0]}{_more(names)} stay equal: their ranks' parts could not be told apart")
    found += sorted({note for tape in (reference, *candidate) for note in tape.notes})
    return found


def _decisions(reference: Tape, candidate: Sequence[Tape], observed: Sequence[Observed]) -> list[str]:
    """Lines at which a program reads what it computed, and may go another way for other data."""
    places = {place for tape in (reference, *candidate) for place in tape.reads}
    one, two = (o.runs for o in observed)
    assert one is not None and two is not None
    for tape, a, b, r in [(reference, one.reference, two.reference, 0), *((t, one.candidate, two.candidate, t.rank) for t in candidate)]:
        last = max((k for k, node in enumerate(tape.nodes) if node.op not in (MARK, READ)), default=0)
        there = b.reads(r)
        places |= {tape.nodes[k].place for k, value in a.reads(r).items() if k < last and k in there and value != there[k]}
    return [f"the same decisions, where the program reads a number that it computed: {place}" for place in sorted(places)]


def _more(names: Sequence[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
