"""A GPT on a (dp, tp) mesh of CPU ranks by torch's own means; with the default mesh of one rank, its reference.

    python parallel_gpt.py                                   # the reference: one device, no process group
    python parallel_gpt.py --mesh dp=2,tp=2 --fsdp --sp      # starts its own four ranks
    torchrun --nproc-per-node 4 parallel_gpt.py --mesh dp=4 --zero

tp: DTensor `parallelize_module`, column- then row-wise; `--sp` shards norms and residuals along the sequence.
dp: DistributedDataParallel; `--fsdp` fully_shard per block and root; `--zero` ZeroRedundancyOptimizer under DDP. With
tp > 1 and neither, `replicate` keeps the replicas equal (DDP does not take parameters that are DTensors).

Microbatch m of a step has the same rows on every mesh: rank d of dp reads its d-th part of them. So the loss printed
for a step, the gradients and the parameters are those of the reference but for rounding.
"""
import argparse
import zlib

import gpt
import injected
import torch
import torch.distributed as dist
import torch.nn as nn
from launch import launch, run_steps
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


class Replicated(ParallelStyle):
    """Parameters and computation are the same on every tp rank; the output may be cut afterwards.

    It makes every parameter a DTensor, which `clip_grad_norm_` and `fully_shard` want: all or none of them.
    """

    def __init__(self, output_layouts=None):
        self.output_layouts = (output_layouts or Replicate(),)

    def _apply(self, module, device_mesh):
        def enter(module, inputs, mesh):
            return tuple(DTensor.from_local(x, mesh, [Replicate()], run_check=False) for x in inputs)

        def leave(module, output, mesh):
            return output.redistribute(placements=self.output_layouts).to_local()

        return distribute_module(module, device_mesh, None, enter, leave)


def tensor_parallel_plan(sp):
    """Module pattern → style. Between modules the tensors are plain; with `sp` they hold a part of the sequence."""
    residual = Shard(1) if sp else Replicate()
    norm = SequenceParallel(use_local_output=True) if sp else Replicated()
    return {
        "embedding.word": RowwiseParallel(input_layouts=Replicate(), output_layouts=residual),
        "embedding.position": Replicated(residual),
        "layers.*.norm1": norm,
        "layers.*.attention.qkv": ColwiseParallel(input_layouts=residual),
        "layers.*.attention.proj": RowwiseParallel(output_layouts=residual),
        "layers.*.norm2": norm,
        "layers.*.mlp.fc1": ColwiseParallel(input_layouts=residual),
        "layers.*.mlp.fc2": RowwiseParallel(output_layouts=residual),
        "norm": norm,
        "head": ColwiseParallel(input_layouts=residual, output_layouts=Replicate()),
    }


def drawing_alone(forward, tp_rank):
    """A forward whose random numbers are this rank's: its heads are others than those of its neighbours. The generator is left as it was."""
    def drawn(*inputs):
        state = torch.get_rng_state()
        torch.manual_seed(zlib.crc32(state.numpy().tobytes()) + tp_rank)   # the same again where it is recomputed
        try:
            return forward(*inputs)
        finally:
            torch.set_rng_state(state)
    return drawn


class Job:
    """One rank's training run. `injected.py` replaces attributes of it, and of the model, to make a mistake."""

    def __init__(self, rank, world, args):
        self.args = args
        self.dp, self.tp = args.mesh["dp"], args.mesh["tp"]
        self.mesh = init_device_mesh("cpu", (self.dp, self.tp), mesh_dim_names=("dp", "tp")) if world > 1 else None
        self.dp_rank, self.tp_rank = divmod(rank, self.tp)
        self.loss_scale = 1 / args.microbatches
        self.loss = gpt.next_token_loss
        self.clip = nn.utils.clip_grad_norm_
        self.retie = True
        self.before_steps = []               # called with the job when the model is wrapped and the optimizer made
        self.model = gpt.build(args)
        injected.apply(args.bug, self)

    def make_parallel(self):
        args = self.args
        if self.tp > 1 and args.dropout:
            if args.sp:
                torch.manual_seed(args.seed + self.tp_rank)      # residuals are cut, too
            for block in self.model.layers.values():
                block.attention.forward = drawing_alone(block.attention.forward, self.tp_rank)
        if self.tp > 1:
            parallelize_module(self.model, self.mesh["tp"], tensor_parallel_plan(args.sp))
            if args.tied and self.retie:      # both have become a parameter of their own, cut alike
                self.model.head.weight = self.model.embedding.word.weight
        if self.dp > 1 and args.fsdp:
            for block in self.model.layers.values():
                fully_shard(block, mesh=self.mesh["dp"])
            fully_shard(self.model, mesh=self.mesh["dp"])
        elif self.dp > 1 and self.tp > 1:
            for block in self.model.layers.values():
                replicate(block, mesh=self.mesh["dp"])
            replicate(self.model, mesh=self.mesh["dp"])
        elif self.dp > 1:
            self.model = DistributedDataParallel(self.model, process_group=self.mesh.get_group("dp"))

        options = {"lr": args.lr, "weight_decay": 0.1}
        if args.zero:
            self.optimizer = ZeroRedundancyOptimizer(
                self.model.parameters(), torch.optim.AdamW, process_group=self.mesh.get_group("dp"), **options
            )
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), **options)
        for call in self.before_steps:
            call(self)

    def rows(self, microbatch):
        """This rank's rows of a microbatch of all ranks."""
        return microbatch.tensor_split(self.dp)[self.dp_rank]

    def reduce_gradients(self, last):
        """Gradients are averaged over dp in the backward pass of the last microbatch only."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last
        elif isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(last)

    def step(self, batch):
        """One optimizer step. Returns its loss, averaged over microbatches and dp ranks, and the gradient norm."""
        self.optimizer.zero_grad()
        mean = torch.zeros(())
        for number, microbatch in enumerate(batch):
            tokens = self.rows(microbatch)
            self.reduce_gradients(last=number == len(batch) - 1)
            loss = self.loss(self.model(tokens[:, :-1]), tokens[:, 1:])
            (loss * self.loss_scale).backward()
            mean += loss.detach() / len(batch)
        norm = self.clip(self.model.parameters(), self.args.max_norm)
        self.optimizer.step()
        if self.dp > 1:
            dist.all_reduce(mean, group=self.mesh.get_group("dp"))
        return mean.item() / self.dp, full(norm).item()


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank, world, args):
    job = Job(rank, world, args)
    job.make_parallel()

    def param_sum():
        return sum(full(p.detach()).double().abs().sum().item() for p in job.model.parameters())

    run_steps(rank, job.step, gpt.batches(args), param_sum)


def mesh_sizes(text):
    """`dp=2,tp=2` → {"dp": 2, "tp": 2}; an axis that is not named has size 1."""
    sizes = {"dp": 1, "tp": 1}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if axis not in sizes or not size.isdigit() or int(size) < 1:
            raise argparse.ArgumentTypeError(f"{part!r} is not dp=N or tp=N")
        sizes[axis] = int(size)
    return sizes


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpt.add_arguments(parser)
    parser.add_argument("--mesh", type=mesh_sizes, default="dp=1,tp=1", help="such as dp=2,tp=2")
    parser.add_argument("--sp", action="store_true", help="sequence parallel norms and residuals (needs tp > 1)")
    parser.add_argument("--fsdp", action="store_true", help="fully_shard over dp")
    parser.add_argument("--zero", action="store_true", help="ZeroRedundancyOptimizer over dp (needs tp = 1)")
    parser.add_argument("--bug", choices=injected.names("parallel_gpt"), help="a mistake of injected.py")
    args = parser.parse_args(argv)
    dp, tp = args.mesh["dp"], args.mesh["tp"]
    if args.sp and tp == 1:
        parser.error("--sp needs tp > 1")
    if (args.fsdp or args.zero) and dp == 1:
        parser.error("--fsdp and --zero need dp > 1")
    if args.zero and (tp > 1 or args.fsdp):
        parser.error("--zero works with DDP alone: tp = 1, no --fsdp")
    for size, what, parts, axis in (
        (args.heads, "heads", tp, "tp"),
        (args.vocab, "vocab", tp, "tp"),
        (args.context, "context", tp if args.sp else 1, "tp"),
        (args.rows, "rows", dp, "dp"),
    ):
        if size % parts:
            parser.error(f"--{what} {size} is not a multiple of {axis}={parts}")
    return args


if __name__ == "__main__":
    args = arguments()
    launch(train, args, args.mesh["dp"] * args.mesh["tp"])
