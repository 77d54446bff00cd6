"""Semi-supervised paper classification on a citation graph with a graph convolutional network (Kipf & Welling).

Full-batch Adam with weight decay on the first layer, sparse adjacency, train/val/test node masks,
best-on-validation weights kept and restored for the final test. The graph is generated: papers cite mostly their own field.

Class: tabular
"""
import argparse
import copy
import json
import math

import torch
import torch.nn.functional as F
from torch import nn


def citation_graph(nodes, fields, words, seed):
    """Return bag-of-words features (nodes, words), labels (nodes,) and an undirected edge list (2, edges)."""
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, fields, (nodes,), generator=g)
    same = labels[:, None] == labels[None, :]
    probability = torch.where(same, 6.0 / nodes * fields / 2, 1.0 / nodes)
    upper = torch.triu(torch.rand(nodes, nodes, generator=g) < probability, diagonal=1)
    src, dst = upper.nonzero(as_tuple=True)
    topics = torch.rand(fields, words, generator=g) ** 4 * 0.25
    features = (torch.rand(nodes, words, generator=g) < topics[labels] + 0.02).float()
    return features, labels, torch.stack([torch.cat([src, dst]), torch.cat([dst, src])])


def normalized_adjacency(edges, nodes):
    """Symmetrically normalised adjacency with self loops, D^-1/2 (A + I) D^-1/2, as a sparse tensor."""
    loops = torch.arange(nodes).repeat(2, 1)
    index = torch.cat([edges, loops], dim=1)
    degree = torch.bincount(index[0], minlength=nodes).float()
    weight = degree[index[0]].rsqrt() * degree[index[1]].rsqrt()
    return torch.sparse_coo_tensor(index, weight, (nodes, nodes), check_invariants=False).coalesce()


class GraphConvolution(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cin, cout))
        self.bias = nn.Parameter(torch.empty(cout))
        bound = 1 / math.sqrt(cout)
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x, adj):
        return torch.sparse.mm(adj, x @ self.weight) + self.bias


class GCN(nn.Module):
    def __init__(self, words, hidden, fields, dropout):
        super().__init__()
        self.gc1 = GraphConvolution(words, hidden)
        self.gc2 = GraphConvolution(hidden, fields)
        self.dropout = dropout

    def forward(self, x, adj):
        x = F.relu(self.gc1(x, adj))
        x = F.dropout(x, self.dropout, training=self.training)
        return F.log_softmax(self.gc2(x, adj), dim=1)


@torch.no_grad()
def accuracy(model, x, adj, labels, mask):
    model.eval()
    return (model(x, adj)[mask].argmax(1) == labels[mask]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=16)
    parser.add_argument("--nodes", type=int, default=500)
    parser.add_argument("--fields", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=20, help="labelled papers of each field")
    parser.add_argument("--lr", type=float, default=0.02)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    x, y, edges = citation_graph(args.nodes, args.fields, 120, args.seed)
    x = x / x.sum(1, keepdim=True).clamp(min=1)
    adj = normalized_adjacency(edges, args.nodes)

    train_mask = torch.zeros(args.nodes, dtype=torch.bool)
    for c in range(args.fields):
        train_mask[(y == c).nonzero().flatten()[: args.batch_size]] = True
    rest = (~train_mask).nonzero().flatten()
    rest = rest[torch.randperm(len(rest))]
    val_mask = torch.zeros_like(train_mask)
    test_mask = torch.zeros_like(train_mask)
    val_mask[rest[: len(rest) // 3]] = True
    test_mask[rest[len(rest) // 3:]] = True

    model = GCN(x.shape[1], args.hidden, args.fields, dropout=0.3)
    optimizer = torch.optim.Adam(
        [{"params": model.gc1.parameters(), "weight_decay": 5e-4}, {"params": model.gc2.parameters()}], lr=args.lr
    )

    losses, val = [], []
    best, best_state = -1.0, None
    for it in range(args.iters):
        model.train()
        model.zero_grad()
        out = model(x, adj)
        loss = F.nll_loss(out[train_mask], y[train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

        val.append(accuracy(model, x, adj, y, val_mask))
        if val[-1] > best:
            best, best_state = val[-1], copy.deepcopy(model.state_dict())
        if (it + 1) % 10 == 0:
            print(f"iter {it + 1} loss {losses[-1]:.4f} val {val[-1]:.3f}", flush=True)

    model.load_state_dict(best_state)
    test = accuracy(model, x, adj, y, test_mask)
    print(f"best val {best:.3f} test {test:.3f}", flush=True)
    param_sum = sum(p.detach().double().abs().sum().item() for p in model.parameters())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "val": val, "test": test}), flush=True)


if __name__ == "__main__":
    main()
