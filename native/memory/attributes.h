// Attributes and methods of tensors by name, as Python code would ask for them.
//
// GIL: needed. `called` and `counted` leave the Python error set where there was one.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>

#include "pyref.h"

namespace proctor {

struct Names {
  static PyObject* name(const char* text) {
    PyObject* made = PyUnicode_InternFromString(text);
    if (!made) throw pybind11::error_already_set();
    return made;  // kept for the life of the process
  }
  PyObject *layout = name("layout"), *is_cpu = name("is_cpu"), *dtype = name("dtype"), *grad = name("grad"), *is_leaf = name("is_leaf");
  PyObject *dim = name("dim"), *numel = name("numel"), *is_contiguous = name("is_contiguous"), *is_neg = name("is_neg");
  PyObject *storage_offset = name("storage_offset"), *untyped_storage = name("untyped_storage"), *nbytes = name("nbytes");
  PyObject *data_ptr = name("data_ptr"), *version = name("_version"), *local = name("_local_tensor");
};

inline const Names& names() {
  static const Names made;
  return made;
}

inline PyObject* called(PyObject* object, PyObject* method) {  // New reference or NULL
  return PyObject_VectorcallMethod(method, &object, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

inline std::optional<std::uint64_t> counted(PyObject* object, PyObject* method) {
  const Owned answer(called(object, method));
  if (!answer) return std::nullopt;
  const unsigned long long value = PyLong_AsUnsignedLongLong(answer.get());
  if (PyErr_Occurred()) return std::nullopt;
  return value;
}

inline Owned got(PyObject* object, PyObject* attribute) {
  Owned found(PyObject_GetAttr(object, attribute));
  if (!found) throw pybind11::error_already_set();
  return found;
}

}  // namespace proctor
