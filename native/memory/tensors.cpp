#include "memory/tensors.h"

#include <bit>
#include <cstring>
#include <optional>
#include <vector>

#include "memory/fingerprint.h"
#include "pyref.h"

namespace proctor {
namespace {

namespace py = pybind11;

PyObject* name(const char* text) {
  PyObject* made = PyUnicode_InternFromString(text);
  if (!made) throw py::error_already_set();
  return made;  // kept for the life of the process
}

struct Names {
  PyObject *layout = name("layout"), *is_cpu = name("is_cpu"), *dtype = name("dtype"), *grad = name("grad"), *is_leaf = name("is_leaf");
  PyObject *dim = name("dim"), *numel = name("numel"), *is_contiguous = name("is_contiguous"), *is_neg = name("is_neg");
  PyObject *storage_offset = name("storage_offset"), *untyped_storage = name("untyped_storage"), *nbytes = name("nbytes");
  PyObject *data_ptr = name("data_ptr"), *own_version = name("_version"), *local = name("_local_tensor");
  PyObject *owner = name("owner"), *sharded = name("sharded"), *version = name("version"), *ptr = name("ptr");
};

const Names& names() {
  static const Names made;
  return made;
}

PyObject* called(PyObject* object, PyObject* method) {  // New reference or NULL
  return PyObject_VectorcallMethod(method, &object, 1 | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
}

bool says(PyObject* object, PyObject* method, PyObject* wanted) {
  const Owned answer(called(object, method));
  return answer.get() == wanted;
}

std::optional<uint64_t> counted(PyObject* object, PyObject* method) {
  const Owned answer(called(object, method));
  if (!answer) return std::nullopt;
  const unsigned long long value = PyLong_AsUnsignedLongLong(answer.get());
  if (PyErr_Occurred()) return std::nullopt;
  return value;
}

struct Memory {
  uint64_t address = 0, elements = 0;
  int width = 0;
  Kind kind = Kind::kRaw;
};

Owned got(PyObject* object, PyObject* attribute) {
  Owned found(PyObject_GetAttr(object, attribute));
  if (!found) throw py::error_already_set();
  return found;
}

void put(PyObject* object, PyObject* attribute, PyObject* value) {
  if (!value || PyObject_SetAttr(object, attribute, value) < 0) throw py::error_already_set();
}

bool same(PyObject* a, PyObject* b) {
  const int equal = PyObject_RichCompareBool(a, b, Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

class Tensors {
 public:
  Tensors(py::type tensor, py::type parameter, py::object strided, py::dict formats, py::type summary)
      : tensor_(std::move(tensor)), parameter_(std::move(parameter)), strided_(std::move(strided)), summary_(std::move(summary)) {
    for (const auto& [dtype, format] : formats) {
      const auto [width, kind] = format.cast<std::pair<int, int>>();
      formats_.emplace_back(py::reinterpret_borrow<py::object>(dtype), width, static_cast<Kind>(kind));
    }
  }

  // A summary for each tensor, None for one that is not plain.
  py::list summaries(const py::list& tensors) const {
    const auto count = static_cast<size_t>(PyList_GET_SIZE(tensors.ptr()));
    py::list found(count);
    std::vector<std::pair<size_t, Memory>> plain;
    std::vector<Owned> held;  // their memory must outlive the reading
    uint64_t bytes = 0;
    for (size_t i = 0; i < count && static_cast<Py_ssize_t>(i) < PyList_GET_SIZE(tensors.ptr()); ++i) {
      Owned tensor = Owned::share(PyList_GET_ITEM(tensors.ptr(), i));
      if (const std::optional<Memory> memory = memory_of(tensor.get())) {
        plain.emplace_back(i, *memory);
        bytes += memory->elements * memory->width;
        held.push_back(std::move(tensor));
      }
    }
    std::vector<Summary> read(plain.size());
    {
      std::optional<py::gil_scoped_release> unlocked;
      if (bytes > kGilBytes) unlocked.emplace();
      const Simd level = default_simd();
      for (size_t k = 0; k < plain.size(); ++k) {
        const Memory& m = plain[k].second;
        read[k] = fingerprint(reinterpret_cast<const void*>(m.address), m.elements * m.width, m.width, m.kind, 0, 1, 0, true, level);
      }
    }
    size_t next = 0;
    for (size_t i = 0; i < count; ++i) {
      if (next < plain.size() && plain[next].first == i) {
        found[i] = made(read[next++]);
      } else {
        found[i] = py::none();
      }
    }
    return found;
  }

  // The number in a plain tensor without dimensions; None for a plain one with dimensions, NotImplemented for any other.
  py::object number(const py::object& tensor) const {
    PyObject* t = tensor.ptr();
    if (!ours(t)) return not_implemented();
    const std::optional<uint64_t> dimensions = counted(t, names().dim);
    if (dimensions && *dimensions > 0) return py::none();
    const std::optional<Memory> memory = dimensions ? memory_of(t) : std::nullopt;
    const std::optional<double> value = memory ? value_of(*memory) : std::nullopt;
    if (PyErr_Occurred()) swallow_error();
    return value ? py::reinterpret_steal<py::object>(PyFloat_FromDouble(*value)) : not_implemented();
  }

  // Add (slot, tensor) for each of `slots` whose tensor is to be hashed: of all if `force`, or where version or address moved.
  static void collect(const py::list& work, const py::list& slots, bool force) {
    const Names& n = names();
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(slots.ptr()); ++i) {
      const Owned held = Owned::share(PyList_GET_ITEM(slots.ptr(), i));
      PyObject* slot = held.get();
      const Owned owner = got(slot, n.owner);
      Owned tensor(PyObject_CallNoArgs(owner.get()));
      if (!tensor) throw py::error_already_set();
      if (tensor.get() == Py_None) continue;
      if (got(slot, n.grad).get() == Py_True) {
        if (got(tensor.get(), n.is_leaf).get() != Py_True) continue;  // what was made of others has none
        tensor = got(tensor.get(), n.grad);
        if (tensor.get() == Py_None) {
          const Owned nothing(PyLong_FromLong(0)), unknown(PyLong_FromLong(-1));
          if (!same(got(slot, n.ptr).get(), nothing.get())) {
            put(slot, n.ptr, nothing.get());
            put(slot, n.version, unknown.get());
            add(work, slot, Py_None);
          }
          continue;
        }
      }
      Owned version(PyObject_GetAttr(tensor.get(), n.own_version));
      const bool counts = static_cast<bool>(version);
      if (!counts) {  // inference tensors have none
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw py::error_already_set();
        PyErr_Clear();
        version.reset(PyLong_FromLong(-1));
      }
      if (got(slot, n.sharded).get() == Py_True) {
        Owned local(PyObject_GetAttr(tensor.get(), n.local));
        if (local) {
          tensor = std::move(local);
        } else {
          if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw py::error_already_set();
          PyErr_Clear();
        }
      }
      const Owned address(called(tensor.get(), n.data_ptr));
      if (!address) throw py::error_already_set();
      if (!force && counts && same(version.get(), got(slot, n.version).get()) && same(address.get(), got(slot, n.ptr).get())) continue;
      put(slot, n.version, version.get());
      put(slot, n.ptr, address.get());
      add(work, slot, tensor.get());
    }
  }

 private:
  static py::object not_implemented() { return py::reinterpret_borrow<py::object>(Py_NotImplemented); }

  static void add(const py::list& work, PyObject* slot, PyObject* tensor) {
    const Owned pair(PyTuple_Pack(2, slot, tensor));
    if (!pair || PyList_Append(work.ptr(), pair.get()) < 0) throw py::error_already_set();
  }

  bool ours(PyObject* object) const {
    auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == tensor_.ptr() || type == parameter_.ptr();
  }

  // Where the content of a plain tensor lies. An error that an attribute raises means that it is not plain.
  std::optional<Memory> memory_of(PyObject* t) const {
    if (!ours(t)) return std::nullopt;
    std::optional<Memory> found = read_memory(t);
    if (PyErr_Occurred()) {
      swallow_error();
      return std::nullopt;
    }
    return found;
  }

  std::optional<Memory> read_memory(PyObject* t) const {
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

  template <typename T>
  static double as(const Memory& m) {
    T value;
    std::memcpy(&value, reinterpret_cast<const void*>(m.address), sizeof value);
    return static_cast<double>(value);
  }

  static std::optional<double> value_of(const Memory& m) {
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

  py::object made(const Summary& s) const {
    py::tuple fields = py::make_tuple(s.fp, s.norm, s.flags);
    const Owned arguments(PyTuple_Pack(1, fields.ptr()));
    if (!arguments) throw py::error_already_set();
    PyObject* summary = PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(summary_.ptr()), arguments.get(), nullptr);
    if (!summary) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(summary);
  }

  py::object tensor_, parameter_, strided_, summary_;
  std::vector<std::tuple<py::object, int, Kind>> formats_;
};

}  // namespace

void bind_tensors(py::module_& m) {
  py::class_<Tensors>(m, "Tensors", "Reads plain tensors. `formats`: bytes of an element and its kind, by dtype; `summary`: a tuple class of three fields.")
      .def(py::init<py::type, py::type, py::object, py::dict, py::type>(), py::arg("tensor"), py::arg("parameter"), py::arg("strided"),
           py::arg("formats"), py::arg("summary"))
      .def("summaries", &Tensors::summaries, py::arg("tensors"), "Fingerprint, norm and flags of each tensor, None for one that is not plain.")
      .def("number", &Tensors::number, py::arg("tensor"), "The number in a plain tensor without dimensions; None for one with, NotImplemented for what is not plain.")
      .def_static("collect", &Tensors::collect, py::arg("work"), py::arg("slots"), py::arg("force"),
                  "Add (slot, tensor) to `work` for each slot whose tensor is to be hashed: all, or those whose version or address moved.");
}

}  // namespace proctor
