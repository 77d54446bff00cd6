"""Operations are replaced for who asks, and for nobody else; what has no rule is named with the user's line."""

import threading

import pytest
import torch

from proctor.errors import OracleError
from proctor.oracle.parallel.box import Box
from proctor.oracle.parallel.draws import FIXED, registry
from proctor.oracle.parallel.intercept import install, placed, random_kernels, uninstall
from proctor.oracle.parallel.streams import Ident, stream

# What they draw depends on the values (rejection samplers), so a shard cannot know where its elements begin.
WITHOUT = {"_sample_dirichlet", "_standard_gamma", "binomial", "poisson"}
# Variants that nothing composed calls; a program that names them is stopped.
UNUSED = {"multinomial.out", "normal.Tensor_Tensor_out", "normal.Tensor_float_out", "normal.float_Tensor_out"}
RRELU = {"rrelu_with_noise", "rrelu_with_noise.out", "rrelu_with_noise_"}


def whole(kind="keyed"):
    source = stream(kind, 5)
    return placed(lambda tensor: (source, Box.whole(tuple(tensor.shape)), Ident("x")))


def test_every_random_kernel_has_a_rule_or_a_reason():
    assert set(random_kernels()) - set(registry()) == WITHOUT | UNUSED | RRELU
    assert not set(FIXED) & set(registry())


def test_outside_torch_draws_as_if_nothing_were_replaced():
    uninstall()
    torch.manual_seed(3)
    plain = [torch.randn(40), torch.nn.functional.dropout(torch.ones(9)), torch.randperm(7), torch.rand(3).multinomial(2)]
    install()
    torch.manual_seed(3)
    with_us = [torch.randn(40), torch.nn.functional.dropout(torch.ones(9)), torch.randperm(7), torch.rand(3).multinomial(2)]
    assert all(torch.equal(a, b) for a, b in zip(plain, with_us))


def test_another_thread_is_not_placed():
    drawn = []
    with whole():
        inside = torch.rand(5)
        thread = threading.Thread(target=lambda: drawn.append(torch.rand(5, generator=torch.Generator().manual_seed(1))))
        thread.start()
        thread.join()
    assert torch.equal(drawn[0], torch.rand(5, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(inside, drawn[0])


def sample(name):
    """Arguments of a kernel by its schema: tensors of 0.5, or of shape-like numbers where it wants whole ones."""
    base, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, base), overload or "default")
    values = {"Tensor": lambda: torch.full((2, 3), 0.5), "float": lambda: 0.5, "int": lambda: 2, "bool": lambda: True, "number": lambda: 0.5}
    given = [values[str(a.type)]() for a in operation._schema.arguments if not a.has_default_value() and not a.is_out]
    out = {a.name: torch.empty(0) for a in operation._schema.arguments if a.is_out}
    return operation, given, out


@pytest.mark.parametrize("name", sorted(set(random_kernels()) - set(registry())))
def test_an_operation_without_a_rule_stops_with_its_name_and_line(name):
    operation, given, out = sample(name)
    with whole(), pytest.raises(OracleError, match=rf"{name} draws random numbers and has no rule \(.*test_intercept.py:\d+ in"):
        operation(*given, **out)


@pytest.mark.parametrize("module", [torch.nn.LSTM(4, 4, 2, dropout=0.5), torch.nn.Dropout(0.5), torch.nn.Dropout1d(0.5), torch.nn.AlphaDropout(0.5)])
def test_layers_draw_by_the_stream(module):
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with whole():
            out = module(torch.ones(2, 4, 4))
            found.append(out[0] if isinstance(out, tuple) else out)
    assert torch.equal(*found)


def test_attention_draws_by_the_stream():
    x = torch.randn(1, 2, 4, 8)
    found = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with whole():
            found.append(torch.nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    assert torch.equal(*found)
