"""The numbers probe: what is read of frames and results, and which formulas their source gives."""

from __future__ import annotations

import ast
import gc
import json
import math
import sys
import textwrap
import weakref
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from proctor.instrument.config import RecordConfig
from proctor.instrument.patch.patches import METHOD, Patches
from proctor.instrument.probes import Home, Sink
from proctor.invariants.schema import Name
from proctor.native import Recorder

torch = pytest.importorskip("torch")

from proctor.instrument.probes.numbers import UPDATE, Numbers  # noqa: E402
from proctor.instrument.probes.source import assignments as _assignments  # noqa: E402
from proctor.instrument.probes.source import formulas as _formulas  # noqa: E402
from proctor.instrument.probes.source import reading as _reading  # noqa: E402  they import torch


class Watch:
    """A probe whose hooks the test calls where a tap would."""

    def __init__(self) -> None:
        self.recorder = Recorder()
        self.sink = Sink(self.recorder, lambda: 0, RecordConfig(run="run"), lambda: True)
        self.probe = Numbers(self.sink)
        update, _ = self.probe.hooks(UPDATE, Home.TORCH)
        backward, _ = self.probe.hooks("torch.Tensor.backward", Home.TORCH)
        assert update is not None and backward is not None
        # No frame of the test's own between the hook and the function that is looked at.
        self.update = partial(update, (None,), None)
        self.before_backward = backward

    def rows(self) -> dict[str, dict[str, Any]]:
        """Number and formulas by place, the last look at each; places without the module and `<locals>`."""
        texts = {(kind, code): text for kind, code, text in self.recorder.drain_names()}
        found: dict[str, dict[str, Any]] = {}
        for row in self.sink.take_rows():
            place = texts[(int(Name.PLACE), row[3])].removeprefix(f"{__name__}.")
            meta = json.loads(texts[(int(Name.META), row[5])]) if row[5] else {}
            found[place] = {"number": row[8], "made": json.loads(meta.get("formula", "[]")), "through": meta.get("through", "")}
        return found


def steps_of(samples: int, batch: int, drop_last: bool = False) -> int:
    """Updates of an epoch."""
    if drop_last:
        return samples // batch
    return math.ceil(samples / batch)


def plan(samples: int, batch: int, epochs: int) -> tuple[int, int]:
    per_epoch = steps_of(samples, batch, True)
    return per_epoch, per_epoch * epochs


def test_each_element_of_a_returned_tuple_has_its_formula() -> None:
    watch = Watch()

    def loop(data: list[int], epochs: int) -> None:
        per_epoch, total = plan(len(data), 2, epochs)
        watch.update()
        del per_epoch, total

    loop(list(range(9)), 3)
    rows = watch.rows()
    assert rows["loop:total"]["number"] == 12
    assert rows["loop:total"]["made"] == [["*", ["//", "len(data)", 2], "epochs"]]


def train(watch: Watch, args: Any, data: list[int]) -> None:
    per_epoch = steps_of(len(data), args.batch)
    total = args.epochs * per_epoch
    warmup = int(0.1 * total)
    done = 0
    while done < 2:
        rate = args.lr * min(1.0, done / max(warmup, 1))
        watch.update()
        done += 1
    del rate


def test_totals_have_their_formulas_through_functions_of_the_program() -> None:
    watch = Watch()
    train(watch, SimpleNamespace(epochs=3, batch=4, lr=0.1), list(range(10)))
    rows = watch.rows()
    assert rows["train:total"]["number"] == 9
    assert rows["train:total"]["made"] == [["*", "args.epochs", "per_epoch"]]
    assert rows["train:per_epoch"]["made"] == [["ceil", ["/", "len(data)", "args.batch"]]]
    assert rows["train:warmup"]["made"] == [["int", ["*", 0.1, "total"]]]
    assert rows["train:len(data)"]["number"] == 10 and rows["train:args.batch"]["number"] == 4
    assert rows["train:rate"]["made"] and not rows["train:done"]["made"]


class Loop:
    def __init__(self, epochs: int, accum: int, data: list[int]) -> None:
        self.epochs = epochs
        self.accum = accum
        self.data = data
        self.total = self.per_epoch * epochs
        self.done = 0

    @property
    def per_epoch(self) -> int:
        return len(self.data) // self.accum

    def run(self, watch: Watch) -> None:
        for _ in range(2):
            loss = torch.tensor(3.0)
            loss = loss / self.accum
            watch.update()
            self.done += 1


def test_attributes_have_the_formula_of_the_constructor() -> None:
    watch = Watch()
    Loop(3, 2, list(range(9))).run(watch)
    rows = watch.rows()
    assert rows["Loop.run:self.total"]["number"] == 12
    assert rows["Loop.run:self.total"]["made"] == [["*", ["//", "len(self.data)", "self.accum"], "self.epochs"]]
    assert rows["Loop.run:self.accum"]["number"] == 2
    assert not rows["Loop.run:self.done"]["made"]
    # `torch.tensor(3.0)` is no number of the program, so what is made of it is not said.
    assert not rows["Loop.run:loss"]["made"]


def test_what_is_propagated_has_the_formula_of_the_call() -> None:
    watch = Watch()

    def loop(accum: int) -> None:
        loss = torch.tensor(3.0, requires_grad=True)
        (loss * 2).backward()
        (
            loss
            / accum
        ).backward()

    _, after = watch.probe.hooks("torch.nn.functional.mse_loss", Home.TORCH)
    assert after is not None
    after((), None, torch.tensor(7.0), False)
    watch.recorder.enabled = True
    patches = Patches(watch.recorder)
    patches.tap(torch.Tensor, "backward", "torch.Tensor.backward", kind=METHOD, before=watch.before_backward)
    loop(4)
    patches.remove()
    rows = watch.rows()
    assert rows["loop:backward[0]"]["made"] == [["*", "loss", 2]]
    assert rows["loop:backward[1]"] == {"number": 0.75, "made": [["/", "loss", "accum"]], "through": ""}
    assert rows["loop:loss()"]["number"] == 7


def test_results_of_functions_have_the_formula_of_their_return() -> None:
    watch = Watch()
    _, after = watch.probe.hooks(f"{__name__}.steps_of", Home.USER)
    assert after is not None
    after((10, 4), {"drop_last": False}, 3, False)
    rows = watch.rows()
    assert rows["steps_of:return"]["number"] == 3
    assert rows["steps_of:return"]["made"] == [["if", "drop_last", ["//", "samples", "batch"], ["ceil", ["/", "samples", "batch"]]]]
    after((10, 4), None, torch.ones(3), False)  # not one number
    assert not watch.rows()


def test_nothing_of_the_user_is_kept_alive_or_run() -> None:
    watch = Watch()
    ran: list[str] = []

    class Config:
        def __init__(self) -> None:
            self.rate = 2

        @property
        def total(self) -> int:
            ran.append("property")
            return 3

        def __len__(self) -> int:
            ran.append("len")
            return 3

        def __getattr__(self, name: str) -> Any:
            ran.append(name)
            raise AttributeError(name)

    def loop() -> tuple[weakref.ref[Any], int]:
        config = Config()
        big = torch.ones(5)
        size = len(config) + config.total
        ran.clear()
        watch.update()
        gone = weakref.ref(big)
        del big
        return gone, size

    gone, size = loop()
    gc.collect()
    assert gone() is None and size == 6 and ran == []
    assert watch.rows()["loop:config.rate"]["number"] == 2


def test_a_function_that_asks_for_its_variables_is_left_alone() -> None:
    watch = Watch()

    def loop(epochs: int) -> dict[str, Any]:
        kept = locals()
        watch.update()
        return kept

    def other(epochs: int) -> None:
        torch.nn.Linear(1, 1).eval()
        watch.update()

    other(3)
    assert loop(3)["epochs"] == 3
    places = watch.rows()
    assert not any(place.startswith("loop:") for place in places) and "other:epochs" in places


def test_what_a_function_asks_for_by_name_stays_its_own() -> None:
    def asks(one: int) -> tuple[dict[str, Any], dict[str, Any]]:
        table = locals()
        table["put"] = one
        scope = _reading.scope_of(sys._getframe())
        _reading.release(sys._getframe(), scope)
        return table, scope

    table, scope = asks(3)
    assert table["put"] == 3 and table["one"] == 3 and scope == {}


def test_what_a_function_asks_its_frame_for_stays_its_own() -> None:
    def asks(one: int) -> dict[str, Any]:
        table = sys._getframe().f_locals
        _reading.release(sys._getframe(), _reading.scope_of(sys._getframe()))
        return dict(table)

    assert asks(3)["one"] == 3


def test_looks_are_bounded() -> None:
    watch = Watch()

    def loop(epochs: int) -> None:
        total = epochs * 2
        for _ in range(1000):
            watch.update()
        del total

    loop(3)
    assert len(watch.sink.take_rows()) < 1200


def made(source: str) -> dict[str, Any]:
    tree = ast.parse(textwrap.dedent(source))
    reader = _formulas.Reader(lambda name: None, lambda function: False)
    return _assignments.made(tree, reader, frozenset()).names


def test_assignments_of_one_name_follow_each_other_or_are_alternatives() -> None:
    assert made("x = a * b\nx = x // c\n") == {"x": [["//", ["*", "a", "b"], "c"]]}
    assert made("x = a * b\nx //= c\n") == {"x": [["//", ["*", "a", "b"], "c"]]}
    assert made("if a > 0:\n    x = a\nelse:\n    x = b * c\n") == {"x": ["a", ["*", "b", "c"]]}
    assert made("x = b\nif a > 0:\n    x = a\n") == {"x": ["b", "a"]}


@pytest.mark.parametrize(
    "source",
    [
        "x = f(a)\n",  # not arithmetic
        "x = a\nfor i in y:\n    x += 1\n",  # a counter
        "for i in y:\n    if i > 3:\n        x = a * i\n",  # of an earlier round, most of the time
        "for i in y:\n    x = a * 2\n    for j in z:\n        a = j\n",  # its operand goes on alone
        "x = a * 2\nfor x in y:\n    pass\n",
        "x = 3\n",  # the user's own choice
        "x = a\nwith f() as x:\n    pass\n",
        "if a > 0:\n    o.x = b * 2\n",  # or what it was
    ],
)
def test_a_name_that_may_be_out_of_date_has_no_formula(source: str) -> None:
    assert not {"x", "o.x"} & made(source).keys()


class Own(torch.Tensor):
    """A tensor of a program's own class."""

    def fails(self, *_: Any, **__: Any) -> Any:
        raise AssertionError

    dim = detach = __float__ = item = is_complex = fails  # type: ignore[assignment]
    device = property(fails)  # type: ignore[assignment]
    __torch_function__ = classmethod(fails)  # type: ignore[assignment]



def test_numbers_are_read_without_asking_a_device() -> None:
    assert _reading.number(torch.tensor(2.5, requires_grad=True)) == 2.5
    assert _reading.number(torch.tensor(2.5).as_subclass(Own)) == 2.5, "none of its methods runs"
    assert _reading.number(torch.ones(1)) is None and _reading.number(torch.empty((), device="meta")) is None
    seen: list[Any] = []
    torch.func.vmap(lambda x: (seen.append(_reading.number(x.sum())), x)[1])(torch.ones(2, 3))
    assert seen == [None]
    assert _reading.number(10**400) is None and _reading.number("7") is None
    assert _reading.length(torch.ones(3, 2)) == 3 and _reading.length([1, 2]) == 2 and _reading.length("ab") is None
    loader = torch.utils.data.DataLoader(list(range(10)), batch_size=3)
    scope = {"loader": loader, "opt": torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.5), "d": {"k": 4}}
    found = _reading.numbers(scope)
    assert found["len(loader)"] == 4 and found["loader.batch_size"] == 3 and found["opt.lr"] == 0.5 and found["d['k']"] == 4
    for name, value in found.items():
        if "param_groups" not in name:
            assert _reading.read(name, scope.get) == value
    assert _reading.read("d['k'].x", scope.get) is None and _reading.read("opt.param_groups[0]", scope.get) is None
