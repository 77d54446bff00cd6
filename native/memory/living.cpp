#include "memory/living.h"

#include <stdexcept>

namespace proctor {
namespace {

namespace py = pybind11;

py::list living(const py::list& objects, const py::type& base) {
  auto* wanted = reinterpret_cast<PyTypeObject*>(base.ptr());
  py::list found;
  for (Py_ssize_t i = 0, count = PyList_GET_SIZE(objects.ptr()); i < count; ++i) {
    PyObject* one = PyList_GET_ITEM(objects.ptr(), i);
    if (PyType_IsSubtype(Py_TYPE(one), wanted)) found.append(py::handle(one));
  }
  return found;
}

bool is_one_of(PyObject* value, const py::tuple& kinds) {
  auto* kind = reinterpret_cast<PyObject*>(Py_TYPE(value));
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(kinds.ptr()); ++i) {
    if (PyTuple_GET_ITEM(kinds.ptr(), i) == kind) return true;
  }
  return false;
}

// Whether a mapping has as many entries, the first of such a kind, or more and one of such a kind under the key.
bool mapping_holds(PyObject* mapping, Py_ssize_t size, PyObject* key, const py::tuple& kinds) {
  const Py_ssize_t entries = PyDict_Size(mapping);
  if (entries < size) return false;
  if (entries == size) {
    Py_ssize_t place = 0;
    PyObject* value = nullptr;
    return PyDict_Next(mapping, &place, nullptr, &value) && is_one_of(value, kinds);
  }
  PyObject* value = PyDict_GetItemWithError(mapping, key);
  if (!value && PyErr_Occurred()) {  // raised by a key of the program's that looks like ours: it holds no copy, but Ctrl-C is the user's
    if (!PyErr_ExceptionMatches(PyExc_Exception)) throw py::error_already_set();
    PyErr_Clear();
  }
  return value && is_one_of(value, kinds);
}

py::list holders(const py::list& objects, Py_ssize_t size, const py::str& key, const py::tuple& kinds, const py::type& ordered) {
  if (size < 1) throw std::invalid_argument("a size of 1 or more is needed");
  auto* ordered_type = reinterpret_cast<PyTypeObject*>(ordered.ptr());
  if (!PyType_IsSubtype(ordered_type, &PyDict_Type)) throw std::invalid_argument("a kind of dictionary is needed");
  py::list found;
  for (Py_ssize_t i = 0, count = PyList_GET_SIZE(objects.ptr()); i < count; ++i) {
    PyObject* one = PyList_GET_ITEM(objects.ptr(), i);
    const PyTypeObject* kind = Py_TYPE(one);
    bool holds = false;
    if (kind == &PyTuple_Type) {
      holds = PyTuple_GET_SIZE(one) == size && PyTuple_GET_ITEM(one, 0) && is_one_of(PyTuple_GET_ITEM(one, 0), kinds);
    } else if (kind == &PyList_Type) {
      holds = PyList_GET_SIZE(one) == size && PyList_GET_ITEM(one, 0) && is_one_of(PyList_GET_ITEM(one, 0), kinds);
    } else if (kind == &PyDict_Type || kind == ordered_type) {
      holds = mapping_holds(one, size, key.ptr(), kinds);
    }
    if (holds) found.append(py::handle(one));
  }
  return found;
}

}  // namespace

void bind_living(py::module_& m) {
  m.def("living", &living, py::arg("objects"), py::arg("base"));
  m.def("holders", &holders, py::arg("objects"), py::arg("size"), py::arg("key"), py::arg("kinds"), py::arg("ordered"));
}

}  // namespace proctor
