"""The tap: to the user it is the function it wraps; to us it is one row a call. Both implementations, same tests."""

# More than 400 lines: one set of cases, each run for the extension and for its twin.
from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import json
import math
import os
import pickle
import signal
import subprocess
import sys
import threading
import tracemalloc
import types
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import proctor.native
from proctor.invariants.codec.signature import features
from proctor.invariants.schema import CALLS, CallFlag
from proctor.native.twins import tap as _tap_py

torch = pytest.importorskip("torch")
F = torch.nn.functional

try:
    from proctor.native import _native
except ImportError:
    _native = None

BOTH = [pytest.param(_tap_py, id="python")]
if _native is not None:
    BOTH.append(pytest.param(_native, id="native"))
Point = namedtuple("Point", "x y")


@pytest.fixture(params=BOTH)
def impl(request: pytest.FixtureRequest) -> Any:
    return request.param


def armed(impl: Any) -> Any:
    """A recorder set up as the instrument room does it, and enabled."""
    from proctor.instrument.observe import casts

    r = impl.Recorder()
    r.set_tensor_types(torch.Tensor, torch.nn.Parameter)
    r.set_module_type(torch.nn.Module)
    r.set_probes(
        torch.is_grad_enabled,
        casts.autocast_enabled,
        casts.autocast_dtype,
        ("cpu", "cuda"),
        getattr(torch._C, "_is_any_autocast_enabled", None),
    )
    r.set_torch_function_guard(torch._C._len_torch_function_stack, torch._C.DisableTorchFunction)
    r.set_library_prefixes((os.path.dirname(torch.__file__),))
    r.enabled = True
    return r


@pytest.fixture
def rec(impl: Any) -> Any:
    return armed(impl)


def rows(r: Any) -> list[dict[str, int]]:
    """Drained rows, in order of entry."""
    columns = r.drain()
    n = len(columns["seq"])
    out = [{k: int(v[i]) for k, v in columns.items()} for i in range(n)]
    return sorted(out, key=lambda row: row["seq"])


def names(r: Any, kind: int) -> dict[int, str]:
    return {i: text for k, i, text in r.drain_names() if k == kind}


def describe(impl: Any, *args: Any, **kwargs: Any) -> str:
    r = armed(impl)
    impl.Tap(r, lambda *a, **k: None, 1)(*args, **kwargs)
    return names(r, 2)[1]


def leaf(impl: Any, value: Any) -> Any:
    return json.loads(describe(impl, value))["a"][0]


def plain(a: Any, b: int = 2, *, c: int = 3) -> Any:
    """Doc of plain."""
    return (a, b, c)


def boom(*_: Any) -> None:
    raise LookupError("user's own")


# -- which one is active


def test_active_says_which_implementation_runs() -> None:
    if proctor.native.ACTIVE == "native":
        assert proctor.native.Tap is _native.Tap
    else:
        assert proctor.native.ACTIVE == "python"
        assert proctor.native.Tap is _tap_py.Tap


@pytest.mark.skipif(_native is None, reason="the extension is not built")
@pytest.mark.skipif(os.environ.get("PROCTOR_NATIVE") == "0", reason="switched off")
def test_a_built_extension_is_used() -> None:
    assert proctor.native.ACTIVE == "native"


def test_environment_forces_the_twin() -> None:
    code = "import proctor.native as n; print(n.ACTIVE)"
    env = {**os.environ, "PROCTOR_NATIVE": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "python"


# -- the user's call is untouched


@pytest.mark.parametrize("enabled", [False, True])
def test_arguments_and_result_pass_by_identity(impl: Any, rec: Any, enabled: bool) -> None:
    rec.enabled = enabled
    seen: list[Any] = []
    result = object()

    def f(*args: Any, **kwargs: Any) -> Any:
        seen.append((args, kwargs))
        return result

    a, b = object(), [1]
    assert impl.Tap(rec, f, 1)(a, self=b, args=3) is result
    ((args, kwargs),) = seen
    assert args[0] is a
    assert kwargs["self"] is b
    assert kwargs == {"self": b, "args": 3}
    assert rec.pending == int(enabled)


def test_an_exception_passes_as_the_same_object(impl: Any, rec: Any) -> None:
    error = LookupError("x")
    cause = ValueError("cause")

    def f() -> None:
        raise error from cause

    with pytest.raises(LookupError) as info:
        impl.Tap(rec, f, 1)()
    assert info.value is error
    assert error.__cause__ is cause
    assert error.__context__ is None
    assert [t.name for t in info.traceback][-1] == "f"
    (row,) = rows(rec)
    assert row["flags"] == CallFlag.RAISED
    assert row["ret"] == 0


def test_wrong_arguments_raise_what_the_function_raises(impl: Any, rec: Any) -> None:
    with pytest.raises(TypeError, match="plain"):
        impl.Tap(rec, plain, 1)()


def test_handled_exception_around_the_call_stays_visible(impl: Any, rec: Any) -> None:
    tap = impl.Tap(rec, lambda: sys.exc_info()[1], 1)
    try:
        raise KeyError("outer")
    except KeyError as error:
        assert tap() is error  # noqa: PT017


# -- it looks like the function


def test_it_looks_like_the_function(impl: Any, rec: Any) -> None:
    tap = impl.Tap(rec, plain, 1)
    assert inspect.isfunction(tap)
    assert isinstance(tap, types.FunctionType)
    assert inspect.signature(tap) == inspect.signature(plain)
    assert inspect.unwrap(tap) is plain
    for name in ("__name__", "__doc__", "__module__", "__qualname__", "__code__", "__defaults__", "__kwdefaults__",
                 "__globals__", "__closure__", "__dict__", "__annotations__"):  # fmt: skip
        assert getattr(tap, name) is getattr(plain, name) or getattr(tap, name) == getattr(plain, name)
    assert repr(tap) == repr(plain)
    assert str(tap) == str(plain)
    assert tap.__wrapped__ is plain
    assert tap.tapped is plain
    assert impl.is_tap(tap)
    assert not impl.is_tap(plain)
    assert callable(tap)
    assert not hasattr(tap, "no_such_thing")


def test_attributes_are_written_to_the_function(impl: Any, rec: Any) -> None:
    def f() -> None: ...

    tap = impl.Tap(rec, f, 1)
    tap.mark = 5
    assert f.mark == 5  # type: ignore[attr-defined]
    assert vars(tap) == {"mark": 5}
    del tap.mark
    assert not hasattr(f, "mark")


def test_it_equals_the_function_and_finds_it_in_a_dict(impl: Any, rec: Any) -> None:
    tap, other = impl.Tap(rec, plain, 1), impl.Tap(rec, plain, 2)
    assert tap == plain
    assert plain == tap
    assert tap == other
    assert tap != boom
    assert not (tap != plain)  # noqa: SIM202
    assert {plain: 1}[tap] == 1
    assert {tap: 1}[plain] == 1


def test_wraps_over_a_tap_copies_nothing_of_ours(impl: Any, rec: Any) -> None:
    tap = impl.Tap(rec, plain, 1)

    @functools.wraps(tap)
    def outer(*args: Any) -> Any:
        return tap(*args)

    assert outer.__name__ == "plain"
    assert set(vars(outer)) == {"__wrapped__"}
    assert outer(1) == (1, 2, 3)


def test_a_tap_takes_a_weak_reference(impl: Any, rec: Any) -> None:
    import weakref

    tap = impl.Tap(rec, plain, 1)
    ref = weakref.ref(tap)
    assert ref() is tap
    del tap
    gc.collect()
    assert ref() is None


# -- binding


def test_a_tapped_method_binds(impl: Any, rec: Any) -> None:
    class A:
        def m(self, x: int) -> Any:
            return (self, x)

        def __call__(self, x: int) -> Any:
            return (self, x)

        @staticmethod
        def s(x: int) -> Any:
            return x

        @classmethod
        def c(cls, x: int) -> Any:
            return (cls, x)

    original = A.m
    A.m = impl.Tap(rec, A.__dict__["m"], 1, 1)  # type: ignore[method-assign]
    A.__call__ = impl.Tap(rec, A.__dict__["__call__"], 2, 1)  # type: ignore[method-assign]
    A.s = staticmethod(impl.Tap(rec, A.s, 3))  # type: ignore[method-assign]
    A.c = classmethod(impl.Tap(rec, A.__dict__["c"].__func__, 4))  # type: ignore[assignment]

    class B(A):
        def m(self, x: int) -> Any:
            return super().m(x)

    a, b = A(), B()
    for _ in range(20):  # past the interpreter's specialisation
        assert a.m(1) == (a, 1)
    assert A.m(a, 1) == (a, 1)
    assert A.m == original
    assert b.m(2) == (b, 2)
    assert a(3) == (a, 3)
    assert a.s(4) == A.s(4) == 4
    assert a.c(5) == (A, 5)
    assert B.c(5) == (B, 5)
    bound = a.m
    assert inspect.ismethod(bound)
    assert bound.__self__ is a
    assert bound(6) == (a, 6)
    assert bound.__name__ == "m"
    assert rec.pending == 20 + 1 + 1 + 1 + 2 + 2 + 1


def test_a_tapped_builtin_on_a_class_does_not_bind(impl: Any, rec: Any) -> None:
    class A:
        add = impl.Tap(rec, torch.add, 1)
        size = impl.Tap(rec, len, 2)

    x = torch.ones(2)
    for _ in range(20):
        assert A().size([1, 2]) == 2
    assert torch.equal(A().add(x, x), x + x)
    assert not hasattr(A.size, "__get__")
    assert isinstance(A.add, types.BuiltinFunctionType)


def test_a_tapped_method_descriptor_binds(impl: Any, rec: Any) -> None:
    class T(torch.Tensor):
        add_ = impl.Tap(rec, torch.Tensor.add_, 1, 1)

    x = torch.ones(2).as_subclass(T)
    assert x.add_(1) is x
    assert x.tolist() == [2, 2]
    assert rec.pending >= 1


def test_taps_are_installed_on_torch_itself(impl: Any, rec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "add_", impl.Tap(rec, torch.Tensor.add_, 1, 1))
    monkeypatch.setattr(torch, "add", impl.Tap(rec, torch.add, 2))
    monkeypatch.setattr(F, "relu", impl.Tap(rec, F.relu, 3))
    x = torch.ones(2)
    assert x.add_(1) is x
    assert torch.add(x, x).tolist() == [4, 4]
    assert F.relu(-x).tolist() == [0, 0]
    assert [row["fn"] for row in rows(rec)] == [1, 2, 3]


# -- copies, pickles, compilers


def test_copies_are_the_same_object(impl: Any, rec: Any) -> None:
    tap = impl.Tap(rec, plain, 1)
    assert copy.copy(tap) is tap
    assert copy.deepcopy(tap) is tap
    assert copy.deepcopy({"k": [tap]})["k"][0] is tap


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_pickle_of_an_installed_tap_is_the_functions_own(
    impl: Any, rec: Any, monkeypatch: pytest.MonkeyPatch, protocol: int
) -> None:
    originals = [F.relu, torch.add, torch.Tensor.add_, torch.nn.Linear.forward]
    expected = [pickle.dumps(f, protocol) for f in originals]
    monkeypatch.setattr(F, "relu", impl.Tap(rec, F.relu, 1))
    monkeypatch.setattr(torch, "add", impl.Tap(rec, torch.add, 1))
    monkeypatch.setattr(torch.Tensor, "add_", impl.Tap(rec, torch.Tensor.add_, 1))
    monkeypatch.setattr(torch.nn.Linear, "forward", impl.Tap(rec, torch.nn.Linear.forward, 1))
    taps = [F.relu, torch.add, torch.Tensor.add_, torch.nn.Linear.forward]
    assert [pickle.dumps(t, protocol) for t in taps] == expected
    assert pickle.loads(pickle.dumps(taps[0])) is taps[0]
    assert pickle.loads(pickle.dumps(torch.nn.Linear(1, 1).forward)).__name__ == "forward"


def test_a_pickle_loads_without_proctor(impl: Any, rec: Any) -> None:
    loose = impl.Tap(rec, F.relu, 1)  # not installed at its name
    elsewhere = impl.Tap(rec, F.gelu, 3)  # a built-in function of a module that is not tapped itself
    data = pickle.dumps([loose, impl.Tap(rec, torch.add, 2), elsewhere])
    code = (
        "import sys, pickle\n"
        "class No:\n"
        "    def find_spec(self, name, *a):\n"
        "        if name.split('.')[0] == 'proctor': raise ImportError(name)\n"
        "sys.meta_path.insert(0, No())\n"
        f"relu, add, gelu = pickle.loads({data!r})\n"
        "import torch\n"
        "assert relu is torch.nn.functional.relu and add is torch.add\n"
        "assert gelu is torch.nn.functional.gelu\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_a_local_function_stays_unpicklable(impl: Any, rec: Any) -> None:
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(impl.Tap(rec, lambda: None, 1))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(torch.add(self.fc(x), x))


@pytest.fixture
def tapped_torch(impl: Any, rec: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(torch, "add", impl.Tap(rec, torch.add, 1))
    monkeypatch.setattr(F, "relu", impl.Tap(rec, F.relu, 2))
    monkeypatch.setattr(torch.nn.Module, "__call__", impl.Tap(rec, torch.nn.Module.__call__, 3, 2))
    return rec


def test_script_of_a_module_that_uses_taps(tapped_torch: Any) -> None:
    net, x = Net(), torch.randn(2, 3)
    assert torch.equal(torch.jit.script(net)(x), net(x))


def test_dynamo_finds_what_a_tap_stands_for_without_running_a_getter(impl: Any) -> None:
    """Or all taps would be one object in its table of rules, and importing it would fail."""
    tap = impl.Tap(impl.Recorder(), F.relu, 1)
    assert inspect.getattr_static(tap, "_torchdynamo_inline") is F.relu and tap.__dict__ is F.relu.__dict__


def test_dynamo_follows_a_method_as_the_function_that_its_tap_looks_like(impl: Any) -> None:
    """By an attribute it would find the function without its instance, and call that behind a graph break."""
    tap = impl.Tap(impl.Recorder(), Net.forward, 1, 1)
    assert not hasattr(tap, "_torchdynamo_inline") and inspect.getattr_static(tap, "_torchdynamo_inline", None) is None
    assert isinstance(tap, types.FunctionType) and tap.__code__ is Net.forward.__code__


def test_compile_sees_no_graph_break(impl: Any, tapped_torch: Any) -> None:
    if impl is _tap_py:
        pytest.skip("Dynamo traces into the frames of the twin: it has some, the extension has none")
    torch._dynamo.reset()
    net, x = Net(), torch.randn(2, 3)
    assert torch._dynamo.explain(net)(x).graph_break_count == 0
    torch._dynamo.reset()
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(x), net(x))
    torch._dynamo.reset()


def test_fx_and_functorch_run_through_taps(tapped_torch: Any) -> None:
    net, x = Net(), torch.randn(2, 3)
    assert torch.equal(torch.fx.symbolic_trace(net)(x), net(x))
    out = torch.func.vmap(lambda v: F.relu(torch.add(v, v)))(x)
    assert torch.equal(out, F.relu(x + x))


# -- rows


def test_columns_are_those_of_the_schema(impl: Any, rec: Any) -> None:
    impl.Tap(rec, plain, 7)(1)
    for columns in (rec.drain(), rec.drain()):  # one row, then none
        assert list(columns) == CALLS.names
        for name in CALLS.names:
            assert columns[name].dtype == CALLS.field(name).type.to_pandas_dtype()
    assert len(columns["seq"]) == 0


def test_rows_survive_growth_and_keep_their_order(impl: Any, rec: Any) -> None:
    tap = impl.Tap(rec, len, 9)
    for _ in range(40_000):
        tap(())
    columns = rec.drain()
    assert np.array_equal(columns["seq"], np.arange(1, 40_001))
    assert (columns["dur"] >= 0).all()
    assert (np.diff(columns["t"]) >= 0).all()
    del rec
    gc.collect()
    assert columns["fn"].sum() == 9 * 40_000  # the arrays own their memory


def test_children_name_their_parent(impl: Any, rec: Any) -> None:
    inner = impl.Tap(rec, lambda: rec.current_call, 2)
    outer = impl.Tap(rec, lambda: (rec.current_call, inner(), inner(), [s[:2] for s in rec.open_spans()]), 1)
    assert rec.current_call == 0
    assert outer() == (1, 2, 3, [(1, 1)])
    assert rec.current_call == 0
    assert rec.current_seq == 3
    assert [(r["seq"], r["parent"], r["fn"]) for r in rows(rec)] == [(1, 0, 1), (2, 1, 2), (3, 1, 2)]


def test_recursion_that_ends_in_an_error_leaves_no_open_span(impl: Any, rec: Any) -> None:
    def f(n: int) -> None:
        if n == 0:
            raise LookupError
        tap(n - 1)

    tap = impl.Tap(rec, f, 1)
    with pytest.raises(LookupError):
        tap(20)
    assert rec.open_spans() == []
    assert [r["flags"] for r in rows(rec)] == [CallFlag.RAISED] * 21


def test_more_rows_than_the_capacity_are_counted_not_kept(impl: Any, rec: Any) -> None:
    rec.capacity = 3
    tap = impl.Tap(rec, plain, 1)
    for i in range(5):
        tap(i)
    assert (rec.pending, rec.dropped) == (3, 2)
    assert [r["seq"] for r in rows(rec)] == [1, 2, 3]
    tap(1)
    assert rec.pending == 1


def test_record_false_writes_no_row_but_runs_hooks(impl: Any, rec: Any) -> None:
    calls: list[Any] = []
    tap = impl.Tap(rec, plain, 1, before=lambda *a: calls.append(a))
    tap.record = False
    tap(1)
    assert calls == [((1,), None)]
    assert rec.pending == 0
    assert rec.current_seq == 0


def test_module_calls_are_named_by_class_and_the_outermost_is_the_root(
    impl: Any, rec: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[type] = []
    rec.module_namer = lambda cls: asked.append(cls) or 100 + len(asked)
    monkeypatch.setattr(torch.nn.Module, "__call__", impl.Tap(rec, torch.nn.Module.__call__, 3, 2))
    net, x = Net(), torch.randn(2, 3)
    net(x)
    net(x)
    assert asked == [Net, torch.nn.Linear]
    assert [(r["fn"], r["flags"]) for r in rows(rec)] == [(101, CallFlag.ROOT), (102, 0)] * 2


def test_synthetic_spans_and_rows(impl: Any, rec: Any) -> None:
    sig = rec.intern(2, "{}")
    span = rec.begin(5, sig)
    assert rec.current_call == span
    impl.Tap(rec, plain, 1)(1)
    row = rec.record_call(6, sig, sig, dur_ns=1000)
    rec.end(span, sig, raised=True)
    rec.end(span)  # twice is nothing
    rec.end(12345)
    a, b, c = rows(rec)
    assert (a["seq"], a["fn"], a["args"], a["ret"], a["flags"]) == (span, 5, sig, sig, CallFlag.RAISED)
    assert b["parent"] == span
    assert (c["seq"], c["fn"], c["parent"], c["dur"]) == (row, 6, span, 1000)
    rec.enabled = False
    assert rec.begin(1) == 0
    assert rec.record_call(1, 0, 0) == 0


def test_a_synthetic_span_left_open_closes_with_the_call_around_it(impl: Any, rec: Any) -> None:
    impl.Tap(rec, lambda: rec.begin(2) and None, 1)()
    assert rec.open_spans() == []
    assert [(r["fn"], r["parent"]) for r in rows(rec)] == [(1, 0), (2, 1)]


def test_a_synthetic_span_may_end_inside_another_call(impl: Any, rec: Any) -> None:
    span = rec.begin(1)
    impl.Tap(rec, lambda: rec.end(span), 2)()
    assert rec.open_spans() == []
    assert [r["fn"] for r in rows(rec)] == [1, 2]


# -- names, sites, contexts


def test_in_a_call_that_is_set_aside_all_taps_pass_through(impl: Any, rec: Any) -> None:
    inner = impl.Tap(rec, plain, 1, before=boom)

    def capture(fails: bool) -> Any:
        found = inner(1)
        if fails:
            raise LookupError("user's own")
        return found

    outer = impl.Tap(rec, capture, 2, kind=3)
    assert outer(False) == (1, 2, 3)
    with pytest.raises(LookupError, match="user's own"):
        outer(True)
    assert rows(rec) == []
    assert impl.Tap(rec, plain, 3)(1) == (1, 2, 3)
    assert [row["fn"] for row in rows(rec)] == [3], "it is over"


def test_names_are_interned_once_a_kind(rec: Any) -> None:
    assert [rec.intern(k, "x") for k in range(5)] == [1] * 5
    assert rec.intern(0, "y") == 2
    assert rec.intern(0, "x") == 1
    assert rec.drain_names() == [(0, 1, "x"), (1, 1, "x"), (2, 1, "x"), (3, 1, "x"), (4, 1, "x"), (0, 2, "y")]
    assert rec.drain_names() == []
    with pytest.raises(ValueError, match="kind"):
        rec.intern(6, "x")


def test_site_is_the_nearest_frame_of_user_code(impl: Any, rec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "relu", impl.Tap(rec, torch.relu, 1))
    lines = [inspect.currentframe().f_lineno + i for i in (1, 2)]  # type: ignore[union-attr]
    torch.relu(torch.ones(1))
    F.relu(torch.ones(1))  # torch's own code calls torch.relu
    sites = names(rec, 1)
    assert [sites[r["site"]] for r in rows(rec)] == [f"{__file__}:{n}" for n in lines]
    rec.set_library_prefixes(("",))  # everything is a library
    torch.relu(torch.ones(1))
    assert rows(rec)[0]["site"] == 0


def test_site_of_nested_calls_through_library_code(impl: Any, rec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "relu", impl.Tap(rec, torch.relu, 1))
    monkeypatch.setattr(F, "relu", impl.Tap(rec, F.relu, 2))
    line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
    F.relu(torch.ones(1))
    sites = names(rec, 1)
    assert [sites[r["site"]] for r in rows(rec)] == [f"{__file__}:{line}"] * 2


def test_context_is_the_truth_at_the_call(impl: Any, rec: Any) -> None:
    seen: dict[Any, int] = {}
    rec.set_context_resolver(lambda *key: seen.setdefault(key, 10 + len(seen)))
    rec.ctx = 7
    tap = impl.Tap(rec, lambda f=None: f and f(), 1)
    tap()
    with torch.no_grad():
        tap()

    def inside() -> None:
        with torch.autocast("cpu", enabled=False):
            tap()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        tap(inside)
    tap()
    assert list(seen) == [
        (7, True, "", ""), (7, False, "", ""), (7, True, "bfloat16", "bfloat16"), (7, True, "", "bfloat16"),
    ]  # fmt: skip
    assert [r["ctx"] for r in rows(rec)] == [10, 11, 12, 13, 10]


def test_without_probes_the_context_is_the_base(impl: Any) -> None:
    r = impl.Recorder()
    r.enabled = True
    r.ctx = 4
    impl.Tap(r, plain, 1)(1)
    r.set_context_resolver(lambda base, grad, autocast, outer: {(4, True, "", ""): 9}[base, grad, autocast, outer])
    impl.Tap(r, plain, 1)(1)
    assert [x["ctx"] for x in rows(r)] == [4, 9]


def test_a_failing_resolver_falls_back_to_the_base_and_is_told_once(impl: Any, rec: Any) -> None:
    errors: list[BaseException] = []
    rec.on_error = errors.append
    rec.ctx = 3
    rec.set_context_resolver(boom)
    tap = impl.Tap(rec, plain, 1)
    assert tap(1) == tap(1) == (1, 2, 3)
    assert [r["ctx"] for r in rows(rec)] == [3, 3]
    assert len(errors) == 1


# -- hooks


def test_hooks_see_the_call_while_it_is_current(impl: Any, rec: Any) -> None:
    log: list[Any] = []
    tap = impl.Tap(rec, plain, 1)
    tap.before = lambda args, kwargs: log.append(("before", args, kwargs, rec.current_call))
    tap.after = lambda *a: log.append(("after", *a, rec.current_call))
    tap(1, c=5)
    assert log == [("before", (1,), {"c": 5}, 1), ("after", (1,), {"c": 5}, (1, 2, 5), False, 1)]
    assert rec.current_call == 0


def test_after_hears_of_an_exception(impl: Any, rec: Any) -> None:
    log: list[Any] = []
    tap = impl.Tap(rec, boom, 1, after=lambda *a: log.append((*a, sys.exc_info()[0] is None)))
    with pytest.raises(LookupError):
        tap(1)
    assert log[0][:4] == ((1,), None, None, True)


@pytest.mark.parametrize("slot", ["before", "after"])
def test_an_error_in_a_hook_is_told_once_and_never_reaches_the_user(impl: Any, rec: Any, slot: str) -> None:
    errors: list[BaseException] = []
    rec.on_error = errors.append
    tap = impl.Tap(rec, plain, 1)
    setattr(tap, slot, boom)
    assert tap(1) == tap(1) == (1, 2, 3)
    assert [str(e) for e in errors] == ["user's own"]
    assert errors[0].__traceback__ is not None
    assert getattr(tap, slot) is None
    assert rec.pending == 2
    rec.on_error = boom  # it may fail, too
    setattr(tap, slot, lambda: "too many arguments")
    assert tap(1) == (1, 2, 3)


def test_an_error_in_after_leaves_the_users_exception_alone(impl: Any, rec: Any) -> None:
    error = ValueError("user")

    def f() -> None:
        raise error

    tap = impl.Tap(rec, f, 1, after=boom)
    with pytest.raises(ValueError, match="user") as info:
        tap()
    assert info.value is error
    assert error.__context__ is None


def test_an_interrupt_inside_a_hook_still_reaches_the_user(impl: Any, rec: Any) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    tap = impl.Tap(rec, plain, 1, before=interrupted)

    def work() -> None:
        for _ in range(1000):
            tap(1)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            work()
    finally:
        signal.signal(signal.SIGINT, before)
    assert tap.before is interrupted
    assert rec.open_spans() == []


def test_taps_called_by_hooks_pass_through(impl: Any, rec: Any) -> None:
    inner = impl.Tap(rec, plain, 2)
    tap = impl.Tap(rec, plain, 1, before=lambda *_: inner(1), after=lambda *_: tap(1))
    tap(1)
    assert [r["fn"] for r in rows(rec)] == [1]


def test_a_tripwire_runs_while_the_recorder_is_off(impl: Any, rec: Any) -> None:
    calls: list[Any] = []
    rec.enabled = False
    tap = impl.Tap(rec, plain, 1, before=lambda *a: calls.append(a))
    tap(1)
    assert calls == []
    tap.always = True
    tap(1)
    assert len(calls) == 1
    assert rec.pending == 0


def test_a_call_whose_hook_arms_the_recorder_is_recorded(impl: Any, rec: Any) -> None:
    rec.enabled = False

    def arm(*_: Any) -> None:
        rec.enabled = True
        tap.always = False
        tap.before = None

    tap = impl.Tap(rec, plain, 1, before=arm)
    tap.always = True
    tap(1)
    tap(1)
    assert rec.pending == 2


def test_a_call_whose_hook_switches_recording_off_writes_no_row(impl: Any, rec: Any) -> None:
    def off(*_: Any) -> None:
        rec.enabled = False

    tap = impl.Tap(rec, plain, 1, before=off)
    tap.always = True
    tap(1)
    assert rec.pending == 0
    assert rec.current_call == 0


def test_hooks_are_checked(impl: Any, rec: Any) -> None:
    tap = impl.Tap(rec, plain, 1)
    with pytest.raises(TypeError):
        tap.before = 3
    with pytest.raises(TypeError):
        impl.Tap(rec, 3, 1)
    with pytest.raises(ValueError, match="kind"):
        impl.Tap(rec, plain, 1, 9)


# -- signatures


def test_signature_of_a_tensor(impl: Any) -> None:
    assert leaf(impl, torch.ones(2, 3)) == {"T": "float32", "s": [2, 3], "d": "cpu"}
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    assert leaf(impl, parameter) == {"T": "bfloat16", "s": [4], "d": "cpu", "g": 1, "c": "Parameter"}
    assert leaf(impl, torch.ones((), device="meta")) == {"T": "float32", "s": [], "d": "meta"}
    assert features(describe(impl, torch.ones(2)))["0.shape[0]"] == 2


def test_signature_of_tracked_objects(impl: Any) -> None:
    r = armed(impl)
    net = Net().eval()
    r.set_tracked_names({id(net): "root", id(net.fc.weight): "stale"})
    r.track(id(net.fc.weight), 'fc."weight"é')
    tap = impl.Tap(r, lambda *_: None, 1)
    tap(net, net.fc.weight)
    r.untrack(id(net))
    tap(net, net.fc)
    first, second = names(r, 2)[1], names(r, 2)
    assert second == {}
    assert json.loads(first)["a"] == [
        {"M": f"{Net.__module__}.Net", "p": "root", "t": 0},
        {"T": "float32", "s": [3, 3], "d": "cpu", "g": 1, "c": "Parameter", "v": 'fc."weight"é'},
    ]


def test_signature_of_library_modules(impl: Any) -> None:
    assert leaf(impl, torch.nn.Linear(1, 1)) == {"M": "torch.nn.Linear", "t": 1}
    assert leaf(impl, torch.nn.Sequential()) == {"M": "torch.nn.Sequential", "t": 1}


class Config:
    def __init__(self) -> None:
        self.low, self.name, self.none, self.skipped, self.long = True, "q", None, 3, "x" * 65

    def __getattr__(self, name: str) -> Any:
        raise AssertionError("user code ran")

    def __repr__(self) -> str:
        raise AssertionError("user code ran")

    __len__ = __bool__ = __eq__ = __hash__ = __iter__ = __repr__  # type: ignore[assignment]


class Shown:
    def __init__(self) -> None:
        self.on, self.é, self.n = False, "\u2028\x7f", 3


class Slotted:
    __slots__ = ("a",)


class FakeDict(dict[str, int]):
    def items(self) -> Any:
        raise AssertionError("user code ran")

    __iter__ = __len__ = __getitem__ = keys = items  # type: ignore[assignment]


CASES = [
    (None, None), (True, True), (3, 3), (-5, -5), (0.1, 0.1), (1e30, 1e30), ("mean", "mean"),
    (2**63, 2**63), (2**64, {"e": "int"}), (-(2**63), -(2**63)), (-(2**63) - 1, {"e": "int"}),
    (math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf"),
    ("x" * 100, "x" * 64), ("é" * 100, "é" * 64), ('a"\\\n\t\x01\x7f', 'a"\\\n\t\x01\x7f'),
    ("😀\ud800é", "😀\ufffdé"),
    ([1, 2], {"L": [1, 2], "n": 2}), (Point(1, "b"), {"L": [1, "b"], "n": 2}), (range(3), {"O": "range", "a": {}}),
    (list(range(10)), {"L": list(range(8)), "n": 10}),
    ({3, 1}, {"L": [1, 3], "n": 2}), (frozenset("ba"), {"L": ["a", "b"], "n": 2}), ({1, "a"}, {"L": [], "n": 2}),
    ({True, 2}, {"L": [], "n": 2}), (set(), {"L": [], "n": 0}),
    (torch.Size([1, 2]), {"L": [1, 2], "n": 2}),
    ({"k": 1, 2: 3}, {"D": {"k": 1}, "n": 2}), (OrderedDict(a=1), {"D": {"a": 1}, "n": 1}),
    (FakeDict(a=1), {"D": {"a": 1}, "n": 1}),
    ({str(i): i for i in range(20)}, {"D": {str(i): i for i in range(16)}, "n": 20}),
    ([[[[1]]]], {"L": [{"L": [{"L": [{"e": "list"}], "n": 1}], "n": 1}], "n": 1}),
    (torch.bfloat16, {"y": "torch.bfloat16"}), (torch.device("cpu"), {"y": "cpu"}), (torch.strided, {"y": "torch.strided"}),
    (torch.distributed.ReduceOp.AVG, {"y": "torch._C._distributed_c10d.ReduceOp.RedOpType.AVG"}),
    (torch.channels_last, {"y": "torch.channels_last"}),
    (plain, {"f": f"{__name__}.plain"}), (len, {"f": "len"}), (int, {"f": "int"}), (Net, {"f": f"{__name__}.Net"}),
    (F.relu, {"f": "torch.nn.functional.relu"}), (str.join, {"f": "str.join"}), (Net.forward, {"f": f"{__name__}.Net.forward"}),
    (np.ones((2, 3), np.float32), {"T": "numpy.float32", "s": [2, 3]}), (np.float64(0.5), 0.5),
    (np.int64(1), {"O": "numpy.int64", "a": {}}), (b"x", {"O": "bytes", "a": {}}), (1j, {"O": "complex", "a": {}}),
    (Config(), {"O": f"{__name__}.Config", "a": {"low": True, "name": "q", "none": None}}),
    (Slotted(), {"O": f"{__name__}.Slotted", "a": {}}),
    (functools.partial(plain), {"O": "functools.partial", "a": {}}),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_signature_of_a_value(impl: Any, case: int) -> None:
    value, expected = CASES[case]
    assert leaf(impl, value) == expected


def test_signature_of_keyword_arguments_and_results(impl: Any, rec: Any) -> None:
    impl.Tap(rec, lambda *a, **k: [a[0]], 1)(1, é="x")
    (row,) = rows(rec)
    texts = names(rec, 2)
    assert texts[row["args"]] == '{"a":[1],"k":{"é":"x"}}'
    assert texts[row["ret"]] == '{"L":[1],"n":1}'


def test_bound_methods_and_taps_are_described_as_functions(impl: Any, rec: Any) -> None:
    net = Net()
    assert leaf(impl, net.forward) == {"f": f"{__name__}.Net.forward"}
    assert leaf(impl, impl.Tap(rec, plain, 1)) == {"f": f"{__name__}.plain"}
    assert leaf(impl, impl.Tap(rec, torch.add, 1)) == leaf(impl, torch.add)


def test_a_huge_argument_list_is_cut(impl: Any) -> None:
    deep = [[[0] * 8 for _ in range(8)] for _ in range(8)]
    text = describe(impl, *[deep] * 5)
    assert len(text) < 10_000
    assert '{"e":"cut"}' in text
    assert len(json.loads(describe(impl, *range(100)))["a"]) == 64


def test_tensor_subclasses_and_modes_run_no_user_code(impl: Any) -> None:
    from torch.overrides import TorchFunctionMode

    ran: list[Any] = []

    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func)
            return super().__torch_function__(func, types, args, kwargs or {})

        @property
        def shape(self) -> Any:
            raise AssertionError("user code ran")

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            ran.append(func)
            return func(*args, **(kwargs or {}))

    sub, x = torch.ones(2).as_subclass(Sub), torch.ones(3)
    r = armed(impl)
    tap = impl.Tap(r, lambda *_: None, 1)
    ran.clear()
    tap(sub)
    with Mode():
        ran.clear()
        tap(x)
        assert ran == []
        x.dtype  # noqa: B018  (the mode is on again)
        assert len(ran) == 1
    texts = list(names(r, 2).values())
    assert json.loads(texts[0])["a"] == [{"T": "float32", "s": [2], "d": "cpu", "c": "Sub"}]
    assert json.loads(texts[2])["a"] == [{"T": "float32", "s": [3], "d": "cpu"}]


@pytest.mark.parametrize("name", ["relu", "add_"])
def test_what_c_code_hands_to_torch_function_and_gets_back_is_one_call(impl: Any, name: str) -> None:
    class Sub(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                return tap(*args) if func.__name__ == name else func(*args)

    r = armed(impl)
    hooked: list[str] = []
    tap = impl.Tap(r, getattr(torch, name, None) or getattr(torch.Tensor, name), 1, 0, lambda *_: hooked.append("before"), lambda *_: hooked.append("after"))
    more = [1.0] if name == "add_" else []
    for nth, tensor in enumerate((torch.ones(2).as_subclass(Sub), torch.ones(2), "no tensor", torch.ones(2)), 1):
        if isinstance(tensor, str):
            with pytest.raises(TypeError):
                tap(tensor, *more)
        else:
            assert torch.Tensor.tolist(tap(tensor, *more)) == [1.0 + sum(more)] * 2
        assert hooked == ["before", "after"] * nth
    assert len(rows(r)) == 4


def test_fake_and_functional_tensors_are_described(impl: Any) -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2, 3))
    got = leaf(impl, fake)
    assert (got["T"], got["s"], got["c"]) == ("float32", [2, 3], "FakeTensor")
    r = armed(impl)
    tap = impl.Tap(r, torch.sin, 1)
    assert torch.equal(torch.func.grad(lambda v: tap(v).sum())(torch.zeros(2)), torch.ones(2))
    assert r.pending == 1


def test_too_many_distinct_signatures_say_less(impl: Any, rec: Any) -> None:
    tap = impl.Tap(rec, lambda *_: None, 1)
    for i in range(135):
        tap(i, "s", 0.5, True)
    texts = list(names(rec, 2).values())
    assert texts[0] == '{"a":[0,"s",0.5,true],"k":{}}'
    assert texts[-1] == '{"a":[{"e":"int"},{"e":"str"},{"e":"float"},true],"k":{}}'
    assert len(texts) == 1 + 129 + 1  # null, 129 full ones, one without scalars
    other = impl.Tap(rec, lambda *_: None, 2)
    other(999)
    assert list(names(rec, 2).values()) == ['{"a":[999],"k":{}}']  # the count is the tap's own


def test_far_too_many_lose_the_dims_and_then_everything(impl: Any, rec: Any) -> None:
    meta = [torch.empty((i, 1), device="meta") for i in range(1030)]
    tap = impl.Tap(rec, lambda *_, **__: None, 1)
    for x in meta:
        tap(x)
    assert list(names(rec, 2).values())[-1] == '{"a":[{"T":"float32","s":null,"d":"meta"}],"k":{}}'
    for i in range(4100):
        tap(**{f"k{i}": None})
    assert list(names(rec, 2).values())[-1] == '{"e":"many"}'


LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=80)
    | st.sampled_from([torch.ones(2, 3), torch.nn.Parameter(torch.ones(1)), torch.float16, plain, len, Shown(), Slotted(),
                       torch.nn.Linear(1, 1), np.ones(2), Net, b"x", object(), torch.device("cpu")])
    | st.characters(categories=["Cs", "Cc", "So"])
)  # fmt: skip
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=12)
        | st.lists(inner, max_size=9).map(tuple)
        | st.dictionaries(st.text(max_size=70) | st.integers(), inner, max_size=20)
        | st.sets(st.text(max_size=3) | st.integers(), max_size=10)
        | st.frozensets(st.integers(), max_size=10)
    ),
    max_leaves=30,
)


@pytest.mark.skipif(_native is None, reason="the extension is not built")
@settings(max_examples=150, deadline=None)
@given(args=st.lists(NESTED, max_size=4), kwargs=st.dictionaries(st.text(max_size=5), NESTED, max_size=3))
def test_both_implementations_write_the_same_signature(args: list[Any], kwargs: dict[str, Any]) -> None:
    kwargs = {k: v for k, v in kwargs.items() if k.isidentifier()}
    text = describe(_native, *args, **kwargs)
    assert text == describe(_tap_py, *args, **kwargs)
    assert set(json.loads(text)) == {"a", "k"}
    text.encode()
    features(text)


# -- threads, forks, references


def test_threads_have_their_own_spans(impl: Any, rec: Any) -> None:
    barrier = threading.Barrier(4)
    inner = impl.Tap(rec, lambda: barrier.wait(10) * 0, 2)
    outer = impl.Tap(rec, lambda: inner(), 1)
    threads = [threading.Thread(target=outer) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    got = rows(rec)
    by_seq = {r["seq"]: r for r in got}
    assert len(got) == 8
    assert all(r["flags"] & CallFlag.THREAD for r in got)
    assert all(by_seq[r["parent"]]["fn"] == 1 for r in got if r["fn"] == 2)
    assert len({r["parent"] for r in got if r["fn"] == 2}) == 4
    outer_main = impl.Tap(rec, plain, 3)
    outer_main(1)
    assert rows(rec)[0]["flags"] == 0


def test_draining_from_another_thread_loses_nothing(impl: Any, rec: Any) -> None:
    tap, done, total = impl.Tap(rec, plain, 1), threading.Event(), [0]

    def drainer() -> None:
        while not done.is_set():
            total[0] += len(rec.drain()["seq"])
            rec.drain_names()

    t = threading.Thread(target=drainer)
    t.start()
    for i in range(5000):
        tap(i % 7)
    done.set()
    t.join()
    assert total[0] + len(rec.drain()["seq"]) == 5000


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_records_nothing(impl: Any, rec: Any) -> None:
    impl.Tap(rec, plain, 1)(1)

    def fork() -> int:
        pid = os.fork()
        if pid == 0:
            rec.disable_in_child()
        return pid

    pid = impl.Tap(rec, fork, 2)()
    if pid == 0:
        ok = not rec.enabled and rec.pending == 0 and rec.current_call == 0 and rec.drain_names() == []
        os._exit(0 if ok else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert [r["fn"] for r in rows(rec)] == [1, 2]


def test_calls_keep_no_references(impl: Any, rec: Any) -> None:
    rec.set_context_resolver(lambda *_: 1)
    x, module, thing, mapping = torch.ones(2), torch.nn.Linear(1, 1), Config(), {"a": [1.5, {2}]}
    hook = lambda *_: None  # noqa: E731
    tap = impl.Tap(rec, lambda *a, **k: a, 1, before=hook, after=hook)
    failing = impl.Tap(rec, boom, 2)
    watched = [x, module, thing, mapping, hook, tap, failing, rec, None, True, torch.float32]

    def spin(n: int) -> None:
        for _ in range(n):
            tap(x, module, thing, mapping, torch.float32, k=x)
            with contextlib.suppress(LookupError):
                failing(x)
        rec.drain()

    spin(100)
    gc.collect()
    before = [sys.getrefcount(w) for w in watched]
    spin(2000)
    after = [sys.getrefcount(w) for w in watched]
    # None and True are shared with everything that runs; a leak would be two thousand.
    assert all(abs(b - a) < 500 for a, b in zip(before, after)), list(zip(before, after))


def test_memory_stays_flat_over_many_calls(impl: Any, rec: Any) -> None:
    n = 100_000 if impl is _native else 5_000
    tap, x = impl.Tap(rec, plain, 1), torch.ones(2)

    def spin() -> None:
        for i in range(n):
            tap(x, c=i & 15)
            if i % 1000 == 0:
                rec.drain()
        rec.drain()

    tap(x)
    spin()
    gc.collect()
    tracemalloc.start()
    base = tracemalloc.get_traced_memory()[0]
    spin()
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0] - base
    tracemalloc.stop()
    assert grown < 50_000


def test_a_cycle_through_a_tap_is_collected(impl: Any, rec: Any) -> None:
    import weakref

    class Thing: ...

    def make() -> Any:
        thing = Thing()
        tap = impl.Tap(rec, lambda: thing, 1, before=lambda *_: thing)
        thing.tap = tap  # type: ignore[attr-defined]
        return weakref.ref(thing)

    ref = make()
    gc.collect()
    assert ref() is None


def test_classes_of_arguments_may_die(impl: Any, rec: Any) -> None:
    import weakref

    tap = impl.Tap(rec, lambda *_: None, 1)
    texts = []
    for i in range(5):
        cls = type(f"C{i}", (), {"__module__": "m"})
        tap(cls())
        ref = weakref.ref(cls)
        del cls
        gc.collect()
        assert ref() is None
        texts += list(names(rec, 2).values())
    assert [t for t in texts if t != "null"] == [f'{{"a":[{{"O":"m.C{i}","a":{{}}}}],"k":{{}}}}' for i in range(5)]


def test_root_only_hooks_and_root_flag_see_the_outermost_module(impl: Any) -> None:
    torch = pytest.importorskip("torch")
    r = impl.Recorder()
    r.set_module_type(torch.nn.Module)
    codes = {torch.nn.ReLU: 0, torch.nn.Tanh: r.intern(0, "Tanh") | 1 << 31}  # not wanted; wanted as the root only
    r.module_namer = lambda cls: codes.get(cls, r.intern(0, cls.__name__))
    seen: list[str] = []
    original = torch.nn.Module.__call__
    tap = impl.Tap(r, original, 1, 2, lambda args, kwargs: seen.append(type(args[0]).__name__))
    tap.root_only = True
    torch.nn.Module.__call__ = tap
    try:
        r.enabled = True
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU(), torch.nn.Tanh())
        model(torch.ones(1, 2))
        torch.nn.Tanh()(torch.ones(1))
        r.enabled = False
    finally:
        torch.nn.Module.__call__ = original
    assert seen == ["Sequential", "Tanh"]
    rows = r.drain()
    assert len(rows["seq"]) == 3
    assert [int(f) & 2 for f in rows["flags"]] == [0, 2, 2]


def test_flat_tap_writes_one_row_for_a_recursion(impl: Any) -> None:
    r = impl.Recorder()
    code = r.intern(0, "down")

    def down(n: int) -> int:
        return n and tap(n - 1)

    tap = impl.Tap(r, down, code)
    tap.flat = True
    r.enabled = True
    tap(5)
    assert len(r.drain()["seq"]) == 1


def test_a_hook_that_begins_a_new_context_is_inside_it(impl: Any) -> None:
    r = impl.Recorder()
    r.set_context_resolver(lambda base, grad, autocast, outer: base + 100)
    tap = impl.Tap(r, lambda: None, r.intern(0, "step"), 0, lambda args, kwargs: setattr(r, "ctx", 7))
    r.enabled = True
    tap()
    assert r.drain()["ctx"].tolist() == [107]


def test_other_objects_show_their_tracked_name(impl: Any) -> None:
    r = impl.Recorder()

    class Thing:
        pass

    thing = Thing()
    r.track(id(thing), "#0")
    tap = impl.Tap(r, lambda x: None, r.intern(0, "f"))
    r.enabled = True
    tap(thing)
    assert any('"v":"#0"' in text for _, _, text in r.drain_names())


def test_values_are_wanted_while_calls_are_recorded_until_nobody_may_read_any(impl: Any) -> None:
    r = impl.Recorder()
    asked = [r.wants_values()]
    r.enabled = True
    asked.append(r.wants_values())
    r.muted = True
    assert r.enabled and not r.wants_values(), "calls go on"
    r.muted = r.enabled = False
    asked.append(r.wants_values())
    r.enabled = True
    r.disable_in_child()
    assert [*asked, r.wants_values()] == [False, True, False, False]
