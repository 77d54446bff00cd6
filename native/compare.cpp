#include "compare.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#include <pybind11/stl.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PROCTOR_X86 1
#if !defined(__clang__)
// _mm512_undefined_* in the headers of GCC 9 to 13 reads itself: gcc.gnu.org/PR105593.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c,popcnt")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,popcnt")))
#endif

namespace py = pybind11;

namespace proctor {
namespace {

using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
using Bytes = const uint8_t*;

constexpr uint64_t kBlock = 512;  // elements between two folds of fp32 lanes into double

// Where squares in single precision are good. The lower bound is for the sum of a block: lost (subnormal) squares,
// < 512 * 1.2e-38, stay below 1e-6 of it. NaN fails both comparisons.
constexpr float kSmallest = 1e-29f, kLargest = 1e38f;

// ---- elements ------------------------------------------------------------------------------------------------------

enum Elem : int { kF32, kF64, kF16, kBF16, kE4M3, kE5M2, kI8, kI16, kI32, kI64, kU8, kU16, kU32, kU64, kElems };

constexpr int bytes_of(Elem e) {
  switch (e) {
    case kE4M3: case kE5M2: case kI8: case kU8: return 1;
    case kF16: case kBF16: case kI16: case kU16: return 2;
    case kF64: case kI64: case kU64: return 8;
    default: return 4;
  }
}
constexpr bool is_float(Elem e) { return e <= kE5M2; }
// Differences and values whose squares fp32 cannot hold exist in these only.
constexpr bool can_be_small(Elem e) { return e == kF32 || e == kBF16; }

template <typename T>
T load(Bytes p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

// 2^e for normal exponents of a double.
constexpr double power_of_two(int e) { return std::bit_cast<double>(static_cast<uint64_t>(e + 1023) << 52); }

constexpr double half_value(uint16_t h) {
  const int exponent = (h >> 10) & 31, mantissa = h & 1023;
  double magnitude = exponent == 0 ? mantissa * power_of_two(-24) : (1024 + mantissa) * power_of_two(exponent - 25);
  if (exponent == 31) magnitude = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  return h & 0x8000 ? -magnitude : magnitude;
}

// e4m3fn: no infinities, NaN only where all seven bits are set.
constexpr double e4m3_value(int x) {
  const int exponent = (x >> 3) & 15, mantissa = x & 7;
  double magnitude = exponent == 0 ? mantissa * power_of_two(-9) : (8 + mantissa) * power_of_two(exponent - 10);
  if ((x & 0x7F) == 0x7F) magnitude = std::numeric_limits<double>::quiet_NaN();
  return x & 0x80 ? -magnitude : magnitude;
}

struct Table {
  std::array<double, 256> of{};
  template <typename F>
  constexpr explicit Table(F value) {
    for (int i = 0; i < 256; ++i) of[i] = value(i);
  }
};
constexpr Table kE4M3Values{[](int x) { return e4m3_value(x); }};
constexpr Table kE5M2Values{[](int x) { return half_value(static_cast<uint16_t>(x << 8)); }};  // the upper half of a float16

template <Elem E>
double value(Bytes p) {
  static_assert(is_float(E));
  if constexpr (E == kF32) return load<float>(p);
  else if constexpr (E == kF64) return load<double>(p);
  else if constexpr (E == kF16) return half_value(load<uint16_t>(p));
  else if constexpr (E == kBF16) return std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(p)) << 16);
  else if constexpr (E == kE4M3) return kE4M3Values.of[*p];
  else return kE5M2Values.of[*p];
}

// ---- one element at a time -----------------------------------------------------------------------------------------

template <Elem E, bool Count>
void scalar_floats(Bytes a, Bytes b, uint64_t n, Comparison& out) {
  constexpr int width = bytes_of(E);
  double dd = 0, aa = 0, bb = 0, ab = 0;
  for (uint64_t i = 0; i < n; ++i, a += width, b += width) {
    if constexpr (Count) out.unequal += std::memcmp(a, b, width) != 0;
    const double x = value<E>(a), y = value<E>(b);
    const bool whole_x = std::isfinite(x), whole_y = std::isfinite(y);
    if (whole_y) out.max_b = std::max(out.max_b, std::abs(y));
    if (whole_x && whole_y) {
      const double d = x - y;
      dd += d * d, aa += x * x, bb += y * y, ab += x * y;
      out.max_d = std::max(out.max_d, std::abs(d));
      continue;
    }
    out.nonfinite_a += !whole_x;
    out.nonfinite_b += !whole_y;
    out.mismatch += !(x == y || (std::isnan(x) && std::isnan(y)));
  }
  out.dd += dd, out.aa += aa, out.bb += bb, out.ab += ab;
}

// What compilers vectorise where there is no code of ours for the machine: blocks of fp32 in lanes, as below.
template <Elem E>
void plain_floats(Bytes a, Bytes b, uint64_t n, Comparison& out) {
  constexpr int width = bytes_of(E), lanes = 16;
  static_assert(E == kF32 || E == kBF16);
  using Word = std::conditional_t<E == kF32, uint32_t, uint16_t>;
  for (; n >= kBlock; n -= kBlock, a += kBlock * width, b += kBlock * width) {
    float dd[lanes] = {}, aa[lanes] = {}, bb[lanes] = {}, ab[lanes] = {}, max_d[lanes] = {}, max_b[lanes] = {};
    uint32_t unequal[lanes] = {};
    for (uint64_t i = 0; i < kBlock; i += lanes) {
      Word u[lanes], v[lanes];
      std::memcpy(u, a + i * width, sizeof u);
      std::memcpy(v, b + i * width, sizeof v);
      for (int k = 0; k < lanes; ++k) {
        const float x = std::bit_cast<float>(static_cast<uint32_t>(u[k]) << (32 - 8 * width));
        const float y = std::bit_cast<float>(static_cast<uint32_t>(v[k]) << (32 - 8 * width)), d = x - y;
        unequal[k] += u[k] != v[k];
        dd[k] += d * d, aa[k] += x * x, bb[k] += y * y, ab[k] += x * y;
        max_d[k] = max_d[k] < std::abs(d) ? std::abs(d) : max_d[k];
        max_b[k] = max_b[k] < std::abs(y) ? std::abs(y) : max_b[k];
      }
    }
    Comparison block;
    float least_d = 0, least_a = 0, least_b = 0;
    bool good = true;
    for (int k = 0; k < lanes; ++k) {
      block.unequal += unequal[k];
      block.dd += dd[k], block.aa += aa[k], block.bb += bb[k], block.ab += ab[k];
      block.max_d = std::max<double>(block.max_d, max_d[k]), block.max_b = std::max<double>(block.max_b, max_b[k]);
      least_d = std::max(least_d, dd[k]), least_a = std::max(least_a, aa[k]), least_b = std::max(least_b, bb[k]);
      good = good && dd[k] + aa[k] + bb[k] <= kLargest;
    }
    out.unequal += block.unequal;
    if (!good || (block.unequal && least_d < kSmallest) || least_a < kSmallest || least_b < kSmallest) {
      scalar_floats<E, false>(a, b, kBlock, out);
      continue;
    }
    out.dd += block.dd, out.aa += block.aa, out.bb += block.bb, out.ab += block.ab;
    out.max_d = std::max(out.max_d, block.max_d), out.max_b = std::max(out.max_b, block.max_b);
  }
  scalar_floats<E, true>(a, b, n, out);
}

template <typename T>
void integers(Bytes a, Bytes b, uint64_t n, Comparison& out) {
  using U = std::make_unsigned_t<T>;
  double dd = 0, aa = 0, bb = 0, ab = 0, max_d = 0, max_b = 0;
  uint64_t unequal = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const T x = load<T>(a + i * sizeof(T)), y = load<T>(b + i * sizeof(T));
    const U apart = x > y ? static_cast<U>(static_cast<U>(x) - static_cast<U>(y)) : static_cast<U>(static_cast<U>(y) - static_cast<U>(x));
    const double d = static_cast<double>(apart), fx = static_cast<double>(x), fy = static_cast<double>(y);
    unequal += x != y;
    dd += d * d, aa += fx * fx, bb += fy * fy, ab += fx * fy;
    max_d = std::max(max_d, d), max_b = std::max(max_b, std::abs(fy));
  }
  out.unequal += unequal;
  out.dd += dd, out.aa += aa, out.bb += bb, out.ab += ab;
  out.max_d = std::max(out.max_d, max_d), out.max_b = std::max(out.max_b, max_b);
}

template <Elem E>
void scalar_pairs(Bytes a, Bytes b, uint64_t n, Comparison& out) {
  if constexpr (E == kF32 || E == kBF16) plain_floats<E>(a, b, n, out);
  else if constexpr (is_float(E)) scalar_floats<E, true>(a, b, n, out);
  else if constexpr (E == kI8) integers<int8_t>(a, b, n, out);
  else if constexpr (E == kI16) integers<int16_t>(a, b, n, out);
  else if constexpr (E == kI32) integers<int32_t>(a, b, n, out);
  else if constexpr (E == kI64) integers<int64_t>(a, b, n, out);
  else if constexpr (E == kU8) integers<uint8_t>(a, b, n, out);
  else if constexpr (E == kU16) integers<uint16_t>(a, b, n, out);
  else if constexpr (E == kU32) integers<uint32_t>(a, b, n, out);
  else integers<uint64_t>(a, b, n, out);
}

#if PROCTOR_X86

// ---- AVX-512 -------------------------------------------------------------------------------------------------------

struct Lanes16 {  // of one block
  __m512 dd, aa, bb, ab, max_d, max_b;
};
struct Wide8 {
  __m512d dd, aa, bb, ab, max_d, max_b;
};

AVX512 inline Lanes16 lanes16() {
  const __m512 zero = _mm512_setzero_ps();
  return {zero, zero, zero, zero, zero, zero};
}
AVX512 inline Wide8 wide8() {
  const __m512d zero = _mm512_setzero_pd();
  return {zero, zero, zero, zero, zero, zero};
}

AVX512 inline void take(Lanes16& s, __m512 a, __m512 b) {
  const __m512 d = _mm512_sub_ps(a, b);
  s.dd = _mm512_fmadd_ps(d, d, s.dd);
  s.aa = _mm512_fmadd_ps(a, a, s.aa);
  s.bb = _mm512_fmadd_ps(b, b, s.bb);
  s.ab = _mm512_fmadd_ps(a, b, s.ab);
  s.max_d = _mm512_max_ps(s.max_d, _mm512_abs_ps(d));
  s.max_b = _mm512_max_ps(s.max_b, _mm512_abs_ps(b));
}

AVX512 inline void take(Wide8& s, __m512d a, __m512d b) {
  const __m512d d = _mm512_sub_pd(a, b);
  s.dd = _mm512_fmadd_pd(d, d, s.dd);
  s.aa = _mm512_fmadd_pd(a, a, s.aa);
  s.bb = _mm512_fmadd_pd(b, b, s.bb);
  s.ab = _mm512_fmadd_pd(a, b, s.ab);
  s.max_d = _mm512_max_pd(s.max_d, _mm512_abs_pd(d));
  s.max_b = _mm512_max_pd(s.max_b, _mm512_abs_pd(b));
}

AVX512 inline __m512d low8(__m512 v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
AVX512 inline __m512d high8(__m512 v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
AVX512 inline __m512d fold(__m512d sum, __m512 v) { return _mm512_add_pd(sum, _mm512_add_pd(low8(v), high8(v))); }
AVX512 inline __m512d fold_max(__m512d most, __m512 v) { return _mm512_max_pd(most, _mm512_max_pd(low8(v), high8(v))); }

// Elements that one vector holds.
constexpr int kept16(Elem e) { return e == kF64 ? 8 : e == kBF16 ? 32 : 16; }

AVX512 inline __m512 halves(__m256i w) { return _mm512_cvtph_ps(w); }
AVX512 inline __m512 e5m2(__m128i w) { return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(w), 8)); }
AVX512 inline __m512 e4m3(__m128i w) {  // exponent and mantissa in place of a float16's: 2^8 too small; 0x7F gives 480
  const __m256i x = _mm256_cvtepu8_epi16(w);
  const __m256i magnitude = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x7F)), 7);
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0x80)), 8);
  const __m512 v = _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(magnitude, sign)), _mm512_set1_ps(256.0f));
  const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_abs_ps(v), _mm512_set1_ps(480.0f), _CMP_EQ_OQ);
  return _mm512_mask_mov_ps(v, nan, _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN()));
}

// One vector of each side into the lanes; returns how many of its elements differ.
template <Elem E>
AVX512 inline uint64_t take16(Lanes16& s, Bytes a, Bytes b) {
  if constexpr (E == kF32) {
    const __m512 x = _mm512_loadu_ps(a), y = _mm512_loadu_ps(b);
    take(s, x, y);
    return _mm_popcnt_u32(_mm512_cmpneq_epi32_mask(_mm512_castps_si512(x), _mm512_castps_si512(y)));
  } else if constexpr (E == kBF16) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b), upper = _mm512_set1_epi32(static_cast<int>(0xFFFF0000u));
    take(s, _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)));
    take(s, _mm512_castsi512_ps(_mm512_and_si512(x, upper)), _mm512_castsi512_ps(_mm512_and_si512(y, upper)));
    return _mm_popcnt_u32(_mm512_cmpneq_epi16_mask(x, y));
  } else if constexpr (E == kF16) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(a)), y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(b));
    take(s, halves(x), halves(y));
    return _mm_popcnt_u32(_mm256_cmpneq_epi16_mask(x, y));
  } else {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(a)), y = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b));
    if constexpr (E == kE4M3) take(s, e4m3(x), e4m3(y));
    else take(s, e5m2(x), e5m2(y));
    return _mm_popcnt_u32(_mm_cmpneq_epi8_mask(x, y));
  }
}

// Eight elements as doubles.
template <Elem E>
AVX512 inline __m512d doubles8(Bytes p) {
  if constexpr (E == kF64) return _mm512_loadu_pd(p);
  else if constexpr (E == kF32) return _mm512_cvtps_pd(_mm256_loadu_ps(reinterpret_cast<const float*>(p)));
  else return _mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16)));
}

// A block in double; n is a multiple of 8. Where something is not finite, element by element.
template <Elem E>
AVX512 void wide_block8(Bytes a, Bytes b, uint64_t n, Wide8& sums, Comparison& out) {
  Wide8 s = wide8();
  for (uint64_t i = 0; i < n; i += 8) take(s, doubles8<E>(a + i * bytes_of(E)), doubles8<E>(b + i * bytes_of(E)));
  const __m512d all = _mm512_add_pd(_mm512_add_pd(s.dd, s.aa), s.bb);
  if (_mm512_cmp_pd_mask(all, _mm512_set1_pd(std::numeric_limits<double>::max()), _CMP_LE_OQ) != 0xFF)
    return scalar_floats<E, false>(a, b, n, out);
  sums.dd = _mm512_add_pd(sums.dd, s.dd), sums.aa = _mm512_add_pd(sums.aa, s.aa);
  sums.bb = _mm512_add_pd(sums.bb, s.bb), sums.ab = _mm512_add_pd(sums.ab, s.ab);
  sums.max_d = _mm512_max_pd(sums.max_d, s.max_d), sums.max_b = _mm512_max_pd(sums.max_b, s.max_b);
}

template <Elem E>
AVX512 void avx512_pairs(Bytes a, Bytes b, uint64_t n, Comparison& out) {
  constexpr int width = bytes_of(E), step = kept16(E);
  Wide8 sums = wide8();
  uint64_t unequal = 0;
  for (uint64_t left = n / step * step; left > 0;) {
    const uint64_t block = std::min(left, kBlock);
    if constexpr (E == kF64) {
      for (uint64_t i = 0; i < block; i += 8)
        unequal += _mm_popcnt_u32(_mm512_cmpneq_epi64_mask(_mm512_loadu_si512(a + i * 8), _mm512_loadu_si512(b + i * 8)));
      wide_block8<E>(a, b, block, sums, out);
    } else {
      Lanes16 s = lanes16();
      uint64_t here = 0;
      for (uint64_t i = 0; i < block; i += step) here += take16<E>(s, a + i * width, b + i * width);
      unequal += here;
      const __m512 all = _mm512_add_ps(_mm512_add_ps(s.dd, s.aa), s.bb);
      bool good = _mm512_cmp_ps_mask(all, _mm512_set1_ps(kLargest), _CMP_LE_OQ) == 0xFFFF;
      if constexpr (can_be_small(E)) {
        const __m512 least = _mm512_set1_ps(kSmallest);
        good = good && (here == 0 || _mm512_cmp_ps_mask(s.dd, least, _CMP_GE_OQ)) && _mm512_cmp_ps_mask(s.aa, least, _CMP_GE_OQ) &&
               _mm512_cmp_ps_mask(s.bb, least, _CMP_GE_OQ);
      }
      if (good) {
        sums.dd = fold(sums.dd, s.dd), sums.aa = fold(sums.aa, s.aa);
        sums.bb = fold(sums.bb, s.bb), sums.ab = fold(sums.ab, s.ab);
        sums.max_d = fold_max(sums.max_d, s.max_d), sums.max_b = fold_max(sums.max_b, s.max_b);
      } else if constexpr (can_be_small(E)) {
        wide_block8<E>(a, b, block, sums, out);
      } else {
        scalar_floats<E, false>(a, b, block, out);
      }
    }
    a += block * width, b += block * width, left -= block;
  }
  out.unequal += unequal;
  out.dd += _mm512_reduce_add_pd(sums.dd), out.aa += _mm512_reduce_add_pd(sums.aa);
  out.bb += _mm512_reduce_add_pd(sums.bb), out.ab += _mm512_reduce_add_pd(sums.ab);
  out.max_d = std::max(out.max_d, _mm512_reduce_max_pd(sums.max_d));
  out.max_b = std::max(out.max_b, _mm512_reduce_max_pd(sums.max_b));
  scalar_floats<E, true>(a, b, n % step, out);
}

// ---- AVX2 ----------------------------------------------------------------------------------------------------------

struct Lanes8 {
  __m256 dd, aa, bb, ab, max_d, max_b;
};
struct Wide4 {
  __m256d dd, aa, bb, ab, max_d, max_b;
};

AVX2 inline Lanes8 lanes8() {
  const __m256 zero = _mm256_setzero_ps();
  return {zero, zero, zero, zero, zero, zero};
}
AVX2 inline Wide4 wide4() {
  const __m256d zero = _mm256_setzero_pd();
  return {zero, zero, zero, zero, zero, zero};
}

AVX2 inline void take(Lanes8& s, __m256 a, __m256 b) {
  const __m256 d = _mm256_sub_ps(a, b), sign = _mm256_set1_ps(-0.0f);
  s.dd = _mm256_fmadd_ps(d, d, s.dd);
  s.aa = _mm256_fmadd_ps(a, a, s.aa);
  s.bb = _mm256_fmadd_ps(b, b, s.bb);
  s.ab = _mm256_fmadd_ps(a, b, s.ab);
  s.max_d = _mm256_max_ps(s.max_d, _mm256_andnot_ps(sign, d));
  s.max_b = _mm256_max_ps(s.max_b, _mm256_andnot_ps(sign, b));
}

AVX2 inline void take(Wide4& s, __m256d a, __m256d b) {
  const __m256d d = _mm256_sub_pd(a, b), sign = _mm256_set1_pd(-0.0);
  s.dd = _mm256_fmadd_pd(d, d, s.dd);
  s.aa = _mm256_fmadd_pd(a, a, s.aa);
  s.bb = _mm256_fmadd_pd(b, b, s.bb);
  s.ab = _mm256_fmadd_pd(a, b, s.ab);
  s.max_d = _mm256_max_pd(s.max_d, _mm256_andnot_pd(sign, d));
  s.max_b = _mm256_max_pd(s.max_b, _mm256_andnot_pd(sign, b));
}

AVX2 inline __m256d low4(__m256 v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
AVX2 inline __m256d high4(__m256 v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
AVX2 inline __m256d fold(__m256d sum, __m256 v) { return _mm256_add_pd(sum, _mm256_add_pd(low4(v), high4(v))); }
AVX2 inline __m256d fold_max(__m256d most, __m256 v) { return _mm256_max_pd(most, _mm256_max_pd(low4(v), high4(v))); }
AVX2 inline double add_up(__m256d v) {
  alignas(32) double part[4];
  _mm256_store_pd(part, v);
  return (part[0] + part[1]) + (part[2] + part[3]);
}
AVX2 inline double greatest(__m256d v) {
  alignas(32) double part[4];
  _mm256_store_pd(part, v);
  return std::max(std::max(part[0], part[1]), std::max(part[2], part[3]));
}

constexpr int kept8(Elem e) { return e == kF64 ? 4 : e == kBF16 ? 16 : 8; }

AVX2 inline __m256i loadu(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
AVX2 inline __m128i loadu128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
AVX2 inline __m128i loadl(const void* p) { return _mm_loadl_epi64(static_cast<const __m128i*>(p)); }
AVX2 inline uint32_t equal_bytes(__m256i x, __m256i y, int bytes) {
  const __m256i same = bytes == 2 ? _mm256_cmpeq_epi16(x, y) : bytes == 4 ? _mm256_cmpeq_epi32(x, y) : _mm256_cmpeq_epi64(x, y);
  return _mm_popcnt_u32(static_cast<uint32_t>(_mm256_movemask_epi8(same)));
}

AVX2 inline __m256 e5m2_8(__m128i w) { return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(w), 8)); }
AVX2 inline __m256 e4m3_8(__m128i w) {
  const __m128i x = _mm_cvtepu8_epi16(w);
  const __m128i magnitude = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x7F)), 7);
  const __m128i sign = _mm_slli_epi16(_mm_and_si128(x, _mm_set1_epi16(0x80)), 8);
  const __m256 v = _mm256_mul_ps(_mm256_cvtph_ps(_mm_or_si128(magnitude, sign)), _mm256_set1_ps(256.0f));
  const __m256 nan = _mm256_cmp_ps(_mm256_andnot_ps(_mm256_set1_ps(-0.0f), v), _mm256_set1_ps(480.0f), _CMP_EQ_OQ);
  return _mm256_blendv_ps(v, _mm256_set1_ps(std::numeric_limits<float>::quiet_NaN()), nan);
}

template <Elem E>
AVX2 inline uint64_t take8(Lanes8& s, Bytes a, Bytes b) {
  if constexpr (E == kF32) {
    const __m256i x = loadu(a), y = loadu(b);
    take(s, _mm256_castsi256_ps(x), _mm256_castsi256_ps(y));
    return 8 - equal_bytes(x, y, 4) / 4;
  } else if constexpr (E == kBF16) {
    const __m256i x = loadu(a), y = loadu(b), upper = _mm256_set1_epi32(static_cast<int>(0xFFFF0000u));
    take(s, _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)));
    take(s, _mm256_castsi256_ps(_mm256_and_si256(x, upper)), _mm256_castsi256_ps(_mm256_and_si256(y, upper)));
    return 16 - equal_bytes(x, y, 2) / 2;
  } else if constexpr (E == kF16) {
    const __m128i x = loadu128(a), y = loadu128(b);
    take(s, _mm256_cvtph_ps(x), _mm256_cvtph_ps(y));
    return 8 - _mm_popcnt_u32(static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi16(x, y)))) / 2;
  } else {
    const __m128i x = loadl(a), y = loadl(b);
    if constexpr (E == kE4M3) take(s, e4m3_8(x), e4m3_8(y));
    else take(s, e5m2_8(x), e5m2_8(y));
    return 8 - _mm_popcnt_u32(static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(x, y))) & 0xFF);
  }
}

template <Elem E>
AVX2 inline __m256d doubles4(Bytes p) {
  if constexpr (E == kF64) return _mm256_loadu_pd(reinterpret_cast<const double*>(p));
  else if constexpr (E == kF32) return _mm256_cvtps_pd(_mm_loadu_ps(reinterpret_cast<const float*>(p)));
  else return _mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(_mm_cvtepu16_epi32(loadl(p)), 16)));
}

template <Elem E>
AVX2 void wide_block4(Bytes a, Bytes b, uint64_t n, Wide4& sums, Comparison& out) {
  Wide4 s = wide4();
  for (uint64_t i = 0; i < n; i += 4) take(s, doubles4<E>(a + i * bytes_of(E)), doubles4<E>(b + i * bytes_of(E)));
  const __m256d all = _mm256_add_pd(_mm256_add_pd(s.dd, s.aa), s.bb);
  if (_mm256_movemask_pd(_mm256_cmp_pd(all, _mm256_set1_pd(std::numeric_limits<double>::max()), _CMP_LE_OQ)) != 0xF)
    return scalar_floats<E, false>(a, b, n, out);
  sums.dd = _mm256_add_pd(sums.dd, s.dd), sums.aa = _mm256_add_pd(sums.aa, s.aa);
  sums.bb = _mm256_add_pd(sums.bb, s.bb), sums.ab = _mm256_add_pd(sums.ab, s.ab);
  sums.max_d = _mm256_max_pd(sums.max_d, s.max_d), sums.max_b = _mm256_max_pd(sums.max_b, s.max_b);
}

AVX2 inline bool some(__m256 v) { return _mm256_movemask_ps(_mm256_cmp_ps(v, _mm256_set1_ps(kSmallest), _CMP_GE_OQ)) != 0; }

template <Elem E>
AVX2 void avx2_pairs(Bytes a, Bytes b, uint64_t n, Comparison& out) {
  constexpr int width = bytes_of(E), step = kept8(E);
  Wide4 sums = wide4();
  uint64_t unequal = 0;
  for (uint64_t left = n / step * step; left > 0;) {
    const uint64_t block = std::min(left, kBlock);
    if constexpr (E == kF64) {
      for (uint64_t i = 0; i < block; i += 4) unequal += 4 - equal_bytes(loadu(a + i * 8), loadu(b + i * 8), 8) / 8;
      wide_block4<E>(a, b, block, sums, out);
    } else {
      Lanes8 s = lanes8();
      uint64_t here = 0;
      for (uint64_t i = 0; i < block; i += step) here += take8<E>(s, a + i * width, b + i * width);
      unequal += here;
      const __m256 all = _mm256_add_ps(_mm256_add_ps(s.dd, s.aa), s.bb);
      bool good = _mm256_movemask_ps(_mm256_cmp_ps(all, _mm256_set1_ps(kLargest), _CMP_LE_OQ)) == 0xFF;
      if constexpr (can_be_small(E)) good = good && (here == 0 || some(s.dd)) && some(s.aa) && some(s.bb);
      if (good) {
        sums.dd = fold(sums.dd, s.dd), sums.aa = fold(sums.aa, s.aa);
        sums.bb = fold(sums.bb, s.bb), sums.ab = fold(sums.ab, s.ab);
        sums.max_d = fold_max(sums.max_d, s.max_d), sums.max_b = fold_max(sums.max_b, s.max_b);
      } else if constexpr (can_be_small(E)) {
        wide_block4<E>(a, b, block, sums, out);
      } else {
        scalar_floats<E, false>(a, b, block, out);
      }
    }
    a += block * width, b += block * width, left -= block;
  }
  out.unequal += unequal;
  out.dd += add_up(sums.dd), out.aa += add_up(sums.aa), out.bb += add_up(sums.bb), out.ab += add_up(sums.ab);
  out.max_d = std::max(out.max_d, greatest(sums.max_d)), out.max_b = std::max(out.max_b, greatest(sums.max_b));
  scalar_floats<E, true>(a, b, n % step, out);
}

#endif  // PROCTOR_X86

// ---- dispatch ------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Bytes, Bytes, uint64_t, Comparison&);

template <Simd S, Elem E>
constexpr Kernel kernel() {
#if PROCTOR_X86
  if constexpr (S == Simd::kAvx512 && is_float(E)) return &avx512_pairs<E>;
  else if constexpr (S == Simd::kAvx2 && is_float(E)) return &avx2_pairs<E>;
#endif
  return &scalar_pairs<E>;
}

template <Simd S, int... Es>
constexpr std::array<Kernel, kElems> kernels(std::integer_sequence<int, Es...>) {
  return {kernel<S, static_cast<Elem>(Es)>()...};
}

using AllElems = std::make_integer_sequence<int, kElems>;
constexpr std::array<std::array<Kernel, kElems>, 3> kKernels{kernels<Simd::kScalar>(AllElems{}), kernels<Simd::kAvx2>(AllElems{}),
                                                             kernels<Simd::kAvx512>(AllElems{})};

struct Named {
  std::string_view name;
  Elem elem;
};
constexpr Named kNames[] = {
    {"float32", kF32}, {"bfloat16", kBF16}, {"float16", kF16}, {"float64", kF64}, {"float8_e4m3fn", kE4M3}, {"float8_e5m2", kE5M2},
    {"complex64", kF32}, {"complex128", kF64}, {"int64", kI64}, {"int32", kI32}, {"int16", kI16}, {"int8", kI8},
    {"uint64", kU64}, {"uint32", kU32}, {"uint16", kU16}, {"uint8", kU8}, {"bool", kU8},
};

}  // namespace

Comparison compare(const void* a, const void* b, size_t nbytes, std::string_view dtype, Simd simd) {
  const auto* named = std::find_if(std::begin(kNames), std::end(kNames), [&](const Named& n) { return n.name == dtype; });
  if (named == std::end(kNames)) throw std::invalid_argument("dtype is \"" + std::string(dtype) + "\", which is not one of those compared");
  const int width = bytes_of(named->elem);
  if (nbytes % width)
    throw std::invalid_argument(std::to_string(nbytes) + " bytes are no whole number of elements of " + std::string(dtype));
  Comparison out;
  out.n = nbytes / width;
  kKernels[static_cast<int>(simd)][named->elem](static_cast<Bytes>(a), static_cast<Bytes>(b), out.n, out);
  return out;
}

// ---- bindings ------------------------------------------------------------------------------------------------------

namespace {

// A contiguous buffer of a Python object, held while it lives.
class View {
 public:
  explicit View(const py::object& object) {
    if (PyObject_GetBuffer(object.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw py::error_already_set();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  const void* data() const { return view_.buf; }
  size_t nbytes() const { return static_cast<size_t>(view_.len); }

 private:
  Py_buffer view_;
};

py::tuple bind_buffers(const py::object& a, const py::object& b, const std::string& dtype, const std::optional<std::string>& simd) {
  const Simd level = simd_named(simd);
  const View left(a), right(b);
  if (left.nbytes() != right.nbytes())
    throw std::invalid_argument("buffers of " + std::to_string(left.nbytes()) + " and " + std::to_string(right.nbytes()) + " bytes cannot be compared");
  Comparison c;
  {
    std::optional<py::gil_scoped_release> unlocked;
    if (left.nbytes() > kGilBytes) unlocked.emplace();
    c = compare(left.data(), right.data(), left.nbytes(), dtype, level);
  }
  return py::make_tuple(c.n, c.unequal, c.dd, c.aa, c.bb, c.ab, c.max_d, c.max_b, c.nonfinite_a, c.nonfinite_b, c.mismatch);
}

}  // namespace

void bind_compare(py::module_& m) {
  m.def("compare_buffers", &bind_buffers, py::arg("candidate"), py::arg("reference"), py::arg("dtype"), py::kw_only(),
        py::arg("simd") = py::none(),
        "(n, unequal, sum (a-b)^2, sum a^2, sum b^2, sum a*b, max |a-b|, max |b|, nonfinite a, nonfinite b, mismatch) of two contiguous "
        "buffers of one dtype: see compare.h.");
}

}  // namespace proctor
