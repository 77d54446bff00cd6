// A tensor's content in 64 bits: linear, keyed by global index, so that shards add up to the whole.
//
// Bytes → words. A tensor is a sequence of 32-bit words in logical (row-major) element order. Elements of 1, 2 and
// 4 bytes are one word each (zero-extended); 8-byte elements are two words, low first; 16-byte elements four.
//
// Words → hash. For the word w at global word index g, all arithmetic mod 2^64:
//
//     x      = (w ^ (w >> 16)) + kBias                      a bijection of w, never 0
//     H     += V(g >> 9) * T[g & 511] * x                   T, V odd: splitmix64 of a fixed seed
//
// H(whole) = sum of H over any partition, each part hashed at its own global indices. Odd keys and |dx| < 2^32 mean
// that one changed word always changes H. x folds the high half into the low one because differences of floats
// share trailing zeros (bf16 values held in fp32, sign flips) and a common factor 2^k would leave only 64-k key bits.
// kBias makes zeros count, so tensors of zeros of different lengths differ. Not adversarial; birthday bound 2^32.
// -0.0 and 0.0 differ, as do NaNs of different payload: the hash is of bits.
//
// Speed: T is split in 32-bit halves, so a word costs two 32x32→64 multiplies; the bias is added once a block from
// prefix sums of T. The summary (sum of squares, flags) reads the same registers: benchmarks/fingerprint.py. In
// cache 26 GB/s of float32 (AVX-512, with summary). From 256 MiB, relative to reading: 0.5 on 4 KiB pages (what torch
// allocates), 0.6 on huge pages, 0.8 there without summary. Software prefetch (512 B to 8 KiB ahead, T0/T1/NTA, by line
// and by block) and reading a block ahead were no faster on either, so there is none.
//
// Threads: no state but constants and the chosen instruction set; any number of threads may hash at once. The caller
// keeps the memory alive and unwritten. GIL: released above kGilBytes for one buffer, always for many.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <pybind11/pybind11.h>

namespace proctor {

inline constexpr int kLanes = 512;                               // words a block; T has one key for each
inline constexpr std::uint64_t kSeed = 0x70726F63746F7221ull;    // "proctor!"; far from any block index that V is given
inline constexpr std::uint64_t kBias = 0x9E3779B9ull;            // odd, < 2^32
inline constexpr std::size_t kGilBytes = 64 * 1024;              // 64 KiB ≈ 5 µs: below it a GIL round trip costs more

// What the bytes of an element mean to the summary; the hash does not look at it.
enum class Kind : int {
  kFloat = 0,     // IEEE: 2, 4 or 8 bytes
  kBfloat16 = 1,
  kInt = 2,       // two's complement, 1 to 8 bytes
  kUnsigned = 3,  // bool and unsigned, 1 to 8 bytes
  kRaw = 4,       // float8 and all others: no norm
  kComplex = 5,   // pairs of IEEE floats, 8 or 16 bytes
};

// Bits of proctor.invariants.schema.StateFlag.
enum Flag : int { kZero = 2, kNonfinite = 4, kConstant = 8 };

enum class Simd : int { kScalar = 0, kAvx2 = 1, kAvx512 = 2 };

struct Summary {
  std::uint64_t fp;
  double norm;  // Euclidean; NaN for kRaw or without summary; ±1e-6 relative (fp32 sums of at most 64 squares)
  int flags;
};

// `rows` rows of equal length, adjacent in memory, row r at global word index start + r * row_stride.
// Throws std::invalid_argument where nbytes, start or row_stride do not fall on element boundaries.
Summary fingerprint(const void* data, std::size_t nbytes, int elem_bytes, Kind kind, std::uint64_t start,
                    std::size_t rows, std::uint64_t row_stride, bool with_summary, Simd simd);

// Best instruction set of this machine, or the one $PROCTOR_SIMD names if the machine has it. Read once.
Simd default_simd();

// The instruction set of that name, the default without one. Throws std::invalid_argument if the machine lacks it.
Simd simd_named(const std::optional<std::string>& name);

void bind_fingerprint(pybind11::module_& m);

}  // namespace proctor

using proctor::bind_fingerprint;
