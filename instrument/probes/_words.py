"""Words that are true of a tensor, and words that are clearly not: used by `manners.py`.

What comes out for a matrix of probabilities: `(["it has more than one value", "it lies within 0 and 1", "it is not negative", "its rows sum to 1"], ["its rows have length 1"])`.
"""

from __future__ import annotations

from typing import Any, Final

from proctor.instrument.probes._repeats import halves, node_of, was_joined
from proctor.instrument.probes.graphs import kind_of

FEWEST: Final = 8  # elements
_SEVERAL: Final = 4  # values
_VALUES: Final = 1024  # elements whose values are counted
_PLACES: Final = 4  # rows of a mask
_HIDDEN: Final = -1e3  # in a mask that is added to scores
_TRIANGLE: Final = {-1: "one place before", 0: "on", 1: "right behind", 2: "one place more behind"}
_NEAR: Final = 2.0  # standard deviations from the mean to the border: of numbers that know no border some would be beyond
_BEHIND: Final = 6  # nodes of a graph
_SHARES: Final = frozenset({"Sigmoid", "Softmax", "Hardsigmoid"})
_POSITIVE: Final = _SHARES | frozenset("Relu Abs Exp Exp2 Softplus LinalgVectorNorm Norm Cdist BinaryCrossEntropy BinaryCrossEntropyWithLogits NllLoss NllLoss2D MseLoss".split())
_PASSED: Final = frozenset("View UnsafeView ReshapeAlias Clone Expand Transpose T Permute Select Slice Squeeze Unsqueeze ToCopy Alias Mean Sum Unbind Split Sqrt AsStrided".split())


def words(tensor: Any) -> tuple[list[str], list[str]]:
    """Words that are true of a tensor, and those that are clearly not; of others it says nothing."""
    import torch

    if tensor.numel() < FEWEST or (tensor.is_floating_point() and tensor.itemsize == 1):  # torch counts no values of float8
        return [], []
    with torch.no_grad():
        data = tensor.detach()
        values = data.reshape(-1)[:_VALUES].unique().numel()
        varied = "it has more than one value"
        # Of few different ones, such as actions that are drawn, all may be one by chance.
        has, lacks = [varied] if values >= _SEVERAL else [], [varied] if values == 1 and bool((data == data.reshape(-1)[0]).all()) else []
        if values <= _SEVERAL and (found := _triangle(data)) is not None:
            has.append(_begins(found))
            lacks += [_begins(other) for other in _TRIANGLE if other != found]
        if not data.is_floating_point():
            if data.dtype in (torch.int64, torch.int32):
                negative = "some of it is negative"
                (has if bool((data < 0).any()) else lacks).append(negative)
            return has, lacks
        data = data.float()
        if not bool(torch.isfinite(data).all()):
            return has, lacks
        if values > 1:  # zeros, as of a state that begins, lie on any side
            _shares(data, has, lacks, *_made(tensor))
        if values >= _SEVERAL:
            halves(data, has, lacks, computed=tensor.requires_grad and not was_joined(tensor))
        if data.dim() > 1 and data.shape[-1] > 1:
            _rows(data.flatten(0, -2), has, lacks)
    return has, lacks


def _begins(offset: int) -> str:
    return f"its triangle begins {_TRIANGLE[offset]} the diagonal"


def _triangle(data: Any) -> int | None:
    """Of a mask, by how many places each row sees, or hides, more than the one above: where its triangle begins, counted from the diagonal that ends in the last corner."""
    import torch

    square = data.squeeze()
    if square.dim() < 2:
        return None
    square = square[(0,) * (square.dim() - 2)]
    rows, places = square.shape
    if rows < _PLACES or places < rows:
        return None
    marked = (square < _HIDDEN) if square.is_floating_point() and bool((square < _HIDDEN).any()) else square != 0
    for offset in _TRIANGLE:
        upper = torch.ones_like(marked).triu(offset + places - rows)
        if bool((marked == upper).all()) or bool((marked == ~upper).all()):
            return offset
    return None


def _shares(data: Any, has: list[str], lacks: list[str], made: str, summed: bool) -> None:
    """`made`: the operation that numbers are of, or sums of what it gave. Of others than those that keep them there, all may lie on one side by chance, as a network's first results do, which are nearly the same for all samples."""
    outside, mean, spread = float(((data < 0) | (data > 1)).float().mean()), float(data.mean()), float(data.std())
    if outside == 0:
        if (made in _SHARES and not summed) or min(mean, 1 - mean) <= _NEAR * spread:
            has.append("it lies within 0 and 1")
    elif outside > 0.5:
        lacks.append("it lies within 0 and 1")
    below = float((data < 0).float().mean())
    if below == 0:
        if made in _POSITIVE or mean <= _NEAR * spread:
            has.append("it is not negative")
    elif below > 0.25:
        lacks.append("it is not negative")


def _made(tensor: Any) -> tuple[str, bool]:
    """The operation that a tensor's numbers are of, behind what moves them, means and sums; "" where gradients do not tell. And whether they were summed up."""
    node, summed = node_of(tensor) if tensor.requires_grad else None, False
    for _ in range(_BEHIND):
        if node is None:
            break
        kind = kind_of(node).removesuffix("Backward")
        if kind not in _PASSED:
            return kind, summed
        summed = summed or kind == "Sum"
        node = node.next_functions[0][0]
    return "", summed


def _rows(rows: Any, has: list[str], lacks: list[str]) -> None:
    for word, sizes in (("its rows have length 1", rows.norm(dim=1)), ("its rows sum to 1", rows.sum(1))):
        off = (sizes - 1).abs()
        if bool((off < 1e-3).all()):
            has.append(word)
        elif float((off > 1e-2).float().mean()) > 0.5:
            lacks.append(word)
