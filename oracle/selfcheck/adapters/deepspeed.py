"""deepspeed: a configuration with half the batch and twice the accumulation, and one with another stage of ZeRO, make the same update.

The batch is varied only where deepspeed makes the loader, since it counts parts by itself; the stage only in single precision, where it changes nothing but where state lies.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any, Final

from proctor.oracle.selfcheck.adapters import Adapter, offer, register

_SIZES: Final = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_STAGES: Final = {0: 1, 1: 0, 2: 1}  # what each is held against; the third cuts parameters where they are made


@register
class DeepspeedAdapter(Adapter):
    """Works on the configuration that `initialize` gets, a dictionary or a file."""

    library = "deepspeed"

    def look(self) -> None:
        """As `Adapter.look`."""

        def note(config: dict[str, Any], given: dict[str, Any]) -> None:
            for name, said, _ in _changes(config, given):
                offer(self.library, name, said)

        _wrap(note)

    def change(self, axis: str) -> None:
        """As `Adapter.change`."""
        _wrap(lambda config, given: next((made for name, _, made in _changes(config, given) if name == axis), None))


def _wrap(act: Any) -> None:
    """Call `act` with the configuration and all arguments; what it returns is the configuration from then on."""
    import wrapt

    def initialize(original: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        place = next((k for k in ("config", "config_params") if kwargs.get(k) is not None), "")
        given = kwargs.get(place)
        config = json.loads(Path(given).read_text()) if isinstance(given, str) and Path(given).exists() else given
        made = act(copy.deepcopy(config), kwargs) if isinstance(config, dict) else None
        return original(*args, **(kwargs if made is None else {**kwargs, place: made}))

    wrapt.wrap_function_wrapper("deepspeed", "initialize", initialize)


def _changes(config: dict[str, Any], given: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, words and configuration of each change that must not matter."""
    found = []
    size, parts = (config.get(key) for key in _SIZES)
    parts = 1 if parts is None else parts
    if given.get("training_data") is not None and isinstance(size, int) and isinstance(parts, int) and size % 2 == 0:
        half = {**config, _SIZES[0]: size // 2, _SIZES[1]: 2 * parts}
        found.append(("accumulation", f"deepspeed: batches of {size} in {parts} parts against {size // 2} in {2 * parts}", half))
    stage = config.get("zero_optimization", {}).get("stage", 0)
    short = any(config.get(kind, {}).get("enabled") for kind in ("fp16", "bf16", "bfloat16"))
    if stage in _STAGES and not short:
        other = {**config, "zero_optimization": {**config.get("zero_optimization", {}), "stage": _STAGES[stage]}}
        found.append(("stage", f"deepspeed: ZeRO stage {stage} against {_STAGES[stage]}", other))
    return found
