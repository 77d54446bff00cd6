"""`tensors.h` in Python: oracle of the native one, and what runs where it was not built."""

from __future__ import annotations

from typing import Any


class Tensors:
    """Leaves all reading of tensors to its caller, who can read any; collects what is to be read.

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

    @staticmethod
    def collect(work: list[tuple[Any, Any]], slots: list[Any], force: bool) -> None:
        """Add (slot, tensor) to `work` for each slot whose tensor is to be hashed: all, or those whose version or address moved."""
        for slot in slots:
            t = slot.owner()
            if t is None:
                continue
            if slot.grad:
                if not t.is_leaf:
                    continue  # what was made of others has none
                t = t.grad
                if t is None:
                    if slot.ptr != 0:
                        slot.ptr, slot.version = 0, -1
                        work.append((slot, None))
                    continue
            try:
                version = t._version
            except RuntimeError:  # inference tensors have none
                version = -1
            if slot.sharded:
                t = getattr(t, "_local_tensor", t)
            ptr = t.data_ptr()
            if not force and version == slot.version and ptr == slot.ptr and version >= 0:
                continue
            slot.version, slot.ptr = version, ptr
            work.append((slot, t))
