"""Functions that do not need each other run in other processes, and what they raise comes back."""

from __future__ import annotations

import functools
import os

import pytest

from proctor.errors import OracleError
from proctor.oracle.prove.lanes.family import Unlike
from proctor.oracle.prove.lanes.spread import forking
from proctor.oracle.prove.machine import Misfit, Stuck


def _raises(error: Exception) -> None:
    raise error


def test_results_come_in_order() -> None:
    assert list(forking(2)([functools.partial(pow, 2, k) for k in range(5)])) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("error", [Unlike("other"), NotImplementedError("not known"), Misfit({0: "too small"}), Stuck({0: "in a", 1: "in b"}), OracleError("no", hint="yes")])
def test_what_a_process_raises_is_raised_here(error: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(type(error)) as caught:
        list(forking(2)([functools.partial(_raises, error), functools.partial(pow, 2, 3)]))
    assert str(caught.value) == str(error) and "Traceback" not in capfd.readouterr().err


def test_a_process_that_ends_early_is_said() -> None:
    with pytest.raises(OracleError, match="ended early"):
        list(forking(2)([functools.partial(os._exit, 3), functools.partial(pow, 2, 3)]))
