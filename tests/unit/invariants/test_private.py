"""What a library keeps to itself is no law; what the user's own code calls `_so` is the user's."""

from __future__ import annotations

import pytest

from proctor.invariants.condition import ALWAYS, Condition, Kind, Precondition
from proctor.invariants.invariant import Hypothesis
from proctor.invariants.pack import read_pack, shipped
from proctor.invariants.private import libraries_of, private_name

LIBRARIES = libraries_of({"transformers": "5.0", "mylib": ""})


@pytest.mark.parametrize(
    ("hypothesis", "found"),
    [
        (Hypothesis.of("scalar", fn="transformers.Trainer.train", target="self._logged", formulas='["self.state.step"]'), "self._logged"),
        (Hypothesis.of("scalar", fn="transformers.Trainer._loop", target="total", formulas="[1]"), "transformers.Trainer._loop"),
        (Hypothesis.of("scalar", fn="transformers.Trainer.train", target="n", formulas='[["+","self._a.b",1]]'), "self._a.b"),
        (Hypothesis.of("contain", kind="call", parent="__main__.Mine.run", child="transformers.Trainer._save"), "transformers.Trainer._save"),
        (Hypothesis.of("contain", kind="call", parent="torch.nn.Module._call_impl", child="x.y"), "torch.nn.Module._call_impl"),
        # The user's own, and what everybody may use; which programs a habit is of is no name that it speaks of.
        (Hypothesis.of("manner", mode="given", what="the script > models.Net.forward: argument 2", family="torch.jit._script.RecursiveScriptModule/torch.jit._script.RecursiveScriptModule"), ""),
        (Hypothesis.of("scalar", fn="__main__.Mine._run", target="self._logged", formulas="[1]"), ""),
        (Hypothesis.of("scalar", fn="mylib.engine.Engine._step", target="self._n", formulas="[1]"), ""),
        (Hypothesis.of("contain", kind="call", parent="transformers.Trainer.train", child="torch.utils.data.DataLoader.__iter__"), ""),
        (Hypothesis.of("sequence", first="torch.Tensor.backward", then="torch.nn.utils.clip_grad_norm_"), ""),
    ],
)
def test_a_private_name_is_a_librarys(hypothesis: Hypothesis, found: str) -> None:
    assert private_name(hypothesis, ALWAYS, LIBRARIES) == found


def test_a_precondition_may_not_ask_for_one_either() -> None:
    rule = Hypothesis.of("argument", fn="transformers.Trainer.train", mode="same", feature="0.value")
    when = Precondition(((Condition("argument 0._flag", Kind.CONSTANT, "true"),),))
    assert private_name(rule, when, LIBRARIES) == "0._flag"
    assert not private_name(Hypothesis.of("argument", fn="__main__.train"), when, LIBRARIES)


def test_no_shipped_rule_speaks_of_one() -> None:
    assert shipped()
    for path in shipped():
        pack = read_pack(path)
        libraries = libraries_of({**pack.requires, **pack.provenance.libraries})
        assert [r.text for r in pack.invariants if private_name(r.hypothesis, r.precondition, libraries)] == []
