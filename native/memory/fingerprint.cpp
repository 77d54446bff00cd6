#include "memory/fingerprint.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define PROCTOR_X86 1
#if !defined(__clang__)
// _mm512_undefined_* in the headers of GCC 9 to 13 reads itself: gcc.gnu.org/PR105593.
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#endif

static_assert(std::endian::native == std::endian::little, "word order of 8-byte elements assumes little-endian memory");

namespace py = pybind11;

namespace proctor {
namespace {

using std::size_t;
using std::uint16_t;
using std::uint32_t;
using std::uint64_t;
using std::uint8_t;
using Bytes = const uint8_t*;

// ---- keys ----------------------------------------------------------------------------------------------------------

constexpr uint64_t splitmix64(uint64_t z) {
  z += 0x9E3779B97F4A7C15ull;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

constexpr uint64_t block_key(uint64_t block) { return splitmix64(block) | 1; }

// vpmuludq reads the low half of each 64-bit lane: lo/hi serve the even words of a vector, lo1/hi1 (shifted by one)
// the odd ones. The padding lets a 16-word load start at any lane.
struct Keys {
  alignas(64) std::array<uint32_t, kLanes + 16> lo{}, hi{}, lo1{}, hi1{};
  std::array<uint64_t, kLanes> whole{};
  std::array<uint64_t, kLanes + 1> sum_below{};

  constexpr Keys() {
    for (int i = 0; i < kLanes; ++i) {
      whole[i] = splitmix64(kSeed + i) | 1;
      sum_below[i + 1] = sum_below[i] + whole[i];
      lo[i] = static_cast<uint32_t>(whole[i]);
      hi[i] = static_cast<uint32_t>(whole[i] >> 32);
    }
    for (int i = 0; i + 1 < kLanes; ++i) {
      lo1[i] = lo[i + 1];
      hi1[i] = hi[i + 1];
    }
  }
  constexpr uint64_t bias(uint64_t lane, uint64_t n) const { return kBias * (sum_below[lane + n] - sum_below[lane]); }
};
constexpr Keys kKeys;

// ---- elements ------------------------------------------------------------------------------------------------------

// How memory becomes words and numbers. A complex number is two kF32 or two kF64.
enum Elem : int { kF32, kF64, kF16, kBF16, kI8, kI16, kI32, kI64, kU8, kU16, kU32, kU64, kRaw1, kRaw2, kRaw4, kElems };

constexpr int number_bytes(Elem e) {
  switch (e) {
    case kI8: case kU8: case kRaw1: return 1;
    case kF16: case kBF16: case kI16: case kU16: case kRaw2: return 2;
    case kF64: case kI64: case kU64: return 8;
    default: return 4;
  }
}
constexpr int word_bytes(Elem e) { return number_bytes(e) == 8 ? 4 : number_bytes(e); }
constexpr bool is_raw(Elem e) { return e >= kRaw1; }
constexpr bool is_float(Elem e) { return e <= kBF16; }

template <typename T>
T load(Bytes p) {
  T value;
  std::memcpy(&value, p, sizeof value);
  return value;
}

template <Elem E>
uint32_t load_word(Bytes p) {
  if constexpr (word_bytes(E) == 1) return *p;
  else if constexpr (word_bytes(E) == 2) return load<uint16_t>(p);
  else return load<uint32_t>(p);
}

inline uint64_t fold(uint32_t w) { return w ^ (w >> 16); }

inline double half_value(uint16_t h) {
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
  double magnitude;
  if (exponent == 31) magnitude = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
  else if (exponent == 0) magnitude = std::ldexp(mantissa, -24);
  else magnitude = std::ldexp(1024 + mantissa, static_cast<int>(exponent) - 25);
  return h & 0x8000 ? -magnitude : magnitude;
}

template <Elem E>
double load_number(Bytes p) {
  if constexpr (E == kF32) return load<float>(p);
  else if constexpr (E == kF64) return load<double>(p);
  else if constexpr (E == kF16) return half_value(load<uint16_t>(p));
  else if constexpr (E == kBF16) return std::bit_cast<float>(static_cast<uint32_t>(load<uint16_t>(p)) << 16);
  else if constexpr (E == kI8) return static_cast<int8_t>(*p);
  else if constexpr (E == kI16) return load<int16_t>(p);
  else if constexpr (E == kI32) return load<int32_t>(p);
  else if constexpr (E == kI64) return static_cast<double>(load<int64_t>(p));
  else if constexpr (E == kU8) return *p;
  else if constexpr (E == kU16) return load<uint16_t>(p);
  else if constexpr (E == kU32) return load<uint32_t>(p);
  else return static_cast<double>(load<uint64_t>(p));
}

// ---- accumulation --------------------------------------------------------------------------------------------------

// The first element repeated. Constant: no word differs from it. Zero: it and all differences are at most sign bits.
// One OR per word therefore answers both. Blocks break on element boundaries, so every run starts in phase.
struct Acc {
  uint64_t hash = 0;
  double squares = 0;
  bool nonfinite = false;
  alignas(64) std::array<uint32_t, 16> pattern{};
  std::array<uint32_t, 4> differs{};
};

// Where single-precision sums of squares are good; other blocks are summed again in double. The lower bound keeps
// lost (subnormal) squares, < 64 * 1.2e-38, below 1e-6 of the sum. NaN fails both comparisons.
constexpr float kSmallest = 1e-30f, kLargest = 1e38f;

template <Elem E>
void sum_squares(Bytes p, uint64_t words, Acc& acc) {
  constexpr uint64_t per_number = number_bytes(E) / word_bytes(E);
  double squares = 0;
  bool nonfinite = false;
  for (uint64_t i = 0; i < words / per_number; ++i) {
    const double v = load_number<E>(p + i * number_bytes(E));
    squares += v * v;
    if constexpr (is_float(E)) nonfinite |= !std::isfinite(v);
  }
  acc.squares += squares;
  acc.nonfinite |= nonfinite;
}

// The words [lane, lane + n) of one block; returns their sum, without key and bias.
template <Elem E, bool Summarize>
uint64_t scalar_run(Bytes p, uint64_t lane, uint64_t n, Acc& acc) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < n; ++i) {
    const uint32_t w = load_word<E>(p + i * word_bytes(E));
    sum += kKeys.whole[lane + i] * fold(w);
    if constexpr (Summarize) acc.differs[i & 3] |= w ^ acc.pattern[i & 15];
  }
  if constexpr (Summarize && !is_raw(E)) sum_squares<E>(p, n, acc);
  return sum;
}

template <Elem E, bool Summarize>
void scalar_words(Bytes p, uint64_t g, uint64_t n, Acc& acc) {
  while (n > 0) {
    const uint64_t lane = g % kLanes, take = std::min<uint64_t>(n, kLanes - lane);
    acc.hash += block_key(g / kLanes) * (scalar_run<E, Summarize>(p, lane, take, acc) + kKeys.bias(lane, take));
    p += take * word_bytes(E), g += take, n -= take;
  }
}

#if PROCTOR_X86

// ---- AVX-512: 16 words a turn --------------------------------------------------------------------------------------

template <Elem E>
AVX512 inline __m512i load16(Bytes p) {
  if constexpr (word_bytes(E) == 1) return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  else if constexpr (word_bytes(E) == 2) return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  else return _mm512_loadu_si512(p);
}

// 16 words as 16 floats (w: the words already loaded from p).
template <Elem E>
AVX512 inline __m512 floats16(Bytes p, __m512i w) {
  if constexpr (E == kF32) return _mm512_castsi512_ps(w);
  else if constexpr (E == kBF16) return _mm512_castsi512_ps(_mm512_slli_epi32(w, 16));
  else if constexpr (E == kF16) return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  else if constexpr (E == kI8) return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  else if constexpr (E == kI16) return _mm512_cvtepi32_ps(_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
  else if constexpr (E == kU32) return _mm512_cvtepu32_ps(w);
  else return _mm512_cvtepi32_ps(w);
}

template <Elem E>
AVX512 inline __m512d doubles8(__m512i w) {
  if constexpr (E == kF64) return _mm512_castsi512_pd(w);
  else if constexpr (E == kI64) return _mm512_cvtepi64_pd(w);
  else return _mm512_cvtepu64_pd(w);
}

AVX512 inline __m512d widen_add(__m512 v, __m512d sum) {
  const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
  const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
  return _mm512_add_pd(_mm512_add_pd(low, high), sum);
}

template <Elem E, bool Summarize>
AVX512 void avx512_words(Bytes p, uint64_t g, uint64_t n, Acc& acc) {
  const __m512i pattern = _mm512_load_si512(acc.pattern.data());
  __m512i hash = _mm512_setzero_si512(), differs = _mm512_setzero_si512();
  __m512d squares = _mm512_setzero_pd();
  while (n > 0) {
    const uint64_t lane = g % kLanes, take = std::min<uint64_t>(n, kLanes - lane), vectors = take / 16;
    const uint64_t key = block_key(g / kLanes);
    __m512i lo = _mm512_setzero_si512(), hi = lo, lo1 = lo, hi1 = lo;
    __m512 block = _mm512_setzero_ps();
    __m512d block_d = _mm512_setzero_pd();
#pragma GCC unroll 2
    for (uint64_t i = 0; i < vectors * 16; i += 16) {
      const Bytes q = p + i * word_bytes(E);
      const __m512i w = load16<E>(q);
      __m512i x = w;
      if constexpr (word_bytes(E) == 4) x = _mm512_xor_si512(w, _mm512_srli_epi32(w, 16));
      const __m512i odd = _mm512_srli_epi64(x, 32);
      const uint64_t at = lane + i;
      lo = _mm512_add_epi64(lo, _mm512_mul_epu32(x, _mm512_loadu_si512(&kKeys.lo[at])));
      hi = _mm512_add_epi64(hi, _mm512_mul_epu32(x, _mm512_loadu_si512(&kKeys.hi[at])));
      lo1 = _mm512_add_epi64(lo1, _mm512_mul_epu32(odd, _mm512_loadu_si512(&kKeys.lo1[at])));
      hi1 = _mm512_add_epi64(hi1, _mm512_mul_epu32(odd, _mm512_loadu_si512(&kKeys.hi1[at])));
      if constexpr (Summarize) {
        differs = _mm512_ternarylogic_epi32(differs, w, pattern, 0xF6);  // differs | (w ^ pattern)
        if constexpr (is_raw(E)) {
        } else if constexpr (number_bytes(E) == 8) {
          const __m512d v = doubles8<E>(w);
          block_d = _mm512_fmadd_pd(v, v, block_d);
        } else {
          const __m512 v = floats16<E>(q, w);
          block = _mm512_fmadd_ps(v, v, block);
        }
      }
    }
    const __m512i sum = _mm512_add_epi64(_mm512_add_epi64(lo, lo1), _mm512_slli_epi64(_mm512_add_epi64(hi, hi1), 32));
    hash = _mm512_add_epi64(hash, _mm512_mullo_epi64(sum, _mm512_set1_epi64(static_cast<long long>(key))));
    if constexpr (Summarize && !is_raw(E)) {
      if constexpr (E == kF64) {
        if (_mm512_cmp_pd_mask(block_d, _mm512_set1_pd(std::numeric_limits<double>::max()), _CMP_LE_OQ) == 0xFF)
          squares = _mm512_add_pd(squares, block_d);
        else sum_squares<E>(p, vectors * 16, acc);  // overflow or nonfinite: which one?
      } else if constexpr (number_bytes(E) == 8) {
        squares = _mm512_add_pd(squares, block_d);
      } else if constexpr (E == kF32 || E == kBF16) {
        const __mmask16 good = _mm512_cmp_ps_mask(block, _mm512_set1_ps(kSmallest), _CMP_GE_OQ) &
                               _mm512_cmp_ps_mask(block, _mm512_set1_ps(kLargest), _CMP_LE_OQ);
        if (good != 0xFFFF) {
          for (uint64_t i = 0; i < vectors * 16; i += 16) {
            const Bytes q = p + i * word_bytes(E);
            const __m512 v = floats16<E>(q, load16<E>(q));
            const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(v));
            const __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1));
            block_d = _mm512_fmadd_pd(low, low, _mm512_fmadd_pd(high, high, block_d));
          }
          squares = _mm512_add_pd(squares, block_d);  // squares of floats cannot overflow it: nonfinite is seen at the end
        } else squares = widen_add(block, squares);
      } else squares = widen_add(block, squares);
    }
    uint64_t rest = kKeys.bias(lane, take);
    if (take % 16) rest += scalar_run<E, Summarize>(p + vectors * 16 * word_bytes(E), lane + vectors * 16, take % 16, acc);
    acc.hash += key * rest;
    p += take * word_bytes(E), g += take, n -= take;
  }
  acc.hash += static_cast<uint64_t>(_mm512_reduce_add_epi64(hash));
  if constexpr (Summarize) {
    const double total = _mm512_reduce_add_pd(squares);
    acc.squares += total;
    if constexpr (is_float(E) && E != kF64) acc.nonfinite |= !std::isfinite(total);
    alignas(64) uint32_t d[16];
    _mm512_store_si512(d, differs);
    for (int i = 0; i < 16; ++i) acc.differs[i & 3] |= d[i];
  }
}

AVX512 uint64_t avx512_read(Bytes p, size_t vectors) {
  __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
  size_t i = 0;
  for (; i + 4 <= vectors; i += 4, p += 256) {
    a = _mm512_add_epi64(a, _mm512_loadu_si512(p));
    b = _mm512_add_epi64(b, _mm512_loadu_si512(p + 64));
    c = _mm512_add_epi64(c, _mm512_loadu_si512(p + 128));
    d = _mm512_add_epi64(d, _mm512_loadu_si512(p + 192));
  }
  for (; i < vectors; ++i, p += 64) a = _mm512_add_epi64(a, _mm512_loadu_si512(p));
  return static_cast<uint64_t>(_mm512_reduce_add_epi64(_mm512_add_epi64(_mm512_add_epi64(a, b), _mm512_add_epi64(c, d))));
}

// ---- AVX2: 8 words a turn ------------------------------------------------------------------------------------------

AVX2 inline __m256i loadu(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

template <Elem E>
AVX2 inline __m256i load8(Bytes p) {
  if constexpr (word_bytes(E) == 1) return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  else if constexpr (word_bytes(E) == 2) return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  else return loadu(p);
}

// AVX2 has no conversion from these; their squares are summed by scalar code, block by block from L1.
constexpr bool no_avx2_number(Elem e) { return e == kU32 || e == kI64 || e == kU64; }

template <Elem E>
AVX2 inline __m256 floats8(Bytes p, __m256i w) {
  if constexpr (E == kF32) return _mm256_castsi256_ps(w);
  else if constexpr (E == kBF16) return _mm256_castsi256_ps(_mm256_slli_epi32(w, 16));
  else if constexpr (E == kF16) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  else if constexpr (E == kI8) return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
  else if constexpr (E == kI16) return _mm256_cvtepi32_ps(_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  else return _mm256_cvtepi32_ps(w);
}

AVX2 inline __m256d widen_add(__m256 v, __m256d sum) {
  const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(v)), high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
  return _mm256_add_pd(_mm256_add_pd(low, high), sum);
}

AVX2 inline __m256i mullo64(__m256i a, uint64_t key) {
  const __m256i lo = _mm256_set1_epi64x(static_cast<uint32_t>(key)), hi = _mm256_set1_epi64x(static_cast<uint32_t>(key >> 32));
  const __m256i cross = _mm256_add_epi64(_mm256_mul_epu32(a, hi), _mm256_mul_epu32(_mm256_srli_epi64(a, 32), lo));
  return _mm256_add_epi64(_mm256_mul_epu32(a, lo), _mm256_slli_epi64(cross, 32));
}

AVX2 inline uint64_t add_up(__m256i v) {
  alignas(32) uint64_t part[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(part), v);
  return part[0] + part[1] + part[2] + part[3];
}

template <Elem E, bool Summarize>
AVX2 void avx2_words(Bytes p, uint64_t g, uint64_t n, Acc& acc) {
  const __m256i pattern = _mm256_load_si256(reinterpret_cast<const __m256i*>(acc.pattern.data()));
  __m256i hash = _mm256_setzero_si256(), differs = _mm256_setzero_si256();
  __m256d squares = _mm256_setzero_pd();
  while (n > 0) {
    const uint64_t lane = g % kLanes, take = std::min<uint64_t>(n, kLanes - lane), vectors = take / 8;
    const uint64_t key = block_key(g / kLanes);
    __m256i lo = _mm256_setzero_si256(), hi = lo, lo1 = lo, hi1 = lo;
    __m256 block = _mm256_setzero_ps();
    __m256d block_d = _mm256_setzero_pd();
#pragma GCC unroll 2
    for (uint64_t i = 0; i < vectors * 8; i += 8) {
      const Bytes q = p + i * word_bytes(E);
      const __m256i w = load8<E>(q);
      __m256i x = w;
      if constexpr (word_bytes(E) == 4) x = _mm256_xor_si256(w, _mm256_srli_epi32(w, 16));
      const __m256i odd = _mm256_srli_epi64(x, 32);
      const uint64_t at = lane + i;
      lo = _mm256_add_epi64(lo, _mm256_mul_epu32(x, loadu(&kKeys.lo[at])));
      hi = _mm256_add_epi64(hi, _mm256_mul_epu32(x, loadu(&kKeys.hi[at])));
      lo1 = _mm256_add_epi64(lo1, _mm256_mul_epu32(odd, loadu(&kKeys.lo1[at])));
      hi1 = _mm256_add_epi64(hi1, _mm256_mul_epu32(odd, loadu(&kKeys.hi1[at])));
      if constexpr (Summarize) {
        differs = _mm256_or_si256(differs, _mm256_xor_si256(w, pattern));
        if constexpr (is_raw(E) || no_avx2_number(E)) {
        } else if constexpr (E == kF64) {
          const __m256d v = _mm256_castsi256_pd(w);
          block_d = _mm256_fmadd_pd(v, v, block_d);
        } else {
          const __m256 v = floats8<E>(q, w);
          block = _mm256_fmadd_ps(v, v, block);
        }
      }
    }
    const __m256i sum = _mm256_add_epi64(_mm256_add_epi64(lo, lo1), _mm256_slli_epi64(_mm256_add_epi64(hi, hi1), 32));
    hash = _mm256_add_epi64(hash, mullo64(sum, key));
    if constexpr (Summarize && !is_raw(E)) {
      if constexpr (no_avx2_number(E)) {
        sum_squares<E>(p, vectors * 8, acc);
      } else if constexpr (E == kF64) {
        const __m256d good = _mm256_cmp_pd(block_d, _mm256_set1_pd(std::numeric_limits<double>::max()), _CMP_LE_OQ);
        if (_mm256_movemask_pd(good) == 0xF) squares = _mm256_add_pd(squares, block_d);
        else sum_squares<E>(p, vectors * 8, acc);
      } else if constexpr (E == kF32 || E == kBF16) {
        const __m256 good = _mm256_and_ps(_mm256_cmp_ps(block, _mm256_set1_ps(kSmallest), _CMP_GE_OQ),
                                          _mm256_cmp_ps(block, _mm256_set1_ps(kLargest), _CMP_LE_OQ));
        if (_mm256_movemask_ps(good) != 0xFF) {
          for (uint64_t i = 0; i < vectors * 8; i += 8) {
            const Bytes q = p + i * word_bytes(E);
            const __m256 v = floats8<E>(q, load8<E>(q));
            const __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(v));
            const __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1));
            block_d = _mm256_fmadd_pd(low, low, _mm256_fmadd_pd(high, high, block_d));
          }
          squares = _mm256_add_pd(squares, block_d);
        } else squares = widen_add(block, squares);
      } else squares = widen_add(block, squares);
    }
    uint64_t rest = kKeys.bias(lane, take);
    if (take % 8) rest += scalar_run<E, Summarize>(p + vectors * 8 * word_bytes(E), lane + vectors * 8, take % 8, acc);
    acc.hash += key * rest;
    p += take * word_bytes(E), g += take, n -= take;
  }
  acc.hash += add_up(hash);
  if constexpr (Summarize) {
    alignas(32) double part[4];
    _mm256_store_pd(part, squares);
    const double total = part[0] + part[1] + part[2] + part[3];
    acc.squares += total;
    if constexpr (is_float(E) && E != kF64) acc.nonfinite |= !std::isfinite(total);
    alignas(32) uint32_t d[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(d), differs);
    for (int i = 0; i < 8; ++i) acc.differs[i & 3] |= d[i];
  }
}

#endif  // PROCTOR_X86

// ---- dispatch ------------------------------------------------------------------------------------------------------

using Kernel = void (*)(Bytes, uint64_t, uint64_t, Acc&);
using KernelTable = std::array<std::array<Kernel, 2>, kElems>;

template <Simd S, Elem E, bool Summarize>
constexpr Kernel kernel() {
#if PROCTOR_X86
  if constexpr (S == Simd::kAvx512) return &avx512_words<E, Summarize>;
  if constexpr (S == Simd::kAvx2) return &avx2_words<E, Summarize>;
#endif
  return &scalar_words<E, Summarize>;
}

template <Simd S, int... Es>
constexpr KernelTable kernels(std::integer_sequence<int, Es...>) {
  return {{std::array<Kernel, 2>{kernel<S, static_cast<Elem>(Es), false>(), kernel<S, static_cast<Elem>(Es), true>()}...}};
}

using AllElems = std::make_integer_sequence<int, kElems>;
constexpr std::array<KernelTable, 3> kKernels{kernels<Simd::kScalar>(AllElems{}), kernels<Simd::kAvx2>(AllElems{}),
                                              kernels<Simd::kAvx512>(AllElems{})};

constexpr std::array<std::string_view, 3> kSimdNames{"scalar", "avx2", "avx512"};

bool machine_has(Simd simd) {
#if PROCTOR_X86
  if (simd == Simd::kAvx512)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vl");
  if (simd == Simd::kAvx2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#endif
  return simd == Simd::kScalar;
}

Elem elem_of(int bytes, Kind kind) {
  const int size = bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : bytes == 8 ? 3 : 4;
  constexpr Elem raw[] = {kRaw1, kRaw2, kRaw4, kRaw4, kRaw4};
  constexpr Elem signed_[] = {kI8, kI16, kI32, kI64, kRaw4}, unsigned_[] = {kU8, kU16, kU32, kU64, kRaw4};
  constexpr Elem float_[] = {kRaw1, kF16, kF32, kF64, kRaw4}, complex_[] = {kRaw1, kRaw2, kRaw4, kF32, kF64};
  switch (kind) {
    case Kind::kFloat: return float_[size];
    case Kind::kBfloat16: return bytes == 2 ? kBF16 : raw[size];
    case Kind::kInt: return signed_[size];
    case Kind::kUnsigned: return unsigned_[size];
    case Kind::kComplex: return complex_[size];
    default: return raw[size];
  }
}

// Sign bit of the word at index i of an element of floats; 0 for all else, whose only zero is all bits zero.
uint32_t sign_bits(Elem e, int i) {
  switch (e) {
    case kF32: return 0x80000000u;
    case kF64: return i & 1 ? 0x80000000u : 0;
    case kF16: case kBF16: return 0x8000u;
    default: return 0;
  }
}

}  // namespace

Simd default_simd() {
  static const Simd chosen = [] {
    const char* wanted = std::getenv("PROCTOR_SIMD");
    for (int i = 0; wanted && i < 3; ++i)
      if (kSimdNames[i] == wanted && machine_has(static_cast<Simd>(i))) return static_cast<Simd>(i);
    for (Simd best : {Simd::kAvx512, Simd::kAvx2})
      if (machine_has(best)) return best;
    return Simd::kScalar;
  }();
  return chosen;
}

Summary fingerprint(const void* data, size_t nbytes, int elem_bytes, Kind kind, uint64_t start, size_t rows,
                    uint64_t row_stride, bool with_summary, Simd simd) {
  if (elem_bytes != 1 && elem_bytes != 2 && elem_bytes != 4 && elem_bytes != 8 && elem_bytes != 16)
    throw std::invalid_argument("elem_bytes is " + std::to_string(elem_bytes) + ", expected 1, 2, 4, 8 or 16");
  if (nbytes == 0) return {0, 0.0, kZero | kConstant};
  const uint64_t elem_words = elem_bytes <= 4 ? 1 : elem_bytes / 4;
  if (!data || rows == 0 || nbytes % (rows * elem_bytes) || start % elem_words || row_stride % elem_words)
    throw std::invalid_argument("a buffer of " + std::to_string(nbytes) + " bytes, start " + std::to_string(start) +
                                ", row_stride " + std::to_string(row_stride) + " does not fall into " +
                                std::to_string(rows) + " rows of whole " + std::to_string(elem_bytes) + "-byte elements");
  const Elem elem = elem_of(elem_bytes, kind);
  const Bytes bytes = static_cast<Bytes>(data);
  const uint64_t row_bytes = nbytes / rows, row_words = row_bytes / word_bytes(elem);

  Acc acc;
  for (int i = 0; i < 16; ++i) std::memcpy(&acc.pattern[i], bytes + (i % elem_words) * word_bytes(elem), word_bytes(elem));
  const Kernel run = kKernels[static_cast<int>(simd)][elem][with_summary];
  for (size_t r = 0; r < rows; ++r) run(bytes + r * row_bytes, start + r * row_stride, row_words, acc);

  Summary out{acc.hash, std::numeric_limits<double>::quiet_NaN(), 0};
  if (!with_summary) return out;
  if (!is_raw(elem)) out.norm = std::sqrt(acc.squares);
  uint32_t varies = 0, nonzero = 0;
  for (int i = 0; i < 4; ++i) {
    varies |= acc.differs[i];
    nonzero |= (acc.differs[i] | acc.pattern[i]) & ~sign_bits(elem, i);
  }
  out.flags = (nonzero ? 0 : kZero) | (varies ? 0 : kConstant) | (acc.nonfinite ? kNonfinite : 0);
  return out;
}

Simd simd_named(const std::optional<std::string>& name) {
  if (!name) return default_simd();
  for (int i = 0; i < 3; ++i)
    if (kSimdNames[i] == *name && machine_has(static_cast<Simd>(i))) return static_cast<Simd>(i);
  throw std::invalid_argument("simd is \"" + *name + "\", expected one that this machine has: see fingerprint_backends()");
}

// ---- bindings ------------------------------------------------------------------------------------------------------

namespace {

const void* pointer(uint64_t address) { return reinterpret_cast<const void*>(static_cast<std::uintptr_t>(address)); }

std::tuple<uint64_t, double, int> bind_buffer(uint64_t address, uint64_t nbytes, int elem_bytes, int kind, uint64_t start,
                                              uint64_t rows, uint64_t row_stride, bool summary,
                                              const std::optional<std::string>& simd) {
  const Simd level = simd_named(simd);
  std::optional<py::gil_scoped_release> unlocked;
  if (nbytes > kGilBytes) unlocked.emplace();
  const Summary s = fingerprint(pointer(address), nbytes, elem_bytes, static_cast<Kind>(kind), start, rows, row_stride,
                                summary, level);
  return {s.fp, s.norm, s.flags};
}

template <typename T>
using Column = py::array_t<T, py::array::c_style | py::array::forcecast>;

py::tuple bind_many(const Column<uint64_t>& addresses, const Column<uint64_t>& nbytes, const Column<int>& elem_bytes,
                    const Column<int>& kinds, bool summary, const std::optional<std::string>& simd) {
  const Simd level = simd_named(simd);
  const py::ssize_t n = addresses.size();
  if (nbytes.size() != n || elem_bytes.size() != n || kinds.size() != n)
    throw std::invalid_argument("addresses, nbytes, elem_bytes and kinds differ in length");
  py::array_t<uint64_t> fps(n);
  py::array_t<double> norms(n);
  py::array_t<uint8_t> flags(n);
  {
    const uint64_t *address = addresses.data(), *size = nbytes.data();
    const int *width = elem_bytes.data(), *kind = kinds.data();
    uint64_t* fp = fps.mutable_data();
    double* norm = norms.mutable_data();
    uint8_t* flag = flags.mutable_data();
    py::gil_scoped_release unlocked;
    for (py::ssize_t i = 0; i < n; ++i) {
      const Summary s = fingerprint(pointer(address[i]), size[i], width[i], static_cast<Kind>(kind[i]), 0, 1, 0, summary, level);
      fp[i] = s.fp, norm[i] = s.norm, flag[i] = static_cast<uint8_t>(s.flags);
    }
  }
  return py::make_tuple(fps, norms, flags);
}

uint64_t bind_read_sum(uint64_t address, uint64_t nbytes) {
  py::gil_scoped_release unlocked;
  const Bytes p = static_cast<Bytes>(pointer(address));
  uint64_t sum = 0;
  size_t done = 0;
#if PROCTOR_X86
  if (machine_has(Simd::kAvx512)) {
    sum = avx512_read(p, nbytes / 64);
    done = nbytes / 64 * 64;
  }
#endif
  for (; done + 8 <= nbytes; done += 8) sum += load<uint64_t>(p + done);
  return sum;
}

}  // namespace

void bind_fingerprint(py::module_& m) {
  m.def("fingerprint_buffer", &bind_buffer, py::arg("address"), py::arg("nbytes"), py::arg("elem_bytes"), py::arg("kind"),
        py::arg("start") = 0, py::arg("rows") = 1, py::arg("row_stride") = 0, py::arg("summary") = true, py::kw_only(),
        py::arg("simd") = py::none(),
        "Fingerprint, norm and flags of memory; start and row_stride count 32-bit words. The caller keeps it alive.");
  m.def("fingerprint_many", &bind_many, py::arg("addresses"), py::arg("nbytes"), py::arg("elem_bytes"), py::arg("kinds"),
        py::arg("summary") = true, py::kw_only(), py::arg("simd") = py::none(),
        "Arrays (uint64 fp, float64 norm, uint8 flags) of many contiguous buffers, in one call without the GIL.");
  m.def("fingerprint_backend", [] { return std::string(kSimdNames[static_cast<int>(default_simd())]); },
        "The instruction set in use: avx512, avx2 or scalar. PROCTOR_SIMD chooses, before the first use.");
  m.def("fingerprint_backends", [] {
    std::vector<std::string> names;
    for (int i = 0; i < 3; ++i)
      if (machine_has(static_cast<Simd>(i))) names.emplace_back(kSimdNames[i]);
    return names;
  }, "What `simd=` accepts on this machine.");
  m.def("read_sum", &bind_read_sum, py::arg("address"), py::arg("nbytes"),
        "Sum of the 64-bit words of memory: what reading alone costs, for benchmarks.");
}

}  // namespace proctor
