// Random numbers that follow from a key and a position: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
//
// A stretch is `length` positions in a row from one of `starts`; results lie one stretch after the other. Position i of a stream has the words
// each*i ... each*i + each - 1; block b of four words is Philox of the counter (b low, b high, domain, 0).
//
//   words   the words
//   unit    the upper 24 bits of a position's word over 2^24: float32 in [0, 1)
//   normal  Box and Muller: a pair of words makes a pair of positions, the even one by cosine, the odd one by sine, in float32
//
// Logarithm, sine and cosine are polynomials of plain float32 operations (Moshier, Cephes), nothing is contracted: the bits are the same on every CPU
// and in `twins/philox.py`.
//
// GIL: released. Threads: no state.
#pragma once

#include <pybind11/pybind11.h>

namespace proctor {

void bind_philox(pybind11::module_& m);

}  // namespace proctor
