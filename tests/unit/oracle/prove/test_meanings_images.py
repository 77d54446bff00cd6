"""Convolutions, pooling, norms of batches, recurrent layers: each meaning against torch's own kernel, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.oracle.prove_kernels import numbers, recorded_on, same_numbers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from proctor.oracle.prove.domains.f64 import F64
from proctor.oracle.prove.domains.field import Field
from proctor.oracle.prove.machine import Machine

CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


@settings(max_examples=40, deadline=None)
@given(
    dims=st.integers(1, 3), groups=st.sampled_from([1, 2]), kernel=st.integers(1, 3), stride=st.integers(1, 2), padding=st.integers(0, 2), dilation=st.integers(1, 2),
    transposed=st.booleans(), bias=st.booleans(), more=st.integers(0, 1),
)
def test_a_convolution_is_the_kernel_s(dims: int, groups: int, kernel: int, stride: int, padding: int, dilation: int, transposed: bool, bias: bool, more: int) -> None:
    size = dilation * (kernel - 1) + 2
    x = numbers(2, 2 * groups, *[size] * dims)
    weight = numbers(*((2 * groups, 1) if transposed else (groups * 2, 2)), *[kernel] * dims, seed=1)
    b = numbers(groups * (1 if transposed else 2), seed=2)
    inputs = [x, weight, b] if bias else [x, weight]
    if transposed:
        padding, more = min(padding, dilation * (kernel - 1)), more if more < max(stride, dilation) else 0
        same_numbers(lambda *a: TRANSPOSED[dims - 1](*a, stride=stride, padding=padding, output_padding=more, groups=groups, dilation=dilation), inputs)
    else:
        same_numbers(lambda *a: CONVOLUTIONS[dims - 1](*a, stride=stride, padding=padding, groups=groups, dilation=dilation), inputs)


PROGRAMS: dict[str, tuple[Callable[..., torch.Tensor], tuple[int, ...]]] = {
    "average": (lambda x: F.avg_pool2d(x, 2, 1) + F.avg_pool2d(x, 3, 1, 1)[..., 1:, 1:], (2, 2, 4, 4)),
    "average of a line": (lambda x: F.avg_pool1d(x, 2), (2, 3, 6)),
    "average in space": (lambda x: F.avg_pool3d(x, 2), (1, 2, 4, 4, 2)),
    "largest": (lambda x: F.max_pool2d(x, 3, 2, 1), (2, 2, 5, 5)),
    "largest of a line": (lambda x: F.max_pool1d(x, 2), (2, 3, 6)),
    "largest in space": (lambda x: F.max_pool3d(x, 2), (1, 2, 4, 4, 2)),
    "adaptive": (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), (2, 2, 5, 7)),
    "adaptive, whole": (lambda x: F.adaptive_avg_pool2d(x, 1), (2, 2, 5, 7)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2) + F.interpolate(x, size=(6, 8)), (1, 2, 3, 4)),
    "between": (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear") + F.interpolate(x, size=(6, 8), mode="bilinear", align_corners=True), (1, 2, 3, 4)),
    "between, of a line": (lambda x: F.interpolate(x, size=5, mode="linear"), (1, 2, 3)),
    "batch": (lambda x: F.batch_norm(x, None, None, None, None, True), (3, 2, 4)),
    "group": (lambda x: F.group_norm(x, 2), (2, 4, 3)),
    "instance": (lambda x: F.instance_norm(x), (2, 4, 3)),
    "activations": (lambda x: F.elu(x) + F.leaky_relu(x) + F.hardtanh(x) + F.relu6(x) + F.hardswish(x) + F.mish(x) + F.celu(x) + F.selu(x) + F.logsigmoid(x) + F.softsign(x) + F.hardsigmoid(x) + F.softplus(x), (3, 4)),
    "glu": (lambda x: F.glu(x, 1), (3, 4)),
    "losses": (lambda x: F.huber_loss(x, torch.zeros(3, 4)) + F.smooth_l1_loss(x, torch.ones(3, 4)) + F.mse_loss(x, x.flip(0)) + F.binary_cross_entropy_with_logits(x, torch.full((3, 4), 0.3)) + F.l1_loss(x, torch.ones(3, 4)), (3, 4)),
    "divergence": (lambda x: F.kl_div(x.log_softmax(-1), torch.full((3, 4), 0.25), reduction="batchmean") + F.cross_entropy(x, torch.tensor([0, 1, 3]), label_smoothing=0.1), (3, 4)),
    "cosine": (lambda x: F.cosine_similarity(x, x.flip(0), -1) + F.normalize(x, dim=-1).sum(), (3, 4)),
    "distance": (lambda x: torch.cdist(x, x[:2] * 2 + 1), (3, 4)),
    "turned in place": (lambda x: (x * 1).transpose_(0, 1).unsqueeze_(0).squeeze_(0).contiguous() + 1, (3, 4)),
    "sums along": (lambda x: torch.einsum("bi,bj,ij->b", x, x, x.T @ x) + x.cumsum(1).sum(), (3, 4)),
    "rotation in pairs": (lambda x: torch.stack([x[..., ::2] * 0.6 - x[..., 1::2] * 0.8, x[..., ::2] * 0.8 + x[..., 1::2] * 0.6], -1).flatten(-2), (3, 4)),
    "complex rotation": (lambda x: _rotated(x), (3, 4)),
    "complex arithmetic": (lambda x: _complex(x), (3, 4)),
    "scatter with a reduction": (lambda x: torch.zeros(5, 4).index_add(0, torch.tensor([0, 4, 0]), x) + torch.zeros(5, 4).scatter_add(0, torch.tensor([[0, 1, 2, 3]] * 3), x), (3, 4)),
}


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """As Llama's first code turns queries."""
    turns = torch.polar(torch.ones(2), torch.tensor([0.3, 0.4]))
    pairs = torch.view_as_complex(x.reshape(3, 2, 2))
    return torch.view_as_real(pairs * turns.view(1, 2)).flatten(1)


def _complex(x: torch.Tensor) -> torch.Tensor:
    z = torch.complex(x, x.flip(1)) * (1 + 2j) / (torch.complex(x, torch.ones(3, 4)) + 3)
    both = torch.cat([z.conj(), -z], 1) - torch.stack([z, z], 1).reshape(3, 8)
    return torch.view_as_real(both.sum(0).conj().resolve_conj()).sum(-1) + both.conj().imag


@pytest.mark.parametrize("name", sorted(PROGRAMS))
def test_an_operator_of_images_is_the_kernel_s(name: str) -> None:
    program, shape = PROGRAMS[name]
    same_numbers(program, [numbers(*shape)], name)


def test_a_norm_with_weights_and_running_averages_is_the_kernel_s() -> None:
    def program(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        mean, variance = torch.zeros(2), torch.ones(2)
        first = F.batch_norm(x, mean, variance, w, b, True, 0.3)
        return first + F.batch_norm(first * 2, mean, variance, w, b, False) + F.group_norm(x, 2, w, b)  # the second by what the first left

    same_numbers(program, [numbers(3, 2, 4), numbers(2, seed=1), numbers(2, seed=2)])


def test_products_with_weights_are_the_kernel_s() -> None:
    same_numbers(lambda x, y, w: F.bilinear(x, y, w), [numbers(3, 4), numbers(3, 5, seed=1), numbers(2, 4, 5, seed=2)])


def test_recurrent_layers_are_the_kernels() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(4, 3, batch_first=True).double(), nn.GRU(3, 2, batch_first=True).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.gru(self.lstm(x)[0])[0]  # type: ignore[no-any-return]

    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)  # as a step is recorded
    try:
        same_numbers(Both(), [numbers(2, 3, 4)])
    finally:
        torch._C._set_mkldnn_enabled(before)


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor], bool], torch.optim.Optimizer]] = {
    "Adam": lambda p, fused: torch.optim.Adam(p, lr=0.1, weight_decay=0.01, fused=fused),
    "AdamW": lambda p, fused: torch.optim.AdamW(p, lr=0.1, fused=fused),
    "SGD": lambda p, fused: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, fused=fused),
    "SGD alone": lambda p, fused: torch.optim.SGD(p, lr=0.1, fused=fused),
    "Adagrad": lambda p, fused: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.01, fused=fused),
}


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_fused_step_is_the_same_formula_as_the_one_of_many_operators(name: str) -> None:
    """Its numbers, and elements of a field."""

    def program(fused: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        def stepped(x: torch.Tensor) -> torch.Tensor:
            weight = nn.Parameter(x.detach().clone())
            optimizer = OPTIMIZERS[name]([weight], fused)
            (weight * weight * 0.5).sum().backward()
            optimizer.step()
            return weight.detach() * x

        return stepped

    results = []
    for fused in (False, True):
        tape, found = recorded_on(program(fused), [numbers(3)])
        assert fused == any("_fused_" in node.op for node in tape.nodes)
        for domain in (F64(), Field(1)):
            machine = Machine([tape], domain, {})
            machine.run()
            assert not machine.opaque
            results.append(machine.marks[0]["0"])
        np.testing.assert_allclose(results[-2], found[0].detach().numpy(), rtol=1e-6)
    np.testing.assert_allclose(results[0], results[2], rtol=1e-9)
    np.testing.assert_array_equal(results[1], results[3])
