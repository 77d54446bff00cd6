"""`tensors.h` in Python: oracle of the native one, and what runs where it was not built."""

from __future__ import annotations

from typing import Any


class Tensors:
    """Leaves all reading of tensors to its caller, who can read any.

    Args:
        tensor, parameter, strided, formats, summary: as `tensors.h` needs them.
    """

    def __init__(self, tensor: type, parameter: type, strided: Any, formats: dict[Any, tuple[int, int]], summary: type) -> None:
        del tensor, parameter, strided, formats, summary

    def summaries(self, tensors: list[Any]) -> list[Any]:
        """None for each: it is not read here."""
        return [None] * len(tensors)

    def number(self, tensor: Any) -> Any:
        """`NotImplemented`: it is not read here."""
        del tensor
        return NotImplemented

    def spots(self, tensor: Any, size: int) -> Any:
        """None: it is not read here."""
        del tensor, size
