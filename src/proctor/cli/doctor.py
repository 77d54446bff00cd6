"""Say whether this installation works here, and what would keep Proctor from seeing a job.

exit code: 0 when everything needed works, 1 when something does not
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

Finding = tuple[str, str, str]  # ok | note | FAIL, what, text

_MARK: Final = {"ok": "ok  ", "note": "note", "FAIL": "FAIL"}


def prepare(parser: argparse.ArgumentParser) -> None:
    """No arguments."""


def run(args: argparse.Namespace) -> int:
    """Print one line a finding."""
    failed = False
    for probe in (_python, _package, _tables, _native, _torch, _rules, _startup, _folder):
        for mark, what, text in _guarded(probe):
            failed |= mark == "FAIL"
            print(f"{_MARK[mark]}  {what:<11} {text}")
    print("\nsomething above must be repaired first" if failed else "\nready: proctor record -o RUN -- python train.py")
    return 1 if failed else 0


def _guarded(probe: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    try:
        yield from probe()
    except Exception as error:  # noqa: BLE001  what is broken here is what the doctor is for
        yield "FAIL", probe.__name__.strip("_"), f"{type(error).__name__}: {' '.join(str(error).split())}"


def _python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield "ok" if good else "FAIL", "python", f"{platform.python_version()} on {platform.platform()}" + (
        "" if good else "; 3.11 or newer is needed"
    )


def _package() -> Iterator[Finding]:
    import proctor

    yield "ok", "proctor", f"{proctor.__version__} in {Path(proctor.__file__).parent}"


def _tables() -> Iterator[Finding]:
    import polars as pl
    import pyarrow as pa
    from pyarrow import ipc

    sink = pa.BufferOutputStream()
    batch = pa.record_batch({"n": pa.array([1, 2], pa.uint32())})
    with ipc.new_stream(sink, batch.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    frame = pl.DataFrame(pl.from_arrow(ipc.open_stream(sink.getvalue()).read_all()))
    good = frame["n"].to_list() == [1, 2]
    yield "ok" if good else "FAIL", "tables", f"polars {pl.__version__}, pyarrow {pa.__version__}" + (
        "" if good else ": a table did not survive a round trip"
    )
    for name in ("msgspec", "rich", "jinja2"):
        yield "ok", name, importlib.metadata.version(name)


def _native() -> Iterator[Finding]:
    spec = importlib.util.find_spec("proctor.native")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    found = sorted(f.name for place in places for f in Path(place).glob("*.so"))
    loaded = []
    for name in sorted({f.split(".", 1)[0] for f in found}):
        importlib.import_module(f"proctor.native.{name}")
        loaded.append(name)
    if loaded:
        yield "ok", "native", f"active: {', '.join(loaded)}"
    else:
        yield "FAIL", "native", "the compiled part is missing, so nothing can be recorded  →  pip install --force-reinstall proctor"


def _torch() -> Iterator[Finding]:
    if importlib.util.find_spec("torch") is None:
        yield "note", "torch", "not installed: this box can infer, check and report, but not record"
        return
    version = importlib.metadata.version("torch")
    major, minor = (int(p) for p in version.split("+")[0].split(".")[:2])
    fits = (2, 3) <= (major, minor) < (3, 0)
    yield "ok" if fits else "note", "torch", version + ("" if fits else ": Proctor is tested with 2.3 up to, not including, 3")
    import torch

    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    yield "ok", "devices", f"{devices} CUDA" if devices else "CPU only"


def _rules() -> Iterator[Finding]:
    from proctor.invariants.pack import shipped
    from proctor.invariants.relations import registry

    names = list(registry())
    yield "ok" if names else "FAIL", "relations", f"{len(names)}: {', '.join(names)}" if names else "none found"
    packs = shipped()
    text = ", ".join(p.name for p in packs) or "none shipped: check and watch need -i PACK"
    yield "ok" if packs else "note", "packs", text


def _startup() -> Iterator[Finding]:
    yield "note", "start-up", "jobs run as `python -I`, `-E` or `-S` ignore PYTHONPATH; use `import proctor; proctor.watch(…)` there"
    spec = importlib.util.find_spec("sitecustomize")
    if spec is not None and spec.origin and "proctor" not in spec.origin:
        yield "note", "start-up", f"your own {spec.origin} is kept: Proctor's runs it first"
    for name in ("PYTHONNOUSERSITE", "PYTHONSAFEPATH"):
        if os.environ.get(name):
            yield "note", "start-up", f"{name} is set"


def _folder() -> Iterator[Finding]:
    here = Path.cwd()
    free = os.statvfs(here)
    gib = free.f_bavail * free.f_frsize / 2**30
    if os.access(here, os.W_OK):
        yield "ok" if gib > 1 else "note", "folder", f"{here} is writable, {gib:.1f} GiB free"
    else:
        yield "note", "folder", f"{here} is not writable: name another place with -o RUN"
