"""Train a small GPT with real Megatron-core on CPU: any mix of its parallelisms, or one process as the reference.

    python examples/megatron/train.py                                                   # the reference
    torchrun --nproc-per-node 2 examples/megatron/train.py --tp 2 --sequence-parallel   # the same computation

Processes that tensor, pipeline and context parallelism leave over are data parallel. Every configuration starts from the
same parameters and reads the same micro batches, so it must compute the same, up to rounding. The last line is
`RESULT {"losses", "grad_norms", "param_sum"}`, the sum of absolute values of all parameters.

Class: language
"""
import argparse
import datetime
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent))
import cpu

cpu.install()

from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from model import make_chunks, make_config, sequence_chunks


def make_parser():
    parser = argparse.ArgumentParser()
    group = parser.add_argument_group("how it is run")
    group.add_argument("--tp", type=int, default=1, help="tensor parallel ranks")
    group.add_argument("--sequence-parallel", action="store_true")
    group.add_argument("--pp", type=int, default=1, help="pipeline stages")
    group.add_argument("--vpp", type=int, default=1, help="virtual stages on each pipeline rank")
    group.add_argument("--cp", type=int, default=1, help="context parallel ranks")
    group.add_argument("--ep", type=int, default=1, help="expert parallel ranks, out of the data parallel ones")
    group.add_argument("--etp", type=int, default=0, help="ranks that cut an expert's weights, if not as many as --tp")
    group.add_argument("--distributed-optimizer", action="store_true")
    group.add_argument("--overlap", action="store_true", help="overlap the reduction of gradients, and the gathering of parameters")
    group.add_argument("--recompute", action="store_true", help="recompute every layer in the backward pass")
    group = parser.add_argument_group("what is computed")
    group.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    group.add_argument("--layers", type=int, default=4)
    group.add_argument("--hidden", type=int, default=64)
    group.add_argument("--heads", type=int, default=4)
    group.add_argument("--groups", type=int, default=0, help="key and value heads, if fewer than heads")
    group.add_argument("--norm", choices=["LayerNorm", "RMSNorm"], default="LayerNorm")
    group.add_argument("--swiglu", action="store_true")
    group.add_argument("--tied", action="store_true", help="one weight for the embedding and the output layer")
    group.add_argument("--experts", type=int, default=0)
    group.add_argument("--balance", type=float, default=0.0, help="weight of the loss that balances the experts")
    group.add_argument("--vocab", type=int, default=128)
    group.add_argument("--length", type=int, default=32, help="tokens of a sequence")
    group.add_argument("--batch-size", type=int, default=2, help="sequences of a micro batch")
    group.add_argument("--micro-batches", type=int, default=4, help="micro batches of a step, over all data parallel ranks")
    group.add_argument("--iters", type=int, default=1)
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--clip", type=float, default=1.0, help="norm to which gradients are clipped, 0 for none")
    group.add_argument("--seed", type=int, default=0)
    return parser


def micro_batches(args, step):
    """The micro batches of this data parallel rank; the reference reads those of all of them in the same order."""
    size, rank = mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank()
    part = sequence_chunks(args.length, args.cp, mpu.get_context_parallel_rank())
    for index in range(rank, args.micro_batches, size):
        generator = torch.Generator().manual_seed(1_000_003 * args.seed + 1_009 * step + index)
        text = torch.randint(args.vocab, (args.batch_size, args.length + 1), generator=generator)
        positions = torch.arange(args.length).expand(args.batch_size, -1)
        tokens, labels = text[:, :-1], text[:, 1:]
        yield {"tokens": tokens[:, part], "labels": labels[:, part], "positions": positions[:, part]}


def forward_step(batches, model):
    batch = next(batches)

    def loss_of(losses):
        total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
        return total, count, {"loss": total.detach() / count}

    return model(batch["tokens"], batch["positions"], None, labels=batch["labels"]), loss_of


def build(args):
    config = make_config(args)
    reduce = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=args.overlap,
        overlap_param_gather=args.overlap and args.distributed_optimizer,
        use_distributed_optimizer=args.distributed_optimizer,
    )
    chunks = [
        DistributedDataParallel(config, reduce, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(make_chunks(args, config))
    ]
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=args.lr,
            weight_decay=0.01,
            clip_grad=args.clip,
            bf16=args.dtype == "bf16",
            params_dtype=config.params_dtype,
            use_distributed_optimizer=args.distributed_optimizer,
            overlap_param_gather=reduce.overlap_param_gather,
        ),
        chunks,
    )
    if args.overlap:
        config.no_sync_func = [chunk.no_sync for chunk in chunks] if len(chunks) > 1 else chunks[0].no_sync
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return chunks, optimizer


def mean_loss(reports):
    """Mean over the micro batches of all data parallel ranks, on every rank; only the last stage has any."""
    report = torch.tensor([sum(float(r["loss"]) for r in reports), float(len(reports))], dtype=torch.float64)
    dist.all_reduce(report)
    return float(report[0] / report[1])


def sum_of_parameters(chunks):
    """Sum of the absolute values of all parameters, each part counted once."""
    total = torch.zeros((), dtype=torch.float64)
    for chunk in chunks:
        for parameter in chunk.parameters():
            if getattr(parameter, "allreduce", True):
                replica, part = mpu.get_data_parallel_rank(with_context_parallel=True), mpu.get_tensor_model_parallel_rank()
            else:  # an expert, if there are several expert parallel ranks
                replica, part = mpu.get_expert_data_parallel_rank(), mpu.get_expert_tensor_parallel_rank()
            cut = getattr(parameter, "tensor_model_parallel", False)
            again = getattr(parameter, "shared", False)  # the last stage's copy of a tied embedding
            if replica == 0 and not again and (cut or part == 0):
                total += parameter.detach().double().abs().sum()
    dist.all_reduce(total)
    return float(total)


def train(args, before_step=None):
    """Train `args.iters` steps; `before_step(step, chunks, optimizer)` sees the reduced gradients.

    Returns:
        what the RESULT line holds; the same on every rank.
    """
    mpu.initialize_model_parallel(
        args.tp,
        args.pp,
        args.vpp if args.vpp > 1 else None,
        context_parallel_size=args.cp,
        expert_model_parallel_size=args.ep,
        expert_tensor_parallel_size=args.etp or args.tp,
    )
    model_parallel_cuda_manual_seed(args.seed + 1)
    chunks, optimizer = build(args)
    forward_backward = get_forward_backward_func()
    losses, grad_norms = [], []
    for step in range(args.iters):
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        readers = [micro_batches(args, step) for _ in chunks]
        reports = forward_backward(
            forward_step_func=forward_step,
            data_iterator=readers if len(chunks) > 1 else readers[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=args.micro_batches // mpu.get_data_parallel_world_size(),
            seq_length=args.length,
            micro_batch_size=args.batch_size,
            forward_only=False,
        )
        if before_step is not None:
            before_step(step, chunks, optimizer)
        _, grad_norm, _ = optimizer.step()
        losses.append(mean_loss(reports))
        grad_norms.append(float(grad_norm))
        if dist.get_rank() == 0:
            print(f"step {step} loss {losses[-1]:.6f} grad_norm {grad_norms[-1]:.6f}", flush=True)
    if args.overlap and args.distributed_optimizer:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)
    result = {"losses": losses, "grad_norms": grad_norms, "param_sum": sum_of_parameters(chunks)}
    mpu.destroy_model_parallel()
    return result


def main():
    args = make_parser().parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "0")):
        os.environ.setdefault(name, value)
    world = int(os.environ["WORLD_SIZE"])
    inner = args.tp * args.pp * args.cp
    if world % inner or args.micro_batches % (world // inner):
        sys.exit(f"{world} processes cannot be tp {args.tp} x pp {args.pp} x cp {args.cp} x a divisor of {args.micro_batches} micro batches")
    torch.use_deterministic_algorithms(True)
    dist.init_process_group("gloo", timeout=datetime.timedelta(minutes=5))
    result = train(args)
    if dist.get_rank() == 0:
        print("RESULT", json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
