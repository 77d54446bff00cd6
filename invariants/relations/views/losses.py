"""The functions of torch that give a loss."""

from __future__ import annotations

from typing import Final

LOSSES: Final = frozenset(
    f"torch.nn.functional.{name}"
    for name in """cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div
    binary_cross_entropy_with_logits poisson_nll_loss gaussian_nll_loss hinge_embedding_loss margin_ranking_loss
    cosine_embedding_loss triplet_margin_loss soft_margin_loss multi_margin_loss multilabel_margin_loss
    multilabel_soft_margin_loss ctc_loss""".split()
)
