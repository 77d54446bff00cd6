"""Random numbers of one device on every rank of a run that is recorded (`--rng keyed`).

Called by the collector. While modules of a model run, what torch draws is replaced (`oracle/parallel/intercept`): an element is a
function of the step, the module's canonical path, its call, which draw of that call it is, and where it lies in the whole
tensor. So reference and candidate draw the same, in any order, on any mesh, and nothing is switched off. How a rank's part
lies is said by the plan's `[[draw]]` rules, of the innermost running module that one matches; without ranks it is the whole.

What is drawn outside of modules (data, order of samples) is torch's. A draw that no rule places ends the recording with
one line that names module and line. The program's generators go on as without us where `Decisions` draws a mask for its digest;
else a keyed draw leaves them where they are. Source: veScale §5.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from proctor.errors import OracleError, ProctorError
from proctor.oracle.collect.edges.running import Place
from proctor.oracle.collect.edges.taps import own_draw
from proctor.oracle.parallel import intercept
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.placing import rule_of
from proctor.oracle.parallel.streams import Ident
from proctor.oracle.parallel.streams.keyed import Keyed
from proctor.oracle.plans.plan import Plan

_SEED: Final = 0  # both sides have the same, and a step is as good as another


class KeyedDraws:
    """The `Place` of what a recorded process draws.

    Args:
        running: modules that run, the outermost first; none while nothing is recorded, or in what is computed again outside of a backward.
        step: of the run.
        failed: the recording ends, for this reason.
    """

    def __init__(self, running: Callable[[], Sequence[Place]], step: Callable[[], int], failed: Callable[[str], None]) -> None:
        self._running, self._step, self._failed = running, step, failed
        self._stream = Keyed(_SEED)
        self._plan: Plan | None = None
        self._coords: dict[str, int] = {}
        self._world = 1
        self._counts: dict[Place, int] = {}
        self._installed = False

    def open(self, plan_json: str, rank: int, world: int) -> None:
        """Say where this process stands; a plan of another world (the candidate's, in the reference) does not apply."""
        self._world = world
        plan = Plan.from_json(plan_json) if plan_json else None
        if plan is not None and plan.mesh.world == world:
            self._plan, self._coords = plan, plan.mesh.coords(rank)

    def close(self) -> None:
        """Give torch its kernels back, if it was this recording that replaced them."""
        if self._installed:
            intercept.uninstall()

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

    def applies(self) -> bool:
        """See `draws.Place`."""
        return not own_draw() and bool(self._running())

    def __call__(self, tensor: torch.Tensor) -> tuple[Keyed, Box, Ident]:
        """See `draws.Place`."""
        running = self._running()
        place = running[-1]
        ordinal = self._counts.get(place, 0)
        self._counts[place] = ordinal + 1
        try:
            box = self._box(running, tuple(tensor.shape))
        except ProctorError as error:
            self._failed(error.message)
            raise
        return self._stream, box, Ident(f"{self._step()}/{self._canonical(place.name)}#{place.call}", ordinal)

    def _canonical(self, name: str) -> str:
        return self._plan.canonical(name, self._coords) if self._plan is not None else name

    def _box(self, running: Sequence[Place], shape: tuple[int, ...]) -> Box:
        if self._world == 1:
            return Box.whole(shape)
        if self._plan is not None:
            for place in reversed(running):
                rule = rule_of(self._plan, self._canonical(place.name), len(shape))
                if rule is not None:
                    return Box.around(shape, rule.rule.layout(self._plan.mesh), self._plan.mesh, self._coords)
        raise OracleError(
            f"{running[-1].name or 'the model'} draws random numbers {list(shape)} ({intercept.user_line()}), and no [[draw]] of a plan says how they lie on {self._world} ranks"
        )
