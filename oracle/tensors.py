"""What is said of a recorded tensor, of what a module drew, and of what an optimizer was told: the words that all rooms of the oracle share.

A process writes these, beside the tensors themselves (`store`); plans, merging and judging go by them. Knows no torch and no file.
"""

from __future__ import annotations

import json
from typing import Final

import msgspec

RAW: Final[dict[str, tuple[str, str]]] = {  # safetensors' name → numpy's layout, torch's name
    "F64": ("<f8", "float64"),
    "F32": ("<f4", "float32"),
    "F16": ("<f2", "float16"),
    "BF16": ("<u2", "bfloat16"),
    "F8_E4M3": ("u1", "float8_e4m3fn"),
    "F8_E5M2": ("u1", "float8_e5m2"),
    "I64": ("<i8", "int64"),
    "I32": ("<i4", "int32"),
    "I16": ("<i2", "int16"),
    "I8": ("i1", "int8"),
    "U8": ("u1", "uint8"),
    "BOOL": ("?", "bool"),
}
MASTER: Final = "master"  # slot of an optimizer's own copy of a parameter
NOT_SCORED: Final = 1.0  # in the place of a log-probability that is not known; none is above 0
SHARED: Final = "="  # between places of one tensor
DTYPES: Final = tuple(name for _, name in RAW.values())  # what can be recorded, by torch's names
EVALUATION: Final = "evaluation"
DRAWN: Final = ("keyed", "stock")  # `--rng`: what is drawn is one device's, and nothing is kept from dropping
FORWARD: Final = "forward"  # … of a program that is looked at for its forwards alone
LATER: Final = "#"  # before the number of a further gradient that comes back past one edge in one call


def later(slot: str) -> int:
    """Which gradient past an edge in one call a slot names, from 0."""
    number = slot.partition(LATER)[2]
    return int(number) if number.isdigit() else 0


def slots_in(slot: str) -> tuple[str, ...]:
    """The places in which a tensor crossed an edge: one, or as in `attention(x, x, x)` several, whose gradient is one."""
    return tuple(slot.partition(LATER)[0].split(SHARED))


class Placement(msgspec.Struct, frozen=True):
    """How a DTensor lies on its mesh: one placement an axis, as torch prints them, and the shape of the whole."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    placements: tuple[str, ...]
    shape: tuple[int, ...]


class Entry(msgspec.Struct, frozen=True):
    """One recorded tensor.

    Attributes:
        step: optimizer updates before it.
        call: how often its module had been called in this step (the microbatch); of its rank.
        kind: `input`, `output`, `grad_input`, `grad_output`, `score` and `choice` (what a module chose by, and which; along the last
            dimension), `dropped` and `mask` (what dropout acts on, and which elements stay), `param` (before the step), `main_grad` (as the optimizer takes it), `param_after`, `opt_state`,
            `buffer` (before the first step), `buffer_after` (where a step changed it), `scalar`; of forwards alone with statistics `param_as` (`param` rounded to
            the type in `slot`) and `logprob` (of the tokens that were read).
        name: path of the module or parameter, without wrappers such as DDP's `module.`.
        slot: place in nested inputs and outputs, of a gradient the places of the one tensor that it belongs to (`slots_in`); name of an
            optimizer state.
        source: `file:line` of the module's forward.
        shape: of the local tensor.
        order: when it was recorded, counted by the process.
        placement: of a DTensor.
        span: elements `[start, stop)` of the flattened local parameter (flat shards of ZeRO).
        recompute: recorded while activations were computed again.
        fp8: its module casts to 8-bit floats inside.
        phase: `EVALUATION` of a forward without gradients; "" of training.
        tile: elements along each dimension that one recorded number is a sum over (`numbers/tiles.py`), where only statistics were recorded; () for a whole
            tensor. `shape` and `dtype` are then those of the sums.
        of: type of the tensor itself, where that is not `dtype`.
        stats: of all elements of the local tensor: how many, sum, sum of squares, least, greatest (of those that are finite), how many are not finite.
    """

    step: int
    call: int
    kind: str
    name: str
    slot: str
    cls: str
    source: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    tensor: str
    order: int
    placement: Placement | None = None
    span: tuple[int, int] | None = None
    recompute: bool = False
    fp8: bool = False
    phase: str = ""
    tile: tuple[int, ...] = ()
    of: str = ""
    stats: tuple[float, ...] = ()

    @property
    def precision(self) -> str:
        """The type that its values were rounded to."""
        return self.of or self.dtype


class OptimizerGroup(msgspec.Struct, frozen=True):
    """What an optimizer was told for some parameters.

    Attributes:
        step: of the run.
        optimizer: its class.
        values: learning rate, weight decay and the like; `betas.0` is the first of several.
        params: names, as this rank has them.
    """

    step: int
    optimizer: str
    values: dict[str, float]
    params: list[str]


class Clip(msgspec.Struct, frozen=True):
    """A call of `clip_grad_norm_`.

    Attributes:
        step: of the run.
        norm: that it returned; not a number where that was not finite.
        max_norm: `None` for no limit.
        norm_type: as text; "2.0" is the usual one.
        params: names, as this rank has them.
    """

    step: int
    norm: float | None
    max_norm: float | None
    norm_type: str
    params: list[str]


class Draw(msgspec.Struct, frozen=True):
    """A call that drops elements by chance, or would if its probability were not 0.

    Attributes:
        step, call, module: where; of its rank.
        slot: what does it, and which of the module's it is.
        p: probability of being dropped; 0 where it is switched off.
        mask: digest of what was drawn, "" where that is not known.
        recompute: while activations were computed again.
        phase: as of an entry.
        shape: of the local tensor that is dropped from.
        begins: digest of the generator's state before it drew.
    """

    step: int
    call: int
    module: str
    slot: str
    p: float
    mask: str = ""
    recompute: bool = False
    phase: str = ""
    shape: tuple[int, ...] = ()
    begins: str = ""


class Part(msgspec.Struct, frozen=True):
    """A rank's part of a draw (`--rng`).

    Attributes:
        step, module: where; of the reference.
        draw: which one it is.
        held: digest of the elements that the rank holds.
        begins: digest of the state of the program's own generator.
    """

    step: int
    module: str
    draw: str
    held: str
    begins: str


def key_of(step: int, kind: str, name: str, slot: str, call: int) -> str:
    """How a value that a process is given (`force`, `decisions`) is called in its rank's file."""
    return json.dumps([step, kind, name, slot, call])
