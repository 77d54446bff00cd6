"""Random numbers of one device on every rank of a run that is recorded (`--rng keyed`, `--rng stock`).

Called by the collector. While modules of a model run, what torch draws is replaced (`oracle/parallel/intercept`), and every draw
has a name: the step, the module's canonical path, its call, and which draw of that call it is. `keyed`: an element is a function
of that name and of where it lies in the whole tensor. `stock`: the reference draws by itself, untouched, and the state of its
generator before every draw is kept; who comes after it (its own further runs, ranks of a candidate) draws its part from that state.
So both sides draw the same, in any order, on any mesh, and nothing is switched off. How a rank's part lies is said by the plan's
`[[draw]]` rules, of the innermost running module that one matches, else by what was found of the tensors around it (`lies`).

What is drawn outside of modules (data, order of samples) is torch's. A draw of which nobody knows how it lies ends the recording
with one line that names module and line. Of each draw the state of the program's own generator is kept, too: ranks that hold the
same part must be about to draw the same. The program's generators go on as without us where `Decisions` draws a mask for its
digest; else they stay where they are. Source: veScale §5.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch

from proctor.errors import OracleError, ProctorError
from proctor.oracle.collect.edges.running import Place
from proctor.oracle.collect.edges.taps import own_draw
from proctor.oracle.collect.lies import box_of
from proctor.oracle.parallel import intercept
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.placing import rule_of
from proctor.oracle.parallel.streams import Ident, Stream, stream
from proctor.oracle.plans.plan import Plan
from proctor.oracle.store import ProcessInfo, draws
from proctor.oracle.tensors import Part

_SEED: Final = 0  # both sides have the same, and a step is as good as another


class KeyedDraws:
    """The `Place` of what a recorded process draws.

    Args:
        kind: "keyed" or "stock".
        given: folder of what the reference drew (`store/draws`); "" where this run is the first of a reference.
        info: of the process; is told of draws.
        running: modules that run, the outermost first; none while nothing is recorded, or in what is computed again outside of a backward.
        step: of the run.
        failed: the recording ends, for this reason.
    """

    def __init__(
        self, kind: str, given: str, info: ProcessInfo, running: Callable[[], Sequence[Place]], step: Callable[[], int], failed: Callable[[str], None]
    ) -> None:
        self._running, self._step, self._failed, self._info = running, step, failed, info
        self._folder = Path(given) if given else None
        self._first = self._folder is None
        self._generator = torch.Generator()
        self._stream = stream(kind, _SEED, self._generator)
        self._plan: Plan | None = None
        self._lies: draws.Lies | None = None
        self._drawn: draws.Drawns = {}
        self._coords: dict[str, int] = {}
        self._world = 1
        self._counts: dict[Place, int] = {}
        self._unknown: set[str] = set()
        self._installed = False

    @property
    def untouched(self) -> bool:
        """Whether torch draws as it would without us."""
        return self._first and self._stream.kind == "stock"

    def open(self, plan_json: str) -> None:
        """Say where this process stands; a plan of another world (the candidate's, in the reference) does not apply."""
        self._world = self._info.world
        plan = Plan.from_json(plan_json) if plan_json else None
        if plan is not None and plan.mesh.world == self._world:
            self._plan, self._coords = plan, plan.mesh.coords(self._info.rank)
        if self._folder is not None:
            self._drawn = draws.read(self._folder / draws.DRAWN, draws.Drawns)
            lies = self._folder / f"rank{self._info.rank}.msgpack"
            self._lies = draws.read(lies, draws.Lies) if lies.exists() else None
        elif self._stream.kind == "stock" and self._world > 1:
            self._failed(f"--rng stock needs what a reference on one device drew, and this is the first run of {self._world} ranks: use proctor oracle run")

    def close(self) -> None:
        """Give torch its kernels back, if it was this recording that replaced them."""
        if self._installed:
            intercept.uninstall()

    def write(self, folder: Path) -> None:
        """Keep what a reference drew, at the end of its first run."""
        if self._first:
            draws.write(folder / draws.DRAWN, self._drawn)

    def next_step(self) -> None:
        """Draws are counted by step."""
        self._counts.clear()

    @contextmanager
    def around(self) -> Iterator[None]:
        """While modules run, or a backward pass."""
        self._installed |= intercept.install()
        with intercept.placed(self):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While torch draws by itself."""
        with intercept.placed(None):
            yield

    def applies(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """See `draws.Place`."""
        running = () if own_draw() else self._running()
        if not running:
            return False
        if self._stream.kind == "keyed":
            if self._first:
                self._keep(self._name(running[-1]), self._counts.get(running[-1], 0), args, b"")
            return True
        place = running[-1]
        name, ordinal = self._name(place), self._counts.get(place, 0)
        known = draws.key_of(name, ordinal) in self._drawn
        if self._first or not known:
            self._counts[place] = ordinal + 1
        if self._first:
            generator = next((a for a in (*args, *kwargs.values()) if isinstance(a, torch.Generator)), torch.default_generator)
            self._keep(name, ordinal, args, generator.get_state().numpy().tobytes())
        elif not known and place.name not in self._unknown:
            self._unknown.add(place.name)
            self._info.notes.append(f"{place.name or 'the model'} draws random numbers ({intercept.user_line()}) that the reference does not draw: they are torch's own")
        return known and not self._first

    def _keep(self, name: str, ordinal: int, args: Sequence[Any], state: bytes) -> None:
        first = args[0] if args else ()
        shape = tuple(first.shape) if isinstance(first, torch.Tensor) else (first,) if isinstance(first, int) else ()
        self._drawn.setdefault(draws.key_of(name, ordinal), draws.Drawn(shape, state))  # what is computed again comes later

    def __call__(self, tensor: torch.Tensor) -> tuple[Stream, Box, Ident]:
        """See `draws.Place`."""
        running = self._running()
        place = running[-1]
        ident = Ident(self._name(place), self._counts.get(place, 0))
        self._counts[place] = ident.ordinal + 1
        drawn = self._drawn.get(draws.key_of(ident.name, ident.ordinal))
        try:
            box = self._box(running, tuple(tensor.shape), drawn)
        except ProctorError as error:
            self._failed(error.message)
            raise
        if drawn is not None and drawn.state:
            self._generator.set_state(torch.frombuffer(bytearray(drawn.state), dtype=torch.uint8))
        if self._world > 1 and not place.again:
            self._tell(place, ident, box)
        return self._stream, box, ident

    def _tell(self, place: Place, ident: Ident, box: Box) -> None:
        part = hashlib.blake2b(repr(box.shape).encode(), digest_size=8)
        for index in box.indices:
            part.update(index.tobytes() + b"|")
        begins = hashlib.blake2b(torch.default_generator.get_state().numpy().tobytes(), digest_size=8)
        self._info.parts.append(Part(self._step(), self._canonical(place.name), draws.key_of(ident.name, ident.ordinal), part.hexdigest(), begins.hexdigest()))

    def _name(self, place: Place) -> str:
        name, step, call = self._canonical(place.name), self._step(), place.call
        if self._lies is not None and not place.evaluation:
            call = self._lies.calls.get(f"{step}/{name}", {}).get(call, call)
        return f"{'evaluation ' if place.evaluation else ''}{step}/{name}#{call}"

    def _canonical(self, name: str) -> str:
        if self._lies is not None and name in self._lies.names:
            return self._lies.names[name]
        return self._plan.canonical(name, self._coords) if self._plan is not None else name

    def _box(self, running: Sequence[Place], shape: tuple[int, ...], drawn: draws.Drawn | None) -> Box:
        if self._world == 1:
            return Box.whole(shape)
        modules = [self._canonical(place.name) for place in reversed(running)]
        if self._plan is not None:
            for path in modules:
                rule = rule_of(self._plan, path, len(shape))
                if rule is not None:
                    return Box.folded(shape, rule.fold, rule.rule.layout(self._plan.mesh), self._plan.mesh, self._coords)
        if drawn is not None and (box := box_of(shape, drawn.shape, modules, self._step(), self._lies)) is not None:
            return box
        told = f"; it is not seen how they lie in the reference's {list(drawn.shape)}" if drawn is not None else ""
        raise OracleError(
            f"{modules[0] or 'the model'} draws random numbers {list(shape)} ({intercept.user_line()}), and no [[draw]] of a plan says how they lie on {self._world} ranks{told}"
        )
