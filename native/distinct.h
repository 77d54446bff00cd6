// Which values of an array are equal, as the place where each is seen first.
//
// The live verifier asks this of all fingerprints of a window after each step: some thousand of one job, millions of four thousand ranks.
// A table with open addressing; where a value goes is drawn anew in each process, so that nobody can send values that collide.
//
// GIL: released while many values are looked at. Threads: no state.
#pragma once

#include <pybind11/pybind11.h>

namespace proctor {

void bind_distinct(pybind11::module_& m);

}  // namespace proctor
