"""What must be new is new, and what must be the same is the same: randomness, batches, buffers.

Randomness (`_fresh_randomness`): no forward that draws, no loading of a batch, no loader worker and no shuffled epoch
begins in the state of an earlier one; no training step sets a seed again; no draw returns what was drawn before. Catches
augmentations that repeat because a generator was copied into the workers or is seeded again, dropout with one mask, a
shuffle without `set_epoch`, layers that were initialised alike.
Batches (`_fresh_batches`): a loader does not give a batch twice in a row; ranks that hold the same model are given
different ones; where a program shuffles, each pass draws an order; steps that follow each other train on other batches. Catches a missing sampler, workers that all yield the whole stream,
a shuffle that was left out.
Buffers (`_fresh_buffers`): a statistic changes in every step in which its module trains, a constant in none, and those of
a DDP model are equal on all ranks when its forward begins. Catches stale and diverging buffers.

Most of these speak of no kind of program: they are learned where they have been seen to hold, and then hold everywhere.
Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.fresh import batches as _fresh_batches
from proctor.invariants.relations.fresh import buffers as _fresh_buffers
from proctor.invariants.relations.fresh import randomness as _fresh_randomness
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import MODEL_CALL
from proctor.invariants.trace import Trace

_PARTS: Final[dict[str, Callable[[Trace], pl.DataFrame]]] = {
    "forward": _fresh_randomness.forwards,
    "step": _fresh_randomness.steps,
    "load": _fresh_randomness.loads,
    "epoch": _fresh_randomness.epochs,
    "workers": _fresh_randomness.workers,
    "seed": _fresh_randomness.seeds,
    "draw": _fresh_randomness.draws,
    "batch": _fresh_batches.consecutive,
    "order": _fresh_batches.orders,
    "another": _fresh_batches.other_batches,
    "ranks": _fresh_batches.ranks,
    "moves": _fresh_buffers.changes,
    "still": _fresh_buffers.changes,
    "synchronised": _fresh_buffers.synchronised,
}
_RNG: Final = frozenset({"rng"})
_LOADER: Final = frozenset({_fresh_batches.ITER, _fresh_batches.NEXT})
_NEEDS: Final[dict[str, Needs]] = {
    "forward": Needs(frozenset({MODEL_CALL}), values=_RNG),
    "step": Needs(frozenset({MODEL_CALL, *_LOADER}), values=_RNG),
    "load": Needs(frozenset({MODEL_CALL, *_LOADER}), values=_RNG),
    "epoch": Needs(frozenset({MODEL_CALL, *_LOADER}), values=_RNG),
    "workers": Needs(frozenset({MODEL_CALL, *_LOADER}), values=_RNG),
    "batch": Needs(frozenset({MODEL_CALL, *_LOADER}), values=frozenset({"batch"})),
    "another": Needs(frozenset({MODEL_CALL, _frames.UPDATE, _fresh_batches.ITER}), values=frozenset({"batch"})),
    "order": Needs(_fresh_batches.LOOP | {*_fresh_batches.DRAWS}),
    "ranks": Needs(
        frozenset({MODEL_CALL, _frames.UPDATE, _fresh_batches.NEXT}),
        frozenset({"data"}),
        frozenset({"batch"}),
    ),
    "synchronised": Needs(frozenset({_fresh_buffers.SYNC}), frozenset({"buffer"})),
}
_DRAWS: Final = frozenset(
    [
        f"torch.{n}"
        for n in "rand randn randint randperm rand_like randn_like bernoulli normal multinomial".split()
    ]
    + ["torch.Tensor.normal_", "torch.Tensor.uniform_"]
)
_SAYS: Final[dict[str, str]] = {
    "forward": "a training forward that draws begins in a generator state in which no forward began before",
    "step": "a step in which the {what} generator moves ends in a state in which no step ended before",
    "load": "a batch is drawn from the {what} generator in a state from which none was drawn before",
    "epoch": "each epoch of a shuffling loader has an order of its own",
    "workers": "no loader worker begins an epoch with a generator in the state of another worker or epoch",
    "seed": "no training step calls {what} with a seed that was set before",
    "batch": "a loader does not give the same batch twice in a row",
    "another": "a step trains on another batch than the step before, in one pass over the data",
    "order": "an order of samples is drawn for each pass over the data that is trained on",
    "ranks": "ranks that hold the same model ({what}) are given different batches",
    "moves": "{what} changes in every step in which its module trains",
    "still": "{what} does not change while its module trains",
    "synchronised": "{what} is equal on all ranks when the forward of DistributedDataParallel begins",
}
_ADVICE: Final[dict[str, str]] = {
    "forward": "A seed or generator state is set inside the training loop, so every dropout mask is the same.",
    "step": "A seed or generator state is set inside the training loop, so what is random repeats.",
    "load": "The generator of the augmentation is created or seeded anew for each batch or sample.",
    "epoch": "Call sampler.set_epoch(epoch) before each epoch; do not seed the loader's generator inside the loop.",
    "workers": "Workers are copies of the process that starts them, made anew for each epoch: in worker_init_fn, give each "
    "generator that the dataset uses a seed that follows from get_worker_info().seed.",
    "seed": "Seed once, before the training.",
    "draw": "A seed or generator state was set again between the two draws.",
    "batch": "Workers of an iterable dataset must each yield a part (get_worker_info), with a generator of their own.",
    "ranks": "Give each rank its part of the data: DistributedSampler with the rank of this process.",
    "another": "Look at what the training loop iterates over, and at what hands out batches.",
    "order": "Look at the loader: shuffle=True, or its sampler.",
    "moves": "Look at what updates this buffer: an update that is skipped, or written to a copy or to a tensor that is no "
    "longer registered.",
    "still": "Something writes in place to what the model takes for a constant.",
    "synchronised": "DistributedDataParallel(broadcast_buffers=False), or a forward that goes around it: each "
    "rank keeps statistics of its own. Use SyncBatchNorm or let DDP broadcast.",
}


@register
class Fresh(Relation):
    """Randomness, batches and statistics do not repeat; constants do."""

    name = "fresh"
    code = "PR107"
    upstream: ClassVar[int] = 1
    ahead: ClassVar[int] = 0
    reads: ClassVar[Reads] = "draws"
    absence: ClassVar[bool] = (
        True  # `moves` says that something happened; repetitions are seen, so fewer rows are none
    )
    reach: ClassVar[int | None] = None  # a state may repeat one of any earlier step

    def propose(self, trace: Trace) -> list[Hypothesis]:
        found = _every(trace, set(_PARTS))
        # A rule of one module says something where the rule of its class does not hold.
        broken = {(mode, what) for mode, what in found.filter(~pl.col("passed")).select("mode", "what").unique().iter_rows()}
        held = _sightings.held(self.name, found)
        return [h for h in held if h["mode"] not in ("moves", "still") or (base := _fresh_buffers.for_all(h.text("what"))) == h["what"] or (h.text("mode"), base) in broken]

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _sightings.bound_examples(
            trace, _every(trace, {h.text("mode") for h in hypotheses}), hypotheses
        )

    def measures(self, hypothesis: Hypothesis) -> frozenset[str]:
        return frozenset(_fresh_randomness.SEEDS) if hypothesis["mode"] == "seed" else frozenset()

    def standing_of(self, hypothesis: Hypothesis) -> Standing:
        """Batch statistics move when their module trains. What is drawn again may be drawn again on purpose."""
        if hypothesis["mode"] == "moves":
            return Standing.LAW
        few = hypothesis["mode"] == "draw" and hypothesis["what"] != "weights"  # a small number comes twice by chance
        return Standing.HABIT if few or hypothesis["mode"] in ("still", "order", "another") else Standing.CHOICE

    def needs(self, hypothesis: Hypothesis) -> Needs:
        mode, what = hypothesis.text("mode"), hypothesis.text("what")
        if mode == "seed":
            return Needs(frozenset({what, _frames.UPDATE, _sightings.CREATED, MODEL_CALL}))
        if mode == "draw":
            return Needs(
                _DRAWS if what == "weights" else frozenset({what, MODEL_CALL}), values=frozenset({"draw"})
            )
        if mode in ("moves", "still"):
            return Needs(
                frozenset({f"{_fresh_buffers.for_all(what).rpartition('.')[0]}.forward", _frames.UPDATE}), frozenset({"buffer"})
            )
        return _NEEDS[mode]

    def say(self, hypothesis: Hypothesis) -> str:
        mode, what = hypothesis.text("mode"), hypothesis.text("what")
        if mode == "draw":
            if what == "weights":
                return (
                    "no three tensors of one shape are filled with the same random values before the training"
                )
            return f"{what} returns no values twice in training"
        return _SAYS[mode].format(what=what)

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        mode, what = hypothesis.text("mode"), hypothesis.text("what")
        module = _fresh_buffers.for_all(what).rpartition(".")[0] if mode in ("moves", "still", "synchronised") else ""
        return _sightings.detail(example, _ADVICE[mode], module=module)


def _every(trace: Trace, modes: set[str]) -> pl.DataFrame:
    """Examples of these modes, whatever the hypothesis."""
    return _sightings.of_parts(
        trace, "fresh", {_PARTS[mode].__qualname__: _PARTS[mode] for mode in sorted(modes)}
    )
