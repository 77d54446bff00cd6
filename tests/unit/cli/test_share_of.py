from __future__ import annotations

import pytest

from proctor.cli._parts.budget import share_of
from proctor.errors import UsageError


@pytest.mark.parametrize(("text", "share"), [(None, 0.0), ("none", 0.0), ("1%", 0.01), ("0.5 %", 0.005), ("50%", 0.5)])
def test_a_percentage_is_a_share(text: str | None, share: float) -> None:
    assert share_of(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["1", "-1%", "0%", "90%", "x%", "", "1e3%", "nan%"])
def test_what_is_no_budget_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--budget"):
        share_of(text)
