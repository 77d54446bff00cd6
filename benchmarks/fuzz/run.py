"""Feeds broken files to one reader in a process of its own, and looks at how it answers, how long it takes and what it uses.

A finding is an exception that is none of ours, a process that dies, more than `MOST_S` seconds of the processor for one file, or memory that
grows by more than `MOST_BYTES`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from benchmarks.fuzz.mutate import mutate
from proctor.errors import ProctorError

MOST_S: Final = 2.0
MOST_BYTES: Final = 500 << 20
_BATCH: Final = 400  # files that one process reads
_STATE: Final = struct.Struct("<qqq")  # seed that is read, files read, answers that were errors of ours


@dataclass(frozen=True)
class Reader:
    """What is fuzzed.

    Args:
        name: of the format.
        make: writes sound files into a folder and gives those that are to be broken.
        read: reads them there as a command would; raises `ProctorError` for what is no such file.
    """

    name: str
    make: Callable[[Path], list[Path]]
    read: Callable[[Path], object]


@dataclass
class Findings:
    """What fuzzing one reader showed.

    Args:
        files: broken files that were read.
        refused: of these answered with an error of ours; the others were read, as what is left of them is sound.
        wrong: seed and what happened, of each finding.
        slowest_s, largest_bytes: processor seconds and growth of memory, at most, of one file and of one process.
    """

    name: str
    files: int = 0
    refused: int = 0
    wrong: dict[int, str] = field(default_factory=dict)
    slowest_s: float = 0.0
    largest_bytes: int = 0


class _SlowError(BaseException):
    pass


def fuzz(reader: Reader, folder: Path, *, seconds: float, first: int = 0, most: int = 1 << 62) -> Findings:
    """Break and read files until the time is over.

    Args:
        reader: of the files.
        folder: for them; it is made.
        seconds: in which new processes are started.
        first: seed of the first broken file; the others follow.
        most: files.
    """
    sound = folder / "sound"
    sound.mkdir(parents=True)
    paths = _prepared(reader, sound)
    found, seed, end = Findings(reader.name), first, time.monotonic() + seconds
    with mmap.mmap(-1, 4096) as shared:
        while time.monotonic() < end and found.files < most:
            seed = _batch(reader, folder, paths, seed, min(_BATCH, most - found.files), end, shared, found)
    return found


def _prepared(reader: Reader, sound: Path) -> list[Path]:
    """Sound files, made and read in a process of its own: threads of libraries do not survive the forks that follow."""
    listing = sound.with_name("listing")
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            paths = reader.make(sound)
            reader.read(sound)
            listing.write_text("\n".join(str(path.relative_to(sound)) for path in paths))
            code = 0
        except BaseException:  # noqa: BLE001  of a forked process nothing must go on
            traceback.print_exc()
        finally:
            os._exit(code)
    if os.waitpid(pid, 0)[1]:
        raise RuntimeError(f"{reader.name}: what is sound cannot be read")
    return [Path(line) for line in listing.read_text().splitlines()]


def broken(reader: Reader, folder: Path, paths: list[Path], seed: int) -> None:
    """Put the broken files of one seed into `folder/broken`."""
    rng = random.Random(seed)
    place = folder / "broken"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(folder / "sound", place)
    path = rng.choice(paths)
    others = [(folder / "sound" / other).read_bytes() for other in paths]
    (place / path).write_bytes(mutate((folder / "sound" / path).read_bytes(), rng, others))


def _batch(
    reader: Reader, folder: Path, paths: list[Path], seed: int, most: int, end: float, shared: mmap.mmap, found: Findings
) -> int:
    """One process reads some files; gives the seed that is next."""
    shared[: _STATE.size] = _STATE.pack(seed, 0, 0)
    errors = folder / "errors"
    errors.write_text("")
    pid = os.fork()
    if pid == 0:
        try:
            _child(reader, folder, paths, seed, most, end, shared, errors)
        finally:
            os._exit(0)
    _, status, _ = os.wait4(pid, 0)
    at, files, refused = _STATE.unpack(shared[: _STATE.size])
    found.files, found.refused = found.files + files, found.refused + refused
    if status:
        found.wrong[at] = f"the process died of signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"it ended with {status}"
        found.files += 1
    for line in errors.read_text().splitlines():
        kind, _, rest = line.partition(" ")
        number, _, text = rest.partition(" ")
        if kind == "wrong":
            found.wrong[int(number)] = text
        elif kind == "slow":
            found.slowest_s = max(found.slowest_s, float(number))
        else:
            found.largest_bytes = max(found.largest_bytes, int(number))
            if int(number) > MOST_BYTES:
                found.wrong[at] = f"memory grew by {int(number) >> 20} MiB within {files} files"
    return at + 1


def _child(
    reader: Reader, folder: Path, paths: list[Path], seed: int, most: int, end: float, shared: mmap.mmap, errors: Path
) -> None:
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)
    before, slowest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0.0
    signal.signal(signal.SIGPROF, _slow)
    refused = 0
    with errors.open("a", buffering=1) as told:
        for number in range(seed, seed + most):
            shared[: _STATE.size] = _STATE.pack(number, number - seed, refused)
            broken(reader, folder, paths, number)
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, 3 * MOST_S)
            try:
                reader.read(folder / "broken")
            except ProctorError:
                refused += 1
            except _SlowError:
                told.write(f"wrong {number} more than {3 * MOST_S:.0f} s\n")
            except BaseException as error:  # noqa: BLE001  this is what is looked for
                frame = traceback.extract_tb(error.__traceback__)[-1]
                text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                told.write(f"wrong {number} {text} at {Path(frame.filename).name}:{frame.lineno}\n")
            finally:
                signal.setitimer(signal.ITIMER_PROF, 0)
            spent = time.process_time() - began
            if spent > slowest:
                slowest = spent
            if MOST_S < spent < 3 * MOST_S:
                told.write(f"wrong {number} it took {spent:.1f} s\n")
            shared[: _STATE.size] = _STATE.pack(number, number - seed + 1, refused)
            if time.monotonic() > end:
                break
        told.write(f"slow {slowest:.3f}\n")
        told.write(f"memory {(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10}\n")


def _slow(*_: object) -> None:
    raise _SlowError


def again(reader: Reader, folder: Path, seed: int) -> None:
    """Read one broken file once more, here, with its traceback."""
    sound = folder / "sound"
    sound.mkdir(parents=True)
    paths = [path.relative_to(sound) for path in reader.make(sound)]
    broken(reader, folder, paths, seed)
    with contextlib.suppress(ProctorError):
        reader.read(folder / "broken")
    print("read, or refused as it should be", file=sys.stderr)
