"""Whether a program that trains with diffusers' noise schedulers, averages and autoencoders uses them as they are meant.

Rows of `Value.USAGE`, library `diffusers`. At `add_noise`: `gaussian`: the noise has both signs. `carries`: what is noised carries no gradient (an encoder that nobody froze). `drawn`: the timesteps of a batch are not those of the
two steps before. `scaled`: latents of an autoencoder that did not train here are not noised as its posterior gave them, without its scaling factor. Behind it: `timestep`: the model that is given a noised sample is given the
timesteps at which it was noised, or any that rise or fall with them. `target`: the loss is against what the scheduler's `prediction_type` says (the noise, the sample, the velocity), and not against another of these.
`conditions`: a model that is frozen as a whole and runs beside does not drop out. Of an `EMAModel`: `averaged`: one that is used has been stepped; `restored`: what it was copied into is restored before it trains on;
`once`: it steps no more than once an update.

Only tensors on the CPU are read; on a device the probe knows tensors by identity alone. Cost: some comparisons of a batch, in the first 64 steps.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, Final

from proctor.instrument.observe import content, plainly
from proctor.instrument.observe.modules import class_name
from proctor.instrument.observe.refs import TensorRef
from proctor.instrument.probes import NO_HOOKS, Home, Hooks, Sink, register
from proctor.instrument.probes._average_uses import Averages
from proctor.instrument.probes._usage import MADE, UPDATE, Usage
from proctor.invariants.schema import MODEL_CALL

_NOISES: Final = ("add_noise", "scale_noise")
_VELOCITY: Final = "get_velocity"
_LOSSES: Final = frozenset(f"torch.nn.functional.{name}" for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"))
_LARGEST: Final = 1 << 18  # elements
_ENOUGH: Final = 64  # numbers that show whether there are both signs
_RECORDS: Final = 8  # noised samples of a step
_STEPS: Final = 64
_AGAIN: Final = 3  # steps in a row
_EXPECTED: Final = {"epsilon": "the noise", "sample": "the sample", "v_prediction": "the velocity"}


class _Noised:
    """One call of `add_noise`."""

    def __init__(self, scheduler: Any, sample: Any, noise: Any, timesteps: Any, result: Any) -> None:
        self.predicts = getattr(getattr(scheduler, "config", None), "prediction_type", None)
        self.known = {"the sample": TensorRef(sample), "the noise": TensorRef(noise)}
        self.result = TensorRef(result)
        self.timesteps = timesteps.detach().clone().reshape(-1) if content.plain(timesteps, _LARGEST) else None


@register
class Denoising(Usage):
    """Noise schedulers, averages and autoencoders of diffusers."""

    name = "denoising"
    library = "diffusers"

    def __init__(self, sink: Sink) -> None:
        super().__init__(sink)
        self._left = _STEPS
        self._noised: list[_Noised] = []  # since the last update
        self._before: list[Any] = []  # timesteps of the first call of each of the last steps
        self._beside: dict[int, tuple[weakref.ref[Any], bool]] = {}  # frozen models that were called in this step, and whether they drop out
        self._coder: weakref.ref[Any] | None = None  # the autoencoder that encoded last
        self._latents: list[weakref.ref[Any]] = []  # of it, in this step
        self._trained: set[int] = set()  # ids of parameters that an optimizer held at an update
        self._updating = 0  # the optimizer of the last update
        self._averages = Averages(self)

    def hooks(self, function: str, home: Home) -> Hooks:
        if home is Home.LIBRARY and function.startswith("diffusers."):
            name = function.rpartition(".")[2]
            if function.startswith("diffusers.EMAModel."):
                return self._averages.hooks(name)
            if name in _NOISES:
                return None, self._noises
            return {
                _VELOCITY: (None, self._moves), "encode": (self._encodes, None), "sample": (None, self._sampled), "mode": (None, self._sampled),
            }.get(name, NO_HOOKS)  # fmt: skip
        if function in _LOSSES:
            return self._lost, None
        return {MADE: (None, self.made), MODEL_CALL: (self._called, None), UPDATE: (self._updates, None)}.get(function, NO_HOOKS)

    # -- schedulers -------------------------------------------------------------------------------------------------

    def _noises(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        given = _given(args, kwargs, ("original_samples", "noise", "timesteps"), ("sample", "noise", "timestep"))
        if raised or given is None or self._left <= 0 or len(self._noised) >= _RECORDS:
            return
        import torch

        sample, noise, timesteps = given
        name = type(args[0]).__name__
        if not torch.is_grad_enabled():
            return  # sampling, or a preview
        with content.unseen():
            if content.plain(noise, _LARGEST) and noise.numel() >= _ENOUGH and noise.is_floating_point():
                self.say("gaussian", name, f"the noise that {name} adds is nowhere below 0" if bool(noise.min() >= 0) else "")
            self.say("carries", name, f"what {name} adds noise to carries gradients of what made it" if sample.requires_grad else "")
            self._scaled(sample, name)
            noised = _Noised(args[0], sample, noise, timesteps, result)
            if not self._noised and not self.over and noised.timesteps is not None and noised.timesteps.numel() > 1:
                same = [t for t in self._before if t.shape == noised.timesteps.shape and bool((t == noised.timesteps).all())]
                self._before = [*self._before, noised.timesteps][1 - _AGAIN :]
                self.say("drawn", name, f"the timesteps of {name} are those of the {_AGAIN - 1} steps before" if len(same) == _AGAIN - 1 else "")
            self._noised.append(noised)

    def _moves(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised and self._noised:
            self._noised[-1].known["the velocity"] = TensorRef(result)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if "diffusers" not in sys.modules or self._left <= 0:
            return
        import torch

        model = args[0]
        first = next(plainly.parameters(model), None)
        if first is not None and not any(p.requires_grad for p in plainly.parameters(model)):
            drops = model.training and any(isinstance(m, torch.nn.Dropout) and m.training and m.p > 0 for m in plainly.modules(model))
            if len(self._beside) < _RECORDS:
                self._beside[id(model)] = weakref.ref(model), drops
            return
        if not self._noised or not torch.is_grad_enabled() or not model.training:
            return
        named = kwargs or {}
        given = [*args[1:], *named.values()]
        for noised in self._noised:
            result = noised.result()
            if result is not None and noised.timesteps is not None and any(value is result for value in given):
                told: Any = next((named[key] for key in ("timestep", "timesteps") if key in named), None)
                told = next((v for v in given if isinstance(v, torch.Tensor) and v is not result and v.dim() < 2), None) if told is None else told
                if content.plain(told, _LARGEST):
                    with content.unseen():
                        self._timed(class_name(model).rpartition(".")[2], noised.timesteps, told.reshape(-1))

    def _timed(self, name: str, noised: Any, told: Any) -> None:
        if noised.numel() < 2 or bool((noised == noised[0]).all()) or told.numel() not in (1, noised.numel()):
            return  # of one timestep nobody knows what it is a multiple of
        told = told.expand(noised.numel())
        order = noised.argsort()
        now, then = told[order].double(), noised[order]
        steps, alike = now.diff(), then.diff() == 0
        rises = bool((steps >= 0).all()) or bool((steps <= 0).all())
        same = bool(((steps == 0) == alike).all())
        one = bool((steps == 0).all())
        self.say("timestep", name, "" if rises and same else f"{name} is given {'one timestep for all samples' if one else 'other timesteps'} than its sample was noised at")

    def _lost(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if not self._noised:
            return
        given = _given((None, *args), kwargs, ("input", "target"))
        if given is None:
            return
        made, target = given if not getattr(given[1], "requires_grad", True) else given[::-1]
        if getattr(target, "requires_grad", True) or not getattr(made, "requires_grad", False):
            return
        for noised in reversed(self._noised):
            found = next((what for what, ref in noised.known.items() if _same(ref(), target)), "")
            expected = _EXPECTED.get(str(noised.predicts), "")
            if found and expected:
                self.say("target", "loss", "" if found == expected else f"the loss is against {found}, and the noise scheduler's prediction type is {noised.predicts}")
                return

    # -- what runs beside -------------------------------------------------------------------------------------------

    def _encodes(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        self._coder = weakref.ref(args[0])

    def _sampled(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, result: Any, raised: bool) -> None:
        if not raised and len(self._latents) < _RECORDS:
            self._latents.append(TensorRef(result))

    def _scaled(self, sample: Any, name: str) -> None:
        coder = self._coder() if self._coder is not None else None
        factor = getattr(getattr(coder, "config", None), "scaling_factor", None)
        if coder is None or not self._latents or not isinstance(factor, int | float) or factor == 1:
            return
        if any(id(p) in self._trained for p in plainly.parameters(coder)):
            return  # it trained here: whoever samples may leave the factor out, too
        bare = any(ref() is sample for ref in self._latents)
        self.say("scaled", name, f"{name} adds noise to latents of {type(coder).__name__} without its scaling factor" if bare else "")

    def _updates(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if "diffusers" not in sys.modules:
            return
        self._averages.updates(args[0])
        if self._updating != id(args[0]):  # also where nothing is noised: an autoencoder trains before its latents are
            self._updating = id(args[0])
            self._trained |= {id(p) for group in args[0].param_groups for p in group["params"]}
        if not self._noised:
            self._beside.clear()
            return
        self._left -= 1
        for ref, drops in self._beside.values():
            model = ref()
            if model is not None:
                name = class_name(model).rpartition(".")[2]
                self.say("conditions", name, f"{name} is frozen, and drops out while another model trains" if drops else "")
        self._noised, self._latents = [], []
        self._beside.clear()


def _given(args: tuple[Any, ...], kwargs: dict[str, Any] | None, *names: tuple[str, ...]) -> list[Any] | None:
    """Tensors of a call, behind its first argument, by place or by one of these lists of names."""
    import torch

    for which in names:
        found = [args[i + 1] if len(args) > i + 1 else (kwargs or {}).get(name) for i, name in enumerate(which)]
        if all(isinstance(value, torch.Tensor) for value in found):
            return found
    return None


def _same(known: Any, target: Any) -> bool:
    """Whether a target is a tensor that was seen, or holds the same numbers."""
    if known is target:
        return True
    if known is None or known.shape != target.shape or known.dtype != target.dtype or not content.plain(known, _LARGEST) or not content.plain(target, _LARGEST):
        return False
    with content.unseen():
        return bool((known == target).all())
