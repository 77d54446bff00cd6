// Small helpers over the CPython C API, shared by describe, recorder and tap.
//
// GIL: every function here needs it. Reference counts: `Owned` holds one reference; a plain `PyObject*` that is
// passed in or returned is Borrowed unless its name says otherwise.
#pragma once

#ifndef PY_SSIZE_T_CLEAN
#define PY_SSIZE_T_CLEAN
#endif
#include <Python.h>

#include <cstdint>
#include <string>
#include <utility>

namespace proctor {

class Owned {
 public:
  Owned() = default;
  explicit Owned(PyObject* stolen) : object_(stolen) {}
  Owned(Owned&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Owned& operator=(Owned&& other) noexcept {
    if (this != &other) reset(std::exchange(other.object_, nullptr));
    return *this;
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }

  static Owned share(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Owned(borrowed);
  }
  // The old reference goes last: its destructor may run Python code that looks at this object.
  void reset(PyObject* stolen = nullptr) {
    PyObject* old = std::exchange(object_, stolen);
    Py_XDECREF(old);
  }
  // `None` and NULL both mean "not set".
  void share_unless_none(PyObject* borrowed) {
    if (borrowed == Py_None) borrowed = nullptr;
    Py_XINCREF(borrowed);
    reset(borrowed);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }
  int visit(visitproc visit, void* arg) const { return object_ ? visit(object_, arg) : 0; }

 private:
  PyObject* object_ = nullptr;
};

// The exception that is on its way, taken off the thread and put back unchanged (same object, same traceback).
class ErrorStash {
 public:
#if PY_VERSION_HEX >= 0x030C0000
  ErrorStash() : value_(PyErr_GetRaisedException()) {}
  void restore() { PyErr_SetRaisedException(std::exchange(value_, nullptr)); }
  ~ErrorStash() { Py_XDECREF(value_); }

 private:
  PyObject* value_;
#else
  ErrorStash() { PyErr_Fetch(&type_, &value_, &traceback_); }
  void restore() {
    PyErr_Restore(std::exchange(type_, nullptr), std::exchange(value_, nullptr), std::exchange(traceback_, nullptr));
  }
  ~ErrorStash() {
    Py_XDECREF(type_);
    Py_XDECREF(value_);
    Py_XDECREF(traceback_);
  }

 private:
  PyObject* type_ = nullptr;
  PyObject* value_ = nullptr;
  PyObject* traceback_ = nullptr;
#endif
 public:
  ErrorStash(const ErrorStash&) = delete;
  ErrorStash& operator=(const ErrorStash&) = delete;
};

// The exception that is set, normalised and with its traceback; none is set afterwards. New reference; NULL where there was none.
inline PyObject* take_error() {
#if PY_VERSION_HEX >= 0x030C0000
  return PyErr_GetRaisedException();
#else
  PyObject *type, *value, *traceback;
  PyErr_Fetch(&type, &value, &traceback);
  PyErr_NormalizeException(&type, &value, &traceback);
  if (traceback && value) PyException_SetTraceback(value, traceback);
  Py_XDECREF(type);
  Py_XDECREF(traceback);
  return value;
#endif
}

// Set one that was taken.
inline void put_error(PyObject* error) {
#if PY_VERSION_HEX >= 0x030C0000
  PyErr_SetRaisedException(Py_NewRef(error));
#else
  PyErr_Restore(Py_NewRef(reinterpret_cast<PyObject*>(Py_TYPE(error))), Py_NewRef(error), PyException_GetTraceback(error));
#endif
}

inline bool rearm_handler();  // handlers.h

// Ctrl-C that lands while our own code runs belongs to the user, and what a handler of theirs raises: arm it again, for after we are out of the way.
inline bool rearm_interrupt() {
  if (rearm_handler()) return true;
  if (!PyErr_ExceptionMatches(PyExc_KeyboardInterrupt)) return false;
  PyErr_Clear();
  PyErr_SetInterrupt();
  return true;
}

inline void swallow_error() {
  if (PyErr_Occurred() && !rearm_interrupt()) PyErr_Clear();
}

// True if the weak reference still points to `object`: guards caches that are keyed by address against reuse.
inline bool weakly_is(PyObject* weak, PyObject* object) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* target = nullptr;
  if (PyWeakref_GetRef(weak, &target) < 0) PyErr_Clear();
  Py_XDECREF(target);
  return target == object;
#else
  return PyWeakref_GET_OBJECT(weak) == object;
#endif
}

// UTF-8 of the first `limit` code points; lone surrogates become U+FFFD. Never fails, allocates no Python object.
template <typename Sink>
void utf8(PyObject* text, Py_ssize_t limit, Sink&& put) {
  Py_ssize_t n = PyUnicode_GET_LENGTH(text);
  if (n > limit) n = limit;
  if (PyUnicode_IS_COMPACT_ASCII(text)) {
    put(static_cast<const char*>(PyUnicode_DATA(text)), static_cast<size_t>(n));
    return;
  }
  const int kind = PyUnicode_KIND(text);
  const void* data = PyUnicode_DATA(text);
  for (Py_ssize_t i = 0; i < n; ++i) {
    Py_UCS4 c = PyUnicode_READ(kind, data, i);
    if (c >= 0xD800 && c <= 0xDFFF) c = 0xFFFD;
    char out[4];
    size_t len;
    if (c < 0x80) {
      out[0] = static_cast<char>(c), len = 1;
    } else if (c < 0x800) {
      out[0] = static_cast<char>(0xC0 | (c >> 6)), out[1] = static_cast<char>(0x80 | (c & 63)), len = 2;
    } else if (c < 0x10000) {
      out[0] = static_cast<char>(0xE0 | (c >> 12)), out[1] = static_cast<char>(0x80 | ((c >> 6) & 63));
      out[2] = static_cast<char>(0x80 | (c & 63)), len = 3;
    } else {
      out[0] = static_cast<char>(0xF0 | (c >> 18)), out[1] = static_cast<char>(0x80 | ((c >> 12) & 63));
      out[2] = static_cast<char>(0x80 | ((c >> 6) & 63)), out[3] = static_cast<char>(0x80 | (c & 63)), len = 4;
    }
    put(out, len);
  }
}

inline std::string utf8(PyObject* text, Py_ssize_t limit = PY_SSIZE_T_MAX) {
  std::string out;
  utf8(text, limit, [&](const char* p, size_t n) { out.append(p, n); });
  return out;
}

}  // namespace proctor

#include "handlers.h"
