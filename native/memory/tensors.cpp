#include "memory/tensors.h"

#include <bit>
#include <cstring>

#include "memory/attributes.h"

namespace proctor {
namespace {

namespace py = pybind11;

// As in `look_at` of instrument/observe/fingerprint.py.
constexpr uint64_t kSpots = 16;
constexpr uint64_t kFold = 0x9E3779B97F4A7C15;

bool says(PyObject* object, PyObject* method, PyObject* wanted) {
  const Owned answer(called(object, method));
  return answer.get() == wanted;
}

py::object not_implemented() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

template <typename T>
double as(const Memory& m) {
  T value;
  std::memcpy(&value, reinterpret_cast<const void*>(m.address), sizeof value);
  return static_cast<double>(value);
}

std::optional<double> value_of(const Memory& m) {
  switch (m.kind) {
    case Kind::kFloat:
      if (m.width == 4) return as<float>(m);
      if (m.width == 8) return as<double>(m);
      return std::nullopt;  // float16: torch converts it
    case Kind::kBfloat16: {
      uint16_t half;
      std::memcpy(&half, reinterpret_cast<const void*>(m.address), sizeof half);
      return static_cast<double>(std::bit_cast<float>(static_cast<uint32_t>(half) << 16));
    }
    case Kind::kInt:
      return m.width == 1 ? as<int8_t>(m) : m.width == 2 ? as<int16_t>(m) : m.width == 4 ? as<int32_t>(m) : as<int64_t>(m);
    case Kind::kUnsigned:
      return m.width == 1 ? as<uint8_t>(m) : m.width == 2 ? as<uint16_t>(m) : m.width == 4 ? as<uint32_t>(m) : as<uint64_t>(m);
    default:
      return std::nullopt;
  }
}

}  // namespace

Tensors::Tensors(py::type tensor, py::type parameter, py::object strided, py::dict formats, py::type summary)
    : tensor_(std::move(tensor)), parameter_(std::move(parameter)), strided_(std::move(strided)), summary_(std::move(summary)) {
  for (const auto& [dtype, format] : formats) {
    const auto [width, kind] = format.cast<std::pair<int, int>>();
    formats_.emplace_back(py::reinterpret_borrow<py::object>(dtype), width, static_cast<Kind>(kind));
  }
}

py::list Tensors::summaries(const py::list& tensors) const {
  const auto count = static_cast<size_t>(PyList_GET_SIZE(tensors.ptr()));
  py::list found(count);
  std::vector<size_t> plain;
  std::vector<Memory> places;
  std::vector<Owned> held;  // their memory must outlive the reading
  for (size_t i = 0; i < count && static_cast<Py_ssize_t>(i) < PyList_GET_SIZE(tensors.ptr()); ++i) {
    Owned tensor = Owned::share(PyList_GET_ITEM(tensors.ptr(), i));
    if (const std::optional<Memory> memory = memory_of(tensor.get())) {
      plain.push_back(i);
      places.push_back(*memory);
      held.push_back(std::move(tensor));
    }
  }
  const std::vector<Summary> summaries = read(places);
  size_t next = 0;
  for (size_t i = 0; i < count; ++i) {
    if (next < plain.size() && plain[next] == i) {
      found[i] = made(summaries[next++]);
    } else {
      found[i] = py::none();
    }
  }
  return found;
}

std::vector<Summary> Tensors::read(const std::vector<Memory>& places) {
  uint64_t bytes = 0;
  for (const Memory& m : places) bytes += m.elements * m.width;
  std::vector<Summary> found;
  found.reserve(places.size());
  std::optional<py::gil_scoped_release> unlocked;
  if (bytes > kGilBytes) unlocked.emplace();
  const Simd level = default_simd();
  for (const Memory& m : places) {
    found.push_back(fingerprint(reinterpret_cast<const void*>(m.address), m.elements * m.width, m.width, m.kind, 0, 1, 0, true, level));
  }
  return found;
}

py::object Tensors::number(const py::object& tensor) const {
  PyObject* t = tensor.ptr();
  if (!ours(t)) return not_implemented();
  const std::optional<uint64_t> dimensions = counted(t, names().dim);
  if (dimensions && *dimensions > 0) return py::none();
  const std::optional<Memory> memory = dimensions ? memory_of(t) : std::nullopt;
  const std::optional<double> value = memory ? value_of(*memory) : std::nullopt;
  if (PyErr_Occurred()) swallow_error();
  return value ? py::reinterpret_steal<py::object>(PyFloat_FromDouble(*value)) : not_implemented();
}

py::object Tensors::spots(const py::object& tensor, uint64_t size) const {
  const std::optional<Memory> memory = memory_of(tensor.ptr());
  const uint64_t bytes = memory ? memory->elements * memory->width : 0;
  if (!memory || bytes < size) return py::none();
  const Simd level = default_simd();
  uint64_t folded = 0;
  for (uint64_t i = 0; i < kSpots; ++i) {
    const uint64_t at = (bytes - size) * i / (kSpots - 1);
    folded = folded * kFold + fingerprint(reinterpret_cast<const void*>(memory->address + at), size, 1, Kind::kRaw, 0, 1, 0, false, level).fp;
  }
  return py::int_(folded);
}

bool Tensors::ours(PyObject* object) const {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == tensor_.ptr() || type == parameter_.ptr();
}

std::optional<Memory> Tensors::memory_of(PyObject* t) const {
  if (!ours(t)) return std::nullopt;
  std::optional<Memory> found = read_memory(t);
  if (PyErr_Occurred()) {
    swallow_error();
    return std::nullopt;
  }
  return found;
}

std::optional<Memory> Tensors::read_memory(PyObject* t) const {
  const Names& n = names();
  const Owned layout(PyObject_GetAttr(t, n.layout));
  if (layout.get() != strided_.ptr()) return std::nullopt;
  const Owned on_cpu(PyObject_GetAttr(t, n.is_cpu));
  if (on_cpu.get() != Py_True) return std::nullopt;
  const Owned dtype(PyObject_GetAttr(t, n.dtype));
  Memory m;
  for (const auto& [known, width, kind] : formats_) {
    if (known.ptr() == dtype.get()) m.width = width, m.kind = kind;
  }
  if (!m.width || m.kind == Kind::kComplex) return std::nullopt;  // a complex one may be a conjugate that nobody has written yet
  const auto elements = counted(t, n.numel);
  if (!elements || *elements == 0 || !says(t, n.is_contiguous, Py_True) || !says(t, n.is_neg, Py_False)) return std::nullopt;
  const auto offset = counted(t, n.storage_offset);
  const Owned storage(offset ? called(t, n.untyped_storage) : nullptr);
  const auto there = storage ? counted(storage.get(), n.nbytes) : std::nullopt;
  if (!there || (*offset + *elements) * m.width > *there) return std::nullopt;  // FSDP frees storage under living views
  const auto address = counted(t, n.data_ptr);
  if (!address || !*address) return std::nullopt;
  m.address = *address, m.elements = *elements;
  return m;
}

py::object Tensors::made(const Summary& s) const {
  py::tuple fields = py::make_tuple(s.fp, s.norm, s.flags);
  const Owned arguments(PyTuple_Pack(1, fields.ptr()));
  if (!arguments) throw py::error_already_set();
  PyObject* summary = PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(summary_.ptr()), arguments.get(), nullptr);
  if (!summary) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(summary);
}

void bind_tensors(py::module_& m) {
  py::class_<Tensors>(m, "Tensors", "Reads plain tensors. `formats`: bytes of an element and its kind, by dtype; `summary`: a tuple class of three fields.")
      .def(py::init<py::type, py::type, py::object, py::dict, py::type>(), py::arg("tensor"), py::arg("parameter"), py::arg("strided"),
           py::arg("formats"), py::arg("summary"))
      .def("summaries", &Tensors::summaries, py::arg("tensors"), "Fingerprint, norm and flags of each tensor, None for one that is not plain.")
      .def("number", &Tensors::number, py::arg("tensor"), "The number in a plain tensor without dimensions; None for one with, NotImplemented for what is not plain.")
      .def("spots", &Tensors::spots, py::arg("tensor"), py::arg("size"), "A hash of `size` bytes at each of sixteen places of a plain tensor that has as many; None of any other.");
}

}  // namespace proctor
