#include "memory/slots.h"

#include <pybind11/stl.h>

#include <optional>
#include <vector>

#include "memory/attributes.h"
#include "memory/fingerprint.h"
#include "memory/tensors.h"

namespace proctor {
namespace {

namespace py = pybind11;

constexpr int kNone = 1;  // of `Flag`: there is no value

// One value of a look.
struct Found {
  py::object held;  // keeps the slot
  Slot* slot;
  Owned tensor;  // none: there is no value
  Summary summary;
};

Owned owner_of(const Slot& slot) {
  PyObject* owner = slot.owner.ptr();
#if PY_VERSION_HEX >= 0x030D0000
  if (PyWeakref_CheckRef(owner)) {
    PyObject* target = nullptr;
    if (PyWeakref_GetRef(owner, &target) < 0) throw py::error_already_set();
    return target ? Owned(target) : Owned::share(Py_None);
  }
#else
  if (PyWeakref_CheckRef(owner)) return Owned::share(PyWeakref_GET_OBJECT(owner));
#endif
  Owned target(PyObject_CallNoArgs(owner));
  if (!target) throw py::error_already_set();
  return target;
}

// Add the slot if its tensor is to be hashed: always if `force`, or where version or address moved.
void collect(std::vector<Found>& found, py::object held, bool force) {
  const Names& n = names();
  Slot& slot = *held.cast<Slot*>();
  Owned tensor = owner_of(slot);
  if (tensor.get() == Py_None) return;
  if (slot.grad) {
    if (got(tensor.get(), n.is_leaf).get() != Py_True) return;  // what was made of others has none
    tensor = got(tensor.get(), n.grad);
    if (tensor.get() == Py_None) {
      if (slot.ptr != 0) {
        slot.ptr = 0, slot.version = -1;
        found.push_back({std::move(held), &slot, Owned(), Summary{0, 0.0, kNone}});
      }
      return;
    }
  }
  const Owned number(PyObject_GetAttr(tensor.get(), n.version));
  std::int64_t version = -1;
  if (number) {
    version = PyLong_AsLongLong(number.get());
    if (version == -1 && PyErr_Occurred()) throw py::error_already_set();
  } else {  // inference tensors have none
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw py::error_already_set();
    PyErr_Clear();
  }
  if (slot.sharded) {
    Owned local(PyObject_GetAttr(tensor.get(), n.local));
    if (local) {
      tensor = std::move(local);
    } else {
      if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
      PyErr_Clear();
    }
  }
  const auto address = counted(tensor.get(), n.data_ptr);
  if (!address) throw py::error_already_set();
  const auto ptr = static_cast<std::int64_t>(*address);
  if (!force && version >= 0 && version == slot.version && ptr == slot.ptr) return;
  slot.version = version, slot.ptr = ptr;
  found.push_back({std::move(held), &slot, std::move(tensor), Summary{}});
}

// What the values hold: plain ones are read here, all others by `rest`.
void read(const Tensors& tensors, std::vector<Found>& found, const py::object& rest) {
  std::vector<Memory> places;
  std::vector<Found*> plain, others;
  for (Found& one : found) {
    if (!one.tensor) continue;
    if (const std::optional<Memory> memory = tensors.memory_of(one.tensor.get())) {
      places.push_back(*memory);
      plain.push_back(&one);
    } else {
      others.push_back(&one);
    }
  }
  const std::vector<Summary> summaries = Tensors::read(places);
  for (size_t i = 0; i < plain.size(); ++i) plain[i]->summary = summaries[i];
  if (others.empty()) return;
  py::list given;
  for (const Found* one : others) given.append(py::handle(one->tensor.get()));
  const py::sequence answers = rest(given);
  if (answers.size() != others.size()) throw py::value_error("one summary for each tensor");
  for (size_t i = 0; i < others.size(); ++i) {
    const auto [fp, norm, flags] = answers[i].cast<std::tuple<std::uint64_t, double, int>>();
    others[i]->summary = Summary{fp, norm, flags};
  }
}

// Writable memory of an array, held while this lives: nothing else may run meanwhile.
class Array {
 public:
  Array(const py::handle& array, Py_ssize_t width) {
    if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_WRITABLE) < 0) throw py::error_already_set();
    if (view_.itemsize != width) {
      PyBuffer_Release(&view_);
      throw py::type_error("an array of another width");
    }
  }
  ~Array() { PyBuffer_Release(&view_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  template <typename T>
  void put(size_t at, T value) {
    if (static_cast<Py_ssize_t>(at * sizeof(T)) >= view_.len) throw py::index_error("a place that LastSeen has not");
    static_cast<T*>(view_.buf)[at] = value;
  }

 private:
  Py_buffer view_;
};

void keep(const std::vector<Found>& found, const py::tuple& last) {
  Array fps(last[0], 8), norms(last[1], 8), flags(last[2], 1);
  for (const Found& one : found) {
    fps.put<std::uint64_t>(one.slot->at, one.summary.fp);
    norms.put<double>(one.slot->at, one.summary.norm);
    flags.put<std::uint8_t>(one.slot->at, static_cast<std::uint8_t>(one.summary.flags));
  }
}

void tell(const Found& one, const py::handle& var, const py::tuple& where, const py::object& context, py::list& rows) {
  const Summary& s = one.summary;
  rows.append(py::make_tuple(where[0], where[1], where[2], context, var, one.slot->meta, s.fp, s.norm, s.flags));
}

// Look at the slots of each group, all if its second is true, else those that may have changed. False: at none.
bool look(
    const Tensors& tensors, const py::list& groups, const py::tuple& last, bool settle, std::optional<py::list> rows, const py::tuple& where,
    const py::object& context, const py::object& rest) {
  std::vector<Found> found;
  for (const py::handle group : groups) {
    const auto pair = py::reinterpret_borrow<py::tuple>(group);
    const auto slots = pair[0].cast<py::list>();
    const bool force = pair[1].ptr() == Py_True;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(slots.ptr()); ++i) {
      collect(found, py::reinterpret_borrow<py::object>(PyList_GET_ITEM(slots.ptr(), i)), force);
    }
  }
  if (found.empty()) return false;
  read(tensors, found, rest);
  keep(found, last);
  if (!settle) return true;
  py::object now;
  for (const Found& one : found) {
    Slot& slot = *one.slot;
    const Summary& s = one.summary;
    if (slot.told && slot.fp == s.fp && slot.flags == s.flags && slot.told_meta == slot.meta) continue;
    slot.told = true, slot.fp = s.fp, slot.flags = s.flags, slot.told_meta = slot.meta;
    if (!rows) continue;
    if (!now) now = context();
    tell(one, py::int_(slot.var), where, now, *rows);
    for (const py::handle twin : slot.twins) tell(one, twin, where, now, *rows);
  }
  return true;
}

// Whether the state of an optimizer is still where `expected` says: for each parameter its id and None (whatever it is), or for each key what
// is there: a slot or a weak reference (its tensor), a type (one of that type), None (whatever it is).
bool holds(const py::handle& state, const py::tuple& expected) {
  if (!PyDict_Check(state.ptr()) || PyDict_GET_SIZE(state.ptr()) != static_cast<Py_ssize_t>(expected.size())) return false;
  PyObject *parameter, *own, *key, *value;
  Py_ssize_t at = 0;
  for (const py::handle entry : expected) {
    if (!PyDict_Next(state.ptr(), &at, &parameter, &own)) return false;
    const py::handle id = PyTuple_GET_ITEM(entry.ptr(), 0), keys = PyTuple_GET_ITEM(entry.ptr(), 1);
    if (PyLong_AsVoidPtr(id.ptr()) != parameter) return false;
    if (keys.is_none()) continue;
    if (!PyDict_Check(own) || PyDict_GET_SIZE(own) != PyTuple_GET_SIZE(keys.ptr())) return false;
    Py_ssize_t inner = 0;
    for (Py_ssize_t i = 0; PyDict_Next(own, &inner, &key, &value); ++i) {
      const py::handle pair = PyTuple_GET_ITEM(keys.ptr(), i), wanted = PyTuple_GET_ITEM(pair.ptr(), 1);
      if (PyTuple_GET_ITEM(pair.ptr(), 0) != key) return false;  // the same object: no comparison that runs the user's code
      if (wanted.is_none()) continue;
      if (PyType_Check(wanted.ptr())) {
        if (reinterpret_cast<PyObject*>(Py_TYPE(value)) != wanted.ptr()) return false;
      } else {
        PyObject* weak = PyWeakref_CheckRef(wanted.ptr()) ? wanted.ptr() : wanted.cast<Slot*>()->owner.ptr();
        if (!PyWeakref_CheckRef(weak) || !weakly_is(weak, value)) return false;
      }
    }
  }
  return true;
}

}  // namespace

void bind_slots(py::module_& m) {
  py::class_<Slot>(m, "Slot", "One tracked value: the data or gradient of a parameter, a buffer, or a tensor of optimizer state.")
      .def(py::init([](py::object owner, std::int64_t var, std::int64_t meta, bool grad, std::size_t at) {
             Slot slot{std::move(owner), var, meta, grad, at, false, py::list()};
             slot.sharded = py::hasattr(py::reinterpret_steal<py::object>(owner_of(slot).release()), "_local_tensor");
             return slot;
           }),
           py::arg("owner"), py::arg("var"), py::arg("meta"), py::arg("grad"), py::arg("at"))
      .def_readonly("owner", &Slot::owner)
      .def_readonly("var", &Slot::var)
      .def_readwrite("meta", &Slot::meta)
      .def_readonly("grad", &Slot::grad)
      .def_readonly("at", &Slot::at)
      .def_readonly("sharded", &Slot::sharded)
      .def_readonly("twins", &Slot::twins)
      .def_readonly("version", &Slot::version)
      .def_readonly("ptr", &Slot::ptr);
  m.def("look", &look, py::arg("tensors"), py::arg("groups"), py::arg("last"), py::arg("settle"), py::arg("rows"), py::arg("where"),
        py::arg("context"), py::arg("rest"), "Look at the slots of each group, all if its second is true, else those that may have changed. False: at none.");
  m.def("holds", &holds, py::arg("state"), py::arg("expected"), "Whether the state of an optimizer is still where `expected` says.");
}

}  // namespace proctor
