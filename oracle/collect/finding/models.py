"""The models of a process that train: their roots, and what belongs to which of their modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from proctor.instrument.patch.replaced import Replaced
from proctor.oracle.collect.finding.roots import Meta, Modules, Names, is_wrapper, meta_of, unwrapped
from proctor.oracle.frameworks import framework_of


class Found(NamedTuple):
    """A root that is watched from now on.

    Args:
        root: a model, or a stage of one.
        fresh: its modules that had no name before, by their names.
        left_out: by module, sides that the model as a whole does not have there.
    """

    root: nn.Module
    fresh: list[tuple[str, nn.Module]]
    left_out: Mapping[str, frozenset[str]]


class Models:
    """What trains in this process.

    Attributes:
        modules: all that were constructed.
        names: of modules and parameters.
        roots: the models that were found and have parameters.
    """

    def __init__(self) -> None:
        self.modules = Modules()
        self.names = Names()
        self.roots: list[nn.Module] = []
        self._main_known = False

    def install(self, patches: Replaced) -> None:
        """See modules when they are made. One that is copied (stages and averages are made by `deepcopy`) or loaded runs no constructor."""
        patches.wrap(nn.Module, "__init__", self._made)
        patches.wrap(nn.Module, "__setstate__", self._made)

    def _made(self, original: Callable[..., None], module: nn.Module, /, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        self.modules.add(module)

    def knows(self, module: nn.Module) -> bool:
        """Whether a module was found."""
        return id(module) in self.names.modules

    def discover(self, called: nn.Module) -> list[Found]:
        """Name the models that there are, when one of them is called that is not known.

        Args:
            called: that module.
        """
        roots = self.modules.roots()
        inside = [r for r in roots if any(m is called for m in r.modules())]
        if not inside:
            inside = [called]  # built before we came, or without parameters: a loss module
        ordered = inside + ([r for r in roots if r is not inside[0]] if not self._main_known else [])
        return [self._add(root) for root in ordered]

    def _add(self, root: nn.Module) -> Found:
        prefix = None
        if not self._main_known and any(True for _ in root.parameters()):
            prefix, self._main_known = "", True
        known = framework_of(root)
        left_out = known.left_out(root) if known is not None else {}
        fresh = self.names.add_root(root, prefix, known.canonical_names(root) if known is not None else None)
        if any(True for _ in root.parameters()):
            self.roots.append(root)
        return Found(root, fresh, left_out)

    def rename_parameters(self) -> None:
        """Take notice of parameters that were replaced since."""
        self.names.rename_parameters(self.roots)

    def name_of(self, module: nn.Module) -> str:
        """The name of a module, or of the one that it wraps; "" of the main model, and of what is not known."""
        return self.names.modules.get(id(unwrapped(module)), "")

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Each parameter once, by name."""
        seen: set[int] = set()
        for root in self.roots:
            for parameter in root.parameters():
                name = self.names.parameters.get(id(parameter))
                if name is not None and id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each buffer once, by name."""
        seen: set[int] = set()
        for root in self.roots:
            for module in root.modules():
                path = self.names.modules.get(id(module))
                if path is None or is_wrapper(module):
                    continue
                for leaf, buffer in module._buffers.items():
                    if buffer is not None and id(buffer) not in seen:
                        seen.add(id(buffer))
                        yield f"{path}.{leaf}" if path else leaf, buffer

    def owner(self, name: str) -> Meta:
        """A parameter's name, and class and `file:line` of the module that has it."""
        path = name.rpartition(".")[0]
        for module in self._owners.get(path, ()):
            return meta_of(name, module)
        return name, "", ""

    @functools.cached_property
    def _owners(self) -> dict[str, list[nn.Module]]:
        table: dict[str, list[nn.Module]] = {}
        for root in self.roots:
            for module in root.modules():
                name = self.names.modules.get(id(module))
                if name is not None and module is unwrapped(module):
                    table.setdefault(name, []).append(module)
        return table
