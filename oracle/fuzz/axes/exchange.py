"""Gradients of collectives: the rows of `exchange` lie with the ranks, and one call with a backward pass of its own brings them together.

Each rank has the loss of its own rows of the batch, and the total is the sum of the ranks' losses: that is what `torch.distributed.nn` and the functional collectives differentiate. The
gradient of a row is on the rank that has it; for comparison the ranks' gradients are added up, by a plain `all_reduce`. Each entry of `_CALLS` is the body of `collect(t, reduced)`.
"""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.axes import OfWrapper, Rule, Wrapper, fixed, register, register_wrapper
from proctor.oracle.fuzz.axes.by_hand import _PROGRAM
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Choice, Point

OURS: Final = frozenset({"exchange"})
_MESH: Final = ("from torch.distributed.device_mesh import init_device_mesh", "mesh = init_device_mesh('cpu', (world,))")
_DTENSOR: Final = (*_MESH, "from torch.distributed.tensor import DTensor, Partial, Replicate, Shard")
_FUNCTIONAL: Final = "import torch.distributed._functional_collectives as funcol"
_NN: Final = "import torch.distributed.nn.functional as F_"
_SIZES: Final = "sizes = [1] * (world - 1) + [len(mine) - world + 1]"

_AGAIN: Final = "return reduced(funcol.all_gather_tensor({}, 0, dist.group.WORLD))"

# Call → its lines. DTensors know that all ranks have one loss, that of all rows, but for the call that says otherwise.
_CALLS: Final[dict[str, tuple[str, ...]]] = {
    "nn.all_gather": (_NN, "return reduced(torch.cat(F_.all_gather(mine)))"),
    "nn.all_reduce": (_NN, "return F_.all_reduce(part, op)"),
    "nn.reduce, nn.broadcast": (_NN, "return F_.broadcast(F_.reduce(part, 0, op), 0)"),
    "nn.reduce_scatter": (_NN, "return F_.reduce_scatter(torch.empty_like(part), [part * 1 for _ in range(world)], op)"),
    "nn.broadcast": (_NN, "return reduced(F_.broadcast(t * (rank == world - 1), world - 1))"),
    "nn.gather, nn.scatter": (_NN, _FUNCTIONAL, "mine = F_.scatter(F_.gather(mine, 0), 0)", _AGAIN.format("mine")),
    "nn.all_to_all": (_NN, "return reduced(torch.cat(F_.all_to_all([torch.empty_like(mine) for _ in range(world)], [mine * 1 for _ in range(world)])))"),
    "nn.all_to_all_single": (_NN, "return reduced(F_.all_to_all_single(torch.empty_like(t), torch.cat([mine] * world)))"),
    "nn.all_to_all_single, uneven": (
        _NN, _FUNCTIONAL, _SIZES, "got = F_.all_to_all_single(torch.empty(world * sizes[rank], *t.shape[1:], dtype=t.dtype), mine, [sizes[rank]] * world, sizes)",
        "back = F_.all_to_all_single(torch.empty_like(mine), got, sizes, [sizes[rank]] * world)", _AGAIN.format("back"),
    ),
    "funcol.all_to_all_single, uneven": (
        _FUNCTIONAL, _SIZES, "got = funcol.all_to_all_single(mine, [sizes[rank]] * world, sizes, dist.group.WORLD)",
        "back = funcol.all_to_all_single(got, sizes, [sizes[rank]] * world, dist.group.WORLD)", _AGAIN.format("back"),
    ),
    "funcol.all_reduce": (_FUNCTIONAL, "return funcol.all_reduce(part, net.op.lower(), dist.group.WORLD)"),
    "funcol.all_reduce_coalesced": (_FUNCTIONAL, "return funcol.all_reduce_coalesced([part, part * 2], net.op.lower(), dist.group.WORLD)[0]"),
    "funcol.all_gather_tensor": (_FUNCTIONAL, "return reduced(funcol.all_gather_tensor(mine, 0, dist.group.WORLD))"),
    "funcol.all_gather_tensor, last": (_FUNCTIONAL, "return reduced(funcol.all_gather_tensor(mine.movedim(0, -1), t.ndim - 1, dist.group.WORLD).movedim(-1, 0))"),
    "funcol.all_gather_tensor_autograd": (_FUNCTIONAL, "return reduced(funcol.all_gather_tensor_autograd(mine, 0, dist.group.WORLD))"),
    "funcol.all_gather_into_tensor_coalesced": (_FUNCTIONAL, "return reduced(funcol.all_gather_into_tensor_coalesced([mine * 2, mine], dist.group.WORLD)[1])"),
    "funcol.reduce_scatter_tensor": (_FUNCTIONAL, "return funcol.reduce_scatter_tensor(torch.cat([part] * world), net.op.lower(), 0, dist.group.WORLD)"),
    "funcol.reduce_scatter_tensor, last": (_FUNCTIONAL, "return funcol.reduce_scatter_tensor(torch.cat([part] * world, -1), net.op.lower(), part.ndim - 1, dist.group.WORLD)"),
    "funcol.reduce_scatter_tensor_autograd": (_FUNCTIONAL, "return funcol.reduce_scatter_tensor_autograd(torch.cat([part] * world), net.op.lower(), 0, dist.group.WORLD)"),
    "funcol.reduce_scatter_tensor_coalesced": (
        _FUNCTIONAL, "return funcol.reduce_scatter_tensor_coalesced([torch.cat([part * k] * world) for k in (2, 1)], net.op.lower(), [0, 0], dist.group.WORLD)[1]",
    ),
    "funcol.all_to_all_single": (_FUNCTIONAL, "return reduced(funcol.all_to_all_single(torch.cat([mine] * world), None, None, dist.group.WORLD))"),
    "funcol.all_to_all_single_autograd": (_FUNCTIONAL, "even = [len(mine)] * world", "return reduced(funcol.all_to_all_single_autograd(torch.cat([mine] * world), even, even, dist.group.WORLD))"),
    "funcol.broadcast": (_FUNCTIONAL, "return reduced(funcol.broadcast(t * (rank == world - 1), world - 1, dist.group.WORLD))"),
    "DTensor, Shard, own rows": (*_DTENSOR, "return reduced(DTensor.from_local(mine, mesh, [Shard(0)]).full_tensor(grad_placements=[Partial()]))"),
    "DTensor, Shard": (*_DTENSOR, "return reduced(DTensor.from_local(mine, mesh, [Shard(0)]).full_tensor())"),
    "DTensor, Partial": (*_DTENSOR, "return DTensor.from_local(part, mesh, [Partial(net.op.lower())]).full_tensor()"),
    "DTensor, Partial, Shard": (*_DTENSOR, "return DTensor.from_local(part, mesh, [Partial(net.op.lower())]).redistribute(placements=[Shard(1)]).full_tensor()"),
    "DTensor, redistribute": (
        *_DTENSOR, "whole = DTensor.from_local(mine, mesh, [Shard(0)]).redistribute(placements=[Shard(2)]).redistribute(placements=[Replicate()])", "return reduced(whole.to_local())",
    ),
    "DTensor, reduced": (*_DTENSOR, "return reduced(DTensor.from_local(mine, mesh, [Shard(0)])).full_tensor()"),
    "DTensor, local_map": (
        *_DTENSOR, "from torch.distributed.tensor.experimental import local_map", "one = DTensor.from_local(mine, mesh, [Shard(0)])",
        "return local_map(reduced, out_placements=[Partial(net.op.lower())], in_placements=([Shard(0)],), device_mesh=mesh)(one).full_tensor()",
    ),
}  # fmt: skip


@register_wrapper
class ByExchange(Wrapper):
    """One collective and its backward pass."""

    name: ClassVar[str] = "exchange"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "it brings the rows of a parameter together", when={"wrapper": ("exchange",)}, lacks=OURS),
        Rule("invalid", "rows of a parameter are brought together by a collective", unless={"wrapper": ("none", "exchange")}, traits=OURS),
        *fixed("the collective is what is looked at", OURS, _PROGRAM),
    )

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        body = _CALLS[str(setting["exchange_call"])]
        draft.wrap += [
            "def collect(t, reduced):",
            "    mine, op = t.tensor_split(world)[rank], getattr(dist.ReduceOp, net.op)",
            "    part = reduced(mine)",
            *(f"    {line}" for line in body),
            "net.collect = collect",
        ]
        whole = str(setting["exchange_call"]).startswith("DTensor") and "own rows" not in str(setting["exchange_call"])
        draft.rows = "torch.arange(n)" if whole else "torch.arange(n).tensor_split(world)[rank]"
        draft.after_part.append("dist.all_reduce(net.rows.grad)" if whole else "for p in net.parameters(): dist.all_reduce(p.grad)")


@register
class Call(OfWrapper):
    """The call."""

    of = ("exchange",)
    absent = "there is no collective"
    sorts = True
    choice = Choice("exchange_call", tuple(_CALLS))
