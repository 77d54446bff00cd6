// Bindings only: proctor.native._native.
#include <pybind11/pybind11.h>

#include "compare.h"
#include "fingerprint.h"
#include "tap.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Fingerprints and comparison of tensor memory, and the call tap.";
  using namespace proctor;
  bind_compare(m);
  bind_fingerprint(m);
  bind_tap(m);
}
