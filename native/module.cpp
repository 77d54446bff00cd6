// Bindings only: proctor.native._native.
#include <pybind11/pybind11.h>

#include "fingerprint.h"
#include "tap.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Fingerprints of tensor memory and the call tap.";
  using namespace proctor;
  bind_fingerprint(m);
  bind_tap(m);
}
