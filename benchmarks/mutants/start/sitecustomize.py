"""Start-up hook of a program under test: seeds, stand-ins for data, the bug, and the digest of what the program computed.

It acts before `import torch` returns, and before a start-up hook that waits for the end of that import: Proctor's then wraps
what is planted here. Environment: MUTANTS_SEED moves every seed that the program sets; MUTANTS_STANDIN puts synthetic
data in place of data sets; MUTANTS_PLANT names a process operator; MUTANTS_DIGEST is the folder for one JSON file a process.

A digest is the list of what happened, by steps: results of losses, values that are propagated, parameters after updates,
saved objects. A step ends where an optimizer that has already updated in it updates again.
"""

import atexit
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import zlib

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "smooth_l1_loss", "l1_loss", "binary_cross_entropy", "binary_cross_entropy_with_logits",
           "cosine_embedding_loss", "kl_div")
_LIMIT = 4000  # events; a program that trains longer is too long for the matrix anyway


class _Log:
    """What happened, in order, with the step."""

    def __init__(self) -> None:
        self.events: list[list[object]] = []
        self.step = 0
        self.fired = -1
        self._updated: set[int] = set()

    def add(self, kind: str, value: object) -> None:
        if len(self.events) < _LIMIT:
            self.events.append([self.step, kind, value])

    def begin_update(self, optimizer: object) -> None:
        if id(optimizer) in self._updated:
            self._updated.clear()
            self.step += 1
        self._updated.add(id(optimizer))

    def fire(self) -> None:
        if self.fired < 0:
            self.fired = self.step

    def write(self) -> None:
        folder = os.environ["MUTANTS_DIGEST"]
        if self.events:
            with open(os.path.join(folder, f"{os.environ.get('RANK', '0')}-{os.getpid()}.json"), "w") as file:
                json.dump({"rank": int(os.environ.get("RANK", "0")), "fired": self.fired, "events": self.events}, file)


_LOG = _Log()


def _crc(torch, value, crc=0):
    """A checksum of the tensors and plain values in an object."""
    if isinstance(value, torch.Tensor):
        data = getattr(value, "to_local", lambda: value)()  # of a DTensor, this rank's part
        data = data.detach().cpu().contiguous()
        return zlib.crc32(data.reshape(-1).view(torch.uint8).numpy().tobytes() if data.numel() else b"", crc)
    if isinstance(value, dict):
        for key in value:
            crc = _crc(torch, value[key], zlib.crc32(str(key).encode(), crc))
        return crc
    if isinstance(value, list | tuple):
        for item in value:
            crc = _crc(torch, item, crc)
        return crc
    return zlib.crc32(repr(value).encode(), crc) if isinstance(value, int | float | str | bool) else crc


def _digest(torch) -> None:
    """Log losses, propagated values, parameters and saved objects."""
    functional = torch.nn.functional
    for name in _LOSSES:
        setattr(functional, name, _logged(torch, getattr(functional, name), "loss"))
    backward = torch.autograd.backward

    @functools.wraps(backward)
    def log_backward(tensors, *args, **kwargs):
        _LOG.add("propagated", _crc(torch, tensors))
        return backward(tensors, *args, **kwargs)

    torch.autograd.backward = log_backward
    save = torch.save

    @functools.wraps(save)
    def log_save(obj, *args, **kwargs):
        _LOG.add("saved", _crc(torch, obj))
        return save(obj, *args, **kwargs)

    torch.save = log_save
    wrapped = set()
    built = torch.optim.Optimizer.__init__

    @functools.wraps(built)
    def init(self, *args, **kwargs):
        if type(self) not in wrapped:
            wrapped.add(type(self))
            type(self).step = _logged_step(torch, type(self).step)
        built(self, *args, **kwargs)

    torch.optim.Optimizer.__init__ = init
    atexit.register(_LOG.write)


def _logged(torch, function, kind):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        result = function(*args, **kwargs)
        _LOG.add(kind, _crc(torch, result))
        return result

    return wrapper


def _logged_step(torch, step):
    @functools.wraps(step)
    def wrapper(self, *args, **kwargs):
        _LOG.begin_update(self)
        result = step(self, *args, **kwargs)
        _LOG.add("parameters", _crc(torch, [p for group in self.param_groups for p in group["params"]]))
        return result

    return wrapper


def _seed(torch) -> None:
    """Move every seed that the program sets; seed it where it does not."""
    import random

    offset = 1000 * int(os.environ["MUTANTS_SEED"])
    set_torch, set_plain = torch.manual_seed, random.seed
    torch.manual_seed = functools.wraps(set_torch)(lambda seed: set_torch(int(seed) + offset))
    torch.random.manual_seed = torch.manual_seed
    random.seed = lambda a=None, version=2: set_plain(a + offset if isinstance(a, int) else a, version)
    set_torch(offset)
    set_plain(offset)
    try:
        import numpy
    except ImportError:
        return
    set_numpy = numpy.random.seed
    numpy.random.seed = lambda seed=None: set_numpy(seed + offset if isinstance(seed, int) else seed)
    set_numpy(offset)


def _plant(torch) -> None:
    """Load the operators under a name that nobody takes for the user's code, and plant the one that is wanted."""
    spec = importlib.util.spec_from_file_location(
        "sitecustomize.mutants", os.path.join(_ROOT, "__init__.py"), submodule_search_locations=[_ROOT]
    )
    package = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize.mutants"] = package
    spec.loader.exec_module(package)
    registry = importlib.import_module("sitecustomize.mutants.registry")
    registry.load("process")[os.environ["MUTANTS_PLANT"]].plant(torch, _LOG.fire)


def _on_torch(torch) -> None:
    if os.environ.get("MUTANTS_PLANT"):
        _plant(torch)
    if os.environ.get("MUTANTS_DIGEST"):
        _digest(torch)
    if os.environ.get("MUTANTS_SEED"):
        _seed(torch)


class _Loader(importlib.abc.Loader):
    def __init__(self, loader, act) -> None:
        self._loader, self._act = loader, act

    def create_module(self, spec):
        return self._loader.create_module(spec)

    def exec_module(self, module) -> None:
        self._loader.exec_module(module)
        self._act(module)

    def __getattr__(self, name):
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds as Python does, and acts at the end of the import of a few modules."""

    def __init__(self, acts) -> None:
        self._acts = acts

    def find_spec(self, name, path=None, target=None):
        if name not in self._acts:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._acts[name])
        return spec


def _standins() -> None:
    """Load the stand-ins under a name that nobody takes for the user's code."""
    spec = importlib.util.spec_from_file_location("sitecustomize.standins", os.path.join(_ROOT, "start", "standins.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize.standins"] = module
    spec.loader.exec_module(module)
    module.install()


def _shims(torch) -> None:
    """Start the shims of a wild program, whose folder is on the path; they come before what is planted."""
    shims = os.path.join(os.path.dirname(_ROOT), "wild", "shims", "site-packages", "sitecustomize.py")
    spec = importlib.util.spec_from_file_location("sitecustomize.wild", shims)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.begin(torch)


def begin(torch) -> None:
    """Act in a process that has imported torch already (`benchmarks/forks.py`)."""
    if os.environ.get("WILD_SHIMS") is not None:
        _shims(torch)
    if os.environ.get("MUTANTS_STANDIN"):
        _standins()
    _on_torch(torch)


try:
    if os.environ.get("MUTANTS_STANDIN"):
        _standins()
    # Behind the finders of others: a hook that waits for the end of an import, then comes after this one.
    sys.meta_path.insert(max(len(sys.meta_path) - 1, 0), _Finder({"torch": _on_torch}))
except Exception as error:  # noqa: BLE001 - the program starts, and its mutant will not count
    print(f"mutants: {type(error).__name__}: {error}", file=sys.stderr)
