#include "chain.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <vector>

#include "pyref.h"

namespace proctor {

namespace {

struct Hook {
  Owned label;  // NULL: none
  Owned function;
  bool always = false;
};

struct Parts {
  std::vector<Hook> hooks;
  std::vector<Owned> modes;
  Owned wants, off, over, takes, aside;
  Owned tensor, parameter;
  bool dispatched = false;
};

struct Chain {
  PyObject_HEAD
  vectorcallfunc vectorcall;
  Parts* parts;  // Owned, empty once cleared
};

Chain* cast(PyObject* self) { return reinterpret_cast<Chain*>(self); }

// 1: true, 0: false, -1: an error is set.
int truth(Owned answer) { return answer ? PyObject_IsTrue(answer.get()) : -1; }

// The error that a probe's hook raised: 0 where `takes` took it, -1 where it is set again or another one is.
int given_away(const Parts& parts, const Hook& hook) {
  if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
  const Owned error(take_error());
  PyObject* arguments[] = {hook.label.get(), error.get()};
  const Owned takes = Owned::share(parts.takes.get());
  const int taken = truth(Owned(PyObject_Vectorcall(takes.get(), arguments, 2, nullptr)));
  if (taken == 0) put_error(error.get());
  return taken == 1 ? 0 : -1;
}

enum Standing : int { kPlain, kAside, kForeign };
constexpr Py_ssize_t kLooked = 64;  // of what a container holds

PyObject* dunder_torch_function = nullptr;  // Interned

// What an argument is, by its class, and what a plain container holds.
int standing_of(const Parts& parts, PyObject* value, int depth) {
  PyTypeObject* kind = Py_TYPE(value);
  if (!PyType_HasFeature(kind, Py_TPFLAGS_HEAPTYPE)) {
    int found = kPlain;
    const bool listed = PyTuple_CheckExact(value) || PyList_CheckExact(value);
    for (Py_ssize_t i = 0; listed && depth > 0 && i < std::min(kLooked, PySequence_Fast_GET_SIZE(value)); ++i) {
      found = std::max(found, standing_of(parts, PySequence_Fast_GET_ITEM(value, i), depth - 1));
    }
    PyObject *key, *item;
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; PyDict_CheckExact(value) && depth > 0 && i < kLooked && PyDict_Next(value, &at, &key, &item); ++i) {
      found = std::max(found, standing_of(parts, item, depth - 1));
    }
    return found;
  }
  PyObject* cls = reinterpret_cast<PyObject*>(kind);
  if (cls == parts.tensor.get() || cls == parts.parameter.get() || !_PyType_Lookup(kind, dunder_torch_function)) return kPlain;
  return PyType_IsSubtype(kind, reinterpret_cast<PyTypeObject*>(parts.tensor.get())) ? kAside : kForeign;
}

// Of what a tap hands to its hooks: positional and keyword arguments of the call, and its result.
int standing_of_call(const Parts& parts, PyObject* const* args, Py_ssize_t n) {
  int found = kPlain;
  for (Py_ssize_t i = 0; i < n && i < 3; ++i) found = std::max(found, standing_of(parts, args[i], i < 2 ? 2 : 1));
  return found;
}

PyObject* run(PyObject* self, PyObject* const* args, Py_ssize_t n, bool foreign) {
  const Owned held = Owned::share(self);  // a hook may take the tap's hooks off
  const Parts& parts = *cast(self)->parts;
  int wanted = -1;  // not asked yet
  for (size_t i = 0; i < parts.hooks.size(); ++i) {
    const Hook& hook = parts.hooks[i];
    if (hook.label) {
      if (foreign) continue;
      if (wanted < 0 && (wanted = truth(Owned(PyObject_CallNoArgs(parts.wants.get())))) < 0) return nullptr;
      if (!wanted && !hook.always) continue;
      int off = PySet_Contains(parts.over.get(), hook.label.get());
      if (!off) off = PySet_Contains(parts.off.get(), hook.label.get());
      if (off < 0) return nullptr;
      if (off) continue;
    }
    const Owned function = Owned::share(hook.function.get());
    const Owned done(PyObject_Vectorcall(function.get(), args, static_cast<size_t>(n), nullptr));
    if (!done && (!hook.label || given_away(parts, hook) < 0)) return nullptr;
  }
  return Py_NewRef(Py_None);
}

PyObject* run_plainly(PyObject* self, PyObject* const* args, Py_ssize_t n) {
  const Parts& parts = *cast(self)->parts;
  return run(self, args, n, parts.dispatched && standing_of_call(parts, args, n) == kForeign);
}

PyObject* call(PyObject* self, PyObject* const* args, size_t nargsf, PyObject* kwnames) {
  if (kwnames && PyTuple_GET_SIZE(kwnames)) {
    PyErr_SetString(PyExc_TypeError, "a chain of hooks takes no keyword arguments");
    return nullptr;
  }
  const Py_ssize_t n = PyVectorcall_NARGS(nargsf);
  const Parts& parts = *cast(self)->parts;
  int on = standing_of_call(parts, args, n) != kPlain;
  for (size_t i = 0; i < parts.modes.size() && !on; ++i) {
    if ((on = truth(Owned(PyObject_CallNoArgs(parts.modes[i].get())))) < 0) return nullptr;
  }
  if (on) {
    const Owned plain(PyObject_GetAttrString(self, "run"));
    const Owned given(PyTuple_New(n));
    if (!plain || !given) return nullptr;
    for (Py_ssize_t i = 0; i < n; ++i) PyTuple_SET_ITEM(given.get(), i, Py_NewRef(args[i]));
    const Owned aside = Owned::share(parts.aside.get());
    return PyObject_CallFunctionObjArgs(aside.get(), plain.get(), given.get(), nullptr);
  }
  return run(self, args, n, false);
}

PyObject* new_chain(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"hooks", "wants", "off", "over", "takes", "modes", "aside", "tensor", "parameter", "dispatched", nullptr};
  PyObject *hooks, *wants, *off, *over, *takes, *modes, *aside, *tensor, *parameter;
  int dispatched = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!OO!O!OO!OO!O!|p:Chain", const_cast<char**>(names), &PyTuple_Type, &hooks, &wants, &PySet_Type, &off,
                                   &PySet_Type, &over, &takes, &PyTuple_Type, &modes, &aside, &PyType_Type, &tensor, &PyType_Type, &parameter, &dispatched)) {
    return nullptr;
  }
  auto parts = std::make_unique<Parts>();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(hooks); ++i) {
    PyObject *label, *function;
    int always;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(hooks, i), "UpO", &label, &always, &function)) return nullptr;
    Hook& hook = parts->hooks.emplace_back();
    if (PyUnicode_GET_LENGTH(label)) hook.label = Owned::share(label);
    hook.function = Owned::share(function);
    hook.always = always;
  }
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(modes); ++i) parts->modes.push_back(Owned::share(PyTuple_GET_ITEM(modes, i)));
  parts->tensor = Owned::share(tensor), parts->parameter = Owned::share(parameter), parts->dispatched = dispatched;
  parts->wants = Owned::share(wants), parts->off = Owned::share(off), parts->over = Owned::share(over), parts->takes = Owned::share(takes), parts->aside = Owned::share(aside);
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  cast(self)->vectorcall = call;
  cast(self)->parts = parts.release();
  return self;
}

int traverse_chain(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  const Parts* parts = cast(self)->parts;
  if (!parts) return 0;
  for (const Hook& hook : parts->hooks) {
    if (int stop = hook.function.visit(visit, arg)) return stop;
  }
  for (const Owned* one : {&parts->wants, &parts->off, &parts->over, &parts->takes, &parts->aside, &parts->tensor, &parts->parameter}) {
    if (int stop = one->visit(visit, arg)) return stop;
  }
  return 0;
}

// What it is called with stays: a call may still be on its way. Of a cycle the hooks are the way back.
int clear_chain(PyObject* self) {
  if (Parts* parts = cast(self)->parts) {
    const std::vector<Hook> gone = std::move(parts->hooks);
    parts->hooks.clear();
  }
  return 0;
}

void dealloc_chain(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete std::exchange(cast(self)->parts, nullptr);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(run_plainly)), METH_FASTCALL, "The hooks, whatever modes are on."},
    {nullptr, nullptr, 0, nullptr},
};

PyMemberDef members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Chain, vectorcall), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("The hooks of one function as one; `chain.h`.")},
    {Py_tp_new, reinterpret_cast<void*>(new_chain)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_chain)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_chain)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_chain)},
    {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {"proctor.native._native.Chain", sizeof(Chain), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL, slots};

}  // namespace

void bind_chain(pybind11::module_& m) {
  dunder_torch_function = PyUnicode_InternFromString("__torch_function__");
  if (!dunder_torch_function) throw pybind11::error_already_set();
  const Owned type(PyType_FromSpec(&spec));
  if (!type || PyModule_AddObjectRef(m.ptr(), "Chain", type.get()) < 0) throw pybind11::error_already_set();
}

}  // namespace proctor
