"""float32 is good enough: the same step in float64 gives the same gradients, but for rounding.

Catches sums that cancel, exponentials without a maximum taken off, values that pass through a shorter type. Under autocast the type is the program's
choice, and the model is judged without it.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode

from proctor.oracle.selfcheck import ModelRelation, NotApplicable, Unknown, register
from proctor.oracle.selfcheck.outcomes import Culprit, Outcome
from proctor.oracle.selfcheck.watching.chance import draws_in_training, refuse_kinks
from proctor.oracle.selfcheck.watching.gaps import Gap, gap
from proctor.oracle.selfcheck.watching.parting import part
from proctor.oracle.selfcheck.watching.step import SAMPLES, Call, Outputs, short
from proctor.oracle.selfcheck.watching.undropped import undropped
from proctor.oracle.selfcheck.watching.values import UNIT, exchanged

_CASTS: Final = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
MARGIN: Final = 10.0  # modules round more than once inside, where noise is put to their edges alone
TRIES: Final = 4  # gradients that are looked at
LEAST: Final = 5e-5  # relative error; what passed through float16 has 2e-4 and more


class Wide(TorchFunctionMode):  # type: ignore[misc]
    """Within, every floating-point type that the program asks for is float64: the judge has no shorter one."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CASTS:
            return args[0].double()
        return func(*map(_widened, args), **{k: _widened(v) for k, v in (kwargs or {}).items()})

    def __enter__(self) -> Any:
        self._before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.set_default_dtype(self._before)
        super().__exit__(*error)


@register
class Precision(ModelRelation):
    """Results and gradients of the step in float64 beside those in float32."""

    name, claim = "precision", "the step in float64 gives what it gives in float32, but for rounding"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        with undropped(call.module):
            return self._judge(call)

    def _judge(self, call: Call) -> Outcome:
        types = {p.dtype for p in call.module.parameters() if p.is_floating_point()}
        if types != {torch.float32}:
            raise NotApplicable("its parameters are not all float32" if types else "it has no parameters")
        call.autocast = None
        one, slopes = call.derive()
        before = {n: t.clone() for n, t in call.module.state_dict().items() if isinstance(t, torch.Tensor)}
        call.module.double()
        try:
            with Wide():
                kind, worst, kink = self._apart(call, one, slopes)
        except (NotApplicable, Unknown):
            raise
        except Exception as e:  # noqa: BLE001 - the program's own code
            raise Unknown(f"it cannot run in float64: {short(e)}") from None
        finally:
            call.module.float()
            call.module.load_state_dict(before, strict=False)
        if worst is None:
            return Outcome(relation=self.name, verdict="equivalent", reason=f"{len(one)} results and {len(slopes)} gradients agree but for rounding")
        if draws_in_training(call, slopes):
            raise Unknown("the model draws random numbers, beside those of dropout, which are others in float64")
        if kink is not None:
            raise kink
        return self._differs(call, kind, worst)

    def _apart(self, call: Call, one: Outputs, slopes: Outputs) -> tuple[str, Gap | None, Unknown | None]:
        """What is off by more than float32 does, within float64; and whether that is a kink. All noise is that of float32 in float64, whatever shorter type the program goes through."""
        wide, wide_slopes = call.derive(dtype=torch.float64)
        samples = [_both(call, sample) for sample in range(SAMPLES)]
        undecided: tuple[str, Gap | None, Unknown | None] = ("", None, None)
        for place, (kind, a, b) in enumerate((("result", one, wide), ("gradient of", slopes, wide_slopes))):
            left = _counting(a)
            for _ in range(TRIES):
                worst = gap(_short(b, a), left, lambda place=place, a=a: [_short(s[place], a) for s in samples])  # type: ignore[misc]
                if worst.ratio <= MARGIN or worst.error <= LEAST:
                    break
                if b is wide:
                    return kind, worst, None
                try:
                    refuse_kinks(call, b, worst, lambda: call.derive(dtype=torch.float64)[1], unit=UNIT[torch.float32])
                except Unknown as kink:
                    undecided = undecided if undecided[1] is not None else (kind, worst, kink)
                    del left[worst.name]  # another gradient may be off, and at no kink
                    continue
                return kind, worst, None
        return undecided

    def _differs(self, call: Call, kind: str, worst: Gap) -> Outcome:
        culprit = None
        if kind == "result":
            culprit = _parting(call)
        return Outcome(
            relation=self.name, verdict="different", reason=f"{kind} {worst.name or 'of the model'} in float32 differs by {worst.error:.2g} of its norm from that in float64",
            expected=f"rounding, about {worst.tolerance:.1g}", seen=f"{worst.ratio:.0f} × as much", culprit=culprit or call.place(worst.name.rpartition(".")[0] if kind != "result" else ""),
            error=worst.error, tolerance=worst.tolerance, advice="look for differences of large sums, exp without its maximum, and casts to shorter types",
        )  # fmt: skip


def _widened(argument: Any) -> Any:
    return torch.float64 if isinstance(argument, torch.dtype) and argument.is_floating_point else argument


def _both(call: Call, sample: int) -> tuple[Outputs, Outputs]:
    """Results and gradients in float64 with noise of one rounding of float32."""
    made: list[tuple[Outputs, Outputs]] = []

    def run() -> Outputs:
        made.append(call.derive(dtype=torch.float64))
        return made[0][0]

    call.shaken(run, sample, unit=UNIT[torch.float32])
    return made[0]


def _short(wide: Outputs, found: Outputs) -> Outputs:
    """In the type in which they were found."""
    return {n: t.to(found[n].dtype) if n in found else t for n, t in wide.items()}


def _counting(found: Outputs) -> Outputs:
    """Tensors of some size beside the others: what is mathematically zero is all rounding."""
    sizes = {n: float(t.double().norm()) for n, t in found.items()}
    whole = max((s for n, s in sizes.items() if found[n].is_floating_point()), default=0.0)
    return {n: t for n, t in found.items() if sizes[n] > 1e-4 * whole or not t.is_floating_point()}


def _parting(call: Call) -> Culprit | None:
    """Where float64 and float32 part by more than float32 can: by a shorter type, or by cancellation."""
    args = exchanged(call.inputs, lambda _, t: t.double() if t.is_floating_point() else t)

    def wide() -> object:
        with Wide():
            return call.evaluate(args)

    def look(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if not one.is_floating_point():
            return None
        error = (one.double() - other.double()).norm()
        return (torch.ones(1), torch.zeros(1)) if error > LEAST * one.double().norm() else (one, one)

    try:
        return part(call, call.evaluate, wide, look, call.module.double)
    finally:
        call.module.float()
