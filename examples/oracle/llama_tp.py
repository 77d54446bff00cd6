"""A tiny transformers Llama with the tensor-parallel plan that the library ships; with one rank, its reference.

    python llama_tp.py                                       # the reference: one device
    python llama_tp.py --nprocs 2                            # starts its own two ranks
    torchrun --nproc-per-node 2 llama_tp.py --nprocs 2

The weights are random and made here (nothing is downloaded): a checkpoint is written to a temporary folder and loaded
with `tp_plan="auto"`, which needs the accelerate package. Grouped-query attention, RMSNorm, rotary positions, SwiGLU.
"""
import argparse
import os
import tempfile

import gpt
import injected
import torch
import torch.distributed as dist
import torch.nn as nn
from launch import launch, run_steps
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM


def write_checkpoint(args, folder):
    torch.manual_seed(args.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=args.vocab,
            hidden_size=args.width,
            intermediate_size=3 * args.width,
            num_hidden_layers=args.layers,
            num_attention_heads=args.heads,
            num_key_value_heads=args.heads // 2,
            max_position_embeddings=args.context,
            tie_word_embeddings=args.tied,
            initializer_range=0.1,
        )
    )
    for name, parameter in model.named_parameters():
        if "norm" in name:                   # at its usual value of one a norm that is lost has no effect
            nn.init.normal_(parameter, 1.0, 0.1)
    model.to(gpt.DTYPES[args.dtype]).save_pretrained(folder)


def load(rank, world, args):
    """Rank 0 writes the checkpoint into a folder that the others are told, every rank loads its shards of it."""
    with tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            write_checkpoint(args, folder)
        options = {"dtype": gpt.DTYPES[args.dtype]}
        if world > 1:
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))    # the library reads them
            told = [folder]
            dist.broadcast_object_list(told, src=0)
            options |= {"tp_plan": "auto"}
            model = LlamaForCausalLM.from_pretrained(told[0], **options)
            dist.barrier()                   # rank 0 removes the folder
        else:
            model = LlamaForCausalLM.from_pretrained(folder, **options)
    return model


class Job:
    """One rank's training run. `injected.py` replaces attributes of it, and of the model, to make a mistake."""

    def __init__(self, rank, world, args):
        self.args, self.rank, self.world = args, rank, world
        self.dp, self.tp, self.tp_rank = 1, world, rank
        self.loss_scale = 1 / args.microbatches
        self.loss = gpt.next_token_loss
        self.clip = clip
        self.model = load(rank, world, args)
        if args.recompute:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.model.train()
        injected.apply(args.bug, self)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.1)

    def step(self, batch):
        self.optimizer.zero_grad()
        losses = []
        for tokens in batch:
            logits = self.model(input_ids=tokens[:, :-1], use_cache=False).logits
            losses.append(self.loss(full(logits), tokens[:, 1:]))
            (losses[-1] * self.loss_scale).backward()
        norm = full(self.clip(self.model.parameters(), self.args.max_norm))
        self.optimizer.step()
        return torch.stack(losses).mean().item(), norm.item()


def clip(parameters, max_norm):
    """Clip by the norm of all gradients. The plan leaves some parameters plain, and `clip_grad_norm_` takes no mixture."""
    parameters = list(parameters)
    split, plain = [], []
    for parameter in parameters:
        (split if isinstance(parameter, DTensor) else plain).append(parameter.grad)
    norms = [full(nn.utils.get_total_norm(grads)) for grads in (split, plain) if grads]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for parameter in parameters:
        nn.utils.clip_grads_with_norm_([parameter], max_norm, total)
    return total


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(rank, world, args):
    job = Job(rank, world, args)

    def param_sum():
        return sum(full(p.detach()).double().abs().sum().item() for p in job.model.parameters())

    run_steps(rank, job.step, gpt.batches(args), param_sum)


def arguments(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpt.add_arguments(parser)
    parser.add_argument("--nprocs", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--bug", choices=injected.names("llama_tp"), help="a mistake of injected.py")
    args = parser.parse_args(argv)
    if args.heads // 2 % args.nprocs or args.heads % 2:
        parser.error(f"--heads {args.heads}: half of them are key/value heads, a multiple of --nprocs")
    return args


if __name__ == "__main__":
    args = arguments()
    launch(train, args, args.nprocs)
