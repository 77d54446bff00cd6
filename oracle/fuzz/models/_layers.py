"""Layers that keep their width: what chains and cells are made of.

`D` is the width. Layers whose statistics are those of a rank's own rows carry a trait that says so.
"""

from __future__ import annotations

from typing import Final

# name → (constructor, traits, what tensor parallelism can cut)
LAYERS: Final[dict[str, tuple[str, frozenset[str], str]]] = {
    "linear": ("nn.Linear(D, D)", frozenset(), "linear"),
    "linear_nobias": ("nn.Linear(D, D, bias=False)", frozenset(), "linear"),
    "gelu": ("nn.GELU()", frozenset(), ""),
    "relu": ("nn.ReLU()", frozenset(), ""),
    "layernorm": ("nn.LayerNorm(D)", frozenset({"norm"}), ""),
    "rmsnorm": ("nn.RMSNorm(D)", frozenset({"norm"}), ""),
    "prelu": ("nn.PReLU()", frozenset({"prelu"}), ""),
    "groupnorm": ("nn.GroupNorm(1, D)", frozenset({"norm"}), ""),
    "mlp": ("nn.Sequential(nn.Linear(D, D + 3), nn.Tanh(), nn.Linear(D + 3, D))", frozenset(), "mlp"),
    "weightnorm": ("nn.utils.parametrizations.weight_norm(nn.Linear(D, D))", frozenset({"parametrized"}), ""),
    "spectralnorm": ("nn.utils.parametrizations.spectral_norm(nn.Linear(D, D))", frozenset({"parametrized", "powers"}), ""),
    "batchnorm": ("nn.BatchNorm1d(D)", frozenset({"local statistics"}), ""),
}

FUNCTIONS: Final = frozenset({"gelu", "relu"})  # layers without parameters


def constructor(layer: str, width: int) -> str:
    """The expression that makes a layer."""
    return LAYERS[layer][0].replace("D + 3", str(width + 3)).replace("D", str(width))


def traits(layers: list[str]) -> frozenset[str]:
    """What is special about layers."""
    return frozenset(t for layer in layers for t in LAYERS[layer][1])


def parallel(layers: list[str], prefix: str) -> dict[str, str]:
    """What tensor parallelism can cut of layers that lie in one list."""
    found: dict[str, str] = {}
    for i, layer in enumerate(layers):
        kind = LAYERS[layer][2]
        if kind == "linear":
            found[f"{prefix}.{i}"] = "linear"
        elif kind == "mlp":
            found |= {f"{prefix}.{i}.0": "linear", f"{prefix}.{i}.2": "linear"}
    return found


def pairs(layers: list[str], prefix: str) -> tuple[tuple[str, str], ...]:
    """Linear layers with only an elementwise function between them."""
    return tuple((f"{prefix}.{i}.0", f"{prefix}.{i}.2") for i, layer in enumerate(layers) if layer == "mlp")


_SEQUENCE: Final[dict[str, dict[str, str]]] = {
    "linear": {"": "ColwiseParallel(input_layouts=Shard(0), output_layouts=Shard(0))"},
    "norm": {"": "SequenceParallel(sequence_dim=0, use_local_output=True)"},
    "mlp": {".0": "ColwiseParallel(input_layouts=Shard(0))", ".2": "RowwiseParallel(output_layouts=Shard(0))"},
    "function": {},
}
_KINDS: Final = {"linear": "linear", "linear_nobias": "linear", "layernorm": "norm", "rmsnorm": "norm", "mlp": "mlp", **dict.fromkeys(FUNCTIONS, "function")}


def sequence(layers: list[str], prefix: str) -> dict[str, str]:
    """Styles by which what lies between layers stays cut along its rows; empty if no style covers one of them, or none has parameters."""
    if not set(layers) <= set(_KINDS):
        return {}
    found = {f"{prefix}.{i}{part}": style for i, layer in enumerate(layers) for part, style in _SEQUENCE[_KINDS[layer]].items()}
    whole = "PrepareModuleInputOutput(input_layouts=Replicate(), desired_input_layouts=Shard(0), use_local_input=True, output_layouts=Shard(0), desired_output_layouts=Replicate())"
    return {**found, "": whole} if found else {}
