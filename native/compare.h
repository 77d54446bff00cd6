// Two tensors side by side in one pass: how far apart they are, and every sum that says in what way.
//
// Of candidate a and reference b, of one dtype and n elements, in any alignment:
//
//     unequal                   elements whose bits differ (-0.0 and 0.0 do, NaNs of other payload do)
//     dd, aa, bb, ab            sum of (a-b)^2, a^2, b^2, a*b over the pairs in which both are finite
//     max_d, max_b              greatest |a-b| of those pairs; greatest finite |b|
//     nonfinite_a, nonfinite_b  elements that are NaN or infinite
//     mismatch                  pairs of which one is not finite and the other is not of the same sort (NaN, +inf, -inf)
//
// Arithmetic. Floats of at most 32 bits are summed in fp32 lanes that are folded into double every 512 elements: the
// sums are good to 1e-7 relative. A block whose lanes overflow, meet a NaN or are too small for squares in fp32 (below
// 1e-29) is done again in double. float64 in double. Integers: |a-b| is exact before it becomes a double. float8 and
// float16 are converted in registers, bfloat16 is shifted. Two sums that overflow double (float64 beyond 1e154) are inf.
//
// Speed, relative to reading the same memory: benchmarks/compare_kernel.py. Software prefetch as in fingerprint.h: none.
// Threads: no state but constants; the caller keeps both buffers alive and unwritten. GIL: released above 64 KiB.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <pybind11/pybind11.h>

#include "memory/fingerprint.h"

namespace proctor {

struct Comparison {
  std::uint64_t n = 0, unequal = 0;
  double dd = 0, aa = 0, bb = 0, ab = 0, max_d = 0, max_b = 0;
  std::uint64_t nonfinite_a = 0, nonfinite_b = 0, mismatch = 0;
};

// `dtype` as numpy and torch spell it: float64 float32 float16 bfloat16 float8_e4m3fn float8_e5m2 complex64 complex128
// (pairs of floats) bool uint8 … int64. Throws std::invalid_argument on another, or where nbytes is no whole number of elements.
Comparison compare(const void* a, const void* b, std::size_t nbytes, std::string_view dtype, Simd simd);

void bind_compare(pybind11::module_& m);

}  // namespace proctor

using proctor::bind_compare;
