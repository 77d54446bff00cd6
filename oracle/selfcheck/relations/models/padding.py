"""Padding does not change what is not padding: what a mask hides has no part in the rest.

Applies where the model takes a mask beside its tokens. Where a batch has no padding, the last positions are made some. Catches masks that are ignored,
inverted, or applied after the softmax, and means over padded positions. A loss that the model returns must not change with one position of padding more:
labels that are no padding there, and means that count it. A mask that hides words of several kinds, and on which the returned loss alone depends, says which words count in the loss:
it does not apply.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from proctor.oracle.selfcheck import ModelRelation, NotApplicable, register
from proctor.oracle.selfcheck.outcomes import Outcome
from proctor.oracle.selfcheck.watching.axes import other_tokens, tried
from proctor.oracle.selfcheck.watching.gaps import gap
from proctor.oracle.selfcheck.watching.parting import Look, part
from proctor.oracle.selfcheck.watching.step import Call, Outputs
from proctor.oracle.selfcheck.watching.values import exchanged


@register
class Padding(ModelRelation):
    """Tokens under the mask become others; the results of the others stay."""

    name, claim = "padding", "in evaluation, what a mask hides does not change the rest"

    def check(self, call: Call) -> Outcome:
        """See the class."""
        results = call.baseline  # repeatable, or there is nothing to say
        mask_path, tokens_path, hidden_is = _mask(call)
        mask = call.named_inputs[mask_path][1]
        mask, shown = _with_padding(mask, hidden_is)
        masked = exchanged(call.inputs, lambda p, t: mask if p == mask_path else t)
        tokens = call.named_inputs[tokens_path][1]
        changed = exchanged(masked, lambda p, t: _under(t, shown) if p == tokens_path else t)
        if self._of_loss(call, mask_path, tokens_path, hidden_is):
            raise NotApplicable(f"{call.named_inputs[mask_path][0]} tells which positions count in the loss: nothing else depends on it")
        one, other = (tried(call, batch, "padding") for batch in (masked, changed))

        def select(outputs: Mapping[str, torch.Tensor]) -> Outputs:
            return {p: _shown(t, shown) for p, t in outputs.items() if t.ndim and _per_sample(t, shown)}

        counted = self._longer(call, mask_path, hidden_is)
        if counted is not None:
            return counted
        if not select(one) or not results:
            raise NotApplicable("no result belongs to samples or positions")
        worst = gap(select(one), select(other), lambda: [select(s) for s in call.noise(lambda: call.evaluate(masked))])
        if worst.ratio <= 1.0:
            return Outcome(relation=self.name, verdict="equivalent", reason=f"what {call.named_inputs[mask_path][0]} hides changes nothing else")
        name, hides = call.named_inputs[mask_path][0], call.named_inputs[tokens_path][0]
        culprit = part(call, lambda: call.evaluate(masked), lambda: call.evaluate(changed), _look(shown))
        return Outcome(
            relation=self.name, verdict="different",
            reason=f"what {name} hides of {hides} changes the rest by {worst.error:.2g} of its norm",
            expected="positions that are masked have no part in the results of the others", seen=f"they have, {worst.ratio:.0f} × what rounding does",
            culprit=culprit or call.place(), error=worst.error, tolerance=worst.tolerance,
            advice=f"look whether {name} reaches every attention and every mean over positions, and what its ones mean; {tokens.ndim}-dimensional {hides}",
        )  # fmt: skip

    def _of_loss(self, call: Call, mask_path: str, tokens_path: str, hidden_is: bool) -> bool:
        """Whether a mask hides what is no padding, and the returned loss alone depends on it."""
        mask, tokens = call.named_inputs[mask_path][1], call.named_inputs[tokens_path][1]
        hidden = mask.bool() == hidden_is
        if not any(tokens[i][row].unique(dim=0).size(0) > 1 for i, row in enumerate(hidden)):
            return False  # padding is one thing again and again
        whole = torch.full_like(mask, not hidden_is)
        with_all = tried(call, exchanged(call.inputs, lambda p, t: whole if p == mask_path else t), "nothing masked")
        apart = {path for path, result in call.baseline.items() if path in with_all and not torch.equal(result, with_all[path])}
        return bool(apart) and all(call.baseline[path].numel() == 1 for path in apart)

    def _longer(self, call: Call, mask_path: str, hidden_is: bool) -> Outcome | None:
        """One position of padding more: a loss that the model returns stays."""
        longer = _one_more(call, mask_path, hidden_is)
        losses = {p: t for p, t in call.baseline.items() if t.numel() == 1 and t.is_floating_point() and p in call.gradients}
        if longer is None or not losses:
            return None
        try:
            seen = call.evaluate(longer)
        except Exception:  # noqa: BLE001 - the program's own code: its positions may be at an end
            return None
        worst = gap(losses, {p: seen[p] for p in losses if p in seen}, lambda: [{p: s[p] for p in losses} for s in call.noise(call.evaluate)])
        if worst.ratio <= 1.0:
            return None
        mask = call.named_inputs[mask_path][0]
        return Outcome(
            relation=self.name, verdict="different", reason=f"the loss changes by {worst.error:.2g} of its size when the batch gets one position of padding more: positions that {mask} hides count in it",
            expected="the loss of a batch does not depend on how far it is padded", seen=f"it does, {worst.ratio:.0f} × what rounding does", culprit=call.place(), error=worst.error, tolerance=worst.tolerance,
            advice="look for labels at padded positions: they must be those that the loss ignores (-100, or its ignore_index), and a mean must count what is shown",
        )  # fmt: skip


def _one_more(call: Call, mask_path: str, hidden_is: bool) -> tuple[object, ...] | None:
    """The batch with one position of padding more at the end, made of what its padding is made of; `None` where it has none there, or of several kinds."""
    mask = call.named_inputs[mask_path][1]
    hidden = mask.bool() == hidden_is
    end = hidden[:, -1]
    if not bool(end.any()) or bool((hidden[:, 1:] < hidden[:, :-1]).any()):
        return None  # nothing is hidden at the end, or something is shown behind what is hidden
    columns: dict[str, torch.Tensor] = {}
    for path, (_, tensor) in call.named_inputs.items():
        if tensor.ndim >= 2 and tensor.shape[:2] == mask.shape:
            kinds = tensor[hidden].unique()
            if tensor.ndim > 2 or kinds.numel() != 1:
                return None
            columns[path] = kinds[0]
    return tuple(exchanged(call.inputs, lambda p, t: torch.cat([t, columns[p].expand(len(t), 1)], 1) if p in columns else t))


def _mask(call: Call) -> tuple[str, str, bool]:
    """Paths of the mask and of what it hides, and the value that hides."""
    inputs = call.named_inputs
    for path, (name, mask) in inputs.items():
        lower = name.lower()
        if "mask" not in lower or "causal" in lower or mask.ndim != 2 or not _binary(mask):
            continue
        hidden = _hides(lower, mask)
        for other, (theirs, tokens) in inputs.items():
            if other != path and tokens.ndim in (2, 3) and tokens.shape[:2] == mask.shape and not any(w in theirs.lower() for w in ("mask", "label", "target", "position", "type")):
                return path, other, hidden
    raise NotApplicable("it takes no mask beside a sequence")


def _binary(mask: torch.Tensor) -> bool:
    return bool(mask.dtype == torch.bool) or bool(((mask == 0) | (mask == 1)).all())


def _hides(name: str, mask: torch.Tensor) -> bool:
    """The value that hides: ones in `key_padding_mask`, zeros in `attention_mask`; else that of the rarer, at the end."""
    if "padding" in name or name.endswith("pad_mask"):
        last = mask[:, -1].float().mean() - mask[:, 0].float().mean()
        return bool(last >= 0)  # True marks padding, unless it is seen to lie the other way round
    if mask.float().mean() in (0.0, 1.0):
        return not bool(mask.reshape(-1)[0])
    return bool(mask[:, -1].float().mean() > mask[:, 0].float().mean())


def _with_padding(mask: torch.Tensor, hidden_is: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A mask with padding, and where it shows: as it is if anything is hidden, else with the last third of every second sample hidden."""
    shown = mask.bool() != hidden_is
    if bool(shown.all()):
        length = mask.size(1)
        if length < 3:
            raise NotApplicable("the sequence is too short for padding")
        mask = mask.clone()
        mask[::2, length - length // 3 :] = hidden_is
        shown = mask.bool() != hidden_is
    return mask, shown


def _under(tokens: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """Other tokens, or other numbers, where nothing is shown."""
    hidden = ~shown
    if tokens.is_floating_point():
        place = hidden if tokens.ndim == 2 else hidden.unsqueeze(-1)
        return torch.where(place, tokens * 1.5 + 1.0, tokens)
    return torch.where(hidden if tokens.ndim == 2 else hidden.unsqueeze(-1), other_tokens(tokens, tokens), tokens)


def _look(shown: torch.Tensor) -> Look:
    """A look at positions that are shown, as they are or flattened, and at whole samples."""
    samples, length = shown.shape

    def look(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        if one.ndim >= 2 and one.shape[:2] == shown.shape and length not in one.shape[2:]:
            return one[shown], other[shown]
        if one.ndim and one.size(0) == samples * length:
            flat = shown.reshape(-1)
            return one[flat], other[flat]
        if one.ndim and one.size(0) == samples and length not in one.shape[1:] and one.is_floating_point():
            return one, other
        return None

    return look


def _per_sample(result: torch.Tensor, shown: torch.Tensor) -> bool:
    return bool(result.size(0) == shown.size(0))


def _shown(result: torch.Tensor, shown: torch.Tensor) -> torch.Tensor:
    """What belongs to positions that are shown, or to whole samples."""
    if result.ndim >= 2 and result.shape[:2] == shown.shape:
        return result[shown]
    return result
