// What a signal handler of the program's raises while our own code runs is the program's: a SystemExit on SIGTERM, a TimeoutError on SIGALRM.
//
// It is taken off and raised again, the same object, as soon as the main thread is out of our way (Py_AddPendingCall). Known by the handler's
// own frame in the traceback. GIL: needed. Runs only where our code was left by an exception, so its cost is no matter.
#pragma once

#include "pyref.h"

#include <frameobject.h>

namespace proctor {

constexpr int kSignals = 65;  // one more than Linux has

// Borrowed: the code that runs when a handler is called; NULL where that is no Python function.
inline PyObject* code_of_handler(PyObject* handler) {
  for (int depth = 0; handler && depth < 4; ++depth) {
    if (PyFunction_Check(handler)) return PyFunction_GetCode(handler);
    if (PyMethod_Check(handler)) {
      handler = PyMethod_GET_FUNCTION(handler);
      continue;
    }
    Owned inner(PyObject_GetAttrString(handler, "func"));  // functools.partial keeps it alive
    if (!inner) {
      PyErr_Clear();
      Owned called(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(handler)), "__call__"));  // its class keeps it alive
      if (!called) PyErr_Clear();
      handler = called.get();
    } else {
      handler = inner.get();
    }
  }
  return nullptr;
}

// Borrowed: where in a traceback a handler of the program's begins; NULL where there is none.
inline PyObject* begun_in_handler(PyObject* traceback) {
  if (!traceback || traceback == Py_None) return nullptr;
  Owned module(PyImport_ImportModule("_signal"));
  Owned getsignal(module ? PyObject_GetAttrString(module.get(), "getsignal") : nullptr);
  PyObject* found = nullptr;
  for (int number = 1; getsignal && number < kSignals && !found; ++number) {
    Owned handler(PyObject_CallFunction(getsignal.get(), "i", number));
    if (!handler) {
      PyErr_Clear();
      continue;
    }
    PyObject* code = PyCallable_Check(handler.get()) ? code_of_handler(handler.get()) : nullptr;
    if (!code) continue;
    for (auto* entry = reinterpret_cast<PyTracebackObject*>(traceback); entry && !found; entry = entry->tb_next) {
      PyCodeObject* running = PyFrame_GetCode(entry->tb_frame);
      if (reinterpret_cast<PyObject*>(running) == code) found = reinterpret_cast<PyObject*>(entry);
      Py_DECREF(running);
    }
  }
  PyErr_Clear();
  return found;
}

inline int raise_again(void* held) {
  const Owned value(static_cast<PyObject*>(held));
  put_error(value.get());
  return -1;
}

// Takes the pending error if it is the program's, to be raised later; false, and it stays, if it is not.
inline bool rearm_handler() {
  Owned value(take_error());
  if (!value) return false;
  Owned whole(PyException_GetTraceback(value.get()));
  PyObject* begun = begun_in_handler(whole.get());
  if (begun) {
    PyException_SetTraceback(value.get(), begun);
    if (Py_AddPendingCall(raise_again, value.get()) == 0) {
      value.release();  // of the pending call now
      return true;
    }
    PyException_SetTraceback(value.get(), whole.get());
  }
  put_error(value.get());
  return false;
}

}  // namespace proctor
