"""Templates of Keras models: a chain of vectors, sequences, images, tables of embeddings. Each layer is called "l" and its place, so that weights have names that stay."""

from __future__ import annotations

from typing import ClassVar, Final

from proctor.oracle.fuzz.models import ModelCode, Template, register
from proctor.oracle.fuzz.space import Choice, Point

LOCAL: Final = "keras local statistics"  # of a replica's own rows
OURS: Final = "keras"  # every one of these models has it

# Layer → constructor; `w` is the width, `name` is put in.
VECTORS: Final = {
    "dense": "layers.Dense({w}, name={name})",
    "relu": "layers.Activation('relu', name={name})",
    "tanh": "layers.Dense({w}, activation='tanh', name={name})",
    "layernorm": "layers.LayerNormalization(name={name})",
    "rmsnorm": "layers.RMSNormalization(name={name})",
    "syncbatchnorm": "layers.BatchNormalization(synchronized=True, momentum=0.7, name={name})",
    "groupnorm": "layers.GroupNormalization(1, name={name})",
    "unitnorm": "layers.UnitNormalization(name={name})",
    "prelu": "layers.PReLU(name={name})",
    "einsum": "layers.EinsumDense('bi,ij->bj', {w}, bias_axes='j', name={name})",
    "spectral": "layers.SpectralNormalization(layers.Dense({w}), name={name})",
    "l2": "layers.Dense({w}, kernel_regularizer='l2', bias_regularizer='l1', name={name})",
    "activity": "layers.ActivityRegularization(l2=0.1, name={name})",
    "maxnorm": "layers.Dense({w}, kernel_constraint=keras.constraints.MaxNorm(1.0), name={name})",
    "orthogonal": "layers.Dense({w}, kernel_regularizer=keras.regularizers.OrthogonalRegularizer(0.1), name={name})",
    "lora": "layers.Dense({w}, lora_rank=2, name={name})",
}
SEQUENCES: Final = {
    "lstm": "layers.LSTM({w}, return_sequences=True, name={name})",
    "gru": "layers.GRU({w}, return_sequences=True, name={name})",
    "gru_before": "layers.GRU({w}, return_sequences=True, reset_after=False, name={name})",
    "rnn": "layers.SimpleRNN({w}, return_sequences=True, name={name})",
    "unrolled": "layers.LSTM({w}, return_sequences=True, unroll=True, go_backwards=True, name={name})",
    "both": "layers.Bidirectional(layers.GRU({w}, return_sequences=True), merge_mode='sum', name={name})",
    "conv": "layers.Conv1D({w}, 3, padding='causal', name={name})",
    "distributed": "layers.TimeDistributed(layers.Dense({w}), name={name})",
    "dense": "layers.Dense({w}, name={name})",
    "layernorm": "layers.LayerNormalization(name={name})",
    "syncbatchnorm": "layers.BatchNormalization(synchronized=True, momentum=0.7, name={name})",
}
IMAGES: Final = {
    "conv": "layers.Conv2D({w}, 3, padding='same', name={name})",
    "depthwise": "layers.DepthwiseConv2D(3, padding='same', name={name})",
    "separable": "layers.SeparableConv2D({w}, 3, padding='same', name={name})",
    "transpose": "layers.Conv2DTranspose({w}, 3, padding='same', name={name})",
    "max": "layers.MaxPooling2D(2, strides=1, padding='same', name={name})",
    "average": "layers.AveragePooling2D(2, strides=1, padding='same', name={name})",
    "relu": "layers.LeakyReLU(name={name})",
    "groupnorm": "layers.GroupNormalization(1, name={name})",
    "syncbatchnorm": "layers.BatchNormalization(synchronized=True, momentum=0.7, name={name})",
    "spectral": "layers.SpectralNormalization(layers.Conv2D({w}, 3, padding='same'), name={name})",
}
_TRAITS: Final = {"syncbatchnorm": "synchronized", "spectral": "powers", "activity": "activity regularizer", "orthogonal": "regularizer", "l2": "regularizer"}
_FROZEN: Final = Choice("frozen", ("no", "first", "last"), rare=0.3)
_TWICE: Final = Choice("twice", (False, True), rare=0.2)


def traits(layers: list[str], point: Point) -> frozenset[str]:
    """What rules and reports ask of a model."""
    found = {OURS, *(_TRAITS[layer] for layer in layers if layer in _TRAITS), *(f"keras {layer}" for layer in layers)}
    if point.get("frozen", "no") != "no":
        found.add("frozen")
    if point.get("twice"):
        found.add("twice")
    return frozenset(found)


def _chained(known: dict[str, str], point: Point, width: int) -> list[str]:
    names = [str(layer) for layer in point["layers"]]  # type: ignore[union-attr]
    found = [f"    chain = [{', '.join(known[layer].format(w=width, name=repr(f'l{i}')) for i, layer in enumerate(names))}]"]
    found.append(f"    for layer in chain{' * 2' if point['twice'] else ''}:")
    found.append("        x = x + layer(x)" if point.get("skip") else "        x = layer(x)")
    if point["frozen"] != "no":
        found.append(f"    chain[{0 if point['frozen'] == 'first' else -1}].trainable = False")
    return found


def _model(shape: str, dtype: str, body: list[str]) -> tuple[str, ...]:
    given = f", dtype='{dtype}'" if dtype else ""
    return ("def model():", f"    inputs = x = keras.Input({shape}{given})", *body, "    return keras.Model(inputs, x)")


@register
class KerasChain(Template):
    """Layers of vectors one after the other, and a last dense one."""

    name: ClassVar[str] = "keras_chain"
    library: ClassVar[str] = "keras"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("layers", tuple(VECTORS), most=4), Choice("width", (4, 3, 6)), Choice("skip", (False, True)), _TWICE, _FROZEN, Choice("head", (True, False), rare=0.3),
        Choice("local", (False, True), rare=0.1),  # of such a model there is nothing to compare on several replicas
    )  # fmt: skip

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        width = int(str(point["width"]))
        head = ["    x = layers.Dense(2, name='head')(x)"] if point["head"] else []
        local = ["    x = layers.BatchNormalization(momentum=0.7, name='local')(x)"] if point["local"] else []
        net = _model(f"({width},)", "", [*_chained(VECTORS, point, width), *local, *head])
        found = traits(list(point["layers"]), point) | ({LOCAL} if local else set())  # type: ignore[arg-type]
        return ModelCode(net=net, x=f"rng.randn(n, {width})", y=(2 if head else width,), traits=found)


@register
class KerasSequence(Template):
    """Layers of sequences: of vectors, or of words with a padding that is masked; then what is over all times."""

    name: ClassVar[str] = "keras_sequence"
    library: ClassVar[str] = "keras"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("layers", tuple(SEQUENCES), most=3), Choice("words", ("no", "plain", "masked")), Choice("attention", ("no", "self", "causal", "grouped"), rare=0.4),
        Choice("last", ("average", "lstm", "flat")), _TWICE, _FROZEN,
    )  # fmt: skip

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        words = point["words"] != "no"
        first = [f"    x = layers.Embedding(9, 4, mask_zero={point['words'] == 'masked'}, name='words')(x)"] if words else []
        attention = {
            "no": [], "self": ["    x = x + layers.MultiHeadAttention(2, 3, name='attention')(x, x)"], "causal": ["    x = x + layers.MultiHeadAttention(2, 3, name='attention')(x, x, use_causal_mask=True)"],
            "grouped": ["    x = x + layers.GroupQueryAttention(3, 4, 2, name='attention')(x, x)"],
        }[str(point["attention"])]  # fmt: skip
        last = {"average": "layers.GlobalAveragePooling1D()(x)", "lstm": "layers.LSTM(3, name='last')(x)", "flat": "layers.Flatten()(x)"}[str(point["last"])]
        net = _model("(5,)" if words else "(5, 4)", "int32" if words else "", [*first, *_chained(SEQUENCES, point, 4), *attention, f"    x = layers.Dense(2, name='head')({last})"])
        found = traits(list(point["layers"]), point)  # type: ignore[arg-type]
        more = {*(["embedding"] if words else []), *(["masked"] if point["words"] == "masked" else []), *(["keras attention"] if attention else [])}
        x = "rng.randint(0, 9, (n, 5))" if words else "rng.randn(n, 5, 4)"
        return ModelCode(net=net, x=x, y=(2,), traits=found | more)


@register
class KerasImage(Template):
    """Layers of small images; then their mean."""

    name: ClassVar[str] = "keras_image"
    library: ClassVar[str] = "keras"
    choices: ClassVar[tuple[Choice, ...]] = (Choice("layers", tuple(IMAGES), most=3), Choice("last", ("average", "max", "flat")), _TWICE, _FROZEN)

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        last = {"average": "layers.GlobalAveragePooling2D()(x)", "max": "layers.GlobalMaxPooling2D()(x)", "flat": "layers.Flatten()(x)"}[str(point["last"])]
        net = _model("(4, 4, 2)", "", [*_chained(IMAGES, point, 2), f"    x = layers.Dense(2, name='head')({last})"])
        return ModelCode(net=net, x="rng.randn(n, 4, 4, 2)", y=(2,), traits=traits(list(point["layers"]), point))  # type: ignore[arg-type]


@register
class KerasTables(Template):
    """D3's recommender: a table of embeddings for each feature, a dense part of them, and one over all."""

    name: ClassVar[str] = "keras_tables"
    library: ClassVar[str] = "keras"
    choices: ClassVar[tuple[Choice, ...]] = (
        Choice("tables", (2, 1, 3)), Choice("shared", (False, True), rare=0.3), Choice("pooled", ("sum", "mean")), Choice("regularized", (False, True), rare=0.3), _FROZEN,
    )  # fmt: skip

    def write(self, point: Point) -> ModelCode:
        """As `Template.write`."""
        number, more = int(str(point["tables"])), ", embeddings_regularizer='l2'" if point["regularized"] else ""
        which = "0" if point["shared"] else "i"
        body = [
            f"    tables = [layers.Embedding(7, 4{more}, name=f't{{i}}') for i in range({number})]",
            f"    pooled = [keras.ops.{point['pooled']}(tables[{which}](x[:, 3 * i:3 * i + 3]), axis=1) for i in range({number})]",
            "    x = layers.Dense(3, name='over')(layers.Concatenate()(pooled) if len(pooled) > 1 else pooled[0])",
            *(["    tables[0].trainable = False"] if point["frozen"] == "first" else []),
            "    x = layers.Dense(2, name='head')(x)",
        ]
        found = {OURS, "embedding", *(["frozen"] if point["frozen"] != "no" else []), *(["shared"] if point["shared"] else []), *(["regularizer"] if point["regularized"] else [])}
        return ModelCode(net=_model(f"({3 * number},)", "int32", body), x=f"rng.randint(0, 7, (n, {3 * number}))", y=(2,), traits=frozenset(found))
