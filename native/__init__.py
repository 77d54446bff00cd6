"""Hot loops: fingerprints of tensor memory, comparison of two, the call tap, rows of a trace as bytes, equal values, random
numbers, and which objects live. No policy, no torch headers.

`ACTIVE` says which implementation runs: "native", or "python" where the extension is missing or
`PROCTOR_NATIVE=0` is set.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from proctor.native.twins.tap import ModuleReference

__all__ = [
    "ACTIVE",
    "Chain",
    "ModuleReference",
    "Packer",
    "Recorder",
    "Slot",
    "Tap",
    "Tensors",
    "compare_buffers",
    "fingerprint_backend",
    "fingerprint_backends",
    "fingerprint_buffer",
    "fingerprint_many",
    "first_seen",
    "holders",
    "holds",
    "is_tap",
    "living",
    "look",
    "pack_tables",
    "philox_normal",
    "philox_unit",
    "philox_words",
]

if TYPE_CHECKING:
    from proctor.native._native import (
        Chain,
        Packer,
        Recorder,
        Slot,
        Tap,
        Tensors,
        compare_buffers,
        fingerprint_backend,
        fingerprint_backends,
        fingerprint_buffer,
        fingerprint_many,
        first_seen,
        holders,
        holds,
        is_tap,
        living,
        look,
        pack_tables,
        philox_normal,
        philox_unit,
        philox_words,
    )

    ACTIVE: str
else:
    try:
        if os.environ.get("PROCTOR_NATIVE") == "0":
            raise ImportError("PROCTOR_NATIVE=0")
        from proctor.native._native import (
            Chain,
            Packer,
            Recorder,
            Slot,
            Tap,
            Tensors,
            compare_buffers,
            fingerprint_backend,
            fingerprint_backends,
            fingerprint_buffer,
            fingerprint_many,
            first_seen,
            holders,
            holds,
            is_tap,
            living,
            look,
            pack_tables,
            philox_normal,
            philox_unit,
            philox_words,
        )

        ACTIVE = "native"
    except ImportError:
        from proctor.native.twins.chain import Chain
        from proctor.native.twins.columns import Packer, pack_tables
        from proctor.native.twins.compare import compare_buffers
        from proctor.native.twins.distinct import first_seen
        from proctor.native.twins.fingerprint import (
            fingerprint_backend,
            fingerprint_backends,
            fingerprint_buffer,
            fingerprint_many,
        )
        from proctor.native.twins.living import holders, living
        from proctor.native.twins.philox import philox_normal, philox_unit, philox_words
        from proctor.native.twins.slots import Slot, holds, look
        from proctor.native.twins.tap import Recorder, Tap, is_tap
        from proctor.native.twins.tensors import Tensors

        ACTIVE = "python"
