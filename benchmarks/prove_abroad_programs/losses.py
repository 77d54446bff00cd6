"""Losses over the rows of all ranks, of self-supervised learning: what is gathered, averaged or balanced over ranks, and what its gradient is."""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from . import Step, checkout, group_of_one, normal, numbers, program, rows_of, stub, who

WIDTH, ROWS = 4, 4
Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


def stepped(loss: Loss, *, summed: bool = False, alone: bool = False) -> Step:
    """Two views of this rank's rows through one network, by DistributedDataParallel where there are ranks; `summed`: gradients are added up by hand; `alone`: the loss wants a group of one rank."""

    def step() -> None:
        with group_of_one() if alone else contextlib.nullcontext():
            model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, 3))
            normal(model)
            update = torch.optim.SGD(model.parameters(), lr=0.1)
            several = who()[1] > 1
            found = DistributedDataParallel(model) if several and not summed else model
            one, other = rows_of([numbers(ROWS, WIDTH), numbers(ROWS, WIDTH, seed=11)])
            loss(found, one, other).backward()
            for parameter in model.parameters() if several and summed else ():
                dist.all_reduce(parameter.grad)
            update.step()

    return step


def modules_of(by: str, inside: str = "") -> None:
    """A checkout is put on the path, and modules of another one with the same names are forgotten."""
    for name in [n for n in sys.modules if n.split(".")[0] in ("src", "models", "utils")]:
        del sys.modules[name]
    found = str(checkout(by, inside))
    sys.path.remove(found)
    sys.path.insert(0, found)


def _ntxent(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    folder = checkout("Spijkervet/SimCLR", "simclr/modules")
    package = types.ModuleType("simclr_modules")  # its own __init__ wants torchvision
    package.__path__ = [str(folder)]
    sys.modules.setdefault("simclr_modules", package)
    made = importlib.import_module("simclr_modules.nt_xent").NT_Xent(len(one), 0.5, who()[1])
    found: torch.Tensor = made(model(one), model(other))
    return found


@program("SimCLR, NT-Xent with DDP", "Spijkervet/SimCLR", "dp=2")
def _() -> Step:
    return stepped(_ntxent)


@program("SimCLR, NT-Xent, gradients added up", "Spijkervet/SimCLR", "dp=2")
def _() -> Step:
    return stepped(_ntxent, summed=True)


def _msn(sinkhorn: bool) -> Loss:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        modules_of("facebookresearch/msn")
        made = importlib.import_module("src.losses").init_msn_loss(tau=0.5)
        prototypes, labels = numbers(3, 3, seed=4), torch.eye(3)
        ce, regular, _, _ = made(model(one), model(other), prototypes, labels, T=0.5, use_sinkhorn=sinkhorn)
        found: torch.Tensor = ce + regular
        return found

    return loss


@program("MSN, mean over all ranks", "facebookresearch/msn", "dp=2")
def _() -> Step:
    return stepped(_msn(False))


@program("MSN, balanced over all ranks", "facebookresearch/msn", "dp=2")
def _() -> Step:
    return stepped(_msn(True))


@program("PAWS, supports of all ranks", "facebookresearch/suncet", "dp=2")
def _() -> Step:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        modules_of("facebookresearch/suncet")
        made = importlib.import_module("src.losses").init_paws_loss(multicrop=0, tau=0.5, T=0.5)
        labels = F.one_hot(torch.arange(ROWS) % 3, 3).float()
        supports, queries = model(one), model(other)
        ce, regular = made(queries, supports, labels, queries.detach(), supports.detach(), labels)
        found: torch.Tensor = ce + regular
        return found

    return stepped(loss)


@program("DINO, centre of all ranks", "facebookresearch/dino", "dp=2")
def _() -> Step:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        modules_of("facebookresearch/dino")
        stub("torchvision", datasets=None, transforms=types.SimpleNamespace(), models=types.SimpleNamespace(__dict__={}))
        made = importlib.import_module("main_dino").DINOLoss(3, 2, 0.5, 0.5, 1, 2, student_temp=0.5)
        views = torch.cat([one, other])
        found = made(model(views), model(views).detach(), 0)
        return torch.as_tensor(found + made(model(views), model(views.flip(1)).detach(), 1))

    return stepped(loss, alone=True)


@contextlib.contextmanager
def on_the_cpu() -> Iterator[None]:
    """What is moved to a GPU stays where it is."""
    original = torch.Tensor.cuda
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.Tensor.cuda = original  # type: ignore[method-assign]


@program("MoCo v3, targets of all ranks", "facebookresearch/moco-v3", "dp=2")
def _() -> Step:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        modules_of("facebookresearch/moco-v3")
        made: Any = importlib.import_module("moco.builder").MoCo.contrastive_loss
        with on_the_cpu():
            found: torch.Tensor = made(types.SimpleNamespace(T=0.5), model(one), model(other).detach())
            return found

    return stepped(loss, alone=True)


@program("BLIP, gathered with gradients", "salesforce/BLIP", "dp=2")
def _() -> Step:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        modules_of("salesforce/BLIP")
        stub("transformers", BertTokenizer=None)
        stub("models.med", BertConfig=None, BertModel=None)
        stub("models.blip", create_vit=None, init_tokenizer=None, load_checkpoint=None)
        sys.modules["models"].__path__ = [str(checkout("salesforce/BLIP", "models"))]
        gather = importlib.import_module("models.blip_retrieval").all_gather_with_grad
        images, texts = (F.normalize(gather(model(x)), dim=-1) for x in (one, other))
        logits = images @ texts.t() / 0.5
        return F.cross_entropy(logits, torch.arange(len(logits)))

    return stepped(loss, alone=True)
