"""Losses of libraries that gather embeddings of all ranks, with or without their gradients."""

from __future__ import annotations

import importlib
import logging
import sys
import types
from typing import Any

import torch
from torch import nn

from . import Step, checkout, program, stub, who
from .losses import Loss, modules_of, stepped


def bare(by: str, *packages: str) -> None:
    """Packages of a checkout without what their own `__init__` imports."""
    for name in packages:
        if name not in sys.modules:
            made = types.ModuleType(name)
            made.__path__ = [str(checkout(by) / name.replace(".", "/"))]
            sys.modules[name] = made


def _slip(kind: str) -> Loss:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        modules_of("facebookresearch/SLIP")
        sys.modules.pop("losses", None)
        stub("PIL", ImageFilter=None)
        losses = importlib.import_module("losses")
        a, b = model(one), model(other)
        found: torch.Tensor
        if kind == "clip":
            found = losses.CLIPLoss()({"image_embed": a, "text_embed": b, "logit_scale": 2.0})["loss"]
        else:
            found = losses.SIMCLRLoss(0.5)({"aug1_embed": a, "aug2_embed": b})["loss"]
        return found

    return loss


@program("SLIP, CLIP's loss with DDP", "facebookresearch/SLIP", "dp=2")
def _() -> Step:
    return stepped(_slip("clip"), alone=True)


@program("SLIP, SimCLR's loss with gradients", "facebookresearch/SLIP", "dp=2")
def _() -> Step:
    return stepped(_slip("simclr"), alone=True)


def _solo(name: str) -> Any:
    bare("vturrisi/solo-learn", "solo", "solo.losses", "solo.utils")
    for missing, attributes in (("omegaconf", ("OmegaConf",)), ("timm.models.helpers", ("group_parameters",)), ("timm.optim.optim_factory", ("_layer_map",))):
        try:
            importlib.import_module(missing)
        except ImportError:
            stub(missing, **dict.fromkeys(attributes))
    return importlib.import_module(f"solo.losses.{name}")


@program("solo-learn, SimCLR", "vturrisi/solo-learn", "dp=2")
def _() -> Step:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        number = torch.arange(len(one)) + len(one) * who()[0]
        found: torch.Tensor = _solo("simclr").simclr_loss_func(torch.cat([model(one), model(other)]), number.repeat(2), 0.5)
        return found

    return stepped(loss)


@program("solo-learn, VICReg", "vturrisi/solo-learn", "dp=2")
def _() -> Step:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _solo("vicreg").vicreg_loss_func(model(one), model(other))
        return found

    return stepped(loss)


def _lightly(module: str, name: str, **arguments: Any) -> Loss:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        bare("lightly-ai/lightly", "lightly", "lightly.loss", "lightly.utils", "lightly.models", "lightly.models.modules")
        stub("lightly.models.utils")
        made = getattr(importlib.import_module(f"lightly.loss.{module}"), name)(gather_distributed=True, **arguments)
        found: torch.Tensor = made(model(one), model(other))
        return found

    return loss


@program("lightly, NT-Xent", "lightly-ai/lightly", "dp=2")
def _() -> Step:
    return stepped(_lightly("ntx_ent_loss", "NTXentLoss"))


@program("lightly, decoupled contrastive loss", "lightly-ai/lightly", "dp=2")
def _() -> Step:
    return stepped(_lightly("dcl_loss", "DCLLoss"))


@program("lightly, VICReg", "lightly-ai/lightly", "dp=2")
def _() -> Step:
    return stepped(_lightly("vicreg_loss", "VICRegLoss"))


@program("sentence-transformers, ranking with negatives of all ranks", "UKPLab/sentence-transformers", "dp=2")
def _() -> Step:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        by = "UKPLab/sentence-transformers"
        bare(by, "sentence_transformers", "sentence_transformers.losses", "sentence_transformers.util")
        stub("sentence_transformers.SentenceTransformer", SentenceTransformer=nn.Module)
        stub("transformers.utils", logging=types.SimpleNamespace(get_logger=lambda name: types.SimpleNamespace(warning_once=logging.getLogger(name).warning)))
        util = sys.modules["sentence_transformers.util"]
        util.__dict__["all_gather_with_grad"] = importlib.import_module("sentence_transformers.util.distributed").all_gather_with_grad
        util.__dict__["cos_sim"] = importlib.import_module("sentence_transformers.util.similarity").cos_sim
        made = importlib.import_module("sentence_transformers.losses.MultipleNegativesRankingLoss").MultipleNegativesRankingLoss
        found: torch.Tensor = made(model, gather_across_devices=True, scale=2.0).compute_loss_from_embeddings([model(one), model(other)], torch.empty(0))
        return found

    return stepped(loss)


@program("Barlow Twins, correlation of all ranks", "facebookresearch/barlowtwins", "dp=2")
def _() -> Step:
    def loss(model: nn.Module, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        modules_of("facebookresearch/barlowtwins")
        stub("PIL", Image=None, ImageFilter=None, ImageOps=None)
        stub("torchvision", models=types.SimpleNamespace(), datasets=None)
        stub("torchvision.transforms")
        sys.modules.pop("main", None)
        made: Any = importlib.import_module("main").BarlowTwins
        itself = types.SimpleNamespace(projector=model, backbone=nn.Identity(), bn=nn.Identity(), args=types.SimpleNamespace(batch_size=len(one) * who()[1], lambd=0.1))
        found: torch.Tensor = made.forward(itself, one, other)  # without its norms of a rank's own rows
        return found

    return stepped(loss, alone=True)
