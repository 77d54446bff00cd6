"""A mask of the words that count in a loss is none of padding."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from helpers.selfchecked import call_of, verdict  # noqa: E402
from torch import nn  # noqa: E402

from proctor.oracle.selfcheck import NotApplicable  # noqa: E402


class Completing(nn.Module):
    """Each position sees all, whatever the mask says: that weighs the loss alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, ids, lm_mask, labels):
        x = self.embed(ids)
        scores = self.head(x + x.mean(1, keepdim=True))
        loss = F.cross_entropy(scores.transpose(1, 2), labels, reduction="none")
        return scores, (loss * lm_mask).sum() / lm_mask.sum()


@pytest.mark.parametrize("padded", [False, True])
def test_a_mask_of_the_words_that_count_in_a_loss_hides_nothing(padded):
    ids = torch.randint(1, 20, (4, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(4, 9)
    mask[:, :4] = 0  # the prompts
    if padded:
        ids[:, 7:] = mask[:, 7:] = 0
    with pytest.raises(NotApplicable, match="count in the loss"):
        verdict("padding", call_of(Completing(), ids, mask, ids.roll(-1, 1)))


def test_a_mask_of_padding_that_reaches_the_loss_alone_is_found():
    ids = torch.randint(1, 20, (4, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones(4, 9)
    mask[1:, 6:] = 0
    ids = ids * mask.long()
    assert verdict("padding", call_of(Completing(), ids, mask, ids.roll(-1, 1))).verdict == "different"
