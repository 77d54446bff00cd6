"""Small synthetic files under the names that programs read: a text, names, tokens, documents. Made anew for every run, always alike."""

from __future__ import annotations

import json
import random
import string
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final

_WORDS: Final = "the a model of loss and step to learn data in batch with rate is at layer from head".split()


def _text(path: Path, sentences: int = 400) -> None:
    rng = random.Random(0)
    lines = (" ".join(rng.choices(_WORDS, k=rng.randint(4, 12))).capitalize() + "." for _ in range(sentences))
    # Programs that generate begin with a phrase of the real text: every letter is in this one.
    path.write_text("\n".join([*lines, f"{string.ascii_letters} {string.digits} {string.punctuation}"]) + "\n")


def _names(path: Path) -> None:
    rng = random.Random(0)
    made = {"".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(3, 8))) for _ in range(3000)}
    path.write_text("\n".join(sorted(made)) + "\n")


def _tokens(path: Path, count: int = 20_000, vocabulary: int = 50) -> None:
    rng = random.Random(0)
    path.write_bytes(struct.pack(f"<{count}H", *(rng.randrange(vocabulary) for _ in range(count))))


def _documents(path: Path, count: int = 1000) -> None:
    rng = random.Random(0)
    path.write_text("".join(json.dumps({"text": " ".join(rng.choices(_WORDS, k=rng.randint(40, 400)))}) + "\n" for _ in range(count)))


MAKERS: Final[dict[str, Callable[[Path], None]]] = {"text": _text, "names": _names, "tokens": _tokens, "documents": _documents}


def make(folder: Path, wanted: dict[str, str]) -> None:
    """Write files below a folder.

    Args:
        folder: working directory of a program.
        wanted: name to kind.

    Raises:
        KeyError: no such kind.
    """
    for name, kind in wanted.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        MAKERS[kind](path)
