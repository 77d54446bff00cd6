"""oracle/collect: what a training step leaves in a recording, and that the program does not notice."""

# More than 400 lines: all of these record the same few programs.
from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

torch = pytest.importorskip("torch")

from helpers.small_net import Net, batch, step  # noqa: E402
from safetensors.torch import save_file  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from proctor.errors import OracleError  # noqa: E402
from proctor.oracle import trace  # noqa: E402
from proctor.oracle.collect.collector import Collector  # noqa: E402
from proctor.oracle.store import RankRecord, Recording  # noqa: E402
from proctor.oracle.tensors import (  # noqa: E402
    Entry,
    key_of,
    slots_in,
)


def record(path: Path, model: nn.Module | list[nn.Module], body: Callable[[], Any], **options: Any) -> RankRecord:
    with trace(model, path, **options):
        body()
    return Recording(path).ranks()[0]


def held(rank: RankRecord, kind: str, name: str, **where: Any) -> list[Entry]:
    return [e for e in rank.entries if e.kind == kind and e.name == name and all(getattr(e, k) == v for k, v in where.items())]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_a_step_has_everything(tmp_path: Path) -> None:
    net = Net()
    before = net.first.weight.detach().clone()
    optimizer = torch.optim.AdamW(net.parameters())
    rank = record(tmp_path / "r", net, lambda: step(net, optimizer))
    assert {e.kind for e in rank.entries} == {
        "param", "input", "output", "grad_output", "grad_input", "main_grad", "param_after", "opt_state", "scalar",
    }  # fmt: skip
    (param,), (after,) = held(rank, "param", "first.weight"), held(rank, "param_after", "first.weight")
    assert torch.equal(torch.from_numpy(rank.array(param).copy()), before)
    assert torch.equal(torch.from_numpy(rank.array(after).copy()), net.first.weight.detach())
    (grad,) = held(rank, "main_grad", "first.weight")
    assert net.first.weight.grad is not None
    assert torch.equal(torch.from_numpy(rank.array(grad).copy()), net.first.weight.grad)
    assert {e.slot for e in held(rank, "opt_state", "first.weight")} == {"exp_avg", "exp_avg_sq"}
    assert held(rank, "output", "")[0].source.endswith(f"small_net.py:{Net.forward.__code__.co_firstlineno}")


def test_bits_are_the_same_with_and_without(tmp_path: Path) -> None:
    nets = [Net(), Net()]
    losses = []
    for number, net in enumerate(nets):
        optimizer = torch.optim.AdamW(net.parameters())
        if number:
            record(tmp_path / "r", net, lambda o=optimizer, n=net: losses.append([step(n, o) for _ in range(3)]), steps=2)
        else:
            losses.append([step(net, optimizer) for _ in range(3)])
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def test_nothing_stays_behind(tmp_path: Path) -> None:
    before = [nn.Module.__call__, nn.Module.__init__, torch.autograd.backward, nn.utils.clip_grad_norm_, torch.Tensor.to]
    before += [torch.optim.Optimizer.zero_grad, torch.optim.Optimizer.__init__]
    net = Net()
    record(tmp_path / "r", net, lambda: step(net, sgd(net)))
    with pytest.raises(ZeroDivisionError):
        record(tmp_path / "s", net, lambda: step(net, sgd(net)) / 0)
    after = [nn.Module.__call__, nn.Module.__init__, torch.autograd.backward, nn.utils.clip_grad_norm_, torch.Tensor.to]
    after += [torch.optim.Optimizer.zero_grad, torch.optim.Optimizer.__init__]
    assert before == after
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_steps_after_a_forward_that_failed_are_steps(tmp_path: Path) -> None:
    net = Net()

    def body() -> None:
        optimizer = sgd(net)
        for number in range(5):
            if number == 1:
                with pytest.raises(RuntimeError):
                    net(torch.zeros(2, 3))
            step(net, optimizer)

    rank = record(tmp_path / "r", net, body, steps=9)
    assert sorted({e.step for e in rank.entries if e.kind == "param_after"}) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("name", ["original", "module", "call"])
def test_arguments_may_have_any_name(tmp_path: Path, name: str) -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor, **scales: float) -> torch.Tensor:
            return self.net(x) * scales[name]

    model = Named()

    def body() -> None:
        optimizer = sgd(model)
        model(batch(), **{name: 2.0}).mean().backward()
        optimizer.step()

    rank = record(tmp_path / "r", model, body)
    assert held(rank, "output", "net") and held(rank, "param_after", "net.first.weight")


def test_microbatches_are_calls_of_one_step(tmp_path: Path) -> None:
    net = Net()

    def accumulate() -> None:
        for rows in batch().chunk(4):
            net(rows).square().mean().backward()
        sgd(net).step()

    rank = record(tmp_path / "r", net, accumulate)
    assert [e.call for e in held(rank, "output", "first")] == [0, 1, 2, 3]
    assert [e.call for e in held(rank, "grad_output", "first")] == [0, 1, 2, 3]
    assert {e.step for e in rank.entries} == {0}
    assert len(held(rank, "main_grad", "first.weight")) == 1


def test_as_many_steps_as_asked_for(tmp_path: Path) -> None:
    net = Net()
    optimizer = sgd(net)
    rank = record(tmp_path / "r", net, lambda: [step(net, optimizer) for _ in range(4)], steps=2)
    assert {e.step for e in rank.entries} == {0, 1} and rank.info.steps == 2
    assert len(held(rank, "param_after", "first.weight")) == 2


def test_an_evaluation_is_no_part_of_it(tmp_path: Path) -> None:
    net = Net()

    def body() -> None:
        with torch.no_grad():
            net(batch()[:2])
        step(net, sgd(net))
        with torch.no_grad():
            net(batch()[:3])

    rank = record(tmp_path / "r", net, body)
    assert [e.shape for e in held(rank, "output", "")] == [(8, 4)]


def test_recomputation_is_marked(tmp_path: Path) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = checkpoint(lambda v: torch.nn.functional.gelu(self.first(v)), x, use_reentrant=False)
            return self.last(hidden)  # type: ignore[no-any-return]

    net = Checkpointed()
    rank = record(tmp_path / "r", net, lambda: step(net, sgd(net)))
    assert [e.recompute for e in held(rank, "output", "first")] == [False, True]
    assert [e.call for e in held(rank, "output", "first")] == [0, 0]
    assert len(held(rank, "grad_output", "first")) == 1


def test_nested_values_and_keywords_have_slots(tmp_path: Path) -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor, *, mask: torch.Tensor, flag: bool = True) -> dict[str, Any]:
            return {"hidden": [x * self.w, x * mask], "mask": mask, "flag": flag}

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x, mask=torch.tensor([1, 0, 1, 0]))
            return out["hidden"][0] + out["hidden"][1]  # type: ignore[no-any-return]

    net = Outer()
    rank = record(tmp_path / "r", net, lambda: net(torch.ones(2, 4)).sum().backward())
    assert {(e.slot, e.dtype) for e in held(rank, "output", "inner")} == {("hidden.0", "float32"), ("hidden.1", "float32"), ("mask", "int64")}
    assert {e.slot for e in held(rank, "input", "inner")} == {"0", "mask"}
    assert [e.slot for e in held(rank, "input", "")] == [""]


class Asks(nn.Module):
    """Computes otherwise where query, key and value are one tensor, as attention does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4))
        self.asked: list[bool] = []

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.asked.append(query is key and key is value)
        out = query * self.w + key * 2 + value * 3
        return out, out


class Asking(nn.Module):
    def __init__(self, *, again: bool = False) -> None:
        super().__init__()
        self.inner, self.again = Asks(), again
        self.same = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        x.retain_grad()
        self.x = x
        one, other = checkpoint(self.inner, x, x, x, use_reentrant=False) if self.again else self.inner(x, x, x)
        self.same = self.same and one is other
        return one + other  # type: ignore[no-any-return]


@pytest.mark.parametrize("options", [{}, {"run": "noise-0"}])
@pytest.mark.parametrize("again", [False, True])
def test_a_tensor_that_is_passed_in_twice_stays_one(tmp_path: Path, again: bool, options: dict[str, Any]) -> None:
    if options:
        record(tmp_path / "r", (net := Asking(again=again)), lambda: net(torch.ones(2, 4, requires_grad=True)).sum().backward())
    net = Asking(again=again)
    with trace(net, tmp_path / "r", **options):
        net(torch.ones(2, 4, requires_grad=True)).sum().backward()
    rank = Recording(tmp_path / "r").ranks(options.get("run", "clean"))[0]
    assert net.inner.asked == [True] * (2 if again else 1)
    assert net.same or again  # a checkpoint makes others of what it returns
    assert {e.slot for e in held(rank, "input", "inner")} == {"0", "1", "2"}
    (grad,) = held(rank, "grad_input", "inner")
    assert grad.slot == "0=1=2" and slots_in(grad.slot) == ("0", "1", "2")
    assert net.x.grad is not None and torch.allclose(torch.from_numpy(rank.array(grad).copy()), net.x.grad)


@pytest.mark.parametrize("apart", [False, True])
def test_a_tensor_that_is_given_other_values_in_each_place_is_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    values = {key_of(0, "input", "inner", str(i), 0): torch.full((2, 4), 5.0 + i * apart) for i in range(3)}
    save_file(values, str(tmp_path / "rank0.safetensors"))

    def made(config: Any) -> Collector:
        return Collector(msgspec.structs.replace(config, force=str(tmp_path)))

    monkeypatch.setattr(sys.modules["proctor.oracle.recording.tracing"], "_collector", made)
    net = Asking()
    with torch.no_grad():
        net.inner.w.fill_(1.0)
    found = []
    rank = record(tmp_path / "r", net, lambda: found.append(net(torch.ones(2, 4, requires_grad=True))))
    assert net.inner.asked == [not apart]
    assert found[0][0, 0].item() == 2 * (5 + 6 * 2 + 7 * 3 if apart else 5 * 6)
    assert [float(rank.array(e).max()) for e in held(rank, "input", "inner")] == [2.0, 2.0, 2.0]  # as the program had them


def test_operations_in_place_work_as_before(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.relu, self.b = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.relu(self.a(x).add_(0.1)))  # type: ignore[no-any-return]

    nets = [InPlace(), InPlace()]
    alone = step(nets[0], sgd(nets[0]))
    found: list[float] = []
    rank = record(tmp_path / "r", nets[1], lambda: found.append(step(nets[1], sgd(nets[1]))))
    assert found == [alone]
    (output,) = held(rank, "output", "a")
    assert float(rank.array(output).min()) < 0  # as it was when it left the layer


def test_wrappers_are_left_out_of_names(tmp_path: Path) -> None:
    net = Net()
    wrapped = nn.DataParallel(net, device_ids=[])
    rank = record(tmp_path / "r", wrapped, lambda: wrapped(batch()).sum().backward())
    assert held(rank, "output", "first") and held(rank, "param", "first.weight")
    assert not [e for e in rank.entries if "module" in e.name]


def test_two_models(tmp_path: Path) -> None:
    one, two = Net(), Net()
    rank = record(tmp_path / "r", [one, two], lambda: (two(batch()) + one(batch())).sum().backward())
    assert held(rank, "output", "first") and held(rank, "output", "Net.first")
    assert len(held(rank, "param", "Net.last.bias")) == 1


def test_tied_parameters_are_one(tmp_path: Path) -> None:
    class Tied(Net):
        def __init__(self) -> None:
            super().__init__(wide=8)
            self.second = nn.Linear(8, 8)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.second(x))

    net = Tied()
    rank = record(tmp_path / "r", net, lambda: step(net, sgd(net)))
    assert len([e for e in rank.entries if e.kind == "param" and e.name.endswith("weight")]) == 2
    assert len([e for e in rank.entries if e.kind == "main_grad" and e.name.endswith("weight")]) == 2


def test_a_module_that_fails_is_no_concern_of_ours(tmp_path: Path) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("not today")

    class Outer(Net):
        def __init__(self) -> None:
            super().__init__()
            self.fails = Fails()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ValueError):
                self.fails(x)
            return super().forward(x)

    net = Outer()
    rank = record(tmp_path / "r", net, lambda: step(net, sgd(net)))
    assert len(held(rank, "output", "")) == len(held(rank, "output", "last")) == 1


def test_bfloat16_and_odd_tensors(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return x.t() * self.w[0], torch.zeros(0, 3), torch.ones(2, dtype=torch.complex64), torch.ones(()).expand(4)

    net = Odd()
    rank = record(tmp_path / "r", net, lambda: net(torch.ones(2, 3, dtype=torch.bfloat16))[0].sum().backward())
    shapes = {e.slot: (e.dtype, e.shape) for e in held(rank, "output", "")}
    assert shapes == {"0": ("bfloat16", (3, 2)), "1": ("float32", (0, 3)), "3": ("float32", (4,))}
    assert all(rank.array(e).shape == e.shape for e in rank.entries)


def test_noise_is_of_one_rounding_and_repeatable(tmp_path: Path) -> None:
    import numpy as np

    net = Net()
    runs = {}
    for run in ("clean", "noise-0", "noise-1"):
        with trace(net, tmp_path / "r", run=run):
            net(batch()).square().mean().backward()
        net.zero_grad()
        rank = Recording(tmp_path / "r").ranks(run)[0]
        runs[run] = rank.array(held(rank, "output", "first")[0]).copy()
    with trace(net, tmp_path / "r", run="noise-0"):
        net(batch()).square().mean().backward()
    rank = Recording(tmp_path / "r").ranks("noise-0")[0]
    assert np.array_equal(rank.array(held(rank, "output", "first")[0]), runs["noise-0"])
    for run in ("noise-0", "noise-1"):
        error = np.linalg.norm(runs[run] - runs["clean"]) / np.linalg.norm(runs["clean"])
        assert 0.2 * 2**-24 < error < 3 * 2**-24
    assert not np.array_equal(runs["noise-0"], runs["noise-1"])


def test_gradients_before_a_program_scales_them_by_a_norm_of_its_own(tmp_path: Path) -> None:
    net = Net()
    optimizer = sgd(net)

    def train() -> None:
        net(batch()).square().mean().backward()
        torch.nn.utils.clip_grads_with_norm_(net.parameters(), 1e-3, torch.tensor(1.0))
        optimizer.step()

    rank = record(tmp_path / "r", net, train)
    (before,), (after,) = (held(rank, "main_grad", "first.weight", slot=slot) for slot in ("unclipped", ""))
    assert torch.allclose(torch.from_numpy(rank.array(before) * 1e-3), torch.from_numpy(rank.array(after).copy()), rtol=1e-4)


def test_a_gradient_of_a_gradient_is_kept_beside_the_first(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(8, 4), nn.Softplus(), nn.Linear(4, 1))
    optimizer = sgd(net)

    def penalised() -> None:
        x = batch().requires_grad_()
        out = net(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        (out.mean() + (slope.norm(dim=1) - 1).square().mean()).backward()
        optimizer.step()

    plain = nn.Sequential(nn.Linear(8, 4), nn.Softplus(), nn.Linear(4, 1))
    plain.load_state_dict(net.state_dict())
    rank = record(tmp_path / "r", net, penalised)
    back = held(rank, "grad_output", "1")
    assert [e.slot for e in back] == ["", "#1"] and slots_in("0=1#1") == ("0", "1")
    net, optimizer = plain, sgd(plain)
    penalised()
    assert torch.equal(torch.from_numpy(rank.array(held(rank, "main_grad", "0.weight")[0]).copy()), plain[0].weight.grad)


def test_models_that_are_copied_are_found_with_their_parameters(tmp_path: Path) -> None:
    """`deepcopy` runs no constructor: a stage that is a copy of the whole must not count as an unknown module's list of layers."""
    import copy

    collector = Collector(collect_config(tmp_path / "r"))
    collector.install()
    try:
        whole = Net()
        stage = copy.deepcopy(whole)
        stage.last = nn.Linear(16, 4)
        optimizer = sgd(stage)
        step(stage, optimizer)
        assert {n for n, _ in collector.models.parameters() if not n.startswith("Net.")} == {"first.weight", "first.bias", "last.weight", "last.bias"}
        assert any(root is whole for root in collector.models.roots)
    finally:
        collector.end()


def test_parameters_in_flat_tensors_are_said_to_be_beyond_it(tmp_path: Path) -> None:
    class FullyShardedDataParallel(nn.Module):  # FSDP1
        def __init__(self) -> None:
            super().__init__()
            self._fsdp_wrapped_module = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._fsdp_wrapped_module(x)  # type: ignore[no-any-return]

    net = FullyShardedDataParallel()
    with pytest.raises(OracleError, match="FSDP1"):
        record(tmp_path / "r", net, lambda: step(net, sgd(net)))


def collect_config(folder: Path) -> Any:
    from proctor.oracle.collect.config import CollectConfig

    folder.mkdir(parents=True)
    return CollectConfig(folder=str(folder), steps=1)
