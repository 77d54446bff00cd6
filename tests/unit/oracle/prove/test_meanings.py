"""Every meaning against torch's own kernel: in doubles it must give the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.machine import Machine
from proctor.oracle.prove.recording.recorder import Recorder
from proctor.oracle.prove.tape import MARK, Tape

Make = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
ROWS = torch.tensor([2, 0, 2, 1])

PROGRAMS: dict[str, Make] = {
    "add with alpha": lambda x, y: torch.add(x, y, alpha=3),
    "rsub": lambda x, y: 1 - x,
    "div": lambda x, y: x / y / 3,
    "pow": lambda x, y: x.abs() ** 1.5 + x**3 + (y * y) ** -0.5,
    "rsqrt": lambda x, y: (x * x + 1).rsqrt(),
    "functions": lambda x, y: x.exp() + x.sigmoid() + x.tanh() + x.erf() + x.sin() + x.cos() + x.abs().log() + x.expm1(),
    "silu": lambda x, y: F.silu(x),
    "gelu": lambda x, y: F.gelu(x) + F.gelu(y, approximate="tanh"),
    "relu": lambda x, y: F.relu(x),
    "softplus": lambda x, y: F.softplus(x),
    "where": lambda x, y: torch.where(x > 0, x, y).masked_fill(y > 1, 7.0),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5) + torch.maximum(x, y) + torch.minimum(x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5) + torch.addcdiv(x, x, y, value=0.5),
    "triangles": lambda x, y: x.tril() + y.triu(1),
    "sums": lambda x, y: x.sum(0) + y.sum(0, keepdim=True) + x.mean() + y.mean(1).sum(),
    "variance": lambda x, y: x.var(1) + x.std(1) + torch.var_mean(y, 1, correction=0)[0],
    "norms": lambda x, y: x.norm() + torch.linalg.vector_norm(y, 2, 1) + x.norm(1) + y.norm(float("inf")),
    "largest": lambda x, y: x.amax(1) + x.max(1).values + y.amin(1) + x.max() + x.logsumexp(1),
    "smallest": lambda x, y: x.min(1).values + y.min(0, keepdim=True)[0] + x.min() + torch.min(x, y),
    "diagonals": lambda x, y: x.diagonal(1).sum() * y + x.diag() + torch.stack([x, y]).diagonal(-1, 2, 0).sum(),
    "cumsum": lambda x, y: x.cumsum(1),
    "topk": lambda x, y: x.topk(2, 1).values + y.sort(1).values[:, :2],
    "products": lambda x, y: (x @ y.T) @ torch.addmm(x, x @ y.T, y, beta=0.5, alpha=2) + torch.stack([x, y]).matmul(torch.stack([y.T, x.T]))[0] @ x,
    "softmax": lambda x, y: x.softmax(1) * y.log_softmax(0),
    "cross entropy": lambda x, y: F.cross_entropy(x, ROWS) + F.cross_entropy(y, torch.tensor([0, -100, 2, 1]), reduction="sum"),
    "embedding": lambda x, y: F.embedding(ROWS, x) * F.embedding(torch.tensor([3, 3, 0, 1]), y),
    "index": lambda x, y: x[ROWS] + y[[0, 1, 2, 3], ROWS][:, None] + x[:, ROWS],
    "boolean index": lambda x, y: x[torch.tensor([True, False, True, True])],
    "index_put": lambda x, y: x.clone().index_put((ROWS,), y, accumulate=True) + x.index_put((ROWS[1:],), y[1:]),
    "gather": lambda x, y: x.gather(1, ROWS[:, None]) + torch.zeros(4, 4).scatter(1, ROWS[:, None], y[:, :1]) + torch.zeros(4, 4).scatter_add(0, ROWS[:, None].repeat(1, 4), y),
    "index_add": lambda x, y: x.index_add(0, ROWS, y, alpha=2) + x.index_select(1, ROWS),
    "joins": lambda x, y: torch.cat([x, y], 1)[:, 2:6] + torch.stack([x, y])[1] + x.repeat(2, 1)[2:6] + y.flip(0) + x.roll(1, 0),
    "pad": lambda x, y: F.pad(x, (1, 2, 0, 1))[:4, :4],
    "layer norm": lambda x, y: F.layer_norm(x, (4,), y[0], y[1]) + F.layer_norm(y, (4,)),
    "rms norm": lambda x, y: F.rms_norm(x, (4,), y[0], 1e-5),
    "norm of what needs no gradient": lambda x, y: F.layer_norm(x.detach(), (4,), y[0], y[1]) + F.rms_norm(x.detach(), (4,), y[2]),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], (x * y)[None, None], is_causal=True)[0, 0],
    "in place": lambda x, y: x.clone().mul_(y).add_(1).t().contiguous().zero_().add_(y).sub_(x),
    "through a view": lambda x, y: _through_a_view(x, y),
    "lists": lambda x, y: torch.stack(torch._foreach_add(torch._foreach_mul([x, y], 2.0), [y, x])).sum(0),
    "interleave": lambda x, y: x.repeat_interleave(2, 0)[:4] + x.masked_select(torch.ones(4, 4, dtype=torch.bool)).view(4, 4),
}


def _through_a_view(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    whole = x * 1
    part = whole[1:3]
    part += y[:2]
    whole[0] = 5.0
    return whole.view(2, 8).t() @ y.view(2, 8)


def recorded(program: Make) -> tuple[Tape, list[torch.Tensor], list[torch.Tensor]]:
    """The tape of a program with its backward, what torch says, and the inputs."""
    torch.manual_seed(0)
    x, y = (torch.randn(4, 4, dtype=torch.float64).requires_grad_() for _ in range(2))
    torch.set_default_dtype(torch.float64)
    torch.backends.cuda.enable_flash_sdp(False)
    recorder = Recorder(0, 1, lambda: ("", "forward"), lambda: "sum", real=True)
    try:
        with recorder:
            recorder.on = True
            found = program(x, y)
            grads = torch.autograd.grad((found * torch.arange(found.numel()).view(found.shape)).sum(), [x, y], allow_unused=True)
            results = [found, *(g for g in grads if g is not None)]
            for k, tensor in enumerate(results):
                recorder.mark(str(k), tensor)
            recorder.on = False
    finally:
        torch.set_default_dtype(torch.float32)
        torch.backends.cuda.enable_flash_sdp(True)
    return recorder.tape, results, [x, y]


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_a_meaning_gives_the_numbers_of_the_kernel(name: str) -> None:
    tape, results, _ = recorded(PROGRAMS[name])
    assert any(node.op != MARK and node.values.count(-1) for node in tape.nodes)
    machine = Machine([tape], F64(), {})
    machine.run()
    assert not machine.opaque
    for k, tensor in enumerate(results):
        np.testing.assert_allclose(machine.marks[0][str(k)], tensor.detach().numpy(), rtol=1e-10, atol=1e-12, err_msg=f"{name}, result {k}")


def test_products_of_groups_are_those_of_each_group() -> None:
    ends = torch.tensor([1, 4], dtype=torch.int32)
    tape, results, _ = recorded(lambda x, y: torch._grouped_mm(x.float(), torch.stack([y, 2 * y]).float(), offs=ends).double())
    machine = Machine([tape], F64(), {})
    machine.run()
    assert not machine.opaque and len(results) == 3
    for k, tensor in enumerate(results):
        np.testing.assert_allclose(machine.marks[0][str(k)], tensor.detach().numpy(), rtol=1e-4, atol=1e-5)


def test_what_is_made_of_integers_alone_needs_no_meaning() -> None:
    tape, _, _ = recorded(lambda x, y: x * y[torch.histc(ROWS.double(), 4, 0, 4).cumsum(0).long() - 1])
    machine = Machine([tape], F64(), {})
    machine.run()
    assert not machine.opaque


def test_an_operator_without_a_meaning_is_listed() -> None:
    tape, _, _ = recorded(lambda x, y: torch.linalg.inv(x) + y)
    machine = Machine([tape], F64(), {})
    machine.run()
    assert any("linalg_inv" in op for op in machine.opaque)


def test_a_tape_survives_its_file(tmp_path: Any) -> None:
    from proctor.oracle.prove.tape import read, write

    tape, results, _ = recorded(PROGRAMS["through a view"])
    write(tape, tmp_path / "rank0.tape")
    machine = Machine([read(tmp_path / "rank0.tape")], F64(), {})
    machine.run()
    np.testing.assert_allclose(machine.marks[0]["0"], results[0].detach().numpy())
