// Bindings only: proctor.native._native.
#include <pybind11/pybind11.h>

#include "columns.h"
#include "compare.h"
#include "distinct.h"
#include "memory/fingerprint.h"
#include "memory/living.h"
#include "philox.h"
#include "memory/slots.h"
#include "memory/tensors.h"
#include "calls/chain.h"
#include "calls/tap.h"

PYBIND11_MODULE(_native, m) {
  m.doc() = "Fingerprints and comparison of tensor memory, the call tap, rows of a trace as bytes, equal values, random numbers, what tensors hold, and which objects live.";
  using namespace proctor;
  bind_chain(m);
  bind_columns(m);
  bind_compare(m);
  bind_distinct(m);
  bind_fingerprint(m);
  bind_living(m);
  bind_philox(m);
  bind_slots(m);
  bind_tensors(m);
  bind_tap(m);
}
