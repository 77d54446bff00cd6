#include "philox.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

// One build for the CPUs at hand; which one runs changes no bit.
#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define PROCTOR_VECTORS __attribute__((target_clones("arch=x86-64-v4", "avx2", "default")))
#else
#define PROCTOR_VECTORS
#endif

namespace proctor {
namespace {

namespace py = pybind11;

constexpr size_t kLanes = 64;  // blocks at a time

struct Blocks {
  alignas(64) uint32_t word[4][kLanes];  // word j of each block
};

inline __attribute__((always_inline)) void philox(uint64_t key, const uint64_t* counter, uint32_t domain, Blocks& out) {
  for (size_t i = 0; i < kLanes; ++i) {
    uint32_t c0 = static_cast<uint32_t>(counter[i]), c1 = static_cast<uint32_t>(counter[i] >> 32), c2 = domain, c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t{c0} * 0xD2511F53u, p1 = uint64_t{c2} * 0xCD9E8D57u;
      c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
      c1 = static_cast<uint32_t>(p1);
      c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
      c3 = static_cast<uint32_t>(p0);
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out.word[0][i] = c0, out.word[1][i] = c1, out.word[2][i] = c2, out.word[3][i] = c3;
  }
}

// One block as four results of 32 bits, for all lanes.
struct Words {
  using Out = uint32_t;
  static inline __attribute__((always_inline)) void turn(const Blocks& from, uint32_t* out) {
    for (size_t i = 0; i < kLanes; ++i)
      for (size_t j = 0; j < 4; ++j) out[4 * i + j] = from.word[j][i];
  }
};

struct Unit {
  using Out = float;
  static inline __attribute__((always_inline)) void turn(const Blocks& from, float* out) {
    for (size_t i = 0; i < kLanes; ++i)
      for (size_t j = 0; j < 4; ++j) out[4 * i + j] = static_cast<float>(static_cast<int32_t>(from.word[j][i] >> 8)) * 0x1p-24f;
  }
};

struct Normal {
  using Out = float;
  static inline __attribute__((always_inline)) void pair(uint32_t a, uint32_t b, float& even, float& odd) {
    // log of u1 = ((a >> 8) + 1) / 2^24, as m * 2^e with m from sqrt(1/2) to sqrt(2)
    const int32_t bits = std::bit_cast<int32_t>(static_cast<float>(static_cast<int32_t>((a >> 8) + 1)));
    const int32_t e = (bits - 0x3F3504F3) >> 23;
    const float m = std::bit_cast<float>(bits - (e << 23)) - 1.0f, ef = static_cast<float>(e - 24), mm = m * m;
    float p = 7.0376836292e-2f;
    p = p * m + -1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m + -1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m + -1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m + -2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * mm + ef * -2.12194440e-4f + mm * -0.5f;
    const float r = std::sqrt((m + p + ef * 0.693359375f) * -2.0f);
    // u2 = (b >> 8) / 2^24 of a turn: the nearest quarter, and what is left of it, from -1/2 to 1/2 quarter
    const int32_t turn = static_cast<int32_t>(b >> 8), quarter = (turn + (1 << 21)) >> 22;
    const float x = static_cast<float>(turn - (quarter << 22)) * 0x1p-22f * 1.57079632679489662f, z = x * x;
    const float s = ((-1.9515295891e-4f * z + 8.3321608736e-3f) * z + -1.6666654611e-1f) * z * x + x;
    const float c = ((2.443315711809948e-5f * z + -1.388731625493765e-3f) * z + 4.166664568298827e-2f) * z * z + z * -0.5f + 1.0f;
    const uint32_t swap = 0u - static_cast<uint32_t>(quarter & 1);
    const uint32_t sb = std::bit_cast<uint32_t>(s), cb = std::bit_cast<uint32_t>(c), both = (sb ^ cb) & swap;
    const uint32_t cosine = (cb ^ both) ^ (static_cast<uint32_t>((quarter + 1) & 2) << 30);
    const uint32_t sine = (sb ^ both) ^ (static_cast<uint32_t>(quarter & 2) << 30);
    even = r * std::bit_cast<float>(cosine), odd = r * std::bit_cast<float>(sine);
  }
  static inline __attribute__((always_inline)) void turn(const Blocks& from, float* out) {
    alignas(64) float made[4][kLanes];
    for (size_t i = 0; i < kLanes; ++i) pair(from.word[0][i], from.word[1][i], made[0][i], made[1][i]);
    for (size_t i = 0; i < kLanes; ++i) pair(from.word[2][i], from.word[3][i], made[2][i], made[3][i]);
    for (size_t i = 0; i < kLanes; ++i)
      for (size_t j = 0; j < 4; ++j) out[4 * i + j] = made[j][i];
  }
};

struct Draw {
  uint64_t key;
  uint32_t domain;
  const int64_t* starts;
  size_t stretches, begin_factor, length;  // a stretch has `length` results from result begin_factor * start on
};

// Blocks are gathered over stretches until all lanes are full: short stretches cost their own blocks, not a round of lanes each.
template <class Kind>
inline __attribute__((always_inline)) void fill(const Draw& draw, typename Kind::Out* out) {
  using Out = typename Kind::Out;
  alignas(64) uint64_t counter[kLanes] = {};
  alignas(64) Out made[4 * kLanes];
  struct Piece {
    Out* to;
    uint32_t from, count;
  } pieces[kLanes];
  Blocks blocks;
  size_t lanes = 0, waiting = 0;
  const auto flush = [&]() __attribute__((always_inline)) {
    philox(draw.key, counter, draw.domain, blocks);
    Kind::turn(blocks, made);
    for (size_t p = 0; p < waiting; ++p) std::memcpy(pieces[p].to, made + pieces[p].from, pieces[p].count * sizeof(Out));
    lanes = waiting = 0;
  };
  for (size_t n = 0; n < draw.stretches; ++n) {
    uint64_t at = static_cast<uint64_t>(draw.starts[n]) * draw.begin_factor;
    for (size_t left = draw.length; left;) {
      const size_t skip = at & 3, taken = std::min(kLanes - lanes, (skip + left + 3) / 4), count = std::min(4 * taken - skip, left);
      for (size_t i = 0; i < taken; ++i) counter[lanes + i] = (at >> 2) + i;
      pieces[waiting++] = {out, static_cast<uint32_t>(4 * lanes + skip), static_cast<uint32_t>(count)};
      lanes += taken, at += count, left -= count, out += count;
      if (lanes == kLanes) flush();
    }
  }
  if (lanes) flush();
}

PROCTOR_VECTORS void fill_words(const Draw& draw, uint32_t* out) { fill<Words>(draw, out); }
PROCTOR_VECTORS void fill_unit(const Draw& draw, float* out) { fill<Unit>(draw, out); }
PROCTOR_VECTORS void fill_normal(const Draw& draw, float* out) { fill<Normal>(draw, out); }

template <class Out>
void run(void (*kernel)(const Draw&, Out*), uint64_t key, const py::buffer& starts, size_t length, size_t each, uint32_t domain, const py::buffer& out) {
  const py::buffer_info from = starts.request(), to = out.request(true);
  const bool longs = from.ndim == 1 && from.itemsize == 8 && from.format.find_first_of("lq") != std::string::npos;
  if (!longs || (from.size > 1 && from.strides[0] != 8)) throw std::invalid_argument("starts: a plain array of int64 is needed");
  if (each != 1 && each != 2 && each != 4) throw std::invalid_argument("each: 1, 2 or 4");
  const size_t count = static_cast<size_t>(from.size) * length * each;
  if (to.itemsize != sizeof(Out) || static_cast<size_t>(to.size) != count || (to.size && !PyBuffer_IsContiguous(to.view(), 'C')))
    throw std::invalid_argument("out: a contiguous array with a place for each result is needed");
  const Draw draw{key, domain, static_cast<const int64_t*>(from.ptr), static_cast<size_t>(from.size), each, length * each};
  py::gil_scoped_release release;
  kernel(draw, static_cast<Out*>(to.ptr));
}

}  // namespace

void bind_philox(py::module_& m) {
  m.def(
      "philox_words",
      [](uint64_t key, const py::buffer& starts, size_t length, size_t each, uint32_t domain, const py::buffer& out) {
        run<uint32_t>(&fill_words, key, starts, length, each, domain, out);
      },
      py::arg("key"), py::arg("starts"), py::arg("length"), py::arg("each"), py::arg("domain"), py::arg("out"),
      "The words of stretches of positions: see philox.h.");
  m.def(
      "philox_unit",
      [](uint64_t key, const py::buffer& starts, size_t length, const py::buffer& out) { run<float>(&fill_unit, key, starts, length, 1, 0, out); },
      py::arg("key"), py::arg("starts"), py::arg("length"), py::arg("out"), "Uniform float32 of stretches of positions: see philox.h.");
  m.def(
      "philox_normal",
      [](uint64_t key, const py::buffer& starts, size_t length, const py::buffer& out) { run<float>(&fill_normal, key, starts, length, 1, 2, out); },
      py::arg("key"), py::arg("starts"), py::arg("length"), py::arg("out"), "Standard normal float32 of stretches of positions: see philox.h.");
}

}  // namespace proctor
