"""Which models there are, and what their modules and parameters are called.

Every module that is constructed is remembered (weakly). A *root* is one that no other module holds and that owns
parameters. The root of the first module that trains has no prefix; further ones (teachers, copies, loss modules with
parameters) are called by their class. Wrappers are left out of names: the parameters of `DDP(Net())` are `Net`'s.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from proctor.instrument.observe.modules import joined, roots_among

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module")
WRAPPING = (
    "DistributedDataParallel",
    "DataParallel",
    "OptimizedModule",
    "FullyShardedDataParallel",
    "CheckpointWrapper",
    "OffloadWrapper",
    "Float16Module",
    "DeepSpeedEngine",
    "_FabricModule",
    "PipelineStage",
)

Meta = tuple[str, str, str]  # name, class and `file:line` of a module, or of what belongs to one


class Modules:
    """All modules of the process that are alive."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[nn.Module]] = {}

    def add(self, module: nn.Module) -> None:
        key = id(module)
        self._alive[key] = weakref.ref(module, lambda _: self._alive.pop(key, None))

    def roots(self) -> list[nn.Module]:
        """Modules that own parameters and that no other module holds, in the order of their construction."""
        return roots_among([m for ref in list(self._alive.values()) if (m := ref()) is not None])


class Names:
    """Canonical names within this process."""

    def __init__(self) -> None:
        self.modules: dict[int, str] = {}
        self.parameters: dict[int, str] = {}  # id of the parameter → name
        self._keep: list[Any] = []
        self._prefixes: dict[str, int] = {}
        self._given: dict[int, dict[str, str]] = {}
        self._roots: set[int] = set()

    def add_root(
        self, root: nn.Module, prefix: str | None = None, given: Mapping[str, str] | None = None
    ) -> list[tuple[str, nn.Module]]:
        """Name a root's modules and parameters; returns those that are new.

        Args:
            root: a model, or a stage of one.
            prefix: of its names; without one its class.
            given: names by path, where a framework knows them.
        """
        self._given[id(root)] = dict(given or {})
        inner = unwrapped(root)
        if id(inner) in self._roots:
            new_prefix = self.modules.get(id(inner), "")
        elif prefix is not None:
            new_prefix = prefix
        else:
            kind = type(inner).__name__
            count = self._prefixes[kind] = self._prefixes.get(kind, 0) + 1
            new_prefix = kind if count == 1 else f"{kind}#{count}"
        self._roots.add(id(inner))
        self._keep.append(root)
        fresh = []
        for path, module in root.named_modules():
            if id(module) in self.modules:
                continue
            name = self._given[id(root)].get(path, joined(new_prefix, strip(root, path)))
            self.modules[id(module)] = name
            if not is_wrapper(module):
                fresh.append((name, module))
        for path, parameter in root.named_parameters(remove_duplicate=True):
            self.parameters.setdefault(id(parameter), self._given[id(root)].get(path, joined(new_prefix, strip(root, path))))
        return fresh

    def rename_parameters(self, roots: Iterator[nn.Module] | list[nn.Module]) -> None:
        """Take notice of parameters that were replaced since (`parallelize_module`, `fully_shard`, `to_empty`)."""
        seen: set[int] = set()  # a module in two models, as in the whole and in a stage of it, is called as in the first
        for root in roots:
            prefix = self.modules.get(id(unwrapped(root)), "")
            for path, parameter in root.named_parameters(remove_duplicate=True):
                if id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                self.parameters[id(parameter)] = self._given.get(id(root), {}).get(path, joined(prefix, strip(root, path)))


def is_wrapper(module: nn.Module) -> bool:
    """A module that only hands its call on to the one it wraps."""
    return type(module).__name__ in WRAPPING


def in_flat_tensors(root: nn.Module) -> bool:
    """Whether FSDP1 has a part of a model: its parameters are views of flat tensors that come and go, and nobody can tell where."""
    return any(type(m).__name__ == "FullyShardedDataParallel" for m in root.modules())


def unwrapped(module: nn.Module) -> nn.Module:
    """The user's module inside DDP, `torch.compile`, FSDP1 and the like."""
    while is_wrapper(module):
        inner = next((module._modules[w] for w in WRAPPERS if module._modules.get(w) is not None), None)
        if inner is None:
            return module
        module = inner
    return module


def strip(root: nn.Module, path: str) -> str:
    """A path below a root without the parts that lead through a wrapper."""
    parts, module, out = path.split(".") if path else [], root, []
    for part in parts:
        child = getattr(module, part, None)
        if not (part in WRAPPERS and is_wrapper(module)):
            out.append(part)
        if isinstance(child, nn.Module):
            module = child
    return ".".join(out)


def source_of(module: nn.Module) -> str:
    """`file:line` of a module's forward; "" where it has none in Python."""
    code = getattr(getattr(type(module), "forward", None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""


def is_torch_module(module: nn.Module) -> bool:
    """Whether torch ships its class."""
    return type(module).__module__.split(".")[0] == "torch"


def meta_of(name: str, module: nn.Module) -> Meta:
    """What is said of a module; the place of its forward, unless torch ships it."""
    return name, type(module).__name__, source_of(module) if not is_torch_module(module) else ""


def local_of(tensor: Any) -> torch.Tensor:
    """A DTensor's local part; any other tensor as it is."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if type(local).__name__ == "AsyncCollectiveTensor":
        local = local.wait()
    return local
