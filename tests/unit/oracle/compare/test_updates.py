"""oracle/collect/optimizer/shaken.py and optimizers.py: noise of an optimizer's own arithmetic, and what no optimizer has."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from helpers.small_net import Net, batch  # noqa: E402

from proctor.oracle import trace  # noqa: E402
from proctor.oracle.collect.optimizer.shaken import shaken  # noqa: E402
from proctor.oracle.store import Recording  # noqa: E402


class Orthogonal(torch.optim.Optimizer):
    """Iterates its update in a shorter type, as Muon does."""

    def __init__(self, params: object, dtype: torch.dtype) -> None:
        super().__init__(params, {"lr": 1.0, "dtype": dtype})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                x = (p.grad / p.grad.norm()).to(group["dtype"])
                for _ in range(5):
                    x = 1.5 * x - 0.5 * x @ x.mT @ x
                p.sub_(x.to(p.dtype))


@pytest.mark.parametrize(("dtype", "least", "most"), [(torch.bfloat16, 1e-4, 1e-1), (torch.float32, 0.0, 0.0)])
def test_noise_reaches_what_an_optimizer_computes_in_a_shorter_type(dtype: torch.dtype, least: float, most: float) -> None:
    def update(seed: int | None) -> torch.Tensor:
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.zeros(6, 8))
        optimizer = Orthogonal([weight], dtype)
        weight.grad = torch.randn(6, 8)
        restore = shaken(optimizer, seed) if seed is not None else lambda: None
        optimizer.step()
        restore()
        first = weight.detach().clone()
        optimizer.step()  # nothing is left of it
        return torch.stack([first, weight.detach() - first])

    bare, noisy, other = update(None), update(0), update(1)
    off = float((noisy[0] - bare[0]).norm() / bare[0].norm())
    assert least <= off <= most
    assert torch.allclose(noisy[1], bare[1], atol=1e-6) and (dtype == torch.float32 or not torch.equal(noisy[0], other[0]))


def test_frozen_parameters_of_fsdp_are_recorded_after_the_step(tmp_path: Path) -> None:
    dist = pytest.importorskip("torch.distributed")
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if dist.is_initialized():
        pytest.skip("another test's process group")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        net = Net()
        net.first.requires_grad_(False)
        fsdp.fully_shard(net, mesh=torch.distributed.device_mesh.init_device_mesh("cpu", (1,)))
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        with trace(net, tmp_path / "c"):
            for _ in range(2):
                net(batch()).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    entries = Recording(tmp_path / "c").ranks()[0].entries
    after = [e for e in entries if e.kind == "param_after"]
    assert {e.name for e in after} == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert all(e.placement is not None for e in after)
