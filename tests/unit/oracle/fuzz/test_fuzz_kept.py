"""What ranks keep between tasks: the shape of what an operator returns is asked for once, and is what asking again would give."""

from __future__ import annotations

from collections import namedtuple
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from proctor.oracle.fuzz.running.kept import _asked_once

Meta = namedtuple("Meta", "shape stride dtype")
MESH = SimpleNamespace(device_type="cpu")


def schema(*args: object, **kwargs: object) -> Any:
    return SimpleNamespace(op="aten.add", args_schema=args, kwargs_schema=kwargs)


def cut(*shape: int, dtype: torch.dtype = torch.float64, placement: str = "S0") -> Any:
    return SimpleNamespace(tensor_meta=Meta(shape, tuple(reversed(shape)), dtype), mesh=MESH, placements=placement)


def test_a_shape_is_asked_for_once_whatever_the_placement_is() -> None:
    asked: list[Any] = []
    ask = _asked_once(lambda _, one: asked.append(one) or len(asked))  # type: ignore[func-returns-value]
    assert ask(None, schema(cut(2, 3), 1)) == ask(None, schema(cut(2, 3, placement="R"), 1)) == 1
    different = [
        schema(cut(2, 4), 1), schema(cut(2, 3, dtype=torch.float32), 1), schema(cut(2, 3), 1.0), schema(cut(2, 3), True), schema([cut(2, 3)], 1),
        schema(cut(2, 3), alpha=1), schema(cut(2, 3), beta=1),
    ]
    assert len({ask(None, one) for one in different}) == len(different)


def test_what_raises_or_cannot_be_compared_is_asked_again() -> None:
    asked: list[Any] = []

    def ask(_: Any, one: Any) -> int:
        asked.append(one)
        if len(asked) == 1:
            raise RuntimeError("no such shape")
        return len(asked)

    kept = _asked_once(ask)
    with pytest.raises(RuntimeError, match="no such shape"):
        kept(None, schema(cut(2)))
    assert kept(None, schema(cut(2))) == kept(None, schema(cut(2))) == 2
    value = torch.ones(())
    assert [kept(None, schema(cut(2), value)), kept(None, schema(cut(2), value))] == [3, 4]
