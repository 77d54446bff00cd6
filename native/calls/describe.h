// What a call was given, as a compact binary key (hot, every call) and as JSON text (cold, once a distinct key).
//
// A key is a prefix tree in one byte buffer; integers are little-endian as on the host, `str` is u16 length + UTF-8:
//   ( u8 n leaf*n u8 k (str leaf)*k      a call's arguments        n t f                 None True False
//   i i64 · u u64 · d f64 · s str        plain values              y u32 / F str         constant / function text
//   T u32 dtype u32 device u32 class u32 name u8 grad u8 ndim i64*ndim                   tensor (class, name 0: none;
//                                                                                        ndim 255: dims left out)
//   A u32 dtype u8 ndim i64*ndim         numpy array               M u32 class u32 path u8 training(2: unknown)
//   L u32 len u8 n leaf*n                sequence                  D u32 len u8 n (str leaf)*n
//   O u32 class u8 n (str leaf)*n        other object              e u32 text            left out
// u32 texts are ids of the describer's own table. The JSON is `invariants/codec/signature.py`'s.
//
// User code is never called: types are told apart by slots, values read from raw dicts and C getters. torch's
// getters run `__torch_function__` under a mode or on a subclass, so those are read with it switched off.
// Threads: all state is under the GIL; a key belongs to the thread that builds it, because a getter may let go
// of the GIL.
#pragma once

#include <array>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "pyref.h"

namespace proctor {

constexpr size_t kMaxText = 64;          // characters of a string value
constexpr size_t kMaxFunctionText = 200; // characters of a function's name
constexpr size_t kMaxSequence = 8;       // items shown of a list, tuple or set
constexpr size_t kMaxMapping = 16;       // string keys shown of a dict
constexpr size_t kMaxAttributes = 12;    // plain attributes shown of another object
constexpr size_t kMaxArguments = 64;     // positional arguments shown, and keyword arguments shown
constexpr int kMaxDepth = 3;             // containers in containers
constexpr int kMaxLeaves = 256;          // leaves of one signature
constexpr uint8_t kNoDims = 255;         // in place of the number of dimensions

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
template <typename Value>
using TextMap = std::unordered_map<std::string, Value, StringHash, std::equal_to<>>;

class Key {
 public:
  Key() { bytes_.resize(512); }
  void clear() { size_ = 0; }
  size_t size() const { return size_; }
  void truncate(size_t n) { size_ = n; }
  std::string_view view() const { return {bytes_.data(), size_}; }
  template <typename T>
  void put(T value) {
    std::memcpy(grow(sizeof value), &value, sizeof value);
  }
  void put(char tag) { *grow(1) = tag; }
  void put(const char* data, size_t n) { std::memcpy(grow(n), data, n); }
  void put_text(PyObject* text, size_t limit) {
    const size_t at = size_;
    put(uint16_t{0});
    utf8(text, static_cast<Py_ssize_t>(limit), [this](const char* p, size_t n) { put(p, n); });
    const auto n = static_cast<uint16_t>(size_ - at - 2);
    std::memcpy(bytes_.data() + at, &n, 2);
  }
  void put_text(std::string_view text) {
    put(static_cast<uint16_t>(text.size()));
    put(text.data(), text.size());
  }
  char& at(size_t i) { return bytes_[i]; }

 private:
  char* grow(size_t n) {
    if (size_ + n > bytes_.size()) bytes_.resize(2 * (size_ + n));
    char* out = bytes_.data() + size_;
    size_ += n;
    return out;
  }
  std::vector<char> bytes_;
  size_t size_ = 0;
};

// How much a signature says; it rises with the number of distinct ones that a tap has seen.
enum class Detail : int { Full = 0, NoScalars = 1, NoDims = 2, Nothing = 3 };

class Describer {
 public:
  Describer();

  void set_tensor_types(PyObject* tensor, PyObject* parameter);
  void set_module_type(PyObject* module);
  // `depth()` says how many torch function modes are active; `disable()` gives a context manager.
  void set_torch_function_guard(PyObject* depth, PyObject* disable);
  void track(uintptr_t id, std::string_view name) { tracked_[id] = text_id(name); }
  void untrack(uintptr_t id) { tracked_.erase(id); }
  void untrack_all() { tracked_.clear(); }

  void call(Key& key, PyObject* const* args, Py_ssize_t n_args, PyObject* kwnames, Detail detail);
  void value(Key& key, PyObject* object, Detail detail);
  std::string render(std::string_view key) const;

  bool asks_gradient(PyObject* object) const;  // it is a tensor that requires a gradient

  uint32_t text_id(std::string_view text);
  uint32_t dtype_id(PyObject* dtype);
  const std::string& text(uint32_t id) const { return texts_[id]; }

  int traverse(visitproc visit, void* arg) const;
  void clear();

 private:
  friend class Encoder;
  enum class Kind : uint8_t {
    Object, Tensor, Module, List, Tuple, Dict, Set, Str, Float, Constant, Function, Builtin, Method,
    MethodDescriptor, Type, NumpyArray, BoundEnum, Tap,
  };
  struct TypeInfo {
    PyObject* weak = nullptr;  // Owned by `types_`
    Kind kind = Kind::Object;
    uint32_t text = 0;  // module.qualname
    uint32_t name = 0;  // class name of a tensor subclass
  };
  // A C getter of the tensor type, called without a lookup; a plain attribute read where it is not one.
  struct Getter {
    PyObject* name = nullptr;  // Owned, interned
    Owned descriptor;
    PyObject* read(PyObject* object) const;  // New reference or NULL
  };
  enum { kDtype, kShape, kGrad, kIsCpu, kIsCuda, kDevice, kGetters };

  TypeInfo type_info(PyTypeObject* type);
  void forget_types();

  std::vector<std::string> texts_;
  TextMap<uint32_t> text_ids_;
  std::unordered_map<PyObject*, std::pair<Owned, uint32_t>> dtypes_;
  std::unordered_map<PyTypeObject*, TypeInfo> types_;
  std::unordered_map<uintptr_t, uint32_t> tracked_;
  std::array<Getter, kGetters> getters_;
  Owned tensor_, parameter_, module_, mode_depth_, disable_;
  PyObject* training_ = nullptr;  // Owned: interned attribute names
  PyObject* type_attr_ = nullptr;
  PyObject* enter_ = nullptr;
  PyObject* exit_ = nullptr;
  uint32_t cpu_, cuda_, error_, cut_, int_, float_, str_, list_, tuple_, set_, dict_, unknown_, empty_, parameter_name_;
};

// module.qualname of a type, without asking its metaclass; a builtin has no module in its name.
std::string type_text(PyTypeObject* type);
// Set by tap.cpp: the callable behind a tap (Borrowed), NULL for anything else.
PyObject* tap_target(PyObject* object);
bool is_tap_type(PyTypeObject* type);

}  // namespace proctor
