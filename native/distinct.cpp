#include "distinct.h"

#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

namespace proctor {
namespace {

namespace py = pybind11;

constexpr uint32_t kFree = std::numeric_limits<uint32_t>::max();
constexpr size_t kMany = 4096;  // values from which on the GIL is worth releasing

uint64_t draw_odd() {
  std::random_device device;
  return (uint64_t{device()} << 32 | device()) | 1;
}

size_t slot_of(uint64_t value, unsigned shift) {
  static const uint64_t factor = draw_odd(), mask = draw_odd();
  value = (value ^ mask) * factor;
  return static_cast<size_t>(((value ^ value >> 32) * factor) >> shift);
}

void look(const uint64_t* values, size_t count, uint32_t* first) {
  const unsigned bits = static_cast<unsigned>(std::bit_width(2 * count));
  const size_t last = (size_t{1} << bits) - 1;
  std::vector<uint32_t> table(last + 1, kFree);
  for (size_t i = 0; i < count; ++i) {
    size_t slot = slot_of(values[i], 64 - bits);
    while (table[slot] != kFree && values[table[slot]] != values[i]) slot = (slot + 1) & last;
    if (table[slot] == kFree) table[slot] = static_cast<uint32_t>(i);
    first[i] = table[slot];
  }
}

py::bytes first_seen(const py::buffer& values) {
  const py::buffer_info info = values.request();
  const bool whole = info.ndim == 1 && info.itemsize == 8 && (info.size < 2 || info.strides[0] == 8);
  if (!whole || info.format.find_first_of("LQ") == std::string::npos) throw std::invalid_argument("a plain array of uint64 is needed");
  const size_t count = static_cast<size_t>(info.size);
  if (count >= kFree) throw std::invalid_argument("too many values");
  PyObject* made = PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(count * sizeof(uint32_t)));
  if (!made) throw py::error_already_set();
  const py::bytes result = py::reinterpret_steal<py::bytes>(made);
  auto* first = reinterpret_cast<uint32_t*>(PyBytes_AS_STRING(made));
  const auto* from = static_cast<const uint64_t*>(info.ptr);
  if (count >= kMany) {
    py::gil_scoped_release release;
    look(from, count, first);
  } else if (count) {
    look(from, count, first);
  }
  return result;
}

}  // namespace

void bind_distinct(py::module_& m) {
  m.def("first_seen", &first_seen, py::arg("values"),
        "Of each value the place of the first that is equal, as the bytes of uint32 numbers: see distinct.h.");
}

}  // namespace proctor
