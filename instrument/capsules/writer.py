"""Writes kept steps to `RUN/capsules`, on a thread of its own that exists once something was asked for.

Limits: a few capsules a key, `MAX_FOLDERS` a rank, `capsule_disk` bytes a rank, and never more than half of what is free
on the disk. What does not fit is said once and not written; nothing is overwritten.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from proctor.instrument.capsules.render import render
from proctor.instrument.config import RecordConfig
from proctor.instrument.guard import Guard, say
from proctor.instrument.own_thread import OwnThread
from proctor.instrument.record.rundir import environment
from proctor.invariants.capsule import FOLDER, folder_name, write_capsule

if TYPE_CHECKING:
    from proctor.instrument.capsules.step import HeldStep

MAX_FOLDERS: Final = 32
MAX_A_KEY: Final = 4
PERIODIC: Final = "periodic"
_LOOK_S: Final = 1.0
_LEAVE_S: Final = 10.0  # for what was asked for when the process ends
_MAX_REQUESTS: Final = 256


class Facts(NamedTuple):
    """What a capsule says about its process."""

    program: str
    command: tuple[str, ...]
    cwd: str
    environment: dict[str, str]
    rank: int
    world: int
    coords: dict[str, int]
    versions: dict[str, str]
    devices: tuple[str, ...]


def facts(config: RecordConfig, process: dict[str, Any]) -> Facts:
    """From `run.json`, what `process.json` will say, and the devices in use."""
    import torch

    try:
        run = json.loads((Path(config.run) / "run.json").read_bytes())
    except (OSError, ValueError):
        run = {}
    devices = [platform.processor() or platform.machine()]
    if torch.cuda.is_initialized():
        devices += [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    versions = {"python": process["python"], "torch": str(process["torch"]), **process["libraries"]}
    return Facts(
        str(run.get("program", "")),
        tuple(str(word) for word in run.get("command", ())),
        str(run.get("cwd", "")),
        environment(os.environ),
        process["rank"],
        process["world"],
        dict(process["coords"]),
        versions,
        tuple(devices),
    )


class _Request(NamedTuple):
    key: str
    step: int
    later: bool = False  # the first step after it that has values
    control: int | None = None  # the step beside which it is written


class CapsuleWriter:
    """Takes requests from any thread.

    Args:
        config: where, and how much.
        facts: asked for once something is written.
        steps: those that are kept, oldest first.
    """

    def __init__(
        self, config: RecordConfig, facts: Callable[[], Facts], guard: Guard, steps: Callable[[], Sequence[HeldStep]]
    ) -> None:
        self.config = config
        self.lock = threading.Lock()  # held while a step is marked as frozen, or its memory is given to another
        self.notes: list[str] = []
        self.written = 0
        self._facts, self._guard, self._steps = facts, guard, steps
        self._folder = Path(config.run) / FOLDER
        self._bytes = 0
        self._first_batch = 0
        self._requests: list[_Request] = []
        self._asked: set[tuple[str, int]] = set()
        self._keys: dict[str, int] = {}
        self._newest = -1
        self._wake = threading.Event()
        self._stop = False
        self._thread: OwnThread | None = None

    def ask(self, key: str, step: int) -> None:
        """Have a step written; never waits."""
        with self.lock:
            count = self._keys.get(key, 0)
            most = MAX_FOLDERS // 2 if key == PERIODIC else MAX_A_KEY
            if (key, step) in self._asked or count >= most or len(self._requests) >= _MAX_REQUESTS or self._stop:
                return
            self._asked.add((key, step))
            self._keys[key] = count + 1
            self._requests.append(_Request(key, step))
            if self._thread is None:
                self._thread = OwnThread(self._loop)
                self._thread.start()
        self._wake.set()

    def step_is_there(self, step: int, first_batch: int) -> None:
        """A step is complete; called by the training thread."""
        self._newest, self._first_batch = step, first_batch
        if self._requests:
            self._wake.set()

    def close(self) -> None:
        """Write what can be written, and stop."""
        self._stop = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_LEAVE_S)

    def _loop(self) -> None:
        while True:
            self._wake.wait(_LOOK_S if self._requests else None)
            self._wake.clear()
            stopping = self._stop
            self._guard.run("capsule writer", self._serve, stopping)
            if stopping:
                return

    def _serve(self, stopping: bool) -> None:
        with self.lock:
            requests, self._requests = self._requests, []
        waiting: list[_Request] = []
        while requests:
            request = requests.pop(0)
            step = self._take(request)
            if step is not None:
                requests += self._write(request, step)
            elif not request.later and request.step < self._newest:
                self._say(f"step {request.step} was asked for too late to be kept ({request.key})", "late")
            elif not stopping:
                waiting.append(request)
        with self.lock:
            self._requests = waiting + self._requests

    def _take(self, request: _Request) -> HeldStep | None:
        """The step of a request, marked so that its memory stays its own."""
        with self.lock:
            for step in self._steps():
                if request.later:
                    match = step.step > request.step and step.values is not None
                else:
                    match = step.step == request.step
                if match:
                    step.frozen = True
                    return step
        return None

    def _control(self, step: HeldStep) -> HeldStep | None:
        """The nearest earlier step with values."""
        with self.lock:
            for other in reversed(self._steps()):
                if other.step < step.step and other.values is not None:
                    other.frozen = True
                    return other
        return None

    def _write(self, request: _Request, step: HeldStep) -> list[_Request]:
        """Write one step; returns what has to follow it."""
        if not self._put(request.key, step, request.control) or request.control is not None or request.key == PERIODIC:
            return []
        if step.values is None:
            return [_Request(request.key, step.step, later=True)] if step.skipped and not request.later else []
        control = self._control(step)
        if control is None:
            return [_Request(request.key, step.step, later=True, control=step.step)]
        self._put(request.key, control, step.step)
        return []

    def _put(self, key: str, step: HeldStep, control: int | None) -> bool:
        facts = self._facts()
        folder = self._folder / folder_name(key, step.step, facts.rank)
        if folder.exists():
            return False
        if self.written >= MAX_FOLDERS:
            self._say(f"{MAX_FOLDERS} capsules are written: no more of this rank", "count")
            return False
        capsule, blobs = render(step, self._first_batch)
        capsule = msgspec.structs.replace(
            capsule,
            key=key,
            control=control,
            written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **facts._asdict(),
        )
        size = sum(blob.nbytes for blob in blobs)
        if self._bytes + size > self.config.capsule_disk:
            self._say(f"capsules of this rank would take more than {self.config.capsule_disk >> 20} MiB: no more", "disk")
            return False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            if 2 * size > shutil.disk_usage(self._folder).free:
                self._say("a capsule would take more than half of what is free on the disk: not written", "free")
                return False
            self._bytes += write_capsule(folder, capsule, blobs)
        except OSError as e:
            self._say(f"a capsule cannot be written: {e.strerror or e}: {folder}", "write")
            return False
        self.written += 1
        return True

    def _say(self, text: str, kind: str) -> None:
        if not any(note.startswith(f"[{kind}]") for note in self.notes):
            self.notes.append(f"[{kind}] {text}")
            say(text)


