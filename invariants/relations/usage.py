"""A library is used as it is meant: adapters of peft train and are saved, diffusers' noise schedulers and averages are asked for what they give, DeepSpeed's engine is left its work.

Told by a probe of each library (`instrument/probes/adapters.py`, `denoising.py`, `engines.py`), which says at each place that it knows whether all is well there. So an example is a place that had something to fail on, and
a program that uses a library otherwise, or none, has none. They are choices, so warnings where they ship: a
right program may do so on purpose, though seldom.

Source: ours; each mode is something that the library's documentation asks for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import polars as pl

from proctor.invariants.invariant import Hypothesis, Standing
from proctor.invariants.relations import Detail, Examples, Needs, Reads, Relation, register
from proctor.invariants.relations.views import frames as _frames
from proctor.invariants.relations.views import sightings as _sightings
from proctor.invariants.schema import MODEL_CALL, Value
from proctor.invariants.trace import Trace


class _Mode(NamedTuple):
    says: str
    advice: str
    functions: frozenset[str] = frozenset()  # besides updates


_LOADS: Final = frozenset({"peft.set_peft_model_state_dict"})
_ADAPTERS: Final = frozenset(
    {MODEL_CALL, _sightings.CREATED, "peft.get_peft_model", "peft.PeftModel.set_adapter", "peft.PeftModel.add_adapter", "peft.PeftModel.delete_adapter", "peft.PeftModel.load_adapter", "peft.BaseTuner.merge_adapter"} | _LOADS
)
_SAVES: Final = frozenset({"peft.PeftModel.save_pretrained", "peft.get_peft_model_state_dict", "torch.save", "safetensors.torch.save_file", "safetensors.torch.save_model", "torch.nn.Module.state_dict", _sightings.CREATED})
_SCHEDULERS: Final = (
    "DDPM", "DDIM", "DDPMParallel", "DDIMParallel", "EulerDiscrete", "LCM", "PNDM", "EulerAncestralDiscrete", "LMSDiscrete", "HeunDiscrete",
    "DPMSolverMultistep", "DEISMultistep", "UniPCMultistep", "EDMEuler",
)  # fmt: skip
_NOISES: Final = frozenset({*(f"diffusers.{name}Scheduler.add_noise" for name in _SCHEDULERS), "diffusers.FlowMatchEulerDiscreteScheduler.scale_noise"})
_VELOCITIES: Final = frozenset(f"diffusers.{name}Scheduler.get_velocity" for name in _SCHEDULERS[:6])
_LOSSES: Final = frozenset(f"torch.nn.functional.{name}" for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
_CODES: Final = frozenset({"diffusers.AutoencoderKL.encode", "diffusers.DiagonalGaussianDistribution.sample", "diffusers.DiagonalGaussianDistribution.mode"})
_AVERAGES: Final = frozenset({f"diffusers.EMAModel.{name}" for name in ("__init__", "step", "copy_to", "store", "restore", "save_pretrained")} | {_sightings.CREATED})
_ENGINE: Final = frozenset({f"deepspeed.DeepSpeedEngine.{name}" for name in ("forward", "backward", "step", "save_checkpoint", "load_checkpoint")} | {"torch.Tensor.backward", "torch.autograd.backward"})
MODES: Final = {
    "peft": {
        "merged": _Mode("an adapter that trains is not merged into its base", "Call unmerge_adapter() behind what the adapters were merged for: merged, they get no gradient.", _ADAPTERS),
        "enabled": _Mode("the adapters of a model that trains are not all switched off", "Look for disable_adapter() around the forward that trains, or a disable that nothing ends.", _ADAPTERS),
        "held": _Mode("what is to train of the active adapters is in an optimizer", "Build the optimizer behind get_peft_model, from the parameters of the adapter that is active.", _ADAPTERS),
        "frozen": _Mode("the active adapters of a model that trains are not frozen", "Load the adapter with is_trainable=True, or activate the one that is to train (set_adapter).", _ADAPTERS),
        "base": _Mode("a weight under an adapter does not train", "Look for requires_grad_(True) of the whole model behind get_peft_model; save_pretrained leaves such weights out.", _ADAPTERS),
        "saved": _Mode("an adapter's file has all that trained", "Name what trains beside the adapters in modules_to_save; keep what merge_and_unload() gives.", _SAVES),
        "loaded": _Mode("the tensors of a state that is loaded into an adapter are those of the adapter", "Look at how the state was saved: get_peft_model_state_dict names it without prefixes of wrappers and without the adapter.", _LOADS),
    },
    "diffusers": {
        "gaussian": _Mode("the noise that a scheduler adds has both signs", "Draw the noise with randn, not rand.", _NOISES),
        "carries": _Mode("what noise is added to carries no gradient", "Freeze the encoder and encode under torch.no_grad().", _NOISES),
        "drawn": _Mode("the timesteps of a batch are drawn anew in each step", "Draw them in the loop.", _NOISES),
        "scaled": _Mode("latents are multiplied by their autoencoder's scaling factor before noise is added", "Multiply by vae.config.scaling_factor behind sample(), as pipelines divide by it.", _NOISES | _CODES),
        "timestep": _Mode("a denoiser is given the timesteps at which its sample was noised", "Hand the tensor on that add_noise was given.", _NOISES | {MODEL_CALL}),
        "target": _Mode("the loss of a denoiser is against what its noise scheduler's prediction type says", "epsilon: the noise; v_prediction: get_velocity(sample, noise, timesteps); sample: the sample.", _NOISES | _VELOCITIES | _LOSSES),
        "conditions": _Mode("a frozen model beside a denoiser that trains does not drop out", "Call eval() of text encoders and autoencoders behind train() of what holds them.", _NOISES | {MODEL_CALL}),
        "averaged": _Mode("an EMAModel that is used has been stepped", "Call ema.step(model.parameters()) behind each update.", _AVERAGES),
        "restored": _Mode("weights that an EMAModel was copied into are restored before they train on", "Call ema.restore(model.parameters()) behind the evaluation.", _AVERAGES),
        "once": _Mode("an EMAModel steps no more than once an update", "Step it where the optimizer updates (accelerator.sync_gradients), not for each microbatch.", _AVERAGES),
    },
    "deepspeed": {
        "fed": _Mode("an engine steps behind a backward pass", "Look for a second engine.step().", _ENGINE),
        "counts": _Mode("an engine that accumulates is asked to step behind each batch", "Call engine.step() behind each engine.backward(): it counts the batches itself.", _ENGINE),
        "clears": _Mode("gradients are not cleared between the batches of an engine's update", "Leave the clearing to engine.step().", _ENGINE | {"torch.optim.Optimizer.zero_grad", "torch.nn.Module.zero_grad", "deepspeed.DeepSpeedEngine.zero_grad"}),
        "updates": _Mode("the optimizer of an engine is stepped by the engine alone", "Call engine.step() only.", _ENGINE),
        "scheduled": _Mode("the scheduler of an engine is stepped by the engine alone", "Leave scheduler.step() out: engine.step() calls it.", _ENGINE | {"torch.optim.lr_scheduler.LRScheduler.step", *(f"deepspeed.{name}.step" for name in ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupCosineLR"))}),
        "clipped": _Mode("gradients that are clipped beside an engine are there", "Set gradient_clipping in the engine's configuration.", _ENGINE | {"torch.nn.utils.clip_grad_norm_", "torch.nn.utils.clip_grad_value_"}),
    },
}  # fmt: skip


@register
class Usage(Relation):
    """What a library asks of a program is done."""

    name = "usage"
    code = "PR127"
    standing: ClassVar[Standing] = Standing.CHOICE
    upstream: ClassVar[int] = 1
    ahead: ClassVar[int] = 1
    reach: ClassVar[int | None] = 1
    alone: ClassVar[bool] = True
    reads_signatures: ClassVar[bool] = False

    def propose(self, trace: Trace) -> list[Hypothesis]:
        return _sightings.held(self.name, _told(trace))

    def examples(self, trace: Trace, hypotheses: Sequence[Hypothesis]) -> Examples:
        return _sightings.bound_examples(trace, _told(trace), hypotheses)

    def reads_of(self, hypothesis: Hypothesis) -> Reads:
        return "numbers"

    def needs(self, hypothesis: Hypothesis) -> Needs:
        return Needs(_mode(hypothesis).functions | {_frames.UPDATE}, values=frozenset({"usage"}))

    def say(self, hypothesis: Hypothesis) -> str:
        return f"{hypothesis['what']}: {_mode(hypothesis).says}"

    def detail(self, trace: Trace, hypothesis: Hypothesis, example: Mapping[str, Any]) -> Detail:
        return _sightings.detail(example, _mode(hypothesis).advice, expected=_mode(hypothesis).says)


def _mode(hypothesis: Hypothesis) -> _Mode:
    return MODES[hypothesis.text("what")][hypothesis.text("mode")]


def _told(trace: Trace) -> pl.DataFrame:
    return _frames.memo(trace, "usage", _every)


def _every(trace: Trace) -> pl.DataFrame:
    """What probes said, in the form of `sightings.EXAMPLE`. What was seen between two steps belongs to the update before."""
    rows = _sightings.sightings(trace, Value.USAGE).join(_frames.metas(trace, "library", "mode", "seen"), on="meta", how="left", maintain_order="left")
    rows = rows.filter(pl.struct("library", "mode").is_in([{"library": library, "mode": mode} for library, modes in MODES.items() for mode in modes]))
    rows = _sightings.sites(trace, rows.with_columns(pl.col("step").clip(lower_bound=0)))
    lossy = pl.col("proc").is_in([i for i, p in enumerate(trace.processes) if p.dropped > 0])
    passed = pl.when(pl.col("seen") == "").then(pl.lit(value=True)).when(~lossy).then(pl.lit(value=False))
    return _sightings.example(rows.with_columns(passed.alias("passed")), what=pl.col("library"), _seen=pl.col("seen"), _function=pl.col("function"), _variable=pl.col("text"))
