"""What healthy programs do that looks like a bug: entries of a batch that a model has no use for, buffers that a forward moves and computes from."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from helpers.selfchecked import call_of, verdict  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from proctor.oracle.selfcheck.watching.seen.recomputed import maybe_checkpoint  # noqa: E402


class Reads(nn.Module):
    """Given a whole batch, it asks for some of it."""

    def __init__(self, reads):
        super().__init__()
        self.fc, self.reads = nn.Linear(6, 3), reads

    def forward(self, batch):
        return self.fc(self.reads(batch))


def batch():
    made = torch.Generator().manual_seed(1)
    return {"x": torch.randn(8, 6, generator=made), "weight": torch.rand(8, 6, generator=made), "label": torch.arange(8) % 3}


@pytest.mark.parametrize(
    ("reads", "wanted"),
    [
        (lambda b: b["x"], "by-design"),
        (lambda b: b.get("x"), "by-design"),
        (lambda b: b["x"] + 0 * b["weight"] + 0 * b["label"][:, None], "different"),
        (lambda b: dict(**b)["x"], "different"),
        (lambda b: next(iter(b.values())), "different"),
    ],
)
def test_an_entry_that_a_forward_never_asks_for_is_no_input(reads, wanted):
    found = verdict("inputs", call_of(Reads(reads), batch()))
    assert found.verdict == wanted and "batch.label" in found.reason and "batch.weight" in found.reason


class Normed(nn.Module):
    """A spectral norm of the program's own, whose vector each forward in training moves."""

    def __init__(self, vector):
        super().__init__()
        self.fc = nn.Linear(6, 6)
        if vector:
            self.register_buffer("u", torch.randn(6, generator=torch.Generator().manual_seed(2)))
        self.count = 0

    def forward(self, x):
        if not hasattr(self, "u"):
            self.count += 1
            return torch.sin(self.fc(x) * self.count)
        with torch.no_grad():
            v = nn.functional.normalize(self.fc.weight.t() @ self.u, dim=0)
            u = nn.functional.normalize(self.fc.weight @ v, dim=0)
            if self.training:
                self.u[:] = u
        return x @ (self.fc.weight / (u @ self.fc.weight @ v)).t()


def test_a_buffer_that_a_forward_moves_is_by_design_where_nothing_is_checkpointed():
    found = verdict("checkpointing", call_of(nn.Sequential(Normed(vector=True), Normed(vector=True)), batch()["x"]))
    assert found.verdict == "by-design" and "0.u" in found.reason and found.culprit.module == "0"
    assert verdict("checkpointing", call_of(nn.Sequential(Normed(vector=True), Normed(vector=False)), batch()["x"])).verdict == "different"


def test_blocks_in_lists_within_a_list_are_checkpointed():
    class Nested(nn.Module):
        def __init__(self, vector):
            super().__init__()
            self.blocks = nn.ModuleList([nn.ModuleList([Normed(vector)]), nn.ModuleList([Normed(vector)])])

        def forward(self, x):
            for several in self.blocks:
                for block in several:
                    x = block(x)
            return x

    assert verdict("checkpointing", call_of(Nested(vector=False), batch()["x"])).verdict == "different"
    assert verdict("checkpointing", call_of(Nested(vector=True), batch()["x"])).verdict == "by-design"


def test_a_program_that_checkpoints_such_a_layer_is_told():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.part = Normed(vector=True)

        def forward(self, x):
            return maybe_checkpoint(checkpoint, self.part, x, use_reentrant=False) * 2  # as in a program that is watched

    assert verdict("checkpointing", call_of(Checkpointed(), batch()["x"])).verdict == "different"
