#include "columns.h"

#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
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
  py::bytes bytes() const { return py::bytes(reinterpret_cast<const char*>(bytes_.data()), bytes_.size()); }

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

py::tuple pack_columns(const std::string& kinds, const py::tuple& names, const py::object& rows) {
  Body body;
  const bool listed = PyList_Check(rows.ptr());
  if (names.size() != kinds.size() || kinds.empty()) throw std::invalid_argument("as many names as kinds, at least one");
  std::vector<py::object> columns;
  for (size_t c = 0; !listed && c < kinds.size(); ++c) columns.push_back(rows[names[c]]);
  const size_t count = listed ? static_cast<size_t>(PyList_GET_SIZE(rows.ptr())) : py::len(columns[0]);
  for (size_t c = 0; count && c < kinds.size(); ++c) {
    body.add(0);  // validity: every value is there
    if (listed) {
      add_column(body, kinds[c], count, Column(rows.ptr(), static_cast<Py_ssize_t>(c)));
      continue;
    }
    if (py::len(columns[c]) != count) throw std::invalid_argument("columns differ in length");
    if (!add_memory(body, kinds[c], count, columns[c].ptr())) add_column(body, kinds[c], count, Column(columns[c].ptr()));
  }
  py::tuple spans(body.spans.size());
  for (size_t i = 0; i < body.spans.size(); ++i) spans[i] = body.spans[i];
  return py::make_tuple(count, spans, body.bytes());
}

}  // namespace

void bind_columns(py::module_& m) {
  m.def("pack_columns", &pack_columns, py::arg("kinds"), py::arg("names"), py::arg("rows"),
        "(rows, offset and size of each buffer, all buffers) of a dict of columns or a list of tuples: see columns.h.");
}

}  // namespace proctor
