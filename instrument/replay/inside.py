"""Inside a re-execution: the first step of the program is made the step of a capsule, watched, and the process ends.

At the first training act parameters, buffers, gradients, optimizer state, hyperparameters and random states become the
recorded ones. What the loaders give is exchanged where it is loaded, so that targets and everything that is computed
from a batch follow; arguments of modules and loss functions that still differ are exchanged as they are passed. A tensor
keeps its identity, its content is another (`tensor.data = …`): nothing of the user's code notices.

After the step's last update its fingerprints are written in a capsule of their own, and the process ends from inside,
with no exit handler of the program run. Unlike a recorder, this may fail loudly: nothing depends on the process.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from proctor.instrument.capsules import rng as _rng
from proctor.instrument.capsules.held import is_plain, leaves
from proctor.instrument.capsules.render import render
from proctor.instrument.capsules.ring import Capsules
from proctor.instrument.capsules.state import restore, restore_gradients
from proctor.instrument.observe import mesh, plainly
from proctor.instrument.observe.content import unseen
from proctor.instrument.observe.fingerprint import fingerprint
from proctor.instrument.replay.plan import Origin, Outcome, Plan, outcome_file
from proctor.invariants.capsule import TENSORS, Capsule, Generator, Seen, read_capsule
from proctor.invariants.files import replace_file

if TYPE_CHECKING:
    from torch import Tensor

_OTHERS_S: Final = 60.0  # that a rank waits for the others before it leaves
_FAILED: Final = 70


class Replayer(Capsules):
    """Stands where `Capsules` stands in a recorded process."""

    _plan: Plan | None = None
    _recorded: Capsule | None = None
    _tensors: Any = None
    _module: Any = None  # that is being called

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._handles: list[Any] = []
        self._mode: Any = None  # sees every operation
        self._results: list[tuple[str, Any]] = []

    # -- what to put in ---------------------------------------------------------------------------------------

    @property
    def recorded(self) -> Capsule:
        """The capsule of this rank."""
        if self._recorded is None:
            self._plan = msgspec.json.decode(Path(self.config.replay).read_bytes(), type=Plan)
            folder = self._plan.capsules.get(self._rank())
            if folder is None:
                raise LookupError(f"there is no capsule of rank {self._rank()}")
            self._recorded = read_capsule(Path(folder))
            from safetensors import safe_open

            self._tensors = safe_open(Path(folder) / TENSORS, framework="pt")
        return self._recorded

    @staticmethod
    def _rank() -> int:
        return int(mesh.position()["rank"])

    def _tensor(self, key: str) -> Tensor:
        return self._tensors.get_tensor(key)

    def _run(self, what: Callable[..., None], *args: Any, always: bool = False) -> None:
        if not (always or self._live()) or (self._cuda is not None and self._captures()):
            return
        try:
            with self._plainly():
                what(*args)
        except Exception as e:  # noqa: BLE001 - whatever it is, there will be no outcome
            self._leave(f"{type(e).__name__}: {str(e)[:500]}")

    def _batch(self, result: Any) -> None:
        number = self.given.loaded - self.recorded.first_batch + self.recorded.batches_before
        for batch in self.recorded.batches:
            if batch.number == number:
                self._exchange(leaves(result), batch.items)
        super()._batch(result)

    def _call(
        self, what: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None, opens: bool = False
    ) -> None:
        step = self.current
        at = len(step.calls) if step is not None else -1
        if 0 <= at < len(self.recorded.calls):
            call = self.recorded.calls[at]
            if (call.what, call.name) == (what, name):
                self._exchange(leaves((*args, kwargs), names=True), call.inputs)
                args, kwargs = self._exchange_plain(args, kwargs or {}, call.inputs)
                self._set_generators(call.generators)
        super()._call(what, name, args, kwargs, opens)

    def _backward(self, args: tuple[Any, ...]) -> None:
        if self.current is not None and not any(call.what == "backward" for call in self.current.calls):
            restore_gradients(self.tracker, self.recorded.state, self._tensor)
        super()._backward(args)

    def _exchange(self, found: list[tuple[str, Any]], recorded: tuple[Seen, ...]) -> None:
        wanted = {seen.place: seen for seen in recorded if seen.key}
        for place, leaf in found:
            seen = wanted.get(place)
            if seen is None or not hasattr(leaf, "data_ptr") or leaf.grad_fn is not None:
                continue
            if str(leaf.dtype) != f"torch.{seen.dtype}" or hasattr(leaf, "_local_tensor"):
                continue
            if seen.content is not None and tuple(leaf.shape) == seen.shape and fingerprint(leaf).fp == seen.content.fp:
                continue  # an alias of something stays one
            with unseen():
                leaf.data = self._tensor(seen.key).to(leaf.device)

    def _exchange_plain(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: tuple[Seen, ...]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Numbers and texts that a module is called with, such as a ratio that follows from the number of the step."""
        wanted = {seen.place: seen.value for seen in recorded if not seen.dtype}

        def change(place: str, value: Any) -> Any:
            return wanted[place] if place in wanted and is_plain(value) and type(wanted[place]) is type(value) else value

        new = tuple(change(str(i), v) for i, v in enumerate(args)), {k: change(k, v) for k, v in kwargs.items()}
        if self._module is not None and _plain_part(*new) != _plain_part(args, kwargs):
            handle = self._module.register_forward_pre_hook(lambda *_: new, prepend=True, with_kwargs=True)
            self._handles.append(handle)
        return new

    def model_begins(self, args: tuple[Any, ...], kwargs: dict[str, Any] | None, *, opens: bool = False) -> None:
        self._module = args[0]
        super().model_begins(args, kwargs, opens=opens)
        self._module = None

    def model_ends(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        while self._handles:
            self._handles.pop().remove()
        super().model_ends(args, kwargs, result, raised)

    def _set_generators(self, generators: tuple[Generator, ...]) -> None:
        for generator in generators:
            words = self._tensor(generator.key)
            state = words if generator.name.startswith(("torch", "cuda")) else words.numpy()
            _rng.write(_rng.RngState(generator.name, state, generator.plain))

    # -- the step ---------------------------------------------------------------------------------------------

    def _step_opens(self) -> None:
        if self.current is not None:
            self._finish(self.current)
            self._report()
        trouble = restore(
            self.tracker, self._live_scalers(), self.recorded.state, self.recorded.groups, self._tensor
        )
        if trouble:
            self._leave(*trouble[:20])
        self._set_generators(self.recorded.generators)
        super()._step_opens()
        if self._plan is not None and self._plan.origin:
            self._trace()

    def _updated(self) -> None:
        super()._updated()
        if self.current is not None and self.current.updates == self.recorded.updates:
            self._finish(self.current)
            self._report()

    def close(self) -> None:
        """The program ended before the step did."""
        if self.current is not None and not self.current.complete:
            self._finish(self.current)
            self._report()

    def _trace(self) -> None:
        """See every operation of the step."""
        from proctor.instrument.patch.usercode import library_prefixes
        from proctor.instrument.replay.origin import OriginMode

        libraries = (*library_prefixes(), str(Path(__file__).parents[2]), "<")
        modules = {id(m): name for root in self.tracker.roots() for name, m in plainly.named_modules(root)}
        self._mode = OriginMode(self.tracker.names, modules, lambda file: not file.startswith(libraries))
        self._mode.begin(self.tracker.parameters())

    def _returned(self, what: str, result: Any) -> None:
        if self._mode is not None:
            self._results += [(f"{'a result' if what == 'module' else 'the loss'}", leaf) for _, leaf in leaves(result) if hasattr(leaf, "grad_fn")]
        super()._returned(what, result)

    def _found(self) -> Origin | None:
        if self._mode is None:
            return None
        parameters = self.tracker.parameters()
        ends = [*self._results, *((f"gradient {self.tracker.names.get(k, '')}", p.grad) for k, p in parameters)]
        found: Origin = self._mode.end([*ends, *((f"parameter {self.tracker.names.get(k, '')}", p) for k, p in parameters)])
        return found

    def _report(self) -> None:
        assert self.current is not None
        origin = self._found()
        step, _ = render(self.current, self.given.first_batch)
        self._leave(step=step, origin=origin)

    def _leave(self, *trouble: str, step: Capsule | None = None, origin: Origin | None = None) -> None:
        """Write the outcome, wait for the other ranks (a collective of theirs may need this one), and end the process."""
        failed = True
        try:
            if self._plan is None:
                self._plan = msgspec.json.decode(Path(self.config.replay).read_bytes(), type=Plan)
            out, rank = Path(self._plan.out), self._rank()
            replace_file(outcome_file(out, rank), msgspec.json.encode(Outcome(rank, trouble, step, origin)))
            until = time.monotonic() + _OTHERS_S
            while not all(outcome_file(out, r).exists() for r in self._plan.capsules) and time.monotonic() < until:
                time.sleep(0.01)
            failed = bool(trouble)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_FAILED if failed else 0)


def _plain_part(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    return [(k, v) for k, v in (*enumerate(args), *kwargs.items()) if is_plain(v)]
