"""How a distributed program is laid out: ranks, process groups, meshes, and what wraps its models. Hooks of one observer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from proctor.instrument.observe import mesh
from proctor.instrument.observe.state import Look
from proctor.instrument.patch.patches import Hooks

if TYPE_CHECKING:
    from proctor.instrument.observer import Observer


class Structure:
    """The layout of the program around one process.

    Args:
        observer: is told names, and arms when ranks meet.
    """

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._coords: dict[str, int] = {}
        self._axes = mesh.Axes()
        self._position: tuple[int, int] | None = None  # rank and world, once torch.distributed has said them
        self._groups: list[Any] = []  # process groups that have a name; kept, so that their ids stay theirs

    def hooks(self) -> Hooks:
        """Functions that build it; of late modules `mesh_created` and `sharded`."""
        return {
            "torch.nn.parallel.DistributedDataParallel.__init__": (None, self._ddp_created),
            "torch.nn.parallel.DistributedDataParallel._pre_forward": (None, self._ddp_synchronised),
            "torch.distributed.init_process_group": (None, self._distributed_ready),
            "torch.distributed.new_group": (None, self._group_created),
        }

    def find_coords(self) -> int:
        """Read this process's place from its environment; returns its rank."""
        where = mesh.position()
        self._coords.update(where["coords"])
        return int(where["rank"])

    def facts(self) -> dict[str, Any]:
        """Where this process stands."""
        where = mesh.position()
        rank, world = (where["rank"], where["world"]) if self._position is None else self._position
        coords = self._coords or where["coords"] or self._axes.coords(rank, world)
        return {"rank": rank, "world": world, "restart": mesh.restarts(), "coords": coords}

    def _distributed_ready(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if raised or self._observer.inert:
            return
        where = mesh.position()
        self._position = where["rank"], where["world"]
        self._observer.arm("torch.distributed was initialised")
        import torch.distributed as dist

        default = dist.distributed_c10d._get_default_group()
        self._observer.name(default, mesh.group_label(default))

    def _group_created(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if not raised:
            self._axes.add(args[0] if args else (kwargs or {}).get("ranks"))
        if not raised and hasattr(result, "size"):
            self._observer.name(result, mesh.group_label(result))
            self._groups.append(result)

    def mesh_created(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        """After `DeviceMesh.__init__`."""
        if not raised:
            self._coords.update(mesh.mesh_coords(args[0]))

    def _ddp_created(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        if raised or not self._observer.armed:
            return
        self._observer.guard.run("state", self._observer.tracker.set_wrapper, args[0], "ddp")
        self._observer.guard.run("state", self._observer.tracker.add_model, args[0])
        self._observer.look(1, data=Look.FORCE, buffers=Look.FORCE)

    def _ddp_synchronised(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        """Buffers were broadcast, if they are at all, and the forward has not begun to change them."""
        self._observer.look(1, buffers=Look.FORCE)

    def sharded(self, args: tuple[Any, ...], kwargs: Any, result: Any, raised: bool) -> None:
        """After `fully_shard` and `parallelize_module`."""
        module = args[0] if args else (kwargs or {}).get("module")
        if not raised and hasattr(module, "parameters"):
            self._observer.guard.run("state", self._observer.tracker.set_wrapper, module, "fsdp2" if type(module).__name__.startswith("FSDP") else "tp")
