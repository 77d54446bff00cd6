"""The seven programs that a budget is measured on.

    python budget_programs.py NAME STEPS          (ddp and fsdp2: under torchrun)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from workloads import Block, Cnn, Gcn, Lm

Loss = Callable[[], torch.Tensor]


class Residual(nn.Module):
    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False), nn.BatchNorm2d(c_out)
        self.conv2, self.bn2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False), nn.BatchNorm2d(c_out)
        self.short = nn.Identity() if stride == 1 and c_in == c_out else nn.Conv2d(c_in, c_out, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + self.short(x))


class ResNet20(nn.Module):
    """He et al. 2016, section 4.2, n = 3."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [Residual(a, b, s) for a, b, s in ((16, 16, 1), (16, 16, 1), (16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 32, 1),
                                                    (32, 64, 2), (64, 64, 1), (64, 64, 1))]
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), *blocks)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


def language(d: int, batch: int, length: int) -> tuple[nn.Module, Loss]:
    model, ids = Lm(256, d, 2), torch.randint(0, 256, (64 * 1024,))

    def loss() -> torch.Tensor:
        at = torch.randint(0, len(ids) - length - 1, (batch,))
        x, y = (torch.stack([ids[i + k : i + k + length] for i in at]) for k in (0, 1))
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return model, loss


def images(model: nn.Module, batch: int, *shape: int) -> tuple[nn.Module, Loss]:
    data = DataLoader(TensorDataset(torch.randn(640, *shape), torch.randint(0, 10, (640,))), batch_size=batch, shuffle=True, drop_last=True)

    def forever() -> Iterator[list[torch.Tensor]]:
        while True:
            yield from data

    batches = forever()

    def loss() -> torch.Tensor:
        x, y = next(batches)
        return F.cross_entropy(model(x), y)

    return model, loss


def graph() -> tuple[nn.Module, Loss]:
    n, features = 2708, 1433  # Cora's size
    edges = torch.randint(0, n, (2, 10_556))
    adjacency = torch.sparse_coo_tensor(edges, torch.full((edges.shape[1],), 0.2), (n, n)).coalesce()
    x, y, model = (torch.rand(n, features) < 0.01).float(), torch.randint(0, 7, (n,)), Gcn(features, 16, 7)
    return model, lambda: F.nll_loss(model(x, adjacency)[:140], y[:140])


def replicas() -> tuple[nn.Module, Loss]:
    torch.distributed.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))
    return model, lambda: F.cross_entropy(model(torch.randn(256, 256)), torch.randint(0, 10, (256,)))


def shards() -> tuple[nn.Module, Loss]:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    model, loss = language(128, 16, 64)
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block)
    fully_shard(model)
    return model, loss


def several(steps: int) -> None:
    """Implicit Q-learning's loop: three models, an optimizer each, and a target that is moved by hand."""

    def net(inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Linear(inputs, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, outputs))

    critic, target, value, actor = net(23, 1), net(23, 1).requires_grad_(False), net(17, 1), net(17, 6)
    optimizers = [torch.optim.Adam(m.parameters(), lr=3e-4) for m in (value, critic, actor)]

    def update(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    for _ in range(steps):
        state, action, reward, then = torch.randn(256, 17), torch.rand(256, 6), torch.randn(256, 1), torch.randn(256, 17)
        both = torch.cat([state, action], 1)
        with torch.no_grad():
            wanted, later = target(both), value(then)
        gain = wanted - value(state)
        update(optimizers[0], (torch.where(gain > 0, 0.7, 0.3) * gain**2).mean())
        update(optimizers[1], F.mse_loss(critic(both), reward + 0.99 * later))
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), critic.parameters(), strict=True):
                ours.lerp_(theirs, 0.005)
        update(optimizers[2], (torch.exp(3 * gain.detach()).clamp(max=100) * (actor(state) - action) ** 2).mean())


def trained(parts: Callable[[], tuple[nn.Module, Loss]]) -> Callable[[int], None]:
    """A program that trains a model for so many steps."""

    def train(steps: int) -> None:
        model, loss_of = parts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        for _ in range(steps):
            optimizer.zero_grad()
            loss = loss_of()
            loss.backward()
            optimizer.step()
        print(f"LOSS {float(loss.detach())!r}")

    return train


PROGRAMS: dict[str, tuple[str, int, Callable[[int], None]]] = {  # what it is, ranks, the program of so many steps
    "lm": ("transformer LM", 1, trained(lambda: language(128, 16, 96))),
    "resnet": ("ResNet-20", 1, trained(lambda: images(ResNet20(), 8, 3, 32, 32))),
    "mnist": ("MNIST CNN", 1, trained(lambda: images(Cnn(), 16, 1, 28, 28))),
    "gcn": ("GCN of Cora's size", 1, trained(graph)),
    "ddp": ("DDP, MLP on 2 ranks", 2, trained(replicas)),
    "fsdp2": ("FSDP2, GPT on 2 ranks", 2, trained(shards)),
    "several": ("Q-learning, three optimizers, of an update", 1, several),
    "short": ("transformer LM, short steps", 1, trained(lambda: language(64, 8, 64))),
}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    PROGRAMS[sys.argv[1]][2](int(sys.argv[2]))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
