"""A torch that is too old for a part of the oracle is said in one line, before anything begins."""

from __future__ import annotations

import pytest

from proctor.errors import OracleError
from proctor.oracle import torch_version


@pytest.mark.parametrize(("found", "fits"), [("2.3.1+cu121", False), ("2.8.0", False), ("2.9.0", True), ("2.13.0+cpu", True), ("3.0.0", True)])
def test_an_older_torch_is_said(found: str, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_version, "version", lambda _: found)
    if fits:
        torch_version.require_torch("oracle fuzz")
        return
    with pytest.raises(OracleError, match=r"oracle fuzz needs torch 2\.9 or later, and 2\.[38]"):
        torch_version.require_torch("oracle fuzz")


def test_no_torch_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise torch_version.PackageNotFoundError(name)

    monkeypatch.setattr(torch_version, "version", absent)
    with pytest.raises(OracleError, match="needs torch, which is not installed"):
        torch_version.require_torch("oracle fuzz")
