"""Fit a smooth curve with a small functional network (plain tensors, no nn.Module) by L-BFGS with a closure.

Full batch, strong-Wolfe line search, several loss evaluations inside each optimizer step, double precision,
held-out error printed on the way. `--iters` counts calls of `optimizer.step(closure)`.

Class: tabular
"""
import argparse
import itertools
import json

import torch


def observations(count, generator):
    """Damped oscillation with noise, x in [-1, 1]."""
    x = torch.rand(count, 1, generator=generator, dtype=torch.float64) * 2 - 1
    y = torch.exp(-x) * torch.sin(5 * x) + 0.05 * torch.randn(count, 1, generator=generator, dtype=torch.float64)
    return x, y


def init_params(sizes):
    params = {}
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        weight = torch.randn(fan_out, fan_in, dtype=torch.float64) / fan_in ** 0.5
        params[f"w{i}"] = weight.requires_grad_()
        params[f"b{i}"] = torch.zeros(fan_out, dtype=torch.float64, requires_grad=True)
    return params


def forward(params, x):
    depth = len(params) // 2
    for i in range(depth):
        x = torch.nn.functional.linear(x, params[f"w{i}"], params[f"b{i}"])
        if i < depth - 1:
            x = torch.tanh(x)
    return x


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iters", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hidden", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=200, help="observations (the whole set is one batch)")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--l2", type=float, default=1e-5)
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    x, y = observations(args.batch_size, generator)
    x_test, y_test = observations(100, generator)

    params = init_params([1, args.hidden, args.hidden, 1])
    optimizer = torch.optim.LBFGS(
        list(params.values()), lr=args.lr, max_iter=4, history_size=10, line_search_fn="strong_wolfe"
    )
    evaluations = 0

    def closure():
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        penalty = sum((p ** 2).sum() for name, p in params.items() if name.startswith("w"))
        loss = ((forward(params, x) - y) ** 2).mean() + args.l2 * penalty
        loss.backward()
        return loss

    losses = []
    for it in range(1, args.iters + 1):
        loss = optimizer.step(closure)
        losses.append(loss.item())
        if it % 5 == 0:
            with torch.no_grad():
                test = ((forward(params, x_test) - y_test) ** 2).mean().item()
            print(f"iter {it} loss {losses[-1]:.6f} test {test:.6f} evaluations {evaluations}", flush=True)

    param_sum = sum(p.detach().abs().sum().item() for p in params.values())
    print("RESULT " + json.dumps({"losses": losses, "param_sum": param_sum, "evaluations": evaluations}), flush=True)


if __name__ == "__main__":
    main()
