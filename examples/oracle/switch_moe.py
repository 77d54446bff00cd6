"""A transformer with top-2 mixture-of-experts layers, the experts spread over the ranks; with one rank, its reference.

    python switch_moe.py                                     # the reference: all experts on one device
    python switch_moe.py --nprocs 2                          # starts its own two ranks
    torchrun --nproc-per-node 4 switch_moe.py --nprocs 4

Rank r of n reads the r-th part of the rows and owns the r-th part of the experts, under their global index. Tokens go
to their experts and back by all_to_all; no token is dropped. The other parameters are replicated and their gradients
averaged. The balancing loss (Switch Transformers, eq. 4) uses the load of the whole batch, as on one device.
"""
import argparse

import gpt
import injected
import torch
import torch.distributed as dist
import torch.nn as nn
from launch import launch, run_steps


class Exchange(torch.autograd.Function):
    """Rows of `x` to other ranks, `sent[r]` of them to rank r; the gradient goes the way back."""

    @staticmethod
    def forward(ctx, x, sent, received):
        ctx.splits = sent, received
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx, grad):
        sent, received = ctx.splits
        out = grad.new_empty(sum(sent), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), sent, received)
        return out, None, None


class MoE(nn.Module):
    """Each token is processed by two experts and their outputs added, weighted by the router."""

    def __init__(self, width, experts, rank, world):
        super().__init__()
        self.width, self.count, self.world = width, experts, world
        self.own = range(rank * experts // world, (rank + 1) * experts // world)
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleDict({str(i): gpt.MLP(width) for i in range(experts)})
        self.reduce_load = world > 1
        self.balance = None                  # loss of the last forward

    def keep_own(self):
        self.experts = nn.ModuleDict({str(i): self.experts[str(i)] for i in self.own})

    def scores(self, x):
        return self.router(x).float().softmax(-1)

    def choose(self, probabilities):
        return probabilities.topk(2, -1)

    def route(self, x):
        """tokens [T, width] → expert indices and weights, each [T, 2]."""
        probabilities = self.scores(x)
        weights, chosen = self.choose(probabilities)
        load = torch.bincount(chosen.flatten(), minlength=self.count).float() / chosen.numel()
        if self.reduce_load:
            dist.all_reduce(load)
            load /= self.world
        self.balance = self.count * (load * probabilities.mean(0)).sum()
        return chosen, self.normalise(weights).to(x.dtype)

    def normalise(self, weights):
        return weights / weights.sum(-1, keepdim=True)

    def group(self, incoming):
        """Order by own expert of tokens that arrive sorted by sender, then expert; `incoming`: counts of [sender, expert]."""
        expert = torch.arange(len(self.own)).repeat(self.world).repeat_interleave(incoming.flatten())
        return expert.argsort(stable=True)

    def run_experts(self, x, counts):
        """`x`: tokens in the order of the own experts, `counts` of each."""
        parts = x.split(counts)
        return torch.cat([expert(part) for expert, part in zip(self.experts.values(), parts)])

    def dispatch(self, x, counts):
        """Run every token of `x`, sorted by expert (`counts` of each), through its expert, wherever that is."""
        if self.world == 1:
            return self.run_experts(x, counts.tolist())
        counts = counts.view(self.world, len(self.own))
        incoming = torch.empty_like(counts)                       # [sender, own expert]
        dist.all_to_all_single(incoming, counts)
        sent, received = counts.sum(1).tolist(), incoming.sum(1).tolist()
        x = Exchange.apply(x, sent, received)
        order = self.group(incoming)
        y = self.run_experts(x[order], incoming.sum(0).tolist())
        return Exchange.apply(y[order.argsort()], received, sent)

    def forward(self, x):
        tokens = x.flatten(0, 1)
        chosen, weights = self.route(tokens)
        order = chosen.flatten().argsort(stable=True)
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        outputs = self.dispatch(tokens[order // chosen.shape[1]], counts)[order.argsort()]
        return (outputs.view(*chosen.shape, self.width) * weights[..., None]).sum(1).view_as(x)


class Job:
    """One rank's training run. `injected.py` replaces attributes of it, and of the model, to make a mistake."""

    def __init__(self, rank, world, args):
        self.args, self.rank, self.world = args, rank, world
        self.loss_scale = 1 / args.microbatches
        self.loss = gpt.next_token_loss
        self.expert_grad_scale = 1 / world   # an expert sees the tokens of all ranks, each with the mean of its own rows
        self.not_averaged = ()
        self.norm_of_all_experts = True
        self.model = self.build()
        self.moes = [block.mlp for block in self.model.layers.values()]
        injected.apply(args.bug, self)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.1)

    def build(self):
        """The whole model from the seed, as every rank and the reference make it; then only the own experts of it."""
        args = self.args
        torch.manual_seed(args.seed)
        model = gpt.GPT(args.vocab, args.width, args.heads, args.layers, args.context, args.tied, args.recompute, args.dropout)
        for block in model.layers.values():
            block.mlp = MoE(args.width, args.experts, self.rank, self.world)
        gpt.initialise(model, args.layers)
        for block in model.layers.values():
            block.mlp.keep_own()
        return model.to(gpt.DTYPES[args.dtype])

    def parameters(self, experts):
        return [(name, p) for name, p in self.model.named_parameters() if (".experts." in name) == experts]

    def reduce_gradients(self):
        for name, parameter in self.parameters(experts=False):
            if name not in self.not_averaged:
                dist.all_reduce(parameter.grad)
                parameter.grad /= self.world
        for _, parameter in self.parameters(experts=True):
            parameter.grad *= self.expert_grad_scale

    def clip(self):
        """Clip by the norm of all gradients: the replicated ones once, the experts of every rank."""
        total = nn.utils.get_total_norm([p.grad for _, p in self.parameters(experts=True)]).square()
        if self.world > 1 and self.norm_of_all_experts:
            dist.all_reduce(total)
        total = (total + nn.utils.get_total_norm([p.grad for _, p in self.parameters(experts=False)]).square()).sqrt()
        nn.utils.clip_grads_with_norm_(self.model.parameters(), self.args.max_norm, total)
        return total

    def step(self, batch):
        self.optimizer.zero_grad()
        mean = torch.zeros(())
        for microbatch in batch:
            tokens = microbatch.tensor_split(self.world)[self.rank]
            loss = self.loss(self.model(tokens[:, :-1]), tokens[:, 1:])
            loss = loss + self.args.balance * sum(moe.balance for moe in self.moes)
            (loss * self.loss_scale).backward()
            mean += loss.detach() / len(batch)
        if self.world > 1:
            self.reduce_gradients()
            dist.all_reduce(mean)
        norm = self.clip()
        self.optimizer.step()
        return mean.item() / self.world, norm.item()


def train(rank, world, args):
    job = Job(rank, world, args)

    def total(experts):
        values = (p.detach().double().abs().sum().item() for _, p in job.parameters(experts))
        return torch.tensor(sum(values), dtype=torch.float64)

    def param_sum():
        of_experts = total(experts=True)
        if world > 1:
            dist.all_reduce(of_experts)
        return (total(experts=False) + of_experts).item()

    run_steps(rank, job.step, gpt.batches(args), param_sum)


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpt.add_arguments(parser)
    parser.add_argument("--nprocs", type=int, default=1, help="expert-parallel (and data-parallel) ranks")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--balance", type=float, default=0.05, help="weight of the balancing loss")
    parser.add_argument("--bug", choices=injected.names("switch_moe"), help="a mistake of injected.py")
    args = parser.parse_args(argv)
    if args.experts % args.nprocs or args.rows % args.nprocs:
        parser.error("--experts and --rows must be multiples of --nprocs")
    return args


if __name__ == "__main__":
    args = arguments()
    launch(train, args, args.nprocs)
