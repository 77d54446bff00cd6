"""What plain tensors hold, read natively: the same as torch says; of what is not plain nothing is read, and Python decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from proctor.instrument.observe import fingerprint as fingerprints
from proctor.instrument.observe.content import Summary, formats, readable
from proctor.instrument.observe.fingerprint import fingerprint, look_at
from proctor.native import ACTIVE, Tensors
from proctor.native.twins.tensors import Tensors as Twin

native = pytest.mark.skipif(ACTIVE != "native", reason="the extension is not in use")


def read() -> Tensors:
    return Tensors(torch.Tensor, torch.nn.Parameter, torch.strided, formats(), Summary)


@native
@pytest.mark.parametrize("dtype", [d for d in formats() if not d.is_complex and d.itemsize], ids=str)
def test_a_plain_tensor_is_read_as_it_is(dtype: torch.dtype) -> None:
    whole = torch.arange(96, dtype=torch.uint8).view(dtype).reshape(2, -1) if dtype is not torch.bool else torch.eye(4, dtype=dtype)
    part = whole[1]
    kept = [t for t in (whole, part) if readable(t) is not None]
    found = read().summaries(kept)
    assert all(type(one) is Summary for one in found)
    assert repr(found) == repr([fingerprint(t) for t in kept])


class Own(torch.Tensor):
    pass


def odd() -> dict[str, Any]:
    freed = torch.ones(8)
    view = freed[2:6]
    freed.untyped_storage().resize_(0)
    short = torch.ones(8)
    short.untyped_storage().resize_(16)
    return {
        "empty": torch.ones(0),
        "transposed": torch.ones(2, 3).t(),
        "expanded": torch.ones(1).expand(4),
        "complex": torch.ones(3, dtype=torch.complex64),
        "conjugate": torch.ones(3, dtype=torch.complex64).conj(),
        "negative": torch.ones(1, dtype=torch.complex64).conj().imag,
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.ones(3, device="meta"),
        "subclass": torch.ones(3).as_subclass(Own),
        "uninitialized": torch.nn.UninitializedParameter(),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "freed": freed,
        "view of freed": view,
        "storage too short": short,
        "no tensor": "seven",
    }


@native
@pytest.mark.parametrize("kind", odd())
def test_what_is_not_plain_is_left_to_python(kind: str) -> None:
    thing = odd()[kind]
    assert read().summaries([torch.ones(2), thing])[1] is None
    if kind not in ("empty", "transposed", "expanded"):
        assert read().number(thing) in (None, NotImplemented)


@native
def test_within_a_transform_there_is_nothing_to_read() -> None:
    seen: list[Any] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append((read().summaries([x]), read().number(x.sum())))
        return x.sum()

    torch.func.vmap(look)(torch.ones(2, 3))
    torch.func.grad(look)(torch.ones(3))
    assert seen == [([None], NotImplemented)] * 2


@native
@pytest.mark.parametrize("value", [2.5, -0.0, float("inf"), 7, True], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool], ids=str)
def test_a_number_is_what_torch_says(value: float, dtype: torch.dtype) -> None:
    if value == float("inf") and not dtype.is_floating_point:
        pytest.skip("no integer")
    tensor = torch.tensor(value, dtype=dtype)
    assert repr(read().number(tensor)) == repr(float(tensor))
    assert repr(read().number(torch.stack([tensor, tensor])[1])) == repr(float(tensor)), "behind an offset"
    assert read().number(torch.stack([tensor])) is None, "it has a dimension"


@native
def test_a_number_that_needs_a_gradient_is_read_and_half_precision_is_left_to_torch() -> None:
    assert read().number(torch.tensor(2.5, requires_grad=True)) == 2.5
    assert read().number(torch.nn.Parameter(torch.tensor(1.5))) == 1.5
    assert read().number(torch.tensor(1.5, dtype=torch.float16)) is NotImplemented


@native
def test_spots_are_hashed_as_python_does_it_and_only_of_what_is_plain_and_large_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(n, dtype=torch.float32) for n in (16, 17, 100, 5000)] + [torch.arange(90, dtype=torch.uint8), torch.ones(10, 10)[2:]]
    found = [look_at(t, 64) for t in tensors]
    assert None not in found and found == [read().spots(t, 64) for t in tensors]
    assert [read().spots(t, 64) for t in (torch.ones(15), torch.ones(40, 2).t(), "seven")] == [None] * 3
    monkeypatch.setattr(fingerprints, "reader", lambda: Twin(torch.Tensor, torch.nn.Parameter, None, {}, Summary))
    assert found == [look_at(t, 64) for t in tensors] and look_at(torch.ones(15), 64) is None and look_at(torch.ones(40, 2).t(), 64) is None


def test_the_twin_reads_nothing() -> None:
    twin = Twin(torch.Tensor, torch.nn.Parameter, torch.strided, formats(), Summary)
    assert twin.summaries([torch.ones(2), 3]) == [None, None] and twin.number(torch.ones(())) is NotImplemented
