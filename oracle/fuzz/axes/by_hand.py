"""Collectives by themselves: the rows of `collective` lie with the ranks and are brought together by one call, in every memory layout.

Each entry of `_CALLS` is the body of `collect(t, reduced)`: `t` are all rows, of which a rank uses `mine` alone, `part` is what `reduced` makes of them,
`lay` gives a tensor of the same values in the layout that is asked for. All layouts are tensors that torch's operators take without a difference.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, fixed, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point, Value

OURS: Final = frozenset({"collective"})
_OBJECTS: Final = ("parts = [None] * world", "dist.all_gather_object(parts, out)", "return reduced(torch.cat(parts))")  # what shows every rank's part, by pickles
_FUNCTIONAL: Final = "import torch.distributed._functional_collectives as funcol"

def _saved(save: str) -> tuple[str, ...]:
    """Every rank's part by way of a checkpoint on disk."""
    return (
        "import shutil, tempfile, torch.distributed.checkpoint as dcp", "place = [tempfile.mkdtemp() if rank == 0 else None]", "dist.broadcast_object_list(place)", "folder, = place", save,
        "dist.barrier()", "outs = {f't{r}': torch.zeros_like(mine, memory_format=torch.contiguous_format) for r in range(world)}", "dcp.load(outs, checkpoint_id=folder)", "dist.barrier()",
        "if rank == 0: shutil.rmtree(folder)", "return reduced(torch.cat([*outs.values()]))",
    )  # fmt: skip


# Name → lines, first the one that sends pickles; {more} is where a call takes `async_op`.
_CALLS: Final[dict[str, tuple[str, ...]]] = {
    "all_gather_object": ("out = mine", *_OBJECTS),
    "all_reduce": ("wait(dist.all_reduce(part, op{more}))", "return part"),
    "reduce, broadcast": ("wait(dist.reduce(part, 0, op{more}))", "wait(dist.broadcast(part, 0{more}))", "return part"),
    "reduce_scatter": ("out = lay(torch.zeros_like(part))", "wait(dist.reduce_scatter(out, [lay(part) for _ in range(world)], op{more}))", "return out"),
    "reduce_scatter_tensor": (
        "out = lay(torch.zeros_like(part)[None])", "wait(dist.reduce_scatter_tensor(out, lay(torch.stack([part] * world)), op{more}))", "return out[0]",
    ),
    "broadcast": ("whole = lay(t if rank == world - 1 else torch.zeros_like(t))", "wait(dist.broadcast(whole, world - 1{more}))", "return reduced(whole)"),
    "all_gather": ("outs = [lay(torch.zeros_like(mine)) for _ in range(world)]", "wait(dist.all_gather(outs, mine{more}))", "return reduced(torch.cat(outs))"),
    "all_gather_into_tensor": ("out = lay(torch.zeros_like(t))", "wait(dist.all_gather_into_tensor(out, mine{more}))", "return reduced(out)"),
    "gather, scatter": (
        "outs = [lay(torch.zeros_like(mine)) for _ in range(world)] if rank == 0 else None", "wait(dist.gather(mine, outs, 0{more}))", "out = lay(torch.zeros_like(mine))",
        "wait(dist.scatter(out, outs, 0{more}))", *_OBJECTS,
    ),
    "all_to_all": ("outs = [lay(torch.zeros_like(mine)) for _ in range(world)]", "wait(dist.all_to_all(outs, [lay(mine) for _ in range(world)]{more}))", "return reduced(torch.cat(outs))"),
    "all_to_all_single": ("out = lay(torch.zeros_like(t))", "wait(dist.all_to_all_single(out, lay(torch.cat([mine] * world)){more}))", "return reduced(out)"),
    "send, recv": (
        "out = lay(torch.zeros_like(mine))", "if world == 1: return reduced(mine)", "for r in range(world):",
        "    if rank == r: dist.send(mine, (rank + 1) % world)", "    if rank == (r + 1) % world: dist.recv(out, r)", *_OBJECTS,
    ),
    "batch_isend_irecv": (
        "outs = [lay(torch.zeros_like(mine)) for _ in range(world)]", "outs[rank], others = mine, [r for r in range(world) if r != rank]",
        "calls = [dist.P2POp(dist.isend, mine, r) for r in others] + [dist.P2POp(dist.irecv, outs[r], r) for r in others]",
        "for work in dist.batch_isend_irecv(calls) if calls else (): work.wait()", "return reduced(torch.cat(outs))",
    ),
    "broadcast_object_list": ("whole = [lay(t) if rank == 0 else None]", "dist.broadcast_object_list(whole, 0)", "return reduced(whole[0])"),
    "funcol.all_reduce": (_FUNCTIONAL, "return funcol.all_reduce(part, net.op.lower(), dist.group.WORLD).clone()"),
    "funcol.all_gather_tensor": (_FUNCTIONAL, "return reduced(funcol.all_gather_tensor(mine, 0, dist.group.WORLD).clone())"),
    "funcol.all_gather_tensor, last": (_FUNCTIONAL, "last = lay(mine.movedim(0, -1))", "return reduced((funcol.all_gather_tensor(last, last.ndim - 1, dist.group.WORLD).clone()).movedim(-1, 0))"),
    "funcol.reduce_scatter_tensor": (_FUNCTIONAL, "return (funcol.reduce_scatter_tensor(lay(torch.stack([part] * world)), net.op.lower(), 0, dist.group.WORLD).clone())[0]"),
    "funcol.reduce_scatter_tensor, last": (
        _FUNCTIONAL, "last = lay(torch.stack([part] * world, -1))", "return (funcol.reduce_scatter_tensor(last, net.op.lower(), last.ndim - 1, dist.group.WORLD).clone())[..., 0]",
    ),
    "funcol.all_to_all_single": (_FUNCTIONAL, "return reduced(funcol.all_to_all_single(lay(torch.cat([mine] * world)), None, None, dist.group.WORLD).clone())"),
    "funcol.permute_tensor": (
        _FUNCTIONAL, "there = [(r + 1) % world for r in range(world)]", "out = funcol.permute_tensor(mine, there, dist.group.WORLD).clone()", "parts = [None] * world",
        "dist.all_gather_object(parts, out)", "return reduced(torch.cat([parts[r] for r in there]))",
    ),
    "funcol.broadcast": (_FUNCTIONAL, "return reduced(funcol.broadcast(lay(t if rank == 0 else torch.zeros_like(t)), 0, dist.group.WORLD).clone())"),
    "nn.all_reduce": ("import torch.distributed.nn", "return dist.nn.all_reduce(part, op)"),
    "nn.all_gather": ("import torch.distributed.nn", "return reduced(torch.cat(dist.nn.all_gather(mine)))"),
    "nn.broadcast": ("import torch.distributed.nn", "return reduced(dist.nn.broadcast(lay(t if rank == 0 else torch.zeros_like(t)), 0))"),
    "nn.reduce_scatter": ("import torch.distributed.nn", "return dist.nn.reduce_scatter(lay(torch.zeros_like(part)), [lay(part) for _ in range(world)], op)"),
    "nn.all_to_all_single": ("import torch.distributed.nn", "return reduced(dist.nn.all_to_all_single(lay(torch.zeros_like(t)), lay(torch.cat([mine] * world))))"),
    "DTensor, Shard": (
        "from torch.distributed.device_mesh import init_device_mesh", "from torch.distributed.tensor import DTensor, Shard",
        "return reduced(DTensor.from_local(mine, init_device_mesh('cpu', (world,)), [Shard(0)]).full_tensor())",
    ),
    "DTensor, Partial": (
        "from torch.distributed.device_mesh import init_device_mesh", "from torch.distributed.tensor import DTensor, Partial",
        "return DTensor.from_local(part, init_device_mesh('cpu', (world,)), [Partial(net.op.lower())]).full_tensor()",
    ),
    "distribute_tensor": (
        "from torch.distributed.device_mesh import init_device_mesh", "from torch.distributed.tensor import Shard, distribute_tensor",
        "return reduced(distribute_tensor(lay(t if rank == 0 else torch.zeros_like(t)), init_device_mesh('cpu', (world,)), [Shard(0)]).full_tensor())",
    ),
    "dcp.save": _saved("dcp.save({f't{rank}': mine}, checkpoint_id=folder)"),
    "dcp.async_save": _saved("dcp.async_save({f't{rank}': mine}, checkpoint_id=folder).result()"),
}  # fmt: skip
_BLOCKING: Final = tuple(name for name, lines in _CALLS.items() if not any("{more}" in line for line in lines))
_LAYOUTS: Final = {
    "contiguous": "t.clone()",
    "transposed": "t.clone().movedim(0, -1).contiguous().movedim(-1, 0) if t.ndim else t.clone()",
    "strided": "torch.stack([t, torch.zeros_like(t)], -1)[..., 0]",
    "offset": "torch.stack([torch.zeros_like(t), t])[1]",
    "channels last": "t.contiguous(memory_format={4: torch.channels_last, 5: torch.channels_last_3d}.get(t.ndim, torch.contiguous_format))",
    "conjugate": "t.conj().resolve_conj().conj()",
    "negative": "torch.complex(torch.zeros_like(t), -t).conj().imag",
}
_PROGRAM: Final[dict[str, tuple[Value, ...]]] = {
    "optimizer": ("SGD",), "option": ("",), "groups": ("one",), "implementation": ("",), "scheduler": ("no",), "resume": ("no",), "recompute": ("no",), "clip": ("no",),
    "accumulate": (1,), "zero_grad": ("none",), "precision": ("float64",),
}  # fmt: skip


@register_wrapper
class ByHand(Wrapper):
    """One collective."""

    name: ClassVar[str] = "by_hand"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "it brings the rows of a reduction together", when={"wrapper": ("by_hand",)}, lacks=OURS),
        Rule("invalid", "rows of a reduction are brought together by hand", unless={"wrapper": ("none", "by_hand")}, traits=OURS),
        *fixed("the collective is what is looked at", OURS, _PROGRAM),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        body = (line.replace("{more}", ", async_op=True" if setting["hand_async"] else "") for line in _CALLS[str(setting["hand_call"])])
        draft.wrap += [
            f"lay = lambda t: {_LAYOUTS[str(setting['hand_layout'])]}",
            "wait = lambda work: work and work.wait()",
            "def collect(t, reduced):",
            "    mine, op = lay(t.tensor_split(world)[rank]), getattr(dist.ReduceOp, net.op)",
            "    part = lay(reduced(mine))",
            *(f"    {line}" for line in body),
            "net.collect = collect",
        ]


class _Option(OfWrapper):
    of = ("by_hand",)
    absent = "there is no collective"


@register
class Call(_Option):
    """The call."""

    choice = Choice("hand_call", tuple(_CALLS))


@register
class Layout(_Option):
    """The memory layout of what goes in and of what it is put into."""

    choice = Choice("hand_layout", tuple(_LAYOUTS))
    rules = (
        Rule("invalid", "only complex numbers have a conjugate", when={"hand_layout": ("conjugate",)}, lacks=frozenset({"complex values"})),
        *(
            Rule("invalid", "the imaginary part of a conjugate is a floating-point number", when={"hand_layout": ("negative",)}, traits=frozenset({trait}))
            for trait in ("complex values", "int values", "bool values", "of bfloat16", "of float16")
        ),
    )


@register
class Asynchronous(_Option):
    """`async_op`."""

    choice = Choice("hand_async", (False, True), rare=0.3)
    rules = (Rule("invalid", "the call has no such argument", when={"hand_async": (True,), "hand_call": _BLOCKING}),)
