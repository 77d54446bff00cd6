"""Data parallelism: wrappers, optimizers whose state is cut, losses over all ranks' rows."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from . import Step, checkout, group_of_one, normal, numbers, program, rows_of, stub, tokens, who

WIDTH, CLASSES, ROWS = 4, 3, 6


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    normal(model)
    return model


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(1))


def once(model: nn.Module, optimizer: torch.optim.Optimizer, average: bool = False) -> None:
    """A step on this rank's rows."""
    x, target = rows_of(batch())
    F.cross_entropy(model(x), target).backward()
    if average and dist.is_initialized():
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= who()[1]
    optimizer.step()


def wrapped(optimizer: Any) -> Step:
    """DistributedDataParallel with an optimizer."""

    def step() -> None:
        model = network()
        once(DistributedDataParallel(model) if dist.is_initialized() else model, optimizer(model.parameters()))

    return step


@program("fairscale, OSS", "facebookresearch/fairscale", "dp=2")
def _() -> tuple[Step, Step]:
    def parallel() -> None:
        checkout("facebookresearch/fairscale")
        from fairscale.optim.oss import OSS

        model = network()
        once(DistributedDataParallel(model), OSS(model.parameters(), optim=torch.optim.Adam, lr=0.1))

    return wrapped(lambda p: torch.optim.Adam(p, lr=0.1)), parallel


@program("fairscale, ShardedDDP", "facebookresearch/fairscale", "dp=2")
def _() -> tuple[Step, Step]:
    def parallel() -> None:
        checkout("facebookresearch/fairscale")
        from fairscale.nn.data_parallel import ShardedDataParallel
        from fairscale.optim.oss import OSS

        model = network()
        optimizer = OSS(model.parameters(), optim=torch.optim.SGD, lr=0.1, momentum=0.9)
        once(ShardedDataParallel(model, optimizer, reduce_buffer_size=0), optimizer)

    return wrapped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)), parallel


@program("torch, ZeroRedundancyOptimizer", "pytorch/pytorch", "dp=2")
def _() -> tuple[Step, Step]:
    def parallel() -> None:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        model = network()
        once(DistributedDataParallel(model), ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adagrad, lr=0.1))

    return wrapped(lambda p: torch.optim.Adagrad(p, lr=0.1)), parallel


def muon(single: bool) -> None:
    checkout("KellerJordan/Muon")
    module = importlib.import_module("muon")
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))  # its ranks gather matrices of one shape
    normal(model)
    hidden = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": hidden, "use_muon": True, "lr": 0.02, "weight_decay": 0.01}, {"params": rest, "use_muon": False, "lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.01}]
    half = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = lambda self: self.clone()  # type: ignore[method-assign]  # it is real numbers that are judged
    try:
        once(model, (module.SingleDeviceMuonWithAuxAdam if single else module.MuonWithAuxAdam)(groups), average=True)
    finally:
        torch.Tensor.bfloat16 = half  # type: ignore[method-assign]


program("Muon with Adam", "KellerJordan/Muon", "dp=2")(lambda: (lambda: muon(True), lambda: muon(False)))


@program("pipegoose, DataParallel", "xrsrke/pipegoose", "dp=2")
def _() -> tuple[Step, Step]:
    def parallel() -> None:
        checkout("xrsrke/pipegoose")
        stub("transformers.utils.fx", symbolic_trace=None)
        from pipegoose.distributed.parallel_context import ParallelContext
        from pipegoose.distributed.parallel_mode import ParallelMode
        from pipegoose.nn.data_parallel.data_parallel import DataParallel

        rank, world = who()
        context = types.SimpleNamespace(
            data_parallel_size=world, get_world_size=lambda mode: world if mode is ParallelMode.DATA else 1, get_local_rank=lambda mode: rank if mode is ParallelMode.DATA else 0,
            get_global_rank=lambda: rank, get_group=lambda mode: dist.group.WORLD, is_initialized=lambda mode: True, get_ranks_in_group=lambda mode: list(range(world)), ranks2device=lambda ranks: rank,
        )
        assert ParallelContext
        model = DataParallel(network(), context).parallelize()
        once(model, torch.optim.SGD(model.parameters(), lr=0.1))

    return wrapped(lambda p: torch.optim.SGD(p, lr=0.1)), parallel


def clip(loss: str, **how: Any) -> Step:
    """Two towers by DDP, and a loss of open_clip over all ranks' rows."""

    def step() -> None:
        sys.path.insert(0, str(checkout("mlfoundations/open_clip", "src")))
        spec = importlib.util.spec_from_file_location("open_clip_loss", checkout("mlfoundations/open_clip", "src") / "open_clip" / "loss.py")
        assert spec is not None and spec.loader is not None
        losses = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(losses)
        rank, world = who()

        class Towers(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.image, self.text = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
                self.scale = nn.Parameter(torch.tensor(1.3))

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
                return F.normalize(self.image(x), dim=-1), F.normalize(self.text(y), dim=-1), self.scale.exp()

        model: nn.Module = Towers()
        normal(model)
        if world > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = rows_of((numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=4)))
        image, text, scale = model(x, y)
        if loss == "ClipLoss":
            found = losses.ClipLoss(rank=rank, world_size=world, **how)(image, text, scale)
        else:
            found = losses.SigLipLoss(rank=rank, world_size=world, **how)(image, text, scale, torch.tensor(-2.0))
        found.backward()
        optimizer.step()

    return step


program("open_clip, local loss, gathered with gradients", "mlfoundations/open_clip", "dp=2")(lambda: clip("ClipLoss", local_loss=True, gather_with_grad=True))
program("open_clip, whole loss, gathered with gradients", "mlfoundations/open_clip", "dp=2")(lambda: clip("ClipLoss", local_loss=False, gather_with_grad=True))
program("open_clip, SigLIP, neighbours exchange", "mlfoundations/open_clip", "dp=2")(lambda: clip("SigLipLoss", dist_impl="bidir"))
program("open_clip, SigLIP, shifted", "mlfoundations/open_clip", "dp=3")(lambda: clip("SigLipLoss", dist_impl="shift"))
program("open_clip, SigLIP, reduced", "mlfoundations/open_clip", "dp=2")(lambda: clip("SigLipLoss", dist_impl="reduce"))
program("open_clip, SigLIP, gathered", "mlfoundations/open_clip", "dp=2")(lambda: clip("SigLipLoss", dist_impl="gather"))


def self_supervised(by: str, module: str, parts: str) -> Step:
    """VICReg's loss with its gathering layer, on a backbone of our own."""

    def step() -> None:
        folder = str(checkout(by))
        sys.path.remove(folder)
        sys.path.insert(0, folder)
        for name in ("resnet", "augmentations", "distributed", module):
            sys.modules.pop(name, None)
        sys.modules["resnet"] = types.ModuleType("resnet")
        sys.modules["augmentations"] = types.ModuleType("augmentations")
        sys.modules["resnet"].small = lambda **named: (nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh()), 5)  # type: ignore[attr-defined]
        stub("torchvision.datasets", ImageFolder=object)
        stub("torchvision", datasets=sys.modules["torchvision.datasets"])
        with group_of_one():
            source = importlib.import_module(module)
            args = types.SimpleNamespace(arch="small", mlp=parts, batch_size=ROWS, sim_coeff=25.0, std_coeff=25.0, cov_coeff=1.0)
            model: nn.Module = source.VICReg(args)
            normal(model)
            if who()[1] > 1:
                model = DistributedDataParallel(model)
            optimizer = source.LARS(model.parameters(), lr=0.1, weight_decay=1e-6, weight_decay_filter=source.exclude_bias_and_norm, lars_adaptation_filter=source.exclude_bias_and_norm)
            x, y = rows_of((numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=4)))
            model(x, y).backward()
            optimizer.step()

    return step


program("VICReg with LARS", "facebookresearch/vicreg", "dp=2")(lambda: self_supervised("facebookresearch/vicreg", "main_vicreg", "3"))


@program("examples, FSDP2", "pytorch/examples", "dp=2")
def _() -> Step:
    def step() -> None:
        folder = str(checkout("pytorch/examples", "distributed/FSDP2"))
        sys.path.remove(folder)
        sys.path.insert(0, folder)
        sys.modules.pop("model", None)
        made = importlib.import_module("model")
        model = made.Transformer(made.ModelArgs(n_layers=2, vocab_size=8, max_seq_len=4, dim=8, n_heads=2, dropout_p=0.0))
        normal(model)
        x, target = rows_of(tokens(4, 4, 8))
        if dist.is_initialized():
            from torch.distributed.fsdp import fully_shard

            for layer in model.layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        F.cross_entropy(model(x).flatten(0, 1), target.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()

    return step


@program("examples, ddp", "pytorch/examples", "dp=2")
def _() -> Step:
    def step() -> None:
        folder = str(checkout("pytorch/examples", "distributed/ddp"))
        sys.path.remove(folder)
        sys.path.insert(0, folder)
        sys.modules.pop("example", None)
        model = importlib.import_module("example").ToyModel()
        normal(model)
        model = DistributedDataParallel(model) if dist.is_initialized() else model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
        x, labels = rows_of((numbers(4, 10), numbers(4, 5, seed=2)))
        F.mse_loss(model(x), labels).backward()
        optimizer.step()

    return step


def averaged(kind: str) -> Step:
    """DistributedDataParallel with one of torch's optimizers."""
    makers: dict[str, Any] = {
        "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9), "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1), "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
        "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1), "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1), "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, fused=True), "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    }
    return wrapped(makers[kind])


for _kind in ("RMSprop", "NAdam", "Adafactor", "Adamax", "RAdam", "AdamW fused", "SGD fused", "Adagrad fused"):
    program(f"torch, DDP with {_kind}", "pytorch/pytorch", "dp=2")(lambda kind=_kind: averaged(kind))  # type: ignore[misc]
