"""A program that keeps tensors for its batches and resizes them, as older ones do (`text.resize_(n).copy_(data)`): whoever looks into one leaves it as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from helpers.trained import record, trace_of

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("torch")
from proctor.invariants.schema import Value

PROGRAM = """
words, places, picture, labels, numbers, weights = (torch.empty(1, dtype=d) for d in (torch.int64, torch.int64, torch.float32, torch.int64, torch.float32, torch.float32))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.inner, self.head, self.number = nn.Embedding(12, 16), nn.Linear(16, 16), nn.Linear(16, 12), nn.Linear(16, 1)
    def forward(self, words, places, picture):
        h = torch.relu(self.inner(self.words(words) * places.unsqueeze(-1))) + picture.unsqueeze(1)
        return self.head(F.dropout(h, 0.1, self.training)), self.number(h.mean(1)).squeeze(-1)
model = Net()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, betas=(0.5, 0.999))
loader = DataLoader(TensorDataset(torch.arange(40)), 4, shuffle=True)
done = 0
for epoch in range(2):
    for i, (kept,) in enumerate(loader):
        n, length = len(kept) + done, 6 + done % 3
        text = torch.randint(1, 12, (n, length))
        words.resize_(n, length).copy_(text)
        places.resize_(n, length).copy_(text > 3)
        picture.resize_(n, 16).copy_(torch.randn(n, 16))
        labels.resize_(n, length).copy_(text.roll(-1, 1))
        numbers.resize_(n).copy_(torch.rand(n))
        weights.resize_(12).fill_(1.0)
        kept.resize_(n)
        optimizer.zero_grad()
        scores, number = model(words, places, picture)
        loss = F.cross_entropy(scores.flatten(0, 1), labels.flatten(), weight=weights) + F.mse_loss(number, numbers)
        loss = loss + F.binary_cross_entropy(torch.sigmoid(number), numbers)
        loss.backward()
        grown = model.inner.weight.grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
for tensor in (words, places, picture, labels, numbers, weights, kept, loss.detach(), scores.detach(), grown, model.head.weight.detach()):
    tensor.resize_(4096)
open(OUT + ".done", "w").write(str(done))
"""


def test_tensors_that_were_looked_into_can_still_be_resized(tmp_path: Path) -> None:
    record(tmp_path, {"resizes": PROGRAM}, [("resizes", "run", 0, 4, "")])
    assert (tmp_path / "resizes-run.done").read_text() == "20"
    kinds = set(trace_of(tmp_path / "resizes-run").values["kind"].unique().to_list())
    assert {int(k) for k in (Value.BATCH, Value.JUDGED, Value.HANDED, Value.DIGITS, Value.KEPT)} <= kinds  # the probes that read elements have
