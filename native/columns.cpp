#include "columns.h"

#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "pyref.h"

namespace py = pybind11;

namespace proctor {
namespace {

using std::int64_t;
using std::size_t;
using std::uint64_t;
using std::uint8_t;

[[noreturn]] void raised() { throw py::error_already_set(); }

// The buffers so far, and where each lies.
class Body {
 public:
  // Room for a buffer of this size, all zeros; valid until the next one is asked for.
  uint8_t* add(size_t size) {
    const size_t at = bytes_.size();
    spans.push_back(static_cast<int64_t>(at));
    spans.push_back(static_cast<int64_t>(size));
    bytes_.resize(at + (size + 7) / 8 * 8);
    return bytes_.data() + at;
  }
  const uint8_t* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size(); }

  std::vector<int64_t> spans;

 private:
  std::vector<uint8_t> bytes_;
};

template <typename T>
T number(PyObject* value) {
  if constexpr (std::is_floating_point_v<T>) {
    const double found = PyFloat_AsDouble(value);
    if (found == -1.0 && PyErr_Occurred()) raised();
    return static_cast<T>(found);
  } else {
    Owned index;
    if (!PyLong_Check(value)) {
      index.reset(PyNumber_Index(value));
      if (!index) raised();
      value = index.get();
    }
    if constexpr (std::is_same_v<T, uint64_t>) {
      const uint64_t found = PyLong_AsUnsignedLongLong(value);
      if (found == std::numeric_limits<uint64_t>::max() && PyErr_Occurred()) raised();
      return found;
    } else {
      const int64_t found = PyLong_AsLongLong(value);
      if (found == -1 && PyErr_Occurred()) raised();
      if (found < static_cast<int64_t>(std::numeric_limits<T>::min()) || found > static_cast<int64_t>(std::numeric_limits<T>::max())) {
        PyErr_Format(PyExc_OverflowError, "%lld does not fit into %zu bytes", static_cast<long long>(found), sizeof(T));
        raised();
      }
      return static_cast<T>(found);
    }
  }
}

// Calls put(i, value) for each value of a column of a list of tuples, or of any sequence.
class Column {
 public:
  Column(PyObject* rows, Py_ssize_t at) : rows_(rows), at_(at), count_(PyList_GET_SIZE(rows)) {}
  explicit Column(PyObject* values) : values_(PySequence_Fast(values, "a column is a sequence")), rows_(nullptr), at_(0) {
    if (!values_) raised();
    count_ = PySequence_Fast_GET_SIZE(values_.get());
  }

  template <typename Put>
  void each(Put&& put) const {
    for (Py_ssize_t i = 0; i < count_; ++i) {
      // A conversion may run Python code, and that code change the list: held, and looked at anew each time.
      const Owned row = Owned::share(rows_ ? element(rows_, i) : PySequence_Fast_GET_ITEM(values_.get(), i));
      if (!rows_) {
        put(i, row.get());
        continue;
      }
      if (!PyTuple_Check(row.get()) || PyTuple_GET_SIZE(row.get()) <= at_) throw std::invalid_argument("a row is no tuple of all columns");
      put(i, PyTuple_GET_ITEM(row.get(), at_));
    }
  }

 private:
  static PyObject* element(PyObject* list, Py_ssize_t i) {
    if (i >= PyList_GET_SIZE(list)) throw std::invalid_argument("rows were removed meanwhile");
    return PyList_GET_ITEM(list, i);
  }

  Owned values_;
  PyObject* rows_;
  Py_ssize_t at_, count_;
};

template <typename T>
void add_numbers(Body& body, size_t count, const Column& column) {
  uint8_t* out = body.add(count * sizeof(T));
  column.each([&](size_t i, PyObject* value) {
    const T found = number<T>(value);
    std::memcpy(out + i * sizeof(T), &found, sizeof(T));
  });
}

void add_bits(Body& body, size_t count, const Column& column) {
  uint8_t* out = body.add((count + 7) / 8);
  column.each([&](size_t i, PyObject* value) {
    const int truth = PyObject_IsTrue(value);
    if (truth < 0) raised();
    out[i / 8] = static_cast<uint8_t>(out[i / 8] | truth << (i % 8));
  });
}

void add_text(Body& body, size_t count, const Column& column) {
  std::vector<int32_t> offsets(count + 1);
  std::string text;
  column.each([&](size_t i, PyObject* value) {
    Py_ssize_t size = 0;
    if (!PyUnicode_Check(value)) throw std::invalid_argument("a text is no str");
    if (const char* data = PyUnicode_AsUTF8AndSize(value, &size)) {
      text.append(data, static_cast<size_t>(size));
    } else {
      PyErr_Clear();
      const Owned encoded(PyUnicode_AsEncodedString(value, "utf-8", "replace"));
      if (!encoded) raised();
      text.append(PyBytes_AS_STRING(encoded.get()), static_cast<size_t>(PyBytes_GET_SIZE(encoded.get())));
    }
    if (text.size() > static_cast<size_t>(std::numeric_limits<int32_t>::max())) throw std::invalid_argument("2 GiB of text in one batch");
    offsets[i + 1] = static_cast<int32_t>(text.size());
  });
  std::memcpy(body.add(offsets.size() * sizeof(int32_t)), offsets.data(), offsets.size() * sizeof(int32_t));
  if (uint8_t* out = body.add(text.size()); !text.empty()) std::memcpy(out, text.data(), text.size());
}

size_t width_of(char kind) {
  switch (kind) {
    case 'B': return 1;
    case 'i': case 'I': case 'f': return 4;
    case 'q': case 'Q': case 'd': return 8;
    default: return 0;
  }
}

// A column that lies in memory as it is wanted; false when it does not.
bool add_memory(Body& body, char kind, size_t count, PyObject* values) {
  const size_t width = width_of(kind);
  if (!width || !PyObject_CheckBuffer(values)) return false;
  Py_buffer view;
  if (PyObject_GetBuffer(values, &view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
    PyErr_Clear();
    return false;
  }
  // numpy spells 64-bit integers l or q.
  const char code = view.format && !view.format[1] ? view.format[0] : '\0';
  const bool same = code == kind || (kind == 'q' && code == 'l') || (kind == 'Q' && code == 'L');
  const bool fits = same && view.ndim == 1 && static_cast<size_t>(view.itemsize) == width && static_cast<size_t>(view.len) == count * width;
  if (fits && count) std::memcpy(body.add(count * width), view.buf, count * width);
  PyBuffer_Release(&view);
  return fits;
}

void add_column(Body& body, char kind, size_t count, const Column& column) {
  switch (kind) {
    case 'B': return add_numbers<uint8_t>(body, count, column);
    case 'i': return add_numbers<int32_t>(body, count, column);
    case 'I': return add_numbers<uint32_t>(body, count, column);
    case 'q': return add_numbers<int64_t>(body, count, column);
    case 'Q': return add_numbers<uint64_t>(body, count, column);
    case 'f': return add_numbers<float>(body, count, column);
    case 'd': return add_numbers<double>(body, count, column);
    case '?': return add_bits(body, count, column);
    case 's': return add_text(body, count, column);
    default: throw std::invalid_argument(std::string("no kind of column: ") + kind);
  }
}

// Messages of one table: the bytes before the buffers as a template, into which the numbers of some rows are put.
class Packer {
 public:
  using Places = std::array<size_t, 4>;

  // Places in the template: of the bytes after it, of the number of rows, of the columns' nodes and of the buffers' spans.
  Packer(std::string kinds, const py::tuple& names, std::string head, Places places)
      : kinds_(std::move(kinds)), names_(names), head_(std::move(head)), places_(places) {
    if (names_.size() != kinds_.size() || kinds_.empty()) throw std::invalid_argument("as many names as kinds, at least one");
    size_t buffers = 0;
    for (char kind : kinds_) buffers += kind == 's' ? 3 : 2;  // with that of validity
    const std::array<size_t, 4> sizes{8, 8, 16 * kinds_.size(), 16 * buffers};
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (places_[i] > head_.size() || head_.size() - places_[i] < sizes[i]) throw std::invalid_argument("a place outside of the head");
    }
  }

  // (rows, message), or None when there are no rows.
  py::object pack(const py::object& rows) const {
    const bool listed = PyList_Check(rows.ptr());
    std::vector<py::object> columns;
    if (!listed) columns.push_back(rows[names_[0]]);
    const size_t count = listed ? static_cast<size_t>(PyList_GET_SIZE(rows.ptr())) : py::len(columns[0]);
    if (!count) return py::none();
    for (size_t c = 1; !listed && c < kinds_.size(); ++c) columns.push_back(rows[names_[c]]);
    Body body;
    for (size_t c = 0; c < kinds_.size(); ++c) {
      body.add(0);  // validity: every value is there
      if (listed) {
        add_column(body, kinds_[c], count, Column(rows.ptr(), static_cast<Py_ssize_t>(c)));
        continue;
      }
      if (py::len(columns[c]) != count) throw std::invalid_argument("columns differ in length");
      if (!add_memory(body, kinds_[c], count, columns[c].ptr())) add_column(body, kinds_[c], count, Column(columns[c].ptr()));
    }
    return py::make_tuple(count, message(static_cast<int64_t>(count), body));
  }

 private:
  py::bytes message(int64_t count, const Body& body) const {
    auto made = py::reinterpret_steal<py::bytes>(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(head_.size() + body.size())));
    if (!made) raised();
    char* out = PyBytes_AS_STRING(made.ptr());
    std::memcpy(out, head_.data(), head_.size());
    if (body.size()) std::memcpy(out + head_.size(), body.data(), body.size());
    const auto size = static_cast<int64_t>(body.size());
    std::memcpy(out + places_[0], &size, sizeof size);
    std::memcpy(out + places_[1], &count, sizeof count);
    const std::array<int64_t, 2> node{count, 0};  // rows, and nulls among them
    for (size_t c = 0; c < kinds_.size(); ++c) std::memcpy(out + places_[2] + c * sizeof node, node.data(), sizeof node);
    std::memcpy(out + places_[3], body.spans.data(), body.spans.size() * sizeof(int64_t));
    return made;
  }

  std::string kinds_;
  py::tuple names_;
  std::string head_;
  Places places_;
};

// (table, rows, message) of each table that has rows.
py::list pack_tables(const py::dict& packers, const py::dict& tables) {
  py::list found;
  for (const auto& [table, rows] : tables) {
    const py::object made = packers[table].cast<const Packer&>().pack(py::reinterpret_borrow<py::object>(rows));
    if (!made.is_none()) found.append(py::make_tuple(table, made[py::int_(0)], made[py::int_(1)]));
  }
  return found;
}

}  // namespace

void bind_columns(py::module_& m) {
  py::class_<Packer>(m, "Packer", "Messages of one table: see columns.h.")
      .def(py::init<std::string, py::tuple, py::bytes, Packer::Places>(), py::arg("kinds"), py::arg("names"), py::arg("head"), py::arg("places"))
      .def("pack", &Packer::pack, py::arg("rows"), "(rows, message) of a dict of columns or a list of tuples; None when there are none.");
  m.def("pack_tables", &pack_tables, py::arg("packers"), py::arg("tables"), "(table, rows, message) of each table that has rows.");
}

}  // namespace proctor
