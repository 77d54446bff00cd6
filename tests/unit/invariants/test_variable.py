"""Names of tensors without what wrappers put into them."""

from __future__ import annotations

import pytest

from proctor.invariants.codec.variable import unwrapped


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fc.weight", "fc.weight"),
        ("module.fc.weight", "fc.weight"),
        ("module", ""),
        ("_orig_mod", ""),
        ("", ""),
        (".", "."),
        ("_orig_mod.module.fc.weight", "fc.weight"),
        ("module._forward_module.fc.weight", "fc.weight"),
        ("blocks.0._checkpoint_wrapped_module.fc.weight", "blocks.0.fc.weight"),
        ("encoder.module.weight", "encoder.weight"),
        ("_modulation.weight", "_modulation.weight"),
    ],
)
def test_names_without_wrappers(name: str, expected: str) -> None:
    assert unwrapped(name) == expected
