"""False alarms at kinks: healthy networks of ReLUs and maxima on random batches, and what `precision` and `world` of `oracle self` say of them.

    python -m benchmarks.self_kinks [--seeds N]

A unit that lies within rounding of its kink is turned by float64; of a batch with enough units some are. Nothing is wrong with these networks: each `different`
is a false alarm. Batches with a planted edge have a sample whose first sum cancels, so that rounding decides the sign. Exit code 1 if anything is told as broken.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proctor.oracle.selfcheck import NotApplicable, Unknown, registry
from proctor.oracle.selfcheck.watching.fork import random_states
from proctor.oracle.selfcheck.watching.step import Call


class Residual(nn.Module):
    """Two blocks with batch norms and a sum before the ReLU, written by functions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.one, self.two, self.three = (nn.Conv2d(16, 16, 3, padding=1, bias=False) for _ in range(3))
        self.norms, self.head = nn.ModuleList(nn.BatchNorm2d(16) for _ in range(3)), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm(self.stem(x)))
        h = F.relu(h + self.norms[1](self.two(F.relu(self.norms[0](self.one(h))))))
        return self.head(F.relu(self.norms[2](self.three(h))).mean((2, 3)))


class Plain(nn.Module):
    """A perceptron whose first layer meets the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(32, 64, bias=False), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.two(F.relu(self.one(x)))))


class Pooled(nn.Module):
    """Convolutions, maxima over windows, no norms."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1), nn.Linear(32 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(F.relu(self.one(x)), 2)
        return self.head(F.max_pool2d(F.relu(self.two(h)), 2).flatten(1))


class Functional(nn.Module):
    """Parameters and no modules within: nothing has an edge at which noise could be put."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(32, 64) / 6), nn.Parameter(torch.randn(64, 10) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a).clamp(min=0) @ self.b


def image(edge: bool) -> Tensor:
    """Of 16 × 16; with an edge, two channels that cancel but for rounding."""
    return torch.randn(16, 3, 16, 16)


def row(edge: bool) -> Tensor:
    """Of 32 numbers."""
    return torch.randn(64, 32)


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[bool], Tensor]]] = {"residual": (Residual, image), "plain": (Plain, row), "pooled": (Pooled, image), "functional": (Functional, row)}


def at_edge(module: nn.Module, x: Tensor) -> Tensor:
    """The batch with its first sample moved until a sum of the first layer is not zero in float64 alone, or in float32 alone."""
    weight = next(p for p in module.parameters() if p.ndim == 2).detach()
    rows = weight if isinstance(module, Plain) else weight.T
    for w in rows:
        v = x[0].clone()
        v -= w * (v @ w) / (w @ w)
        for at in range(len(v)):
            u = v.clone()
            for _ in range(8):
                u[at] -= float((u.double() @ w.double()) / w[at].double())
                if ((module.one(u[None])[0] if isinstance(module, Plain) else u @ weight) > 0).ne((u.double() @ rows.double().T).reshape(-1) > 0).any():
                    return torch.cat([u[None], x[1:]])
    return x


def verdict(module: nn.Module, x: Tensor, relation: str) -> str:
    """What a relation says of a step."""
    call = Call(module, type(module).__name__, (x,), {}, random_states(), True)
    y = torch.randint(0, 10, (len(x),))
    out = module(x).detach().requires_grad_()
    F.cross_entropy(out, y).backward()
    call.gradients = {"": out.grad}
    call.results = {"": (tuple(out.shape), out.dtype)}
    try:
        return registry()[relation].check(call).verdict
    except Unknown as e:
        return "undecided: kink" if "kink" in str(e) else f"undecided: {e}"
    except NotApplicable:
        return "not applicable"


def main() -> int:
    """Print a line for each kind of network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=40)
    seeds, wrong = parser.parse_args().seeds, 0
    torch.set_num_threads(1)
    for kind, (make, batch) in KINDS.items():
        for edge in (False, True):
            if edge and batch is not row:
                continue
            for relation in ("precision", "world"):
                found, began = Counter[str](), time.monotonic()
                for seed in range(seeds):
                    torch.manual_seed(seed)
                    module = make()
                    x = batch(edge)
                    found[verdict(module, at_edge(module, x) if edge else x, relation)] += 1
                wrong += found["different"]
                print(f"{kind:11} {'edge' if edge else '':5}{relation:10} {dict(found)} {(time.monotonic() - began) / seeds:.2f} s each", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
