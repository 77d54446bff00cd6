#include "tap.h"

#include <structmember.h>

#include <cstddef>

#include "asleep.h"
#include "recorder.h"

namespace proctor {

namespace {

constexpr uint32_t kRootsOnly = 1u << 31;  // in a module code: wanted as the outermost module only

enum TapKind : int { kPlain, kMethodCall, kModuleCall, kAside, kTapKinds };

struct Tap {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  PyObject* wrapped;   // Owned, never NULL while the tap can be called
  Recorder* recorder;  // Owned
  PyObject* before;    // Owned or NULL
  PyObject* after;     // Owned or NULL
  PyObject* weakrefs;
  Signatures* seen_args;  // Owned
  Signatures* seen_ret;   // Owned
  uint32_t fn;
  uint8_t kind;
  uint8_t act;       // what it is to a training loop while nobody looks
  int8_t group_at;   // of a collective
  bool record, always, root_only, flat;
  bool comes_back;  // wraps C code, which may hand this tap to a `__torch_function__`, and that calls it for the same call
};

PyTypeObject* tap_type = nullptr;
PyTypeObject* method_tap_type = nullptr;
PyObject* own_names = nullptr;      // dict: attribute names that a tap answers itself → None: the wrapped callable
PyObject* dunder_dict = nullptr;    // Interned strings
PyObject* dunder_reduce_ex = nullptr;
PyObject* dunder_module = nullptr;
PyObject* dunder_qualname = nullptr;
PyObject* inline_name = nullptr;

Tap* cast(PyObject* self) { return reinterpret_cast<Tap*>(self); }

PyObject* innermost(PyObject* object) {  // Borrowed
  while (is_tap_type(Py_TYPE(object))) object = cast(object)->wrapped;
  return object;
}

// -- the call -----------------------------------------------------------------------------------------------

// Positional and keyword arguments as the hooks get them; New references, kwargs NULL where there are none.
bool collect(PyObject* const* args, Py_ssize_t n, PyObject* kwnames, Owned* positional, Owned* named) {
  positional->reset(PyTuple_New(n));
  if (!*positional) return false;
  for (Py_ssize_t i = 0; i < n; ++i) PyTuple_SET_ITEM(positional->get(), i, Py_NewRef(args[i]));
  if (!kwnames || PyTuple_GET_SIZE(kwnames) == 0) return true;
  named->reset(PyDict_New());
  if (!*named) return false;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kwnames); ++i) {
    if (PyDict_SetItem(named->get(), PyTuple_GET_ITEM(kwnames, i), args[n + i]) < 0) return false;
  }
  return true;
}

// A hook that fails is reported once and taken off; Ctrl-C inside it, and what a handler of theirs raises, is the user's and leaves it on.
void run_hook(Tap* tap, PyObject* Tap::* slot, PyObject* const* args, size_t n) {
  Owned hook = Owned::share(tap->*slot);
  Owned done(PyObject_Vectorcall(hook.get(), args, n, nullptr));
  if (done) return;
  if (rearm_interrupt()) return;
  ErrorStash failed;
  if (tap->*slot == hook.get()) Py_CLEAR(tap->*slot);
  failed.restore();
  tap->recorder->r->fail();
}

class Observation {
 public:
  Observation(Tap* tap, Tls& tls) : tap_(tap), tls_(tls), r_(*tap->recorder->r) {}

  void enter(PyObject* const* args, Py_ssize_t n, PyObject* kwnames) {
    Inside inside(tls_);
    const bool module = tap_->kind == kModuleCall;
    was_enabled_ = tap_->recorder->enabled;
    bool hooked = tap_->before || tap_->after;
    if (module) {
      counted_ = &r_.thread(tls_);
      if (++counted_->modules > 1 && tap_->root_only) hooked = false;
    }
    if (tap_->recorder->enabled) open(module, args, n, kwnames);
    if (hooked) {
      collected_ = collect(args, n, kwnames, &positional_, &named_);
      if (!collected_) swallow_error();
    }
    if (tap_->before && collected_) {
      PyObject* hook_args[] = {positional_.get(), named()};
      run_hook(tap_, &Tap::before, hook_args, 2);
      after_hook(module, args, n, kwnames);
    }
    if (thread_) {
      started_ = now_ns();
      if (Span* span = mine()) span->t = started_;
    }
  }

  void leave(PyObject* result) {
    const int64_t ended = thread_ ? now_ns() : 0;
    Inside inside(tls_);
    uint32_t signature = 0;
    // A fork inside the call forgot the span; then there is nothing to describe.
    const bool recorded = thread_ && mine();
    if (recorded && result) signature = r_.value_signature(*thread_, *tap_->seen_ret, result);
    if (tap_->after && collected_) {
      PyObject* hook_args[] = {positional_.get(), named(), result ? result : Py_None, result ? Py_False : Py_True};
      run_hook(tap_, &Tap::after, hook_args, 4);
    }
    if (recorded) r_.close(*thread_, seq_, signature, !result, ended);
    if (counted_ && counted_->modules > 0) --counted_->modules;  // a fork inside the call counts from 0 again
  }

 private:
  // Opens this call's span, if the tap writes rows and this class of module is wanted.
  void open(bool module, PyObject* const* args, Py_ssize_t n, PyObject* kwnames) {
    if (!tap_->record) return;
    uint32_t fn = tap_->fn;
    if (module && n > 0) {
      fn = r_.module_code(Py_TYPE(args[0]), tap_->fn);
      if (fn & kRootsOnly) fn = counted_->modules == 1 ? fn & ~kRootsOnly : 0;
    }
    if (!fn || (tap_->flat && r_.innermost_fn(tls_) == fn)) return;
    thread_ = &r_.thread(tls_);
    if (tap_->before) started_ = now_ns();  // what open_spans() says while the hook runs
    seq_ = r_.open(*thread_, fn, module, false);
    thread_->stack.back().t = started_;
    const uint32_t signature = r_.call_signature(*thread_, *tap_->seen_args, args, n, kwnames);
    if (Span* span = mine()) span->args = signature;
  }
  // The hook may have begun a new step, and with it switched sampling: the call belongs to the new step.
  void after_hook(bool module, PyObject* const* args, Py_ssize_t n, PyObject* kwnames) {
    Span* span = thread_ ? mine() : nullptr;
    if (span && !tap_->recorder->enabled) {
      r_.discard(*thread_, seq_);
      thread_ = nullptr;
    } else if (span) {
      r_.refresh_context(*thread_, span - thread_->stack.data());
    } else if (!thread_ && tap_->recorder->enabled && !was_enabled_) {
      open(module, args, n, kwnames);
    }
  }
  PyObject* named() const { return named_ ? named_.get() : Py_None; }
  Span* mine() {
    auto& stack = thread_->stack;
    for (size_t i = stack.size(); i > 0; --i) {
      if (stack[i - 1].seq == seq_) return &stack[i - 1];
    }
    return nullptr;
  }

  Tap* tap_;
  Tls& tls_;
  Recording& r_;
  ThreadState* thread_ = nullptr;   // NULL: this call writes no row
  ThreadState* counted_ = nullptr;  // NULL: not a module call
  uint32_t seq_ = 0;
  int64_t started_ = 0;
  bool collected_ = false, was_enabled_ = false;
  Owned positional_, named_;
};

PyObject* observed(Tap* tap, PyObject* const* args, size_t nargsf, PyObject* kwnames, Tls& tls) {
  // Held: the caller's reference to the tap may go away while the wrapped callable runs.
  Owned held = Owned::share(reinterpret_cast<PyObject*>(tap));
  const void* before = tls.dispatching;
  if (tap->comes_back) tls.dispatching = tap;
  Observation observation(tap, tls);
  const Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  try {
    observation.enter(args, n, kwnames);
  } catch (...) {  // out of memory: the user's call goes on without us
  }
  swallow_error();
  PyObject* result = PyObject_Vectorcall(tap->wrapped, args, nargsf, kwnames);
  tls.dispatching = before;
  if (result) {
    try {
      observation.leave(result);
    } catch (...) {
    }
    swallow_error();
  } else {
    ErrorStash users;
    try {
      observation.leave(nullptr);
    } catch (...) {
    }
    swallow_error();
    users.restore();
  }
  return result;
}

// What runs in such a call is a program that is written down, not one that trains: all taps in this thread pass through.
PyObject* aside(Tap* tap, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  Owned held = Owned::share(reinterpret_cast<PyObject*>(tap));
  Tls& state = tls();
  const int before = state.inside;  // put back as it was: a fork inside the call forgets it
  state.inside = before + 1;
  PyObject* result = PyObject_Vectorcall(tap->wrapped, args, nargsf, kwnames);
  state.inside = before;
  return result;
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  Tap* tap = cast(self);
  if (tap->kind == kAside) [[unlikely]] return aside(tap, args, nargsf, kwnames);
  if (tap->recorder->asleep && tap->act) [[unlikely]] {
    Tls& state = tls();
    if (!state.inside) {
      Owned held = Owned::share(self);
      PyObject* result = nullptr;
      const ActCall here{static_cast<Act>(tap->act), tap->group_at, tap->fn, tap->wrapped, args, nargsf, kwnames};
      if (call_asleep(*tap->recorder, state, here, &result)) return result;
    }
  }
  const bool recording = tap->recorder->enabled && (tap->record || tap->before || tap->after);
  const bool tripwire = tap->always && (tap->before || tap->after);
  if (recording || tripwire) [[unlikely]] {
    Tls& state = tls();
    if (!state.inside && state.dispatching != tap) return observed(tap, args, nargsf, kwnames, state);
  }
  return PyObject_Vectorcall(tap->wrapped, args, nargsf, kwnames);
}

// -- creation -----------------------------------------------------------------------------------------------

// True where the wrapped callable, found on a class, is bound to the instance.
bool binds(PyObject* wrapped) {
  return Py_TYPE(wrapped)->tp_descr_get && !PyMethod_Check(wrapped) && !PyType_Check(wrapped);
}

PyObject* hook_or_null(PyObject* hook, bool* ok) {  // New reference
  *ok = hook == Py_None || PyCallable_Check(hook);
  if (!*ok) PyErr_SetString(PyExc_TypeError, "a hook must be a callable or None");
  return *ok && hook != Py_None ? Py_NewRef(hook) : nullptr;
}

PyObject* new_tap(PyTypeObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"recorder", "wrapped", "fn_code", "kind", "before", "after", nullptr};
  PyObject *recorder, *wrapped, *before = Py_None, *after = Py_None;
  unsigned int fn;
  int kind = kPlain;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OI|iOO:Tap", const_cast<char**>(names), recorder_type, &recorder,
                                   &wrapped, &fn, &kind, &before, &after)) {
    return nullptr;
  }
  if (!PyCallable_Check(wrapped)) return PyErr_Format(PyExc_TypeError, "%s is not callable", Py_TYPE(wrapped)->tp_name);
  if (kind < 0 || kind >= kTapKinds) return PyErr_Format(PyExc_ValueError, "kind is %d, expected 0 to 3", kind);
  bool ok;
  Owned before_hook(hook_or_null(before, &ok));
  if (!ok) return nullptr;
  Owned after_hook(hook_or_null(after, &ok));
  if (!ok) return nullptr;
  PyTypeObject* type = binds(wrapped) ? method_tap_type : tap_type;
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  Tap* tap = cast(self);
  tap->vectorcall = call;
  tap->wrapped = Py_NewRef(wrapped);
  tap->recorder = reinterpret_cast<Recorder*>(Py_NewRef(recorder));
  tap->before = before_hook.release();
  tap->after = after_hook.release();
  tap->seen_args = new Signatures();
  tap->seen_ret = new Signatures();
  tap->fn = fn;
  tap->kind = static_cast<uint8_t>(kind);
  tap->record = true;
  tap->always = false;
  tap->root_only = false;
  tap->flat = false;
  tap->comes_back = PyCFunction_Check(wrapped) || Py_IS_TYPE(wrapped, &PyMethodDescr_Type);
  tap->act = kNone;
  tap->group_at = -1;
  return self;
}

int traverse_tap(PyObject* self, visitproc visit, void* arg) {
  Tap* tap = cast(self);
  Py_VISIT(Py_TYPE(self));
  Py_VISIT(tap->wrapped);
  Py_VISIT(tap->recorder);
  Py_VISIT(tap->before);
  Py_VISIT(tap->after);
  return 0;
}

// A tap stays callable while its cycle is taken apart: `wrapped` and `recorder` go only with the tap itself, and
// the cycle is broken at the other side (a function's tp_clear drops its globals, closure and defaults).
int clear_tap(PyObject* self) {
  Py_CLEAR(cast(self)->before);
  Py_CLEAR(cast(self)->after);
  return 0;
}

void dealloc_tap(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  Tap* tap = cast(self);
  PyObject_GC_UnTrack(self);
  if (tap->weakrefs) PyObject_ClearWeakRefs(self);
  clear_tap(self);
  Py_CLEAR(tap->wrapped);
  Py_CLEAR(tap->recorder);
  delete std::exchange(tap->seen_args, nullptr);
  delete std::exchange(tap->seen_ret, nullptr);
  type->tp_free(self);
  Py_DECREF(type);
}

// -- what it looks like ---------------------------------------------------------------------------------------

// Dynamo goes on from a method to its `_torchdynamo_inline` by attributes of the instance (`net.pick._torchdynamo_inline`), and
// calls that behind a graph break without the instance. A method's tap is followed as the function that it looks like.
bool followed_by_name(Tap* tap) { return tap->kind != kMethodCall || !PyFunction_Check(tap->wrapped); }

PyObject* get_attribute(PyObject* self, PyObject* name) {
  PyObject* own = PyDict_GetItemWithError(own_names, name);  // Borrowed
  if (own == Py_None && (PyUnicode_Compare(name, inline_name) != 0 || followed_by_name(cast(self)))) return Py_NewRef(cast(self)->wrapped);
  if (own == Py_None) own = nullptr;
  if (own) return PyObject_GenericGetAttr(self, name);
  if (PyErr_Occurred()) return nullptr;
  return PyObject_GetAttr(cast(self)->wrapped, name);
}

int set_attribute(PyObject* self, PyObject* name, PyObject* value) {
  PyObject* own = PyDict_GetItemWithError(own_names, name);  // Borrowed
  if (own && own != Py_None) return PyObject_GenericSetAttr(self, name, value);
  if (PyErr_Occurred()) return -1;
  return PyObject_SetAttr(cast(self)->wrapped, name, value);
}

PyObject* represent(PyObject* self) { return PyObject_Repr(cast(self)->wrapped); }
PyObject* text_of(PyObject* self) { return PyObject_Str(cast(self)->wrapped); }
Py_hash_t hash(PyObject* self) { return PyObject_Hash(cast(self)->wrapped); }

PyObject* compare(PyObject* a, PyObject* b, int op) {
  if (op != Py_EQ && op != Py_NE) Py_RETURN_NOTIMPLEMENTED;
  return PyObject_RichCompare(innermost(a), innermost(b), op);
}

PyObject* bind(PyObject* self, PyObject* instance, PyObject*) {
  if (!instance || instance == Py_None) return Py_NewRef(self);
  return PyMethod_New(self, instance);
}

PyObject* copy(PyObject* self, PyObject*) { return Py_NewRef(self); }

// What `inspect.getattr_static` and nobody else sees (everybody else gets the wrapped callable's own `__dict__`):
// it is how Dynamo looks for `_torchdynamo_inline`, without running a getter.
PyObject* static_dict(PyObject* self, void*) {
  Owned out(PyDict_New());
  if (!out) return nullptr;
  Owned theirs(PyObject_GetAttr(cast(self)->wrapped, dunder_dict));
  if (!theirs) {
    PyErr_Clear();
  } else if (PyDict_Check(theirs.get()) && PyDict_Update(out.get(), theirs.get()) < 0) {
    return nullptr;
  }
  if (followed_by_name(cast(self)) && PyDict_SetItem(out.get(), inline_name, cast(self)->wrapped) < 0) return nullptr;
  return out.release();
}

// The object that a pickle of `object` by reference names, or NULL without an error.
PyObject* found_at(PyObject* module, PyObject* qualname) {  // New reference
  if (!PyUnicode_Check(module) || !PyUnicode_Check(qualname)) return nullptr;
  Owned here(PyImport_GetModule(module));
  Owned dot(PyUnicode_FromString("."));
  Owned parts(here && dot ? PyUnicode_Split(qualname, dot.get(), -1) : nullptr);
  for (Py_ssize_t i = 0; parts && here && i < PyList_GET_SIZE(parts.get()); ++i) {
    here.reset(PyObject_GetAttr(here.get(), PyList_GET_ITEM(parts.get(), i)));
  }
  PyErr_Clear();
  return parts ? here.release() : nullptr;
}

// The pickle must load where Proctor is not installed. A function is pickled as its global name, as functions are, and so are
// built-in functions of a module; if this tap does not stand at that name (`F.gelu` is `torch._C._nn.gelu`), the name is
// spelled out, because pickle would refuse it.
PyObject* reduce_ex(PyObject* self, PyObject* protocol) {
  PyObject* wrapped = innermost(self);
  Owned qualname(PyFunction_Check(wrapped) ? PyObject_GetAttr(wrapped, dunder_qualname)
                                           : PyObject_CallMethodOneArg(wrapped, dunder_reduce_ex, protocol));
  if (!qualname || !PyUnicode_Check(qualname.get())) return qualname.release();
  Owned module(PyObject_GetAttr(wrapped, dunder_module));
  if (!module) return nullptr;
  Owned there(found_at(module.get(), qualname.get()));
  if (!there || there.get() == self || innermost(there.get()) != wrapped) return qualname.release();
  Owned module_operator(PyImport_ImportModule("operator"));
  Owned getter(module_operator ? PyObject_CallMethod(module_operator.get(), "attrgetter", "O", qualname.get()) : nullptr);
  if (!getter) return nullptr;
  Owned here(PyImport_ImportModule("proctor.native"));
  Owned reference(here ? PyObject_CallMethod(here.get(), "ModuleReference", "O", module.get()) : nullptr);
  if (!reference) return nullptr;
  return Py_BuildValue("O(O)", getter.get(), reference.get());
}

PyObject* reduce(PyObject* self, PyObject*) {
  Owned protocol(PyLong_FromLong(2));
  return protocol ? reduce_ex(self, protocol.get()) : nullptr;
}

// -- own attributes -------------------------------------------------------------------------------------------

template <PyObject* Tap::* Slot>
PyObject* get_hook(PyObject* self, void*) {
  return Py_NewRef(cast(self)->*Slot ? cast(self)->*Slot : Py_None);
}

template <PyObject* Tap::* Slot>
int set_hook(PyObject* self, PyObject* value, void*) {
  bool ok = true;
  PyObject* hook = value ? hook_or_null(value, &ok) : nullptr;
  if (!ok) return -1;
  Py_XSETREF(cast(self)->*Slot, hook);
  return 0;
}

template <bool Tap::* Slot>
PyObject* get_switch(PyObject* self, void*) {
  return PyBool_FromLong(cast(self)->*Slot);
}

template <bool Tap::* Slot>
int set_switch(PyObject* self, PyObject* value, void*) {
  const int on = value ? PyObject_IsTrue(value) : 0;
  if (on < 0) return -1;
  cast(self)->*Slot = on;
  return 0;
}

PyObject* get_fn(PyObject* self, void*) { return PyLong_FromUnsignedLong(cast(self)->fn); }
PyObject* get_act(PyObject* self, void*) { return PyLong_FromLong(cast(self)->act); }
PyObject* get_group_at(PyObject* self, void*) { return PyLong_FromLong(cast(self)->group_at); }

// A small number in [low, high); -2 with an error set.
long small(PyObject* value, long low, long high) {
  const long number = value ? PyLong_AsLong(value) : -2;
  if (PyErr_Occurred()) return -2;
  if (number >= low && number < high) return number;
  PyErr_Format(PyExc_ValueError, "expected a number from %ld to %ld", low, high - 1);
  return -2;
}

int set_act(PyObject* self, PyObject* value, void*) {
  const long act = small(value, 0, kActs);
  if (act == -2) return -1;
  cast(self)->act = static_cast<uint8_t>(act);
  return 0;
}

int set_group_at(PyObject* self, PyObject* value, void*) {
  const long at = small(value, -1, 127);
  if (at == -2) return -1;
  cast(self)->group_at = static_cast<int8_t>(at);
  return 0;
}

PyObject* get_kind(PyObject* self, void*) { return PyLong_FromLong(cast(self)->kind); }
PyObject* get_recorder(PyObject* self, void*) { return Py_NewRef(reinterpret_cast<PyObject*>(cast(self)->recorder)); }

PyMethodDef methods[] = {
    {"__copy__", copy, METH_NOARGS, nullptr},
    {"__deepcopy__", copy, METH_O, nullptr},
    {"__reduce__", reduce, METH_NOARGS, nullptr},
    {"__reduce_ex__", reduce_ex, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef attributes[] = {
    {"before", get_hook<&Tap::before>, set_hook<&Tap::before>, nullptr, nullptr},
    {"after", get_hook<&Tap::after>, set_hook<&Tap::after>, nullptr, nullptr},
    {"record", get_switch<&Tap::record>, set_switch<&Tap::record>, nullptr, nullptr},
    {"always", get_switch<&Tap::always>, set_switch<&Tap::always>, nullptr, nullptr},
    {"root_only", get_switch<&Tap::root_only>, set_switch<&Tap::root_only>, nullptr, nullptr},
    {"flat", get_switch<&Tap::flat>, set_switch<&Tap::flat>, nullptr, nullptr},
    {"act", get_act, set_act, nullptr, nullptr},
    {"group_at", get_group_at, set_group_at, nullptr, nullptr},
    {"fn_code", get_fn, nullptr, nullptr, nullptr},
    {"kind", get_kind, nullptr, nullptr, nullptr},
    {"recorder", get_recorder, nullptr, nullptr, nullptr},
    {"__dict__", static_dict, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Tap, vectorcall), READONLY, nullptr},
    {"__weaklistoffset__", T_PYSSIZET, offsetof(Tap, weakrefs), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

#define TAP_SLOTS                                                        \
  {Py_tp_new, reinterpret_cast<void*>(new_tap)},                         \
      {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_tap)},             \
      {Py_tp_traverse, reinterpret_cast<void*>(traverse_tap)},           \
      {Py_tp_clear, reinterpret_cast<void*>(clear_tap)},                 \
      {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},          \
      {Py_tp_getattro, reinterpret_cast<void*>(get_attribute)},          \
      {Py_tp_setattro, reinterpret_cast<void*>(set_attribute)},          \
      {Py_tp_repr, reinterpret_cast<void*>(represent)},                  \
      {Py_tp_str, reinterpret_cast<void*>(text_of)},                     \
      {Py_tp_hash, reinterpret_cast<void*>(hash)},                       \
      {Py_tp_richcompare, reinterpret_cast<void*>(compare)},             \
      {Py_tp_methods, methods}, {Py_tp_getset, attributes}, {            \
    Py_tp_members, members                                               \
  }

PyType_Slot tap_slots[] = {TAP_SLOTS, {0, nullptr}};
PyType_Slot method_tap_slots[] = {
    TAP_SLOTS, {Py_tp_descr_get, reinterpret_cast<void*>(bind)}, {0, nullptr}};

constexpr unsigned int kFlags =
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_IMMUTABLETYPE;
PyType_Spec tap_spec = {"proctor.native._native.Tap", sizeof(Tap), 0, kFlags | Py_TPFLAGS_BASETYPE, tap_slots};
PyType_Spec method_tap_spec = {"proctor.native._native.MethodTap", sizeof(Tap), 0,
                               kFlags | Py_TPFLAGS_METHOD_DESCRIPTOR, method_tap_slots};

PyObject* is_tap(PyObject*, PyObject* object) { return PyBool_FromLong(is_tap_type(Py_TYPE(object))); }
PyMethodDef is_tap_def = {"is_tap", is_tap, METH_O, "True if `object` is a tap; `object.tapped` is then the original."};

}  // namespace

bool is_tap_type(PyTypeObject* type) { return type == method_tap_type || type == tap_type; }
PyObject* tap_target(PyObject* object) { return is_tap_type(Py_TYPE(object)) ? cast(object)->wrapped : nullptr; }

void bind_tap(pybind11::module_& m) {
  const auto check = [](bool ok) {
    if (!ok) throw pybind11::error_already_set();
  };
  check(add_recorder_type(m.ptr()));
  tap_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&tap_spec));
  check(tap_type);
  Owned bases(PyTuple_Pack(1, reinterpret_cast<PyObject*>(tap_type)));
  check(static_cast<bool>(bases));
  method_tap_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpecWithBases(&method_tap_spec, bases.get()));
  check(method_tap_type);
  check(PyModule_AddObjectRef(m.ptr(), "Tap", reinterpret_cast<PyObject*>(tap_type)) == 0);
  Owned function(PyCFunction_New(&is_tap_def, nullptr));
  check(function && PyModule_AddObjectRef(m.ptr(), "is_tap", function.get()) == 0);

  own_names = PyDict_New();
  check(own_names);
  for (const char* name : {"before", "after", "record", "always", "root_only", "flat", "act", "group_at", "fn_code", "kind", "recorder", "__copy__",
                           "__deepcopy__", "__reduce__", "__reduce_ex__", "__call__", "__get__"}) {
    check(PyDict_SetItemString(own_names, name, Py_True) == 0);
  }
  for (const char* name : {"tapped", "__wrapped__", "_torchdynamo_inline"}) {
    check(PyDict_SetItemString(own_names, name, Py_None) == 0);
  }
  dunder_dict = PyUnicode_InternFromString("__dict__");
  dunder_reduce_ex = PyUnicode_InternFromString("__reduce_ex__");
  dunder_module = PyUnicode_InternFromString("__module__");
  dunder_qualname = PyUnicode_InternFromString("__qualname__");
  inline_name = PyUnicode_InternFromString("_torchdynamo_inline");
}

}  // namespace proctor
