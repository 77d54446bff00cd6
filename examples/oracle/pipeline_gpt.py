"""The same GPT as a pipeline of stages on CPU ranks (torch.distributed.pipelining); with one rank, its reference.

    python pipeline_gpt.py                                             # the reference: one device, one stage
    python pipeline_gpt.py --nprocs 2 --schedule 1f1b
    torchrun --nproc-per-node 4 pipeline_gpt.py --nprocs 4 --schedule gpipe
    python pipeline_gpt.py --nprocs 2 --schedule interleaved           # two (virtual) stages on each rank; so do zerobubble and zbv

Every stage is a GPT that keeps its own layers under their global index and has no embedding or head unless it is the
first or the last. With `--tied` both of those hold the word embedding, and its two gradients are summed.
"""
import argparse

import gpt
import injected
import torch
import torch.distributed as dist
import torch.nn as nn
from launch import launch, run_steps
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

SCHEDULES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zerobubble": ScheduleInterleavedZeroBubble,  # backward in two parts: of inputs, and of weights
    "zbv": ScheduleZBVZeroBubble,                 # the same; the first rank holds the first stage and the last one
}
TWO_STAGES = ("interleaved", "zerobubble", "zbv")  # on each rank


def divide(layers, stages):
    """Contiguous runs of layer indices, as even as possible."""
    return [part.tolist() for part in torch.arange(layers).tensor_split(stages)]


def keep(model, layers, first, last):
    """Make the whole model a stage of itself."""
    model.layers = nn.ModuleDict({str(i): model.layers[str(i)] for i in layers})
    if not first:
        model.embedding = None
    if not last:
        model.norm = model.head = None
    return model


class Job:
    """One rank's training run. `injected.py` replaces attributes of it, and of the stages, to make a mistake."""

    def __init__(self, rank, world, args):
        self.args, self.rank, self.world = args, rank, world
        self.virtual = 2 if args.schedule in TWO_STAGES and world > 1 else 1
        self.stages = world * self.virtual
        self.indices = range(rank, self.stages, world)            # of the stages of this rank
        if args.schedule == "zbv" and world > 1:
            self.indices = (rank, self.stages - 1 - rank)
        self.division = divide(args.layers, self.stages)
        self.loss = gpt.next_token_loss
        self.loss_scale = 1 / args.microbatches
        self.scale_grads = True              # the schedule divides the gradients by the number of microbatches
        self.sum_tied = True
        self.norm_of_all_stages = True

    def make_models(self):
        return [
            keep(gpt.build(self.args), self.division[i], first=i == 0, last=i == self.stages - 1) for i in self.indices
        ]

    def build(self):
        args = self.args
        self.models = self.make_models()
        injected.apply(args.bug, self)
        if self.world > 1:
            self.tied_group = dist.new_group([0, self.world - 1])     # collective: every rank must call it
            stages = [
                PipelineStage(model, i, self.stages, torch.device("cpu"))
                for i, model in zip(self.indices, self.models)
            ]
            schedule = SCHEDULES[args.schedule]
            self.schedule = schedule(
                stages if self.virtual > 1 else stages[0],
                args.microbatches,
                loss_fn=self.loss,
                scale_grads=self.scale_grads,
            )
        parameters = [p for model in self.models for p in model.parameters()]
        self.optimizer = torch.optim.AdamW(parameters, lr=args.lr, weight_decay=0.1)

    def forward_backward(self, batch):
        """Returns the loss of the step, averaged over its microbatches, on every rank."""
        if self.world == 1:
            losses = []
            for tokens in batch:
                losses.append(self.loss(self.models[0](tokens[:, :-1]), tokens[:, 1:]))
                (losses[-1] * self.loss_scale).backward()
            return torch.stack(losses).detach().mean()
        tokens = batch.flatten(0, 1)         # the schedule cuts it into the same microbatches again
        inputs = (tokens[:, :-1],) if self.rank == 0 else ()
        losses = []
        if self.stages - 1 in self.indices:
            self.schedule.step(*inputs, target=tokens[:, 1:], losses=losses)
        else:
            self.schedule.step(*inputs)
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        return mean

    def sum_tied_gradients(self):
        """The word embedding of the first stage and the head of the last are one parameter."""
        for rank, weight in ((0, lambda: self.models[0].embedding.word.weight),
                             (self.world - 1, lambda: self.models[-1].head.weight)):
            if self.rank == rank:
                dist.all_reduce(weight().grad, group=self.tied_group)

    def clip(self):
        """Clip by the norm of the gradients of all stages; a tied weight counts once."""
        parameters = [p for model in self.models for p in model.parameters()]
        if self.world == 1 or not self.norm_of_all_stages:
            return nn.utils.clip_grad_norm_(parameters, self.args.max_norm)
        twin = self.models[-1].head.weight if self.args.tied and self.rank == self.world - 1 else None
        own = nn.utils.get_total_norm([p.grad for p in parameters if p is not twin])
        total = own.square()
        dist.all_reduce(total)
        total = total.sqrt()
        nn.utils.clip_grads_with_norm_(parameters, self.args.max_norm, total)
        return total

    def step(self, batch):
        self.optimizer.zero_grad()
        loss = self.forward_backward(batch)
        if self.world > 1 and self.args.tied and self.sum_tied:
            self.sum_tied_gradients()
        norm = self.clip()
        self.optimizer.step()
        return loss.item(), norm.item()


def train(rank, world, args):
    job = Job(rank, world, args)
    job.build()

    def param_sum():
        names = {name: p for model in job.models for name, p in model.named_parameters()}
        if args.tied and world > 1 and rank == world - 1:
            names.pop("head.weight")         # the first stage counts it
        total = torch.tensor(sum(p.detach().double().abs().sum().item() for p in names.values()), dtype=torch.float64)
        if world > 1:
            dist.all_reduce(total)
        return total.item()

    run_steps(rank, job.step, gpt.batches(args), param_sum)


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpt.add_arguments(parser)
    parser.set_defaults(layers=4, microbatches=4, rows=4)
    parser.add_argument("--nprocs", type=int, default=1, help="ranks of the pipeline")
    parser.add_argument("--schedule", choices=SCHEDULES, default="1f1b")
    parser.add_argument("--bug", choices=injected.names("pipeline_gpt"), help="a mistake of injected.py")
    args = parser.parse_args(argv)
    stages = args.nprocs * (2 if args.schedule in TWO_STAGES and args.nprocs > 1 else 1)
    if args.layers < stages:
        parser.error(f"--layers {args.layers}: {stages} stages need a layer each")
    if args.schedule in ("interleaved", "zerobubble") and args.microbatches % args.nprocs:
        parser.error("the interleaved schedule needs a multiple of --nprocs microbatches")
    if args.schedule == "zbv" and args.tied:
        parser.error("--tied: both ends are on the first rank under zbv, and nothing sums their gradients here")
    return args


if __name__ == "__main__":
    args = arguments()
    launch(train, args, args.nprocs)
