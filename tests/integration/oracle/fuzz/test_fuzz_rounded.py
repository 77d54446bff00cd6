"""What was told falsely for its rounding alone is said to be that, on real ranks; a bug that is planted in a coarse precision is told."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.fuzzing import alone

# Each was a false finding of a campaign, and had a rule of its own: the larger of two values that are one in bfloat16, and a step size that is rounded at each operation.
TOLD_FALSELY = (
    ("dlrm", {"rows": 9, "width": 8, "mode": "max"}, {"batch": 4, "steps": 1, "seed": 20}, {"wrapper": "fsdp1", "fsdp1_policy": "param_dtype=torch.bfloat16"}),
    ("transformer", {}, {"steps": 3}, {"optimizer": "ASGD", "option": "alpha=0.375", "implementation": "foreach=True"}),
)


@pytest.mark.parametrize("parts", TOLD_FALSELY, ids=lambda p: p[0])
def test_what_differs_by_rounding_is_no_finding(parts: tuple[object, ...], tmp_path: Path) -> None:
    said = alone(
        f"""
        with Worlds(timeout_s=200) as worlds:
            outcome = Runner(worlds).run(Scenario(*{parts!r}))
        assert outcome.verdict == "rounding" and outcome.first.error > outcome.first.allowed, outcome
        assert "one process moves it by" in outcome.why, outcome.why
        """,
        tmp_path,
    )
    assert not said


def test_a_bug_in_a_coarse_precision_is_more_than_rounding(tmp_path: Path) -> None:
    """The hook that DDP calls sums where it should average, under autocast to bfloat16."""
    said = alone(
        """
        with Worlds(timeout_s=200, prepare=ddp_sums) as worlds:
            for template in ("chain", "transformer"):
                outcome = Runner(worlds).run(Scenario(template, {}, {"batch": 8}, {"world": 2, "wrapper": "ddp", "precision": "autocast"}))
                assert outcome.verdict == "inconsistent" and outcome.first.step == 0, outcome
                assert 0 < outcome.first.noise < outcome.first.error / 4, outcome
        """,
        tmp_path,
    )
    assert not said
