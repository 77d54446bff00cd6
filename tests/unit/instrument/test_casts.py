"""Autocast is read alike on an old torch and a new one."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
import torch

from proctor.instrument.observe import casts


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("old", [False, True])
def test_autocast_of_the_cpu_is_seen(old: bool) -> None:
    enabled, dtype = casts._of_old_torch() if old else (casts.autocast_enabled, casts.autocast_dtype)
    assert not enabled("cpu") and not enabled("cuda")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert enabled("cpu") and dtype("cpu") == torch.bfloat16 and not enabled("cuda")
    assert not enabled("cpu")
