"""What the files say that a program has loaded."""

from __future__ import annotations

import sys
from pathlib import Path

from proctor.oracle.selfcheck.watching.parting import SKIP


def loaded_text_has(word: bytes, *, libraries: bool) -> bool:
    """Whether the text of anything that is loaded, beside torch and us, has a word; that of installed packages only with `libraries`."""
    for module in sys.modules.copy().values():
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or not path.endswith(".py") or path.startswith(SKIP):
            continue
        if not libraries and ("site-packages" in path or path.startswith(sys.base_prefix)):
            continue
        try:
            if word in Path(path).read_bytes():
                return True
        except OSError:
            continue
    return False
