import argparse
import json

import torch
import torch.nn.functional as F
from torch import nn


class GCNConv(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.lin = nn.Linear(inp, out, bias=False)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x, edge_index, edge_weight=None):
        source, target = edge_index
        if edge_weight is None:
            edge_weight = torch.ones(edge_index.shape[1])
        degree = torch.zeros(x.shape[-2]).index_add(0, target, edge_weight) + 1
        scale = degree[source].rsqrt() * edge_weight * degree[target].rsqrt()
        x = self.lin(x)
        out = torch.zeros_like(x).index_add(-2, target, scale[:, None] * x[..., source, :])
        return out + x / degree[:, None] + self.bias


class TemporalGCN(nn.Module):
    conv_args = ("edge_index", "edge_weight")

    def __init__(self, width):
        super().__init__()
        self.conv1, self.conv2 = GCNConv(1, width), GCNConv(width, width)
        self.cell = nn.GRUCell(width, width)
        self.out = nn.Linear(width, 1)

    def forward(self, series, graph):
        given = {name: graph[name] for name in self.conv_args}
        nodes, steps = series.shape
        h = torch.zeros(nodes, self.cell.hidden_size)
        for t in range(steps):
            x = F.relu(self.conv1(series[:, t : t + 1], **given))
            h = self.cell(F.relu(self.conv2(x, **given)), h)
        return self.out(h).squeeze(1)


def main(args):
    generator = torch.Generator().manual_seed(args.seed + 1)
    places = torch.rand(14, 2, generator=torch.Generator().manual_seed(3))
    distance = torch.cdist(places, places)
    near = distance.topk(4, largest=False).indices[:, 1:]
    edge_index = torch.stack([near.flatten(), torch.arange(14).repeat_interleave(3)])
    graph = {"edge_index": edge_index, "edge_weight": (-distance[edge_index[0], edge_index[1]] / 0.2).exp()}
    mixing = torch.zeros(14, 14).index_put((edge_index[1], edge_index[0]), graph["edge_weight"])
    model = TemporalGCN(args.width)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(args.steps):
        series = [torch.randn(14, generator=generator)]
        for _ in range(6):
            series.append(0.5 * series[-1] + 0.4 * mixing @ series[-1] + 0.1 * torch.randn(14, generator=generator))
        series = torch.stack(series, 1)
        loss = F.mse_loss(model(series[:, :-1], graph), series[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print("RESULT " + json.dumps({"losses": losses}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    main(args)
