"""A comparison as one JSON object; its keys are the contract, more may follow."""

from __future__ import annotations

import dataclasses
import json
from typing import Final

from proctor.verify.compare import Comparison

SCHEMA: Final = 1


def render(found: Comparison) -> str:
    """ASCII only, so that no locale can break it."""
    tree = {"schema": SCHEMA, "differs": found.differs, "said": found.said, **dataclasses.asdict(found)}
    return json.dumps(tree, allow_nan=False) + "\n"
