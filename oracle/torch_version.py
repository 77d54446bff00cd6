"""What a part of the oracle needs of torch, said in one line before it begins. `record`, `watch`, `check` and `oracle run` need no more than the package does."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from proctor.errors import OracleError

WITH_DTENSOR: Final = (2, 9)  # DTensor in its public place, its operators, and kernels that can be replaced: the oldest that was tried


def require_torch(what: str, least: tuple[int, int] = WITH_DTENSOR) -> None:
    """Raise where the installed torch is older.

    Raises:
        OracleError: it is, or there is none.
    """
    needed = ".".join(map(str, least))
    try:
        found = version("torch")
    except PackageNotFoundError:
        raise OracleError(f"{what} needs torch, which is not installed here", hint=f"install torch {needed} or later") from None
    if tuple(int(part) for part in found.split(".")[:2]) < least:
        raise OracleError(f"{what} needs torch {needed} or later, and {found} is installed here", hint=f"upgrade torch to {needed} or later")
