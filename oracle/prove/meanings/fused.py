"""Optimizers whose step is one operation on lists: Adam, AdamW, SGD and Adagrad, as their papers and torch's loops have them."""

from __future__ import annotations

from typing import Any

import numpy as np

from proctor.oracle.prove.meanings import Context, meaning
from proctor.oracle.prove.meanings.pointwise import inverse
from proctor.oracle.prove.tape import Array


def _lists(cx: Context, *lists: Any) -> list[list[Array]]:
    return [[cx.f(a) for a in one] for one in lists]


def _plain(**named: Any) -> None:
    """Refuse what scales gradients inside.

    Raises:
        NotImplementedError: it does.
    """
    if named.get("grad_scale") is not None or named.get("found_inf") is not None:
        raise NotImplementedError("a fused step that scales gradients")


def _corrections(cx: Context, lr: float, one: float, two: float, steps: Array) -> tuple[Array, Array]:
    """How far a step goes, and 1/√(1 - β₂ᵗ): at a first step the numbers that the loop of many operators has."""
    d = cx.d
    if np.array_equal(np.asarray(steps).reshape(-1), np.asarray(cx.f(1)).reshape(-1)):
        return np.asarray(cx.f(lr / (1 - one))), inverse(cx, (1 - two) ** 0.5)
    powers = [d.apply("pow", *np.broadcast_arrays(cx.f(beta), steps)) for beta in (one, two)]
    first, second = (d.sub(cx.f(1), power) for power in powers)
    return d.mul(cx.f(lr), d.inv(first)), d.inv(d.apply("sqrt", second))


def _adam(decoupled: bool) -> Any:
    def step(cx: Context, params: Any, grads: Any, firsts: Any, seconds: Any, most: Any, steps: Any, **named: Any) -> tuple[Array, ...]:
        _plain(**named)
        if named.get("amsgrad"):
            raise NotImplementedError("amsgrad")
        d = cx.d
        one, two, decay, eps = (cx.f(named.get(k, 0.0)) for k in ("beta1", "beta2", "weight_decay", "eps"))
        found: tuple[list[Array], ...] = ([], [], [])
        for p, g, m, v, t in zip(*_lists(cx, params, grads, firsts, seconds, steps)):
            if named.get("maximize"):
                g = d.mul(g, cx.f(-1))
            if decoupled:
                p = d.mul(p, cx.f(1 - named["lr"] * named["weight_decay"]))
            elif named.get("weight_decay"):
                g = d.add(g, d.mul(p, decay))
            m = d.add(d.mul(one, m), d.mul(cx.f(1 - named["beta1"]), g))
            v = d.add(d.mul(two, v), d.mul(cx.f(1 - named["beta2"]), d.square(g)))
            step_size, corrected = _corrections(cx, named["lr"], named["beta1"], named["beta2"], t)
            denominator = d.add(d.mul(d.apply("sqrt", v), corrected), eps)
            p = d.sub(p, d.mul(step_size, d.mul(m, d.inv(denominator))))
            for where, value in zip(found, (p, m, v)):
                where.append(value)
        return (*found[0], *(cx.f(g) for g in grads), *found[1], *found[2])

    return step


meaning("_fused_adam")(_adam(decoupled=False))
meaning("_fused_adamw")(_adam(decoupled=True))


@meaning("_fused_sgd")
def _sgd(cx: Context, params: Any, grads: Any, momenta: Any, **named: Any) -> tuple[Array, ...]:
    _plain(**named)
    d = cx.d
    lr, decay, momentum, dampening = (cx.f(named.get(k, 0.0)) for k in ("lr", "weight_decay", "momentum", "dampening"))
    after, buffers = [], []
    for k, (p, given) in enumerate(zip(*_lists(cx, params, grads))):
        g = d.mul(given, cx.f(-1)) if named.get("maximize") else given
        if named.get("weight_decay"):
            g = d.add(g, d.mul(p, decay))
        if named.get("momentum"):
            held = g if named.get("is_first_step") else d.add(d.mul(cx.f(momenta[k]), momentum), d.mul(g, d.sub(cx.f(1), dampening)))
            buffers.append(held)
            g = d.add(g, d.mul(held, momentum)) if named.get("nesterov") else held
        after.append(d.sub(p, d.mul(lr, g)))
    return (*after, *(cx.f(g) for g in grads), *buffers)


@meaning("_fused_adagrad")
def _adagrad(cx: Context, params: Any, grads: Any, sums: Any, steps: Any, **named: Any) -> tuple[Array, ...]:
    _plain(**named)
    d = cx.d
    lr, lr_decay, decay, eps = (cx.f(named.get(k, 0.0)) for k in ("lr", "lr_decay", "weight_decay", "eps"))
    after, held = [], []
    for p, g, total, t in zip(*_lists(cx, params, grads, sums, steps)):
        if named.get("maximize"):
            g = d.mul(g, cx.f(-1))
        if named.get("weight_decay"):
            g = d.add(g, d.mul(p, decay))
        rate = d.mul(lr, d.inv(np.asarray(d.add(cx.f(1), d.mul(d.sub(t, cx.f(1)), lr_decay)))))
        total = d.add(total, d.square(g))
        after.append(d.sub(p, d.mul(rate, d.mul(g, d.inv(d.add(d.apply("sqrt", total), eps))))))
        held.append(total)
    return (*after, *(cx.f(g) for g in grads), *held, *(cx.f(t) for t in steps))
