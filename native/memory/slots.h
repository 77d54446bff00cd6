// A look at tracked values in one call: which of them may have changed, what they hold now, and a row for each that did change.
//
// A step of ten milliseconds evicts all of this code and data from the caches, so what a look costs is what it touches: in Python, a look at
// twelve tensors took forty microseconds and more. Tensors that are not plain are given back to Python to be read (`tensors.h`).
//
// GIL: needed; released while many bytes are hashed. Threads: one look of a slot at a time (`instrument/steps/turns.py`).
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

namespace proctor {

// One tracked value: the data or gradient of a parameter, a buffer, or a tensor of optimizer state.
struct Slot {
  pybind11::object owner;  // called, it gives the tensor, or None once it is gone: tracking must not keep a model alive
  std::int64_t var, meta;  // codes of its variable, and of what is known of it besides its value
  bool grad;
  std::size_t at;          // its row in `LastSeen`
  bool sharded;            // a DTensor: this rank's part is hashed
  pybind11::list twins;    // variables that are other names of the same tensor
  std::int64_t version = -1, ptr = -1;

  bool told = false;       // there is a last row, of this state:
  std::uint64_t fp = 0;
  std::int64_t flags = 0, told_meta = 0;
};

void bind_slots(pybind11::module_& m);

}  // namespace proctor

using proctor::bind_slots;
