"""Objects picked by their type, native and by the twin: the same ones, and nothing of the program's own runs."""

from __future__ import annotations

import gc
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proctor import native
from proctor.native.twins import living as twin

IMPLEMENTATIONS = [twin, *([native] if native.ACTIVE == "native" else [])]


class Base: ...


class Derived(Base): ...


class Proxy:
    """Says that it is another's instance."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise AssertionError("asked for its class")


class Counted(dict[str, Any]):
    """A mapping of the program's own."""

    def __len__(self) -> int:
        raise AssertionError("asked for its length")


class Odd:
    """A key that looks like another one."""

    def __init__(self, like: str, error: type[BaseException] = RuntimeError) -> None:
        self._like, self._error = hash(like), error

    def __hash__(self) -> int:
        return self._like

    def __eq__(self, other: object) -> bool:
        raise self._error("compared")


def same(found: list[Any], wanted: list[Any]) -> bool:
    return [id(o) for o in found] == [id(o) for o in wanted]


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_instances_of_a_type_and_of_what_is_derived_of_it(module: ModuleType) -> None:
    base, derived = Base(), Derived()
    assert same(module.living([base, Proxy(), 1, derived, Base], Base), [base, derived])


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_what_lives_is_found_by_the_garbage_collectors_list(module: ModuleType) -> None:
    mine = Derived()
    assert any(o is mine for o in module.living(gc.get_objects(), Base))


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_containers_of_a_size_whose_first_value_is_of_a_kind(module: ModuleType) -> None:
    right = [[1.0, 2.0], (1.0, "x"), {"a": 1.0, "b": 2.0}, OrderedDict(a=1.0, b=2.0), {"a": 1.0, "b": 2.0, "c": 3.0}]
    wrong = [[1, 2.0], [1.0], (1.0, 2.0, 3.0), {"a": "x", "b": 1.0}, {"a": 1.0}, {"b": 1.0, "c": 1.0, "d": 1.0}, {"a": "x", "b": 1.0, "c": 1.0}, Counted(a=1.0, b=2.0), {}, []]
    assert same(module.holders([*right, *wrong], 2, "a", (float,), OrderedDict), right)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_a_key_that_cannot_be_compared_is_no_copy_and_no_error(module: ModuleType) -> None:
    assert module.holders([{Odd("a"): 1.0, "b": 1.0, "c": 1.0}], 2, "a", (float,), OrderedDict) == []


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_an_interrupt_in_such_a_key_is_the_users(module: ModuleType) -> None:
    with pytest.raises(KeyboardInterrupt):
        module.holders([{Odd("a", KeyboardInterrupt): 1.0, "b": 1.0, "c": 1.0}], 2, "a", (float,), OrderedDict)


@pytest.mark.parametrize("module", IMPLEMENTATIONS)
def test_wrong_arguments_are_refused(module: ModuleType) -> None:
    with pytest.raises(ValueError, match="a size of 1"):
        module.holders([], 0, "a", (float,), OrderedDict)
    with pytest.raises(ValueError, match="a kind of dictionary"):
        module.holders([], 1, "a", (float,), list)


VALUES = st.one_of(st.floats(), st.integers(), st.text(max_size=2))
THINGS = st.one_of(VALUES, st.lists(VALUES, max_size=4), st.lists(VALUES, max_size=4).map(tuple), st.dictionaries(st.text("ab", max_size=2), VALUES, max_size=4))


@pytest.mark.skipif(native.ACTIVE != "native", reason="the extension is not built")
@given(things=st.lists(THINGS, max_size=8), size=st.integers(1, 4))
def test_native_and_twin_find_the_same(things: list[Any], size: int) -> None:
    for kinds in ((float,), (float, int), ()):
        assert same(native.holders(things, size, "a", kinds, OrderedDict), twin.holders(things, size, "a", kinds, OrderedDict))
    assert same(native.living(things, dict), twin.living(things, dict))
