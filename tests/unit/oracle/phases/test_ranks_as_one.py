"""A reference of several ranks is put together: shards to the whole, ranks with data of their own one behind the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from helpers.oracle.oracle_ranks import record_ranks  # noqa: E402
from helpers.small_net import Net  # noqa: E402

from proctor.oracle.merging.decoding import View  # noqa: E402
from proctor.oracle.phases.ranks_as_one import AsOne, _whole, as_one, tiled  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402


def record(out: Path, patch: pytest.MonkeyPatch, *, same: bool) -> Recording:
    def run(rank: int) -> Any:
        model = Net()
        x = torch.linspace(-1, 1, 64).view(8, 8)
        mine = x if same else x.chunk(2)[rank]
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train() -> None:
            model(mine).square().mean().backward()
            optimizer.step()

        return model, train

    return Recording(record_ranks(out, patch, run))


def shard(recording: Recording, patch: pytest.MonkeyPatch) -> None:
    """Say of every matrix that a rank holds its half of the rows."""
    import msgspec

    from proctor.oracle.phases import ranks_as_one
    from proctor.oracle.tensors import Placement

    real = Recording.ranks

    def ranks(self: Recording, run: str = "clean") -> dict[int, View]:
        out: dict[int, View] = {}
        for rank, record in real(self, run).items():
            halves: dict[str, Any] = {}
            entries = []
            for e in record.entries:
                if e.kind in ("param", "main_grad", "param_after") and e.name == "first.weight":
                    made = msgspec.structs.replace(e, shape=(e.shape[0] // 2, *e.shape[1:]), tensor=f"half-{e.tensor}", placement=Placement(("dp",), (2,), ("S(0)",), e.shape))
                    halves[made.tensor] = record.array(e)[rank * made.shape[0] : (rank + 1) * made.shape[0]]
                    entries.append(made)
                else:
                    entries.append(e)
            out[rank] = View(record, entries, record.info)
            out[rank].made.update(halves)
        return out

    patch.setattr(ranks_as_one.Recording, "ranks", ranks)


@pytest.mark.parametrize("same", [True, False])
def test_shards_become_the_whole_and_data_are_dealt_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool) -> None:
    recording = record(tmp_path / "r", monkeypatch, same=same)
    assert as_one(recording) is recording  # nothing says that it is cut
    shard(recording, monkeypatch)
    one = as_one(recording)
    assert isinstance(one, AsOne)
    (found,) = one.ranks().values()
    params = {e.name: found.array(e) for e in found.entries if e.kind == "param"}
    torch.manual_seed(0)
    assert np.array_equal(params["first.weight"], Net().first.weight.detach().numpy()) and found.info.world == 1
    inputs = {e.call: found.array(e) for e in found.entries if e.kind == "input" and e.name == "first"}
    assert len(inputs) == (1 if same else 2)
    assert np.array_equal(np.concatenate([inputs[c] for c in sorted(inputs)]), torch.linspace(-1, 1, 64).view(8, 8).numpy())


@pytest.mark.parametrize("partial", [False, True])
def test_statistics_of_shards_become_those_that_one_process_keeps_of_the_whole(partial: bool) -> None:
    from proctor.oracle.collect.summaries import summarise
    from proctor.oracle.phases.ranks_as_one import together
    from proctor.oracle.tensors import Entry, Placement

    torch.manual_seed(1)
    whole = torch.randn(128, 256)
    halves = [whole / 2, whole / 2] if partial else list(whole.chunk(2))

    class Rank:
        def __init__(self, values: Any) -> None:
            from types import SimpleNamespace

            self.values, self.info = values, SimpleNamespace(coords={})

        def array(self, entry: Entry) -> Any:
            return self.values

    records, held = {}, {}
    for rank, half in enumerate(halves):
        kept, said = summarise(half.contiguous(), "main_grad")
        records[rank] = Rank(kept.numpy())
        held[rank] = Entry(0, 0, "main_grad", "w", "", "", "", str(kept.dtype).removeprefix("torch."), tuple(kept.shape), "", f"t{rank}", 0,
                           placement=Placement(("dp",), (2,), ("P(sum)" if partial else "S(0)",), tuple(whole.shape)), **said)  # fmt: skip
    parts = tiled(records, held)  # type: ignore[arg-type]
    assert parts
    made, numbers = _whole(parts), together(parts)
    kept, said = summarise(whole, "main_grad")
    assert made is not None and np.allclose(made, kept.numpy()) and parts[0].entry.tile == said["tile"]
    assert numbers == () if partial else np.allclose(numbers, said["stats"])
