"""safetensors: files of tensors, written and read."""

from __future__ import annotations

LIBRARY = "safetensors.torch"
TRIED = ("0.8.0", "0.8.0")
POINTS: dict[str, dict[str, tuple[str, ...]]] = {
    "safetensors.torch": {"save_file": (), "save_model": (), "load_file": (), "load_model": ()},
}
