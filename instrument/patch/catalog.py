"""Which functions of torch are observed in full mode, and under which names.

Names are those a user would write (`torch.nn.functional.linear`, `torch.optim.Optimizer.step`), one for all
subclasses where the class is told by the first argument. Python-level public API only: `torch._C` internals, jit and
dynamo are never touched. Element-wise arithmetic is left out: it is most of the calls and says least.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

from proctor.instrument.patch.patches import METHOD, PLAIN


class Point(NamedTuple):
    """One function to observe: where it is bound, its name, and other places that hold the same object."""

    owner: Any
    attribute: str
    name: str
    kind: int = PLAIN
    aliases: tuple[Any, ...] = ()


_TORCH = """
matmul bmm mm addmm baddbmm einsum cat stack where gather index_select masked_select
sum mean std var norm softmax log_softmax sigmoid tanh relu logsumexp cumsum topk argmax sort
embedding dropout layer_norm batch_norm conv1d conv2d conv3d conv_transpose2d
randn rand randint randperm randn_like rand_like bernoulli normal multinomial
tensor as_tensor from_numpy zeros ones full arange
isfinite isnan manual_seed seed get_rng_state set_rng_state save load
""".split()

_TENSOR = """
add_ sub_ mul_ div_ copy_ zero_ fill_ normal_ uniform_ clamp_ masked_fill_ lerp_ detach_ requires_grad_ to softmax backward
""".split()

_COLLECTIVES = """
all_reduce broadcast all_gather all_gather_into_tensor reduce_scatter reduce_scatter_tensor all_to_all
all_to_all_single reduce gather scatter send recv isend irecv batch_isend_irecv barrier monitored_barrier
all_gather_object broadcast_object_list gather_object scatter_object_list all_gather_coalesced all_reduce_coalesced
new_group init_process_group destroy_process_group
""".split()

_MODULE = "train eval zero_grad state_dict load_state_dict requires_grad_ to half float double bfloat16 cuda cpu".split()
_NOT_FUNCTIONAL = frozenset(
    """assert_int_or_pair boolean_dispatch handle_torch_function has_torch_function has_torch_function_unary
    has_torch_function_variadic""".split()
)

OPTIMIZER_METHODS = ("step", "zero_grad", "add_param_group", "state_dict", "load_state_dict")
SCHEDULER_METHODS = ("step", "get_last_lr", "state_dict", "load_state_dict")
# These call themselves on every child module; only the outermost call says something.
RECURSIVE = frozenset({"torch.nn.Module.train", "torch.nn.Module.load_state_dict", "torch.nn.Module.state_dict"})
# What the layers of torch fill their parameters with.
INITIALISERS = frozenset(f"torch.nn.init.{name}" for name in ("kaiming_uniform_", "uniform_", "normal_", "ones_", "xavier_uniform_"))
COLLECTIVES = frozenset(f"torch.distributed.{name}" for name in _COLLECTIVES)

# Modules that are imported late or never; their points are patched when they are imported.
LATE = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.tensor.parallel",
    "torch.distributed.checkpoint",
    "torch.distributed.device_mesh",
    "torch.distributed.optim",
    "torch.distributed.pipelining",
    "torch.optim.swa_utils",
    "torch.nn.utils.parametrize",
)


def points() -> Iterator[Point]:
    """Everything that `import torch` brings; optimizers and schedulers are patched per class when constructed."""
    import torch
    import torch.nn.functional as functional
    from torch import Tensor, autograd, nn
    from torch.utils import checkpoint, data

    for name in _TORCH:
        aliases = (torch.random,) if name in ("manual_seed", "seed", "get_rng_state", "set_rng_state") else ()
        aliases = (torch.serialization,) if name in ("save", "load") else aliases
        yield Point(torch, name, f"torch.{name}", aliases=aliases)
    for module in ("random", "numpy.random"):  # torch has imported both
        if module in sys.modules:
            yield Point(sys.modules[module], "seed", f"{module}.seed")
    for name in _TENSOR:
        yield Point(Tensor, name, f"torch.Tensor.{name}", METHOD)
    for name in sorted(vars(functional)):
        if name.startswith("_") or name in _NOT_FUNCTIONAL or name.endswith("_with_indices"):
            continue
        if inspect.isroutine(vars(functional)[name]):
            yield Point(functional, name, f"torch.nn.functional.{name}")
    for name in ("backward", "grad"):
        yield Point(autograd, name, f"torch.autograd.{name}")
    for name in sorted(vars(nn.init)):
        if not name.startswith("_") and name.endswith("_") and inspect.isfunction(vars(nn.init)[name]):
            yield Point(nn.init, name, f"torch.nn.init.{name}")
    for name in _MODULE:
        yield Point(nn.Module, name, f"torch.nn.Module.{name}", METHOD)
    for name, home in (
        ("clip_grad_norm_", nn.utils.clip_grad), ("clip_grad_value_", nn.utils.clip_grad),
        ("vector_to_parameters", nn.utils.convert_parameters), ("parameters_to_vector", nn.utils.convert_parameters),
    ):
        yield Point(home, name, f"torch.nn.utils.{name}", aliases=(nn.utils,))
    yield Point(checkpoint, "checkpoint", "torch.utils.checkpoint.checkpoint")
    yield Point(data.DataLoader, "__iter__", "torch.utils.data.DataLoader.__iter__", METHOD)
    yield Point(data.dataloader._BaseDataLoaderIter, "__next__", "torch.utils.data.DataLoader.__next__", METHOD)
    yield Point(data.distributed.DistributedSampler, "set_epoch", "torch.utils.data.DistributedSampler.set_epoch", METHOD)
    yield Point(data.distributed.DistributedSampler, "__iter__", "torch.utils.data.DistributedSampler.__iter__", METHOD)
    yield from _contexts()
    yield from _distributed()


def _contexts() -> Iterator[Point]:
    from torch import amp
    from torch.autograd import grad_mode

    for name in ("__enter__", "__exit__"):
        yield Point(amp.autocast_mode.autocast, name, f"torch.autocast.{name}", METHOD)
    for cls in ("no_grad", "enable_grad", "inference_mode"):
        yield Point(getattr(grad_mode, cls), "__enter__", f"torch.{cls}.__enter__", METHOD)
    for name in ("scale", "unscale_", "step", "update", "state_dict", "load_state_dict"):
        yield Point(amp.grad_scaler.GradScaler, name, f"torch.amp.GradScaler.{name}", METHOD)


def _distributed() -> Iterator[Point]:
    import torch.distributed as dist
    from torch.nn import SyncBatchNorm
    from torch.nn.parallel import DataParallel, DistributedDataParallel

    yield Point(DataParallel, "__init__", "torch.nn.DataParallel.__init__", METHOD)
    yield Point(SyncBatchNorm, "convert_sync_batchnorm", "torch.nn.SyncBatchNorm.convert_sync_batchnorm")
    if not dist.is_available():
        return
    c10d = dist.distributed_c10d
    for name in _COLLECTIVES:
        yield Point(c10d, name, f"torch.distributed.{name}", aliases=(dist,))
    ddp = "torch.nn.parallel.DistributedDataParallel"
    for name in ("__init__", "no_sync", "_pre_forward"):
        yield Point(DistributedDataParallel, name, f"{ddp}.{name}", METHOD)


def late_points(module: Any) -> Iterator[Point]:
    """Public functions, and constructors of public classes, of a module of `LATE`."""
    name = module.__name__
    for attribute in getattr(module, "__all__", None) or [n for n in vars(module) if not n.startswith("_")]:
        value = vars(module).get(attribute)
        place = str(getattr(value, "__module__", ""))
        if inspect.isfunction(value) and place.startswith(("torch.distributed", "torch.optim.swa_utils")):
            home = inspect.getmodule(value)
            aliases = (home,) if home is not None and home is not module else ()
            yield Point(module, attribute, f"{name}.{attribute}", aliases=aliases)


def library_points(module: Any, prefix: str, methods: dict[str, tuple[str, ...]]) -> Iterator[Point]:
    """Named methods of classes of a library's module; what this version of it lacks is skipped, and `lacking` names it."""
    for cls_name, names in methods.items():
        cls = getattr(module, cls_name, None)
        if cls is None:
            continue
        if not names:
            yield Point(module, cls_name, f"{prefix}.{cls_name}")
            continue
        for method in names:
            for owner in cls.__mro__:
                if method in vars(owner) and owner.__module__.split(".")[0] == prefix.split(".")[0]:
                    yield Point(owner, method, f"{prefix}.{cls_name}.{method}", METHOD)
                    break


def lacking(module: Any, prefix: str, methods: dict[str, tuple[str, ...]]) -> list[str]:
    """Names under which `library_points` has nothing for this version of the library."""
    wanted = [f"{prefix}.{cls_name}{'.' * bool(method)}{method}" for cls_name, names in methods.items() for method in names or ("",)]
    found = {point.name for point in library_points(module, prefix, methods)}
    return [name for name in wanted if name not in found]


def untried(library: str, tried: tuple[str, str]) -> str:
    """The installed version of a library, where it is older than the oldest that was tried or of a later major version than the newest; else nothing."""
    try:
        found = version(library.split(".")[0])
        oldest, newest = (_numbers(text) for text in tried)
    except PackageNotFoundError:
        return ""  # the program's own module of that name
    return found if _numbers(found)[:2] < oldest[:2] or _numbers(found)[:1] > newest[:1] else ""


def _numbers(text: str) -> tuple[int, ...]:
    """Of a version, as far as its parts begin with digits: `2.6.0rc1` is 2, 6, 0."""
    parts = itertools.takewhile(bool, (re.match(r"\d*", part)[0] for part in text.split(".")))  # type: ignore[index]
    return tuple(int(part) for part in parts)


def forward_name(cls: type) -> str:
    """What a call of a module of this class is recorded under."""
    place = cls.__module__ or ""
    if place.startswith("torch.nn.modules."):
        return f"torch.nn.{cls.__qualname__}.forward"
    if place == "torch.nn.parallel.distributed":
        return "torch.nn.parallel.DistributedDataParallel.forward"
    return f"{'__main__' if place == '__mp_main__' else place}.{cls.__qualname__}.forward"
