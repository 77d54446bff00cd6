"""The training program of Keras while axes write into it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

from proctor.oracle.fuzz.axes import Axis
from proctor.oracle.fuzz.axes.draft import Draft
from proctor.oracle.fuzz.space import Point, Value


@dataclass
class KerasDraft(Draft):
    """Parts of a program, as source text; of what it inherits it uses `code`, `steps`, `batch`, `optimizer` and `options`.

    Attributes:
        policy: lines that set the precision.
        rate: expression of the learning rate.
        around: expression around the optimizer, with `{}`.
        compiling: arguments of `compile`.
        weights: expression of sample weights; "" for none.
        tail: rows of the last, partial batch.
        call: how a step is taken: "fit", "train_on_batch" or "run".
        feed: what `fit` is given: "arrays", "dataset", "distributed" or "sequence".
        save: what is saved and loaded after the first step; "" for nothing.
        before: replicas of the program up to there; -1 for as many as afterwards.
        distributed: whether there is a strategy.
        predict: expression of what the trained model says.
        evaluate: expression of its loss and metrics.
    """

    optimizer: str = "SGD"
    options: dict[str, str] = field(default_factory=dict)
    policy: list[str] = field(default_factory=lambda: ["keras.config.set_floatx('float64')", "keras.config.set_dtype_policy('float64')"])
    rate: str = "0.1"
    around: str = "{}"
    compiling: dict[str, str] = field(default_factory=lambda: {"loss": "keras.losses.MeanSquaredError()", "jit_compile": "False"})
    weights: str = ""
    tail: int = 0
    call: str = "fit"
    feed: str = "arrays"
    save: str = ""
    before: int = -1
    distributed: bool = False
    predict: str = ""
    evaluate: str = ""


class KerasAxis(Axis):
    """One thing that settings of Keras differ in."""

    library = "keras"

    def apply(self, value: Value, draft: Draft, setting: Point) -> None:
        """As `Axis.apply`."""
        assert isinstance(draft, KerasDraft)
        self.write(value, draft, setting)

    @abstractmethod
    def write(self, value: Value, draft: KerasDraft, setting: Point) -> None:
        """Write a value that is not neutral into the draft."""
