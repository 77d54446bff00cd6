"""Megatron-core: how what crosses the edge of each module lies on the mesh, read off the modules themselves.

Follows Megatron's conventions: hidden states are [s, b, h] (s tokens, b sequences), cut along s by context parallelism (zigzag)
and, outside of the tensor parallel regions, by sequence parallelism; inside of them heads and features are cut by tp. What
happens among experts is left out: which token goes where is not a layout.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from proctor.oracle.frameworks.megatron import (
    canonical_names,
    cut_axis,
    is_kind,
    is_model,
    layout_of,
    mesh,
    parameter_names,
    present,
    unwrapped,
)
from proctor.oracle.plans.mesh import Cut, Layout, Mesh
from proctor.oracle.plans.plan import ActivationRule, ParamRule, Plan, Rule

__all__ = ["activation_rules", "canonical_names", "gradient_scale", "is_model", "left_out", "plan_of", "present"]

HIDDEN: Final = "|0|hidden_states|input_"
BLOCKS: Final = ("TransformerLayer", "TransformerBlock", "MoELayer")
OUTPUT: Final = "output_layer"
NORMS: Final = ("input_layernorm", "pre_mlp_layernorm", "pre_cross_attn_layernorm", "final_layernorm")


class Cuts(NamedTuple):
    """Layouts of this job.

    Args:
        whole: of [s, b, h] inside tensor parallel regions.
        hidden: of [s, b, h] outside of them.
        batch: of [b, s].
        parts: axis along which features and heads are cut; "" for one rank.
        addends: of the gradient of a bias that is handed out of a row parallel layer.
        sequence: whether sequence parallelism is on.
    """

    whole: tuple[Cut, ...]
    hidden: tuple[Cut, ...]
    batch: tuple[Cut, ...]
    parts: str
    addends: tuple[Cut, ...]
    sequence: bool

    def features(self, dim: int, stride: int = 1) -> tuple[Cut, ...]:
        """Of a tensor whose dimension `dim` is cut by tensor parallelism."""
        if not self.parts:
            return self.whole
        cut = Cut(self.parts, "interleaved", dim, (stride,)) if stride > 1 else Cut(self.parts, "chunk", dim)
        return (*self.whole, cut)


def plan_of(roots: Iterable[Any]) -> Plan:
    """Everything that this rank knows: the mesh, and rules for its parameters and for what crosses its modules' edges.

    Args:
        roots: the model chunks of this rank. Other stages know other names.
    """
    plan = Plan(mesh())
    roots = list(roots)
    names = parameter_names(roots)
    for root in roots:
        for path, module in root.named_modules():
            padded = _has_vocabulary(module, path.rpartition(".")[2])
            for parameter in module.parameters(recurse=False):
                layout = layout_of(parameter, module)
                if layout is not None:
                    plan.add(ParamRule(re.escape(names[id(parameter)]), Rule(layout.cuts, ordered=True, padded=padded)))
        for rule in activation_rules(root):
            plan.add(rule)
    return plan


def gradient_scale(root: Any) -> float:
    """How many times larger than the reference's is the gradient of an activation of one micro batch, in a correct job.

    Each rank takes the mean over its own micro batches and tokens; the mean over ranks is taken with the gradients of
    parameters. With a loss per token (`calculate_per_token_loss`) all division comes last.
    """
    if getattr(unwrapped(root).config, "calculate_per_token_loss", False):
        return 1.0
    axes = mesh()
    return float(axes.size("dp") * axes.size("cp"))


def left_out(root: Any) -> dict[str, frozenset[str]]:
    """Edges of a pipeline stage that are none in the whole model, by canonical module name.

    The model and its decoder end at every stage; only what goes into the first and comes out of the last is what the
    reference has there.
    """
    model = unwrapped(root)
    sides = frozenset(
        side for side, own in (("input", "pre_process"), ("output", "post_process")) if not getattr(model, own, True)
    )
    if not sides:
        return {}
    names = canonical_names(model)
    return {names[path]: sides for path, module in model.named_modules() if not path or is_kind(module, "TransformerBlock")}


def activation_rules(root: Any) -> Iterator[ActivationRule]:
    """Rules for the modules of a chunk, by their canonical names."""
    model = unwrapped(root)
    names = canonical_names(model)
    cuts = cuts_of(mesh(), model)
    among_experts: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(expert) for expert in among_experts):
            continue
        if path.rpartition(".")[2] in ("experts", "shared_experts"):
            among_experts.append(f"{path}.")
            continue
        parent = model.get_submodule(path.rpartition(".")[0]) if path else None
        yield from _rules(re.escape(names[path]), path.rpartition(".")[2], module, parent, cuts)


def cuts_of(axes: Mesh, model: Any) -> Cuts:
    """Layouts on a mesh, for the configuration of a model."""
    parts = cut_axis()
    parts = parts if axes.size(parts) > 1 else ""
    sequence = bool(parts) and bool(getattr(model.config, "sequence_parallel", False))
    context = axes.size("cp") > 1
    whole = (Cut("cp", "striped", 0),) if context else ()
    return Cuts(
        whole=whole,
        hidden=(*whole, Cut(parts, "chunk", 0)) if sequence else whole,
        batch=(Cut("cp", "striped", 1),) if context else (),
        parts=parts,
        addends=tuple(Cut(axis, "partial") for axis, on in (("cp", context), (parts, sequence)) if on),
        sequence=sequence,
    )


def _rules(name: str, leaf: str, module: Any, parent: Any, cuts: Cuts) -> Iterator[ActivationRule]:
    if parent is None:
        slots = "|0|1|input_ids|position_ids|labels|loss_mask"
        yield _rule(name, slots, input=cuts.batch)
        yield _rule(name, "", output=cuts.batch)
    elif is_kind(module, "ColumnParallelLinear") or is_kind(module, "TEColumnParallelLinear") or is_kind(module, "TELayerNormColumnParallelLinear"):
        yield from _column(name, module, cuts, padded=_has_vocabulary(module, leaf))
    elif is_kind(module, "RowParallelLinear") or is_kind(module, "TERowParallelLinear"):
        yield _rule(name, HIDDEN, input=cuts.features(-1))
        yield from _with_bias(name, cuts)
    elif leaf == "core_attention":
        yield _rule(name, "0|1|2|query|key|value", input=cuts.features(2))
        yield _rule(name, "", output=cuts.features(-1))
    elif is_kind(parent, "DotProductAttention"):
        heads = cuts.features(1)[-1:] if cuts.parts else ()
        if not cuts.whole:
            yield _rule(name, "|0|input", input=heads, output=heads)
    elif leaf in ("q_layernorm", "k_layernorm"):
        yield _rule(name, "|0", input=cuts.features(2), output=cuts.features(2))
    elif leaf in NORMS:
        yield _rule(name, HIDDEN, input=cuts.hidden, output=cuts.hidden)
    elif is_kind(parent, "LanguageModelEmbedding") or is_kind(module, "LanguageModelEmbedding"):
        yield from _embedding(name, leaf, module, cuts)
    elif is_kind(module, "TopKRouter"):
        yield _rule(name, HIDDEN, input=cuts.hidden)
        yield _rule(name, "0|1", output=cuts.hidden)
    elif is_kind(module, "Attention") or is_kind(module, "MLP"):
        yield _rule(name, HIDDEN, input=cuts.hidden)
        yield from _with_bias(name, cuts)
    # A layer without cross attention hands its input on.
    elif leaf == "cross_attention" or any(is_kind(module, kind) for kind in BLOCKS):
        yield _rule(name, HIDDEN, input=cuts.hidden)
        yield _rule(name, "|0", output=cuts.hidden)


def _has_vocabulary(module: Any, leaf: str) -> bool:
    """Whether a module has a row for each token, which are padded to a multiple of the ranks (`make_vocab_size_divisible_by`)."""
    return leaf == OUTPUT or is_kind(module, "VocabParallelEmbedding")


def _column(name: str, module: Any, cuts: Cuts, *, padded: bool) -> Iterator[ActivationRule]:
    stride = int(getattr(getattr(module, "weight", None), "partition_stride", 1))
    gathered = bool(getattr(module, "gather_output", False))
    yield _rule(name, HIDDEN, input=cuts.hidden)
    yield _rule(name, "|0", output=cuts.whole if gathered else cuts.features(-1, stride), padded=padded)
    bias = () if gathered else cuts.features(0, stride)[len(cuts.whole) :]
    addends = tuple(cut for cut in cuts.addends if cut.axis == "cp")
    yield _rule(name, "1", output=bias, grad_output=(*bias, *addends), padded=padded)
    tied = cuts.features(0)[len(cuts.whole) :]  # an embedding that is tied is handed in
    yield _rule(name, "weight", input=tied, grad_input=(*tied, *addends), padded=padded)


def _with_bias(name: str, cuts: Cuts) -> Iterator[ActivationRule]:
    """Hidden states, and a bias that is added later, by every rank to its part of the sequence."""
    yield _rule(name, "|0", output=cuts.hidden)
    yield _rule(name, "1", output=(), grad_output=cuts.addends)


def _embedding(name: str, leaf: str, module: Any, cuts: Cuts) -> Iterator[ActivationRule]:
    if is_kind(module, "LanguageModelEmbedding"):
        yield _rule(name, "|0|1|input_ids|position_ids", input=cuts.batch)
        yield _rule(name, "", output=cuts.hidden)
    elif leaf == "embedding_dropout":
        yield _rule(name, "|0|input", input=cuts.hidden, output=cuts.hidden)
    else:
        yield _rule(name, "|0|input|input_", input=cuts.batch)
        # Straight to sequence parallelism: then [s, b, h], where the reference has [b, s, h].
        scattered = cuts.sequence and bool(getattr(module, "reduce_scatter_embeddings", False))
        yield _rule(name, "", "sbh->bsh" if scattered else "", output=cuts.hidden if scattered else cuts.batch)


def _rule(module: str, slot: str, transpose: str = "", *, padded: bool = False, **which: tuple[Cut, ...]) -> ActivationRule:
    rules: Mapping[str, Rule] = {side: Rule(Layout(cuts).cuts, ordered=True, padded=padded) for side, cuts in which.items()}
    return ActivationRule(module, dict(rules), slot, transpose)
