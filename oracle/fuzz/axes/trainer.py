"""transformers' `Trainer`: its own loop, with its counting of tokens, accumulation over ranks and microbatches, clipping, schedule and checkpoints.

Its callbacks keep copies of the model and of the optimizer before and after each update; they are looked at when the training is over. The loss is a program
axis: the squares of every template, given as `compute_loss_func`; or a language model's own, over rows with unlike numbers of tokens.
"""

from __future__ import annotations

import math
from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import Axis, OfWrapper, Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.accelerate import begin
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.axes.loop import rows_of
from proctor.oracle.fuzz.models.transformers import LENGTH
from proctor.oracle.fuzz.space import Choice, Point, Value

_OURS: Final[dict[str, tuple[Value, ...]]] = {"wrapper": ("trainer",)}
_SPLIT: Final = "accelerator_config=dict(split_batches=True)"
_ALONE: Final = "average_tokens_across_devices=False"
_SMOOTH: Final = {"tokens": 0.0, "smoothed": 0.1}
_LABELS: Final = f"x[0].masked_fill(torch.arange({LENGTH}) > 1 + torch.arange(n)[:, None] % 3, -100)"
_GRADIENTS: Final = "[setattr(a, 'grad', None if b.grad is None else b.grad.clone()) for a, b in zip(both[0].parameters(), net.parameters())]"
_TOLD: Final = {
    "on_pre_optimizer_step": "kept('{before}', state)",
    "on_step_end": "kept('update', state)",
    "on_save": "setattr(control, 'should_training_stop', control.should_training_stop or state.global_step == 1)",
}


@register_wrapper
class TrainerWrapper(Wrapper):
    """A `Trainer`, which prepares model, optimizer and rows with accelerate."""

    name: ClassVar[str] = "trainer"
    library: ClassVar[str] = "transformers"
    besides: ClassVar[bool] = True
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "it trains models of the library", when=_OURS, lacks=frozenset({"transformers"})),
        Rule("invalid", "DDP asks for find_unused_parameters where parameters are not used", when=_OURS, unless={"hf_switch": ("ddp_find_unused_parameters=True",)}, traits=frozenset({"unused"})),
        Rule("invalid", "its optimizer has no closure that is called more than once", when={**_OURS, "optimizer": ("LBFGS",)}),
        *(
            Rule("invalid", "the trainer has a training loop of its own", when=_OURS, unless={axis: values})
            for axis, values in (
                ("resume", ("no",)), ("disk", ("no",)), ("sync", ("every",)), ("zero_grad", ("none",)), ("form", ("plain",)), ("average", ("no",)), ("compile", ("no",)),
                ("scaler", ("no",)), ("precision", ("float64", "float32")), ("clip", ("no", "2")), ("clip_foreach", ("",)), ("init", ("no",)),
            )
        ),
        Rule("invalid", "DDP takes reentrant checkpoints only of a static graph", when={**_OURS, "recompute": ("reentrant",)}, unless={"hf_switch": ("ddp_static_graph=True",)}),
    )  # fmt: skip

    def invalid(self, setting: Point, traits: frozenset[str]) -> str:
        """As `Wrapper.invalid`; a step has whole microbatches."""
        batch = rows_of(traits)
        return "the ranks' microbatches do not divide the batch" if batch % (int(str(setting["world"])) * int(str(setting["accumulate"]))) else ""

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        for line in ("import copy, tempfile", "from transformers import Trainer, TrainerCallback, TrainingArguments"):
            draft.add_import(line)
        draft.rows = "torch.arange(n).tensor_split(world)[rank]"
        draft.finish.append(lambda: _loop(draft, setting))


def _loop(draft: Draft, setting: Point) -> None:
    own, accumulate, steps = str(setting["hf_loss"]) in _SMOOTH, int(str(setting["accumulate"])), draft.steps
    rows, resumes = draft.batch // accumulate, bool(setting["hf_resume"]) and steps > 1
    given: dict[str, object] = {
        "max_steps": steps, "gradient_accumulation_steps": accumulate, "per_device_train_batch_size": rows if setting["hf_switch"] == _SPLIT else f"{rows} // world",
        "max_grad_norm": 0.5 if draft.after_backward else 0.0, "lr_scheduler_type": "'constant'", "use_cpu": True, "report_to": [], "disable_tqdm": True,
        "logging_strategy": "'no'", "save_strategy": "'steps'" if resumes else "'no'", "save_steps": 1, "train_sampling_strategy": "'sequential'",
        "remove_unused_columns": False, "label_smoothing_factor": _SMOOTH.get(str(setting["hf_loss"]), 0.0),
    }  # fmt: skip
    arguments = "".join(f", {k}={v}" for k, v in given.items()) + (f", {setting['hf_switch']}" if setting["hf_switch"] else "")
    row = f"dict(input_ids=x[0][i], labels=({_LABELS})[i])" if own else "dict(ids=x[0][i], labels=y[i])"
    more = "" if own else f", compute_loss_func=lambda out, labels, num_items_in_batch: ((out - labels) ** 2).sum() / num_items_in_batch * {math.prod(draft.code.y)}"
    before = "clipped" if draft.after_backward else "backward"
    told = ", ".join(f"{name}=lambda self, args, state, control, **more: {does.format(before=before)}" for name, does in _TOLD.items() if resumes or name != "on_save")
    make = f"Trainer({'net.lm' if own else 'net'}, TrainingArguments(folders[0]{arguments}), train_dataset=data, optimizers=(opt, {'scheduler' if draft.scheduler else None}), callbacks=[Kept()]{more})"
    draft.own_loop = [
        f"n, moments, folders = {draft.batch}, [], [tempfile.mkdtemp()]",
        *(["if world > 1: dist.broadcast_object_list(folders, 0)"] if resumes else []),
        f"data = [{row} for x, y in [batch(step) for step in range({steps})] for i in range(n)]",
        *begin(draft),
        "def kept(moment, state):",
        f"    both = copy.deepcopy((net, opt)); {_GRADIENTS}",
        "    moments.append((moment, state.global_step - (moment == 'update'), *both, ()))",
        f"Kept = type('Kept', (TrainerCallback,), dict({told}))",
        f"{make}.train()",
        *(["net, opt = build(rank, world)", *([f"scheduler = {draft.scheduler}"] if draft.scheduler else []), f"{make}.train(resume_from_checkpoint=folders[0] + '/checkpoint-1')"] if resumes else []),
        "yield from moments",
        f"(x, y), step = batch({steps - 1}), {steps - 1}",
    ]


class _Option(OfWrapper):
    library = "transformers"
    of = ("trainer",)
    absent = "there is no Trainer"


@register
class Switch(_Option):
    """An argument that says how, not what."""

    choice = Choice("hf_switch", (
        "", _ALONE, _SPLIT, "accelerator_config=dict(dispatch_batches=True)", "accelerator_config=dict(even_batches=False)",
        "accelerator_config=dict(gradient_accumulation_kwargs=dict(sync_each_batch=True))", "dataloader_drop_last=True", "dataloader_pin_memory=False",
        "ddp_find_unused_parameters=True", "ddp_broadcast_buffers=True", "ddp_bucket_cap_mb=1", "ddp_static_graph=True", "gradient_checkpointing=True",
    ))  # fmt: skip
    rules = (
        Rule("different", "each rank divides by its own number of tokens", when={"hf_switch": (_ALONE,)}, unless={"hf_loss": ("squares",)}),
        Rule("invalid", "the module around the model has no such method", when={"hf_switch": ("gradient_checkpointing=True",), "hf_loss": ("squares",)}),
        Rule("invalid", "it is recomputed already", when={"hf_switch": ("gradient_checkpointing=True",)}, unless={"hf_checkpointing": ("",)}),
    )


@register
class Resumed(_Option):
    """Whether the training ends after the first step, and a second `Trainer` goes on from its checkpoint."""

    choice = Choice("hf_resume", (False, True), rare=0.3)


@register
class Loss(Axis):
    """The squares of every template, or the cross entropy of the next token, over rows with unlike numbers of tokens; smoothed."""

    library = "transformers"
    program = True
    order = 55
    choice = Choice("hf_loss", ("squares", *_SMOOTH), rare=0.5)
    rules = (
        Rule("invalid", "there are no tokens to be foretold", unless={"hf_loss": ("squares",)}, lacks=frozenset({"transformers"})),
        Rule("invalid", "LBFGS asks for the squares", when={"optimizer": ("LBFGS",)}, unless={"hf_loss": ("squares",)}),
        Rule("invalid", "the form has a loss of its own", unless={"hf_loss": ("squares",), "form": ("plain",)}),
    )

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        draft.before_part.append(f"labels = ({_LABELS})[:, 1:]")
        loss = f"F.cross_entropy(out[:, :-1].flatten(0, 1), labels[part].flatten(), reduction='sum', label_smoothing={_SMOOTH[str(value)]})"
        draft.backward = draft.backward.replace("{loss}", f"({loss} / (labels != -100).sum()){{scale}}")
