"""Records one process of a run: what crosses the edges of modules, parameters and gradients of the first steps.

Nothing is asked of the user's code. Models are found when the first of them is called for training; their modules get
a tap at input and output (`crossings.py`). What a step is says the clock of `instrument/steps` (`acts.py`, `progress.py`). Parameters,
gradients and the state of optimizers are read when an optimizer steps (`optimizers.py`). Patches and guard are `instrument`'s.

After `steps` steps everything is taken off again and the process goes on as if nothing had been there.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from proctor.instrument.guard import Guard
from proctor.instrument.observe.mesh import position
from proctor.instrument.patch.replaced import Replaced
from proctor.instrument.steps.clock import StepClock
from proctor.instrument.steps.rounds import Rounds
from proctor.oracle.collect.acts import Acts
from proctor.oracle.collect.buffers import Buffers
from proctor.oracle.collect.calls import Calls
from proctor.oracle.collect.choosing.answers import Answers
from proctor.oracle.collect.choosing.decisions import Decisions
from proctor.oracle.collect.clipping import Clipping
from proctor.oracle.collect.config import CollectConfig
from proctor.oracle.collect.edges.crossings import Crossings
from proctor.oracle.collect.edges.forced import Supplied
from proctor.oracle.collect.edges.regions import Regions, skip_frames
from proctor.oracle.collect.edges.running import Running
from proctor.oracle.collect.finding.models import Models
from proctor.oracle.collect.finding.roots import in_flat_tensors
from proctor.oracle.collect.forwards import Forwards
from proctor.oracle.collect.guard import RecordingGuard
from proctor.oracle.collect.optimizer.flats import Flats
from proctor.oracle.collect.optimizer.optimizers import Optimizers
from proctor.oracle.collect.progress import Progress
from proctor.oracle.collect.replay.replayed import Replayed
from proctor.oracle.collect.tape import Tape
from proctor.oracle.frameworks import framework_of
from proctor.oracle.tensors import DRAWN

if TYPE_CHECKING:
    from proctor.oracle.collect.keyed import KeyedDraws


class Collector:
    """The life of a recording of one process: its parts, how it begins, goes from step to step, and ends.

    Args:
        config: what to record and where.

    Attributes:
        info: what is said of the process.
        models: those that train.
        optimizers: of the process.
        progress: where the run is.
    """

    def __init__(self, config: CollectConfig) -> None:
        self.config = config
        self.progress = Progress()
        self.models = Models()
        self.regions = Regions(config.compiled)
        self._tape = Tape(self.progress, config.fp8, config.whole, statistics=config.statistics, positions=config.forward)
        self.info = self._tape.info
        self._patches = Replaced()
        guard = self._guard = RecordingGuard(self._failed, compiled=self.regions.on)
        self._supplied = Supplied()
        self._replayed = Replayed(config.replay) if config.replay else None
        self.optimizers = Optimizers(self.models, self.progress, self._tape, self._supplied, self._replayed, config.noise, rounded=config.forward and config.statistics)
        self._buffers = Buffers(self.models, self._tape)
        self._crossings = Crossings(
            config,
            progress=self.progress,
            tape=self._tape,
            supplied=self._supplied,
            regions=self.regions,
            guard=guard,
            next_step=self.next_step,
        )
        self._patches.hold(self._crossings.close)
        answers = Answers(self.progress, self._tape, self._crossings, self._supplied, guard)
        self._keyed = self._make_keyed(answers) if config.dropout in DRAWN else None
        self._decisions = Decisions(answers, "draw" if config.replay or (self._keyed is not None and self._keyed.untouched) else config.dropout, self._keyed)
        self._forwards = Forwards(self) if config.forward else None
        self._acts = Acts(self, self.progress, self.models, self.optimizers, self.regions, guard)
        self._calls = Calls(
            progress=self.progress,
            models=self.models,
            tape=self._tape,
            crossings=self._crossings,
            decisions=self._decisions,
            regions=self.regions,
            acts=self._acts,
            replayed=self._replayed,
            forwards=self._forwards,
            guard=guard,
        )
        if self.regions.on:
            skip_frames(Collector, Acts, Answers, Buffers, Calls, Clipping, Crossings, Flats, Models, Optimizers, Progress, Running, Supplied, Tape)
            skip_frames(Guard, RecordingGuard, Replaced, Rounds, StepClock)

    # -- putting it there -----------------------------------------------------------------------------------

    def _make_keyed(self, answers: Answers) -> KeyedDraws:
        from proctor.oracle.collect.keyed import KeyedDraws  # late: most recordings draw as they would

        running = self._crossings.running
        keyed = KeyedDraws(
            self.config.dropout, self.config.draws, self.info, lambda: running.all() if answers.recording() else (), lambda: self.progress.step, self._failed
        )
        self._patches.hold(keyed.close)
        return keyed

    def install(self) -> None:
        """Patch what tells of models and steps; everything else waits for the first training forward."""
        self.models.install(self._patches)
        self._calls.install(self._patches, watch_fp8=self.config.watch_fp8)
        self._decisions.install(self._patches.wrap)
        self._patches.wrap(torch.optim.Optimizer, "__init__", self._made_optimizer)
        if self._forwards is None:
            self._acts.install(self._patches)
            Clipping(self.progress, self.optimizers, self._guard).install(self._patches)
        at_exit = self._guard.hook(self._at_exit)
        atexit.register(at_exit)
        self._patches.hold(lambda: atexit.unregister(at_exit))

    def _made_optimizer(self, original: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._guard.hook(self._acts.made)(optimizer)

    def adopt(self, models: Sequence[nn.Module]) -> None:
        """Take models, and optimizers, that were made before; the first model's modules have no prefix. After `install`."""
        for module in (m for model in models for m in model.modules()):
            self.models.modules.add(module)
        for model in models:
            if not self.models.knows(model):
                self.discover(model)
        self._acts.adopt()

    def end(self) -> None:
        """Nothing more comes: write what there is, as at the end of the process."""
        self._guard.hook(self._at_exit)()
        self.progress.over = True
        self.remove()

    def abandon(self) -> None:
        """End without a recording that anybody would take for a whole one."""
        if not self.progress.over:
            self._finish(done=False)
        self.remove()

    def remove(self) -> None:
        """Take everything off; a process that goes on is the user's alone."""
        self._patches.remove()
        self._acts.remove()

    def _failed(self, why: str) -> None:
        self.info.notes.append(why)
        self._finish(done=False)

    # -- forwards alone -------------------------------------------------------------------------------------

    def begin_with(self, module: nn.Module) -> None:
        """A model runs for the first time, in a program that is looked at for its forwards."""
        if any(True for _ in module.parameters()):
            self.discover(module)
            self.begin()

    def synchronised(self) -> None:
        """The weights are other ones than in the forward before."""
        self._count_evaluations()
        self.progress.advance()
        self._crossings.next_step()
        self._decisions.next_step()
        if self.progress.step >= self.config.steps:
            self._finish(done=True)
        else:
            self.optimizers.record_before()
            self._tape.flush()

    # -- steps ----------------------------------------------------------------------------------------------

    def discover(self, called: nn.Module) -> None:
        """Watch the modules of models that were not known."""
        for root, fresh, left_out in self.models.discover(called):
            hidden, regions = self.regions.inside(root), {id(m) for m in self.regions.calls(root)}
            for name, module in fresh:
                if id(module) in hidden:
                    self._crossings.edge(name, module, left_out.get(name, frozenset()), compiled=False)
                elif id(module) not in regions:
                    self._patches.hold(*self._crossings.hook(name, module, left_out.get(name, frozenset())))
            self._add_regions(root, left_out)

    def _add_regions(self, root: nn.Module, left_out: Mapping[str, frozenset[str]]) -> None:
        for module in self.regions.calls(root):
            name = self.models.name_of(module)
            self._crossings.edge(name, module, left_out.get(name, frozenset()), compiled=True)
        self.regions.names.update(self.models.names.modules.get(id(m), "") for m in self.regions.with_forward(root))

    def begin(self) -> None:
        """The first training forward begins: say what process this is, read what it begins with."""
        self.progress.begun = True
        self._identify()
        try:
            self._tape.open(Path(self.config.folder) / f"rank{self.info.rank}")
        except FileExistsError:
            self.progress.over = True  # another process of this rank came first (an evaluation, a second job of a script)
            self.remove()
            return
        if any(map(in_flat_tensors, self.models.roots)):
            self._failed("FullyShardedDataParallel (FSDP1) keeps parameters in flat tensors, which the oracle cannot read; use fully_shard (FSDP2)")
            return
        self.models.rename_parameters()
        chunks = [r for r in self.models.roots if framework_of(r) is not None]
        if chunks and not self.config.plan and (known := framework_of(chunks[0])) is not None:
            self.info.plan = known.plan_of(chunks).to_json().decode()
        if self.config.generate is not None:
            self.optimizers.overwrite(functools.partial(self._generate, self.config.generate))
        if self._replayed is not None:
            self.optimizers.overwrite(functools.partial(self._replayed.begin, self.models))
        self.optimizers.record_before()
        self._buffers.record_before()
        self._supplied.read(self.config, self.info.rank)
        if self._keyed is not None:
            self._keyed.open(self.config.plan or self.info.plan)
        if self.info.rank in self.config.ops:
            self._crossings.record_operations(self.config.ops[self.info.rank], self.config.ops_step)

    def _identify(self) -> None:
        dist = torch.distributed
        rank, world = int(os.environ.get("RANK", "0") or 0), int(os.environ.get("WORLD_SIZE", "1") or 1)
        if dist.is_available() and dist.is_initialized():
            rank, world = dist.get_rank(), dist.get_world_size()
        self.info.rank, self.info.world = rank, world
        self.info.coords = dict(position()["coords"])

    def _generate(self, seed: int) -> None:
        from proctor.oracle.collect.finding.generate import generate_parameters

        plan = self.config.plan or self.info.plan
        self.info.notes += generate_parameters(self.models.parameters(), seed, plan, self.info.rank, self.info.world)

    def next_step(self) -> None:
        """The clock has gone on: read what the step before has left."""
        if not self.progress.stepped:
            self.info.notes.append(f"step {self.progress.step}: gradients were cleared without an optimizer's step")
        self.optimizers.record_after()
        self._buffers.record_after()
        self._count_evaluations()
        self.progress.advance()
        self._crossings.next_step()
        self.optimizers.next_step()
        self._decisions.next_step()
        self._calls.next_step()
        if self.progress.step >= self.config.steps and (self.info.evaluated or not self.config.until_evaluation):
            self._finish(done=True)
        elif self.progress.step >= self.config.steps:
            self._tape.waits = True
        else:
            self._tape.flush()

    def updated_again(self) -> None:
        """The step is followed by an update for which nothing was trained, which a recording of it would not show."""
        if self.progress.recording():
            self.info.again.append(self.progress.step)

    def _count_evaluations(self) -> None:
        if counts := self._crossings.evaluated():
            self.info.evaluated[self.progress.step] = counts

    def _at_exit(self) -> None:
        if self.progress.recording():
            self._acts.look()
            # Behind a gradient that no optimizer took there may be an exception: whoever knows the exit code tells.
            self.info.open = self.progress.clock.backward_pending
            if self._forwards is not None:
                self._count_evaluations()
                self.progress.step += 1
            if self.progress.stepped or self.progress.clock.backward_pending:
                self.optimizers.record_after()
                self._buffers.record_after()
                self._count_evaluations()
                self.progress.step += 1
            self._finish(done=True)

    def _finish(self, *, done: bool) -> None:
        self.progress.over = True
        self.remove()
        self.info.steps, self.info.done = self.progress.step, done
        self.info.groups = [g for g in self.info.groups if g.step < self.config.steps]
        self.info.clips = [c for c in self.info.clips if c.step < self.config.steps]
        self.info.fp8 = sorted(self._tape.fp8)
        self.info.busy = self._crossings.busy()
        self.info.compiled = sorted(self.regions.names)
        more = [self._keyed.write] if self._keyed is not None else []
        self._tape.close([*(part.close for part in (self._replayed, self._crossings.ops) if part is not None), *more])
        self.optimizers.close()
