"""What training rests on is as it should be: modes, numbers, statistics, moments and digits stay, and sequences say what they are to say.

`mode`: modules that drop out or normalise by batches train in the mode behind an evaluation that they trained in before it. `number`: so do the numbers of modules,
such as the share of a dropout. `statistics`: a copy of a model that moves towards it is not evaluated with batch statistics of the time when the copy was made.
`buffers`: a buffer of a copy that is the model's does not leave it while the model's stays. `rests`: a copy that is evaluated again on the same data, in place of the model
that trains, has moved since. `precision`: an optimizer that loads moments holds them in the precision
in which they were given. `moments`: an optimizer is not given a state without moments where the file had them. `beginning`: a new optimizer has counted no update
before its first backward. `product`: a tensor in a half type that is multiplied in place by a number is not left as it was by rounding. `update`: nor is a parameter in a half type that has a gradient, where others move. `lost`: gradients of microbatches are not cleared before an update applies them. `stepped`: a scheduler is stepped.
`rescaled`: a loss scaler is not made anew while its optimizer goes on. `itself`: a loss does not take a value from itself. `forgotten`: a part of a model that begins at random and gets gradients is in an optimizer. `early`: a
scheduler is not stepped before the updates of its loop. `alike`: of copies of two models, as the targets of an actor and of a critic, not one alone moves, or is called. `crossed`: a loss does not hold a column of results against a row of numbers. `answer`: the target is no part of what the model is given. `half`: both halves of what
a layer gives get gradients. `snapshot`: a state that is kept, and saved when the model has trained on, is a copy. `follows`: targets do not stay in their order when samples are shuffled.
`unread`: a mask that comes with a batch is read by the function that is given it. `reshaped`: dimensions do not change places by a reshape. `unused`: what is computed of parameters and named is read. `twice`: two parts of a batch are not one.
`filled`: a state that is filled with other values is loaded. `redrawn`: what was loaded is there at the first call. `rate`: a rate that changes in a variable changes in the optimizer. `sorted`: results of packed sequences are put back into the order of their targets, and `padding` does not count.
`shown`: words that a model is to tell are hidden. `order`: what comes with a batch is all in one order. `late`: nothing is added to a loss behind its backward. `sample`: of what a recurrent layer gives for a batch, not one sample alone is used.
`teacher`: a model that was loaded and that nothing trains does not train by its mode. `items`: a list of like layers is gone through, item by item.

`next`: a model over sequences is trained on what comes next: targets that are its inputs lie one place behind them, and not two, nor none where attention is causal. `future`: where they are what comes next,
attention over these places sees neither all of it nor the next place. `mask`: a mask that comes with padded sequences is not the same in all places. `noise`: what a model gives without gradients for the batch that it trains on has no dropout in it.

All but `product` and `update` are told by probes of what they saw in one process, each with what it would take for a right program to look alike (`instrument/probes/modes.py`,
`averages.py`, `checkpoints.py`, `advances.py`, `sequences.py`, `lost.py`, `schedules.py`, `differences.py`, `loose.py`, `ahead.py`, `crossed.py`, `answers.py`, `halves.py`, `snapshots.py`, `follows.py`, `unread.py`, `reshaped.py`, `packed.py`, `filled.py`, `redrawn.py`, `rates.py`, `shown.py`, `late.py`, `samples.py`, `teachers.py`, `items.py`). They are choices, so warnings where they ship: a
right program may do some of them, though seldom, and of the others too few healthy programs have what they speak of.

Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Final

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.course import judged as _judged
from proctor.invariants.relations.course.updating import WHAT, examples
from proctor.invariants.relations.stays import rounding as _rounding
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.relations.views.losses import LOSSES
from proctor.invariants.schema import MODEL_CALL, Value
from proctor.invariants.trace import Trace

_LOADS: Final = "torch.optim.Optimizer.load_state_dict"
SAYS: Final = {
    "mode": "modules train in the mode behind an evaluation that they trained in before it",
    "number": "an evaluation leaves the numbers of modules as they were in training",
    "statistics": "a copy that moves towards a model is evaluated with batch statistics that have moved, too",
    "buffers": "a buffer of a copy that is the model's does not leave it while the model's stays",
    "rests": "a copy of a model that is evaluated in its place, again on the same data, has moved since",
    "precision": "an optimizer that loads moments holds them in the precision in which they were given",
    "moments": "an optimizer is given the moments that were saved with it",
    "beginning": "a new optimizer has counted no update before its first backward",
    "next": "the targets of a model over sequences are what comes next in its inputs",
    "future": "a model that is trained on what comes next in its inputs does not see it",
    "mask": "a mask that comes with padded sequences is not one number throughout",
    "noise": "a model does not drop out when it is given, without gradients, the batch that it trains on",
    "update": "a parameter in a half type that has gradients is not left as it was by rounding",
    "product": "a parameter or buffer in a half type that is multiplied by a number is not left as it was by rounding",
    "thawed": "a parameter that is thawed while the model trains, and has gradients, is in an optimizer",
    "woken": "a frozen part that was set to evaluate before the training evaluates while the model trains",
    "scaled": "gradients behind a loss scaler are unscaled before they are clipped",
    "rescaled": "an optimizer goes on with the gradient scaler that has stepped it",
    "cut": "a checkpointed function whose parameters train gives a result that they get gradients through",
    "lost": "what the backward passes of one line gave is not cleared before an update applies it",
    "itself": "no loss goes through a difference of a value and itself",
    "forgotten": "a part of a model that begins at random and gets gradients is held by an optimizer, or its gradients are cleared",
    "early": "a scheduler that is stepped in a loop is stepped behind the updates, and not before the first one",
    "alike": "copies of two models that train are used alike: both follow their models, and both are called",
    "stepped": "a scheduler has stepped when its optimizer trains on its data a second time, or behind a second evaluation",
    "crossed": "a loss holds each result against its own number, and not against those of all samples",
    "answer": "a model is not given what it is to say",
    "half": "both halves of what a layer gives are used",
    "snapshot": "a state that is saved some updates after it was taken is a copy",
    "follows": "targets follow their samples into a new order",
    "unread": "a mask that comes with a batch is read",
    "reshaped": "dimensions change places by a permutation, and not by a reshape",
    "unused": "what is computed of parameters and gets a name is read",
    "twice": "no two parts of a batch are one",
    "sorted": "results of sequences come in the order of their targets",
    "padding": "places of padding do not count in the loss of a model that leaves them out",
    "filled": "a state that the program fills with other values is loaded",
    "rate": "a rate that the program changes while it trains gets to the optimizer",
    "shown": "a model is not shown the words that it is to tell",
    "order": "what a function is given of a batch is all put into one order, or none of it",
    "late": "nothing that depends on parameters is added to a loss between its backward and the update",
    "sample": "of what a recurrent layer gives for a batch, not one sample alone is used",
    "teacher": "a model that was loaded and that nothing trains is set to evaluate where its mode matters",
    "redrawn": "what a model was loaded with is there when it is called",
    "items": "a list of like layers is gone through, and not one of them as often as the list is long",
    "decay": "an optimizer keeps the same share of the moments of all parameters of a group, and each has its own length",
}
_ADVICE: Final = {
    "mode": "Keep module.training of every module before the evaluation, and set each back; train(flag) sets all that lies below.",
    "number": "Look for an assignment in forward, or in the evaluation, that is not taken back: compute the number anew in each call.",
    "statistics": "Copy or average the buffers, too (AveragedModel(use_buffers=True)), or compute them anew (update_bn) before the evaluation.",
    "buffers": "Look at how buffers of the copy are paired with those of the model: by name, not by order.",
    "rests": "Update the average behind each update of the optimizer (update_parameters, ema.update), or evaluate the model that trains.",
    "precision": "Build the model in the precision in which it trained before the optimizer is built and loaded.",
    "moments": "The optimizer that made the template has no state yet: use get_optimizer_state_dict, or let it make its state first.",
    "beginning": "Make room for a state only where one is loaded, or build the optimizer anew.",
    "next": "Look for a second shift of the labels, or a missing one: one in the data, one in the model, one in the loss.",
    "future": "Look at the mask of the attention: whether it is made, hides places that come later, and is handed on (is_causal=True).",
    "mask": "Look at how the mask is made: it has to tell places of padding from others.",
    "noise": "Call model.eval() for the reference and model.train() behind it, or set the dropout of a model that is its own reference to 0.",
    "update": "Keep parameters in float32 (autocast computes in half), or masters of them: the steps are smaller than the last digit.",
    "thawed": "Give the parameters to the optimizer when they are thawed: add_param_group, or a new optimizer.",
    "woken": "Override train() of the model so that this part stays in evaluation mode, or call eval() of it behind each train().",
    "scaled": "Call scaler.unscale_(optimizer) behind backward and before the clipping.",
    "rescaled": "Make the GradScaler once, before the first epoch; behind a restart give it its state.",
    "cut": "Use checkpoint(..., use_reentrant=False), or let the inputs require gradients (enable_input_require_grads).",
    "lost": "Clear gradients once for each update, in front of its first backward pass, and not for each microbatch.",
    "itself": "Look at what the two sides of this difference are: the same variable twice, one view or sample in the place of two, a shuffle that is left out.",
    "forgotten": "Give the optimizer all parameters of the model (model.parameters()), or freeze this part (requires_grad_(False)).",
    "early": "Call scheduler.step() behind the updates of an epoch, at the end of the loop.",
    "alike": "Look at the lines that move the copies, one for each model, and at which model is called where its copy should be.",
    "stepped": "Look for the call of scheduler.step, once an epoch or an update.",
    "crossed": "Give both sides one shape: squeeze(-1) of the results, or unsqueeze(-1) of the numbers.",
    "answer": "Look at how inputs and targets are cut from the data: a horizon that is one too short, or a label among the features.",
    "half": "Look at how the result of this layer is cut in parts: one slice taken twice, or a part that the loss leaves out.",
    "snapshot": "Keep copy.deepcopy(model.state_dict()), or write the file at once.",
    "follows": "Shuffle samples and targets by one permutation: index each of the arrays by it.",
    "unread": "Look at the formula that this mask belongs to (a target, a loss, an attention), and whether a factor is left out; call it `_` if it is meant to be left alone.",
    "reshaped": "Use permute or transpose where dimensions are to change places, and take apart in the order in which they were joined.",
    "unused": "Look whether another name stands where this one should, or a term of the loss is left out; call it `_` if it is meant to be left alone.",
    "twice": "Look at where the batch is stored: whether one array is written over before it is kept, or one is stored in the place of the other.",
    "sorted": "Put results back by the inverse of the order (order.argsort()), sort the targets likewise, or use pack_padded_sequence(..., enforce_sorted=False).",
    "padding": "Give the loss the number that fills up sequences as ignore_index.",
    "filled": "Call load_state_dict with the state that was filled.",
    "rate": "Set param_group['lr'] of the optimizer's groups, or use a scheduler.",
    "order": "Index each part of the batch by the order, or none of them (enforce_sorted=False of pack_padded_sequence sorts by itself).",
    "late": "Add all terms before the backward: what is added behind it is printed, and trains nothing.",
    "sample": "Look at batch_first and at the dimensions of what this layer is given and gives: samples stand where places are meant.",
    "redrawn": "Initialise the model first and load it behind that.",
    "teacher": "Call eval() of this model behind load_state_dict; call train() of it if it is to drop out, or to normalise by batches.",
    "items": "Look at the index of this list within the loop over its layers: a number where the loop's variable should stand.",
    "shown": "Look at where words are replaced by the mask: in a copy, behind the line that makes the input, or with a share of 0.",
    "decay": "Look for an operation in place on the moment, or on a view or a cast of it that copies nothing.",
    "product": "Keep the tensor, or a copy of it for the update, in float32: the factor lies within half a digit of 1.",
}
_CLIP: Final = "torch.nn.utils.clip_grad_norm_"
_SCHEDULED: Final = "torch.optim.lr_scheduler.LRScheduler.__init__"
_CHECKPOINT: Final = "torch.utils.checkpoint.checkpoint"
_ENTROPY: Final = "torch.nn.functional.cross_entropy"
_CLASSES: Final = frozenset(f"torch.nn.functional.{f}" for f in ("embedding", "nll_loss", "cross_entropy"))
_SEQUENCES: Final = frozenset({MODEL_CALL, *(f"torch.nn.functional.{f}" for f in ("embedding", "scaled_dot_product_attention", "softmax", "nll_loss")), "torch.softmax", "torch.Tensor.softmax", _ENTROPY})
_NEEDS: Final = {
    "mode": frozenset({MODEL_CALL}), "number": frozenset({MODEL_CALL}), "statistics": frozenset({MODEL_CALL}), "buffers": frozenset({MODEL_CALL}), "rests": frozenset({MODEL_CALL}),
    "precision": frozenset({_LOADS}), "moments": frozenset({_LOADS, "torch.distributed.checkpoint.load", "torch.distributed.checkpoint.save", "torch.load", "torch.save"}),
    "beginning": frozenset({_LOADS, _sightings.CREATED, "torch.Tensor.backward", "torch.autograd.backward", "torch.autograd.grad"}),
    "product": frozenset({_rounding.PRODUCT}), "update": frozenset({"torch.Tensor.backward", "torch.autograd.backward"}), "noise": frozenset({MODEL_CALL}), "next": _SEQUENCES, "future": _SEQUENCES, "mask": _SEQUENCES,
    "thawed": frozenset({MODEL_CALL, _sightings.CREATED}), "woken": frozenset({MODEL_CALL, "torch.nn.Module.eval", "torch.nn.Module.train"}), "decay": frozenset[str](), "teacher": frozenset({MODEL_CALL, _sightings.CREATED, "torch.nn.Module.train", "torch.nn.Module.load_state_dict"}),
    "scaled": frozenset({_CLIP, *(f"torch.amp.GradScaler.{name}" for name in ("scale", "unscale_", "step", "update"))}), "cut": frozenset({_CHECKPOINT}),
    "rescaled": frozenset(f"torch.amp.GradScaler.{name}" for name in ("scale", "step", "update", "load_state_dict")),
    "stepped": frozenset({"torch.Tensor.backward", "torch.autograd.backward", _SCHEDULED, "torch.utils.data.DataLoader.__iter__", "torch.utils.data.DataLoader.__next__"}),
    "alike": frozenset({MODEL_CALL}), "crossed": frozenset({"torch.Tensor.backward", "torch.autograd.backward"}), "answer": frozenset({MODEL_CALL, *LOSSES}), "follows": frozenset({MODEL_CALL, *LOSSES}), "half": frozenset({MODEL_CALL}),
    "snapshot": frozenset({"torch.nn.Module.state_dict", "torch.save"}),
    "unread": frozenset({MODEL_CALL}), "reshaped": frozenset({"torch.Tensor.backward", "torch.autograd.backward"}),
    "unused": frozenset({MODEL_CALL}), "order": frozenset({MODEL_CALL}), "twice": frozenset({MODEL_CALL}), "sorted": _CLASSES, "padding": _CLASSES, "shown": _CLASSES | {MODEL_CALL}, "rate": frozenset({_sightings.CREATED}),
    "filled": frozenset({"torch.nn.Module.state_dict", "torch.nn.Module.load_state_dict"}), "redrawn": frozenset({MODEL_CALL, "torch.nn.Module.load_state_dict"}),
    "itself": frozenset({"torch.Tensor.backward", "torch.autograd.backward"}), "items": frozenset({"torch.Tensor.backward", "torch.autograd.backward", MODEL_CALL}), "sample": frozenset({"torch.Tensor.backward", "torch.autograd.backward"}), "late": frozenset({"torch.Tensor.backward", "torch.autograd.backward"}),
    "forgotten": frozenset({"torch.Tensor.backward", "torch.autograd.backward", MODEL_CALL, _sightings.CREATED, "torch.nn.Module.load_state_dict", "torch.load"}),
    "early": frozenset({"torch.Tensor.backward", "torch.autograd.backward", _SCHEDULED, "torch.optim.lr_scheduler.LRScheduler.step"}),
    "lost": frozenset({"torch.Tensor.backward", "torch.autograd.backward", "torch.optim.Optimizer.zero_grad", "torch.nn.Module.zero_grad", _sightings.CREATED}),
}  # fmt: skip
_FORWARDS: Final = 2  # in which a mask says nothing
_FUNCTIONS: Final = {"precision": _LOADS, "moments": _LOADS, "beginning": _frames.UPDATE, "product": _rounding.PRODUCT, "update": _frames.UPDATE, "thawed": _frames.UPDATE, "scaled": _CLIP, "rescaled": "torch.amp.GradScaler.step", "cut": _CHECKPOINT, "decay": _frames.UPDATE, "lost": _frames.UPDATE, "stepped": _frames.UPDATE, "itself": "torch.Tensor.backward", "forgotten": _frames.UPDATE, "early": "torch.optim.lr_scheduler.LRScheduler.step", "crossed": "torch.Tensor.backward", "half": _frames.UPDATE, "snapshot": "torch.save", "reshaped": "torch.Tensor.backward", "unread": _frames.UPDATE, "unused": _frames.UPDATE, "order": _frames.UPDATE, "twice": _frames.UPDATE, "filled": _frames.UPDATE, "rate": _frames.UPDATE, "late": _frames.UPDATE, "sample": "torch.Tensor.backward", "items": "torch.Tensor.backward"}
_PARTS: Final[dict[str, Callable[[Trace], pl.DataFrame]]] = {"product": _rounding.product, "update": _rounding.update}


@register
class Stays(Relation):
    """What nobody meant to change is as it was."""

    name = "stays"
    code = "PR124"
    standing: ClassVar[Standing] = Standing.CHOICE  # a right program may do so, though seldom, or too few healthy programs have what is spoken of
    upstream: ClassVar[int] = 2
    ahead: ClassVar[int] = 1
    reach: ClassVar[int | None] = 1
    alone: ClassVar[bool] = True

    def propose(self, trace: Trace) -> list[Hypothesis]:
        held = _every(trace, set(SAYS)).filter("passed")["mode"].unique().sort()
        return [Hypothesis.of(self.name, mode=mode, what=WHAT) for mode in held]

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _sightings.bound_examples(trace, _every(trace, {h.text("mode") for h in hypotheses}), hypotheses)

    def reads_of(self, hypothesis: Hypothesis) -> Reads:
        return "numbers"

    def told_once(self, hypothesis: Hypothesis) -> bool:
        return hypothesis["mode"] not in _PARTS

    def details(self, hypothesis: Hypothesis) -> frozenset[tuple[str, str]]:
        return frozenset({(_rounding.PRODUCT, "")}) if hypothesis["mode"] == "product" else frozenset()

    def measures(self, hypothesis: Hypothesis) -> frozenset[str]:
        return frozenset({_rounding.PRODUCT}) if hypothesis["mode"] == "product" else frozenset()

    def needs(self, hypothesis: Hypothesis) -> Needs:
        mode = hypothesis.text("mode")
        states = frozenset({"data", "grad"}) if mode == "update" else frozenset[str]()
        return Needs(_NEEDS[mode] | {_frames.UPDATE}, states, frozenset() if mode in _PARTS else frozenset({"kept"}))

    def say(self, hypothesis: Hypothesis) -> str:
        return SAYS[hypothesis.text("mode")]

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        mode = hypothesis.text("mode")
        return Detail(expected=SAYS[mode], seen=example["_seen"] or "", function=example["_function"] or "", variable=example["_variable"] or "", advice=_ADVICE[mode])


def _every(trace: Trace, modes: set[str]) -> pl.DataFrame:
    return _sightings.of_parts(trace, "stays", {mode: _part(mode) for mode in sorted(modes)})


def _part(mode: str) -> Callable[[Trace], pl.DataFrame]:
    return _PARTS.get(mode) or partial(_told, mode=mode)


def told(trace: Trace, mode: str) -> pl.DataFrame:
    """What probes said of a mode: the columns of `sightings`, and `seen`, which is "" where all is well."""
    by_mode, none = _frames.memo(trace, "told by probes", _by_mode)
    return by_mode.get((mode,), none)


def _by_mode(trace: Trace) -> tuple[dict[tuple[Any, ...], pl.DataFrame], pl.DataFrame]:
    """The rows of each mode, and those of a mode that has none."""
    rows = _sightings.sightings(trace, Value.KEPT).join(_frames.metas(trace, "what", "seen"), on="meta", how="left", maintain_order="left")
    return (rows.partition_by("what", as_dict=True, maintain_order=True) if rows.height else {}), rows.clear()


def _told(trace: Trace, mode: str) -> pl.DataFrame:
    """One row an update, and each time that a probe saw something that is not as it was."""
    rows = _TOLD[mode](trace) if mode in _TOLD else told(trace, mode).filter(pl.col("seen") != "")
    function = _FUNCTIONS.get(mode)
    if not rows.height:
        return examples(trace, mode, rows, function=function or MODEL_CALL)
    rows = rows.with_columns(pl.col("step").clip(lower_bound=0))
    if mode == "mask":  # batches may be of one length by chance, and a mask of one may be flat
        varied = told(trace, mode).filter(pl.col("seen") == "").select("proc", "text").unique()
        rows = rows.join(varied, on=["proc", "text"], how="anti", maintain_order="left").filter(pl.int_range(pl.len()).over("proc", "text") == _FORWARDS - 1)
    rows = rows.sort("proc", "step", "seq", maintain_order=True).unique(["proc", "step"], keep="first", maintain_order=True)
    # What was seen between two steps belongs to the update before.
    update = _frames.updates(trace).sort("proc", "seq").group_by("proc", "step", maintain_order=True).agg(pl.col("seq", "site").last().name.prefix("_of_"))
    rows = _sightings.sites(trace, rows).join(update, on=["proc", "step"], how="left", maintain_order="left")
    between = pl.col("seq") == 0
    rows = rows.with_columns(
        pl.when(between).then(pl.col("_of_seq")).otherwise("seq").fill_null(0).cast(pl.UInt32).alias("seq"),
        pl.when(between).then(pl.col("_of_site")).otherwise("site").fill_null(0).cast(pl.UInt32).alias("site"),
        pl.when(between).then(pl.lit(_frames.UPDATE)).otherwise("function").alias("function"),
    )
    bad = rows.select("proc", "step", "seq", "site", pl.col("seen").alias("_seen"), pl.col("text").alias("_variable"))
    found = examples(trace, mode, bad, function=function or MODEL_CALL)
    return found if function else found.with_columns(_judged.named(rows))


def _shifted(trace: Trace) -> pl.DataFrame:
    """Losses whose targets lie more than one place behind the inputs, or at them under causal attention, in steps that have no loss of what comes next."""
    rows = _targets(trace)
    right = rows.filter(pl.col("number") == 1).select("proc", "step").unique()
    wrong = rows.filter((pl.col("number") > 1) | ((pl.col("number") == 0) & (pl.col("sight") == "causal")))
    far = pl.format("the targets are the inputs {} places later", pl.col("number").cast(pl.Int64))
    here = pl.lit("the targets are the inputs themselves, which causal attention sees")
    return wrong.join(right, on=["proc", "step"], how="anti", maintain_order="left").with_columns(pl.when(pl.col("number") > 1).then(far).otherwise(here).alias("seen"))


def _seen_ahead(trace: Trace) -> pl.DataFrame:
    """Losses whose targets are what comes next in the inputs, where all attention over these places sees what comes later, or the next place."""
    rows = _targets(trace).filter((pl.col("number") == 1) & pl.col("sight").is_in(["open", "ahead"]))
    sees = pl.when(pl.col("sight") == "open").then(pl.lit("all places from each: the targets, too")).otherwise(pl.lit("one place more than it may: the target; the mask begins one place too late"))
    return rows.with_columns(pl.concat_str(pl.lit("the targets are the inputs one place later, and attention sees "), sees).alias("seen"))


def _targets(trace: Trace) -> pl.DataFrame:
    """What was said of targets that are the inputs; older traces say `causal` in place of `sight`."""
    rows = told(trace, "next").join(_frames.metas(trace, "sight", "causal"), on="meta", how="left", maintain_order="left")
    return rows.with_columns(pl.coalesce("sight", pl.when(pl.col("causal") == "true").then(pl.lit("causal")), pl.lit("")).alias("sight"))


_TOLD: Final[dict[str, Callable[[Trace], pl.DataFrame]]] = {"next": _shifted, "future": _seen_ahead}
