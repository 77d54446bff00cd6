"""Axes of Keras: optimizer and its arguments, loss, batches, how a step is taken, what it is compiled to, what is saved. Rules say what does not combine, and what Keras does not promise."""

from __future__ import annotations

from typing import ClassVar

from proctor.oracle.fuzz.axes import Rule, Wrapper, register, register_wrapper
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.keras import catalogue
from proctor.oracle.fuzz.keras.draft import KerasAxis, KerasDraft
from proctor.oracle.fuzz.keras.models import LOCAL
from proctor.oracle.fuzz.space import Choice, Point, Value

_LOCAL = "the layer's statistics are those of the replica's own rows; `synchronized=True` is for that"
_ENDS = "`fit` ends by putting averages into the weights; here it ends twice, or not at all"
AVERAGED = ("ScheduleFreeAdamW",)


@register_wrapper
class Mirrored(Wrapper):
    """`tf.distribute.MirroredStrategy` over logical CPUs, reduced on one of them."""

    name: ClassVar[str] = "mirrored"
    library: ClassVar[str] = "keras"
    rules: ClassVar[tuple[Rule, ...]] = (
        Rule("invalid", "models of Keras are distributed by its own strategies", unless={"wrapper": ("none", "mirrored")}, traits=frozenset({"keras"})),
        Rule("different", _LOCAL, when={"wrapper": ("mirrored",)}, unless={"world": (1,)}, traits=frozenset({LOCAL})),
        Rule("different", _LOCAL, unless={"keras_before": ("same", "1")}, traits=frozenset({LOCAL})),
    )

    def invalid(self, setting: Point, traits: frozenset[str]) -> str:
        """As `Wrapper.invalid`."""
        return "" if "keras" in traits else "MirroredStrategy is for models of Keras"

    def apply(self, draft: Draft, setting: Point) -> None:
        """As `Wrapper.apply`."""
        assert isinstance(draft, KerasDraft)
        draft.distributed = True


@register
class KerasOptimizer(KerasAxis):
    """The optimizer's class: those of the library."""

    program = True
    order = 20

    def __init__(self) -> None:
        self._read()
        catalogue.listen(self._read)

    def _read(self) -> None:
        found = catalogue.current().classes()
        self.choice = Choice("keras_optimizer", ("SGD", "Adam", *sorted(set(found) - {"SGD", "Adam"})))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.optimizer = str(value)


@register
class KerasOption(KerasAxis):
    """One argument of the optimizer that is not its default."""

    program = True
    order = 21

    def __init__(self) -> None:
        self._read()
        catalogue.listen(self._read)

    def _read(self) -> None:
        self.choice = Choice("keras_option", ("", *catalogue.current().options()))

    def invalid(self, value: Value, setting: Point, traits: frozenset[str]) -> str:
        """As `Axis.invalid`."""
        optimizer = str(setting["keras_optimizer"])
        return "" if not value or catalogue.current().has(optimizer, str(value)) else f"{optimizer} has no {value}"

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`; nesterov needs a momentum."""
        name, _, new = str(value).partition("=")
        draft.options[name] = new
        if name == "nesterov" and new == "True":
            draft.options["momentum"] = "0.9"


@register
class KerasClip(KerasAxis):
    """Clipping by the optimizer itself."""

    program = True
    order = 22
    choice = Choice("keras_clip", ("", "clipnorm", "global_clipnorm", "clipvalue"))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.options[str(value)] = "0.3"


@register
class KerasEma(KerasAxis):
    """An average of the weights, that takes their place after the training or every second step."""

    program = True
    order = 23
    choice = Choice("keras_ema", ("", "at the end", "every second step"))
    rules = (
        Rule("different", _ENDS, when={"keras_ema": ("at the end",)}, unless={"keras_call": ("fit",)}),
        Rule("different", _ENDS, unless={"keras_ema": ("",), "keras_save": ("",)}),
        Rule("different", _ENDS, when={"keras_ema": ("every second step",)}, unless={"keras_call": ("fit",)}),
        Rule("different", _ENDS, when={"keras_optimizer": AVERAGED}, unless={"keras_call": ("fit",)}),
        Rule("different", _ENDS, when={"keras_optimizer": AVERAGED}, unless={"keras_save": ("",)}),
    )

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.options["use_ema"], draft.options["ema_momentum"] = "True", "0.6"
        if value == "every second step":
            draft.options["ema_overwrite_frequency"] = "2"


@register
class KerasAccumulate(KerasAxis):
    """`gradient_accumulation_steps` of the optimizer."""

    program = True
    order = 24
    choice = Choice("keras_accumulate", (1, 2))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.options["gradient_accumulation_steps"] = str(value)


@register
class KerasRate(KerasAxis):
    """A schedule of the learning rate."""

    program = True
    order = 25
    choice = Choice("keras_rate", ("", "exponential", "cosine", "steps"))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.rate = "keras.optimizers.schedules." + {
            "exponential": "ExponentialDecay(0.2, 1, 0.5)", "cosine": "CosineDecay(0.0, 3, warmup_target=0.2, warmup_steps=1)", "steps": "PiecewiseConstantDecay([0, 1], [0.2, 0.1, 0.05])",
        }[str(value)]  # fmt: skip


@register
class KerasScaler(KerasAxis):
    """The loss is multiplied before the backward pass, and gradients divided after it."""

    program = True
    order = 26
    choice = Choice("keras_scaler", ("", "factor", "dynamic"))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        if value == "factor":
            draft.options["loss_scale_factor"] = "8.0"
        else:
            draft.around = "keras.optimizers.LossScaleOptimizer({}, initial_scale=4.0, dynamic_growth_steps=1)"


@register
class KerasLoss(KerasAxis):
    """The loss's class."""

    program = True
    order = 30
    choice = Choice("keras_loss", ("MeanSquaredError", "Huber", "LogCosh", "CosineSimilarity", "MeanAbsoluteError"))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.compiling["loss"] = f"keras.losses.{value}()"


@register
class KerasReduction(KerasAxis):
    """What the loss makes of a batch's rows."""

    program = True
    order = 31
    choice = Choice("keras_reduction", ("sum_over_batch_size", "sum", "mean", "mean_with_sample_weight"))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.compiling["loss"] = draft.compiling["loss"].removesuffix(")") + f"reduction='{value}')"


@register
class KerasWeighted(KerasAxis):
    """Weights of rows: all positive, or some nothing."""

    program = True
    order = 32
    choice = Choice("keras_weighted", ("", "sample", "zeros"))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.weights = "rng.rand(n) + 0.5" if value == "sample" else "np.arange(n) % 3 * 1.0"


@register
class KerasMetrics(KerasAxis):
    """Metrics beside the loss: a mean of rows, two that are none, one with the rows' weights."""

    program = True
    order = 33
    choice = Choice("keras_metrics", ("", "mae", "rmse", "r2", "weighted"))
    rules = (
        Rule("invalid", "a mean of several of them is none of all", unless={"keras_metrics": ("", "mae", "weighted"), "keras_call": ("fit",)}),
        Rule("invalid", "a mean of several of them is none of all", unless={"keras_metrics": ("", "mae", "weighted"), "keras_save": ("",)}),
        Rule("invalid", "a mean of several of them is none of all", when={"keras_metrics": ("weighted",)}, unless={"keras_call": ("fit",)}),
        Rule("invalid", "a mean of several of them is none of all", when={"keras_metrics": ("weighted",)}, unless={"keras_save": ("",)}),
    )

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        if value == "weighted":
            draft.compiling["weighted_metrics"] = "['mse']"
        else:
            draft.compiling["metrics"] = {"mae": "['mae']", "rmse": "[keras.metrics.RootMeanSquaredError()]", "r2": "[keras.metrics.R2Score()]"}[str(value)]


@register
class KerasRows(KerasAxis):
    """Rows of a batch: those that 2, 3 and 4 divide, those that none of them does, a single one."""

    program = True
    order = 29
    choice = Choice("keras_rows", ("even", "uneven", "one"))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.batch = 1 if value == "one" else draft.batch + 1


@register
class KerasTail(KerasAxis):
    """A last batch that is not full: half of its rows are there, or one row."""

    program = True
    order = 34
    choice = Choice("keras_tail", ("", "half", "one"))
    rules = (
        Rule("invalid", "means of batches have other weights then", unless={"keras_tail": ("",), "keras_call": ("fit",)}),
        Rule("invalid", "means of batches have other weights then", unless={"keras_tail": ("",), "keras_save": ("",)}),
    )

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.tail = draft.batch if value == "half" else 1
        draft.batch *= 2


@register
class KerasPrecision(KerasAxis):
    """The policy of the layers."""

    program = True
    order = 35
    choice = Choice("keras_precision", ("float64", "float32", "mixed_float16", "mixed_bfloat16"))
    rules = (
        Rule("different", "a step whose scaled gradients overflow in half precision is left out, and a replica's share of them may not", when={"keras_precision": ("mixed_float16",), "wrapper": ("mirrored",)}, unless={"world": (1,)}),
    )  # fmt: skip

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.policy = ["keras.config.set_floatx('float32')", f"keras.config.set_dtype_policy('{value}')"]


@register
class KerasCall(KerasAxis):
    """How a step is taken: `fit`, `train_on_batch`, or a loop by hand with `strategy.run`."""

    order = 40
    choice = Choice("keras_call", ("fit", "train_on_batch", "run"))
    rules = (
        Rule("invalid", "a loop by hand has one loss", when={"keras_call": ("run",)}, unless={"keras_loss": ("MeanSquaredError",)}),
        *(Rule("invalid", "a loop by hand has none of it", unless={"keras_call": ("fit", "train_on_batch"), axis: (neutral,)})
          for axis, neutral in (("keras_reduction", "sum_over_batch_size"), ("keras_weighted", ""), ("keras_metrics", ""), ("keras_scaler", ""), ("keras_steps", 1), ("keras_compiled", ""))),
        Rule("invalid", "a loop by hand does not scale the loss", when={"keras_call": ("run",)}, unless={"keras_precision": ("float64", "float32")}),
        Rule("different", "the loop by hand takes an activity's regularization of a replica's rows for its part of the mean", when={"keras_call": ("run",)}, traits=frozenset({"activity regularizer"})),
    )  # fmt: skip

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.call = str(value)


@register
class KerasFeed(KerasAxis):
    """What `fit` is given."""

    order = 41
    choice = Choice("keras_feed", ("arrays", "dataset", "distributed", "sequence"))
    rules = (Rule("invalid", "rows are given batch by batch", unless={"keras_feed": ("arrays",), "keras_call": ("fit",)}),)

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.feed = str(value)


@register
class KerasSteps(KerasAxis):
    """Steps of one call of the compiled function."""

    order = 42
    choice = Choice("keras_steps", (1, 2, 3))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.compiling["steps_per_execution"] = str(value)


@register
class KerasCompiled(KerasAxis):
    """A graph (neutral), eager execution, XLA."""

    order = 43
    choice = Choice("keras_compiled", ("", "eager", "jit", "auto"))
    rules = (
        Rule("invalid", "XLA does not reach variables of another logical CPU; TensorFlow lists it (tensorflow.org/xla/known_issues)", when={"keras_compiled": ("jit",), "wrapper": ("mirrored",)}, unless={"world": (1,)}),
    )  # fmt: skip

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        if value == "eager":
            draft.compiling["run_eagerly"] = "True"
        else:
            draft.compiling["jit_compile"] = "True" if value == "jit" else "'auto'"


@register
class KerasSave(KerasAxis):
    """What is saved after the first step, loaded into another model, and gone on with."""

    order = 44
    choice = Choice("keras_save", ("", "keras", "weights", "config", "checkpoint"))
    rules = (
        Rule("invalid", "there is no second step", unless={"keras_save": ("",)}, traits=frozenset({"steps 1"})),
        Rule("different", "`load_weights` leaves the optimizer's state out where the optimizer is not built yet, with a warning", when={"keras_save": ("weights",)}),
    )

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.save = str(value)


@register
class KerasBefore(KerasAxis):
    """Replicas of the program that saves."""

    order = 45
    choice = Choice("keras_before", ("same", "1", "2", "3", "4"))
    rules = (
        Rule("invalid", "nothing is saved", unless={"keras_before": ("same",)}, when={"keras_save": ("",)}),
        Rule("invalid", "there is no strategy", unless={"keras_before": ("same",)}, when={"wrapper": ("none",)}),
    )

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        draft.before = int(str(value))


@register
class KerasAsked(KerasAxis):
    """What the trained model is asked: what it says, batch by batch or of all rows at once, or its loss and metrics. Neutral: nothing, its weights are compared all the same."""

    order = 46
    choice = Choice("keras_asked", ("", "predict", "evaluate", "predict_on_batch", "call", "test_on_batch"))

    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """As `KerasAxis.write`."""
        rows = f", batch_size={draft.batch}, verbose=0"
        if value in ("evaluate", "test_on_batch"):
            weight = ", sample_weight=weight" if draft.weights else ""
            draft.evaluate = f"net.{value}(x, y{weight}{rows if value == 'evaluate' else ''})"
        else:
            draft.predict = {"predict": f"net.predict(x{rows})", "predict_on_batch": "net.predict_on_batch(x)", "call": "net(x, training=False)"}[str(value)]
