#include "describe.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace proctor {

namespace {

constexpr size_t kMaxTypes = 1 << 16;  // cached classes; beyond, the cache starts again
constexpr size_t kMaxDtypes = 256;

PyObject* interned(const char* text) { return PyUnicode_InternFromString(text); }  // New reference

bool heap(PyTypeObject* type) { return type->tp_flags & Py_TPFLAGS_HEAPTYPE; }

// Text of a module attribute of a class, read from its own dict; "" where it is none.
std::string module_of(PyTypeObject* type) {
  if (!heap(type)) {
    std::string_view name = type->tp_name;
    const size_t dot = name.rfind('.');
    return dot == std::string_view::npos ? "builtins" : std::string(name.substr(0, dot));
  }
  PyObject* module = type->tp_dict ? PyDict_GetItemString(type->tp_dict, "__module__") : nullptr;  // Borrowed
  return module && PyUnicode_CheckExact(module) ? utf8(module) : "";
}

std::string qualname_of(PyTypeObject* type) {
  if (!heap(type)) {
    std::string_view name = type->tp_name;
    return std::string(name.substr(name.rfind('.') + 1));
  }
  return utf8(reinterpret_cast<PyHeapTypeObject*>(type)->ht_qualname);
}

std::string name_of(PyTypeObject* type) {
  if (!heap(type)) return qualname_of(type);
  return utf8(reinterpret_cast<PyHeapTypeObject*>(type)->ht_name);
}

std::string joined(const std::string& module, const std::string& name) {
  return module.empty() || module == "builtins" ? name : module + "." + name;
}

std::string module_class(PyTypeObject* type) {
  const std::string module = module_of(type);
  if (module.starts_with("torch.nn.modules.")) return "torch.nn." + name_of(type);
  return joined(module, qualname_of(type));
}

// name → (value, doc) of a pybind11 enum such as `torch.distributed.ReduceOp`; Borrowed or NULL.
PyObject* enum_entries(PyTypeObject* type) {
  PyObject* entries = heap(type) && type->tp_dict ? PyDict_GetItemString(type->tp_dict, "__entries") : nullptr;
  return entries && PyDict_Check(entries) ? entries : nullptr;
}

// The instance's own attributes, past any `__getattr__` or `__dict__` property; New reference or NULL, no error set.
PyObject* instance_dict(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  bool has = type->tp_dictoffset != 0;
#ifdef Py_TPFLAGS_MANAGED_DICT
  has = has || (type->tp_flags & Py_TPFLAGS_MANAGED_DICT);
#endif
  if (!has) return nullptr;
  PyObject* dict = PyObject_GenericGetDict(object, nullptr);
  if (!dict) PyErr_Clear();
  if (dict && !PyDict_Check(dict)) Py_CLEAR(dict);
  return dict;
}

}  // namespace

std::string type_text(PyTypeObject* type) { return joined(module_of(type), qualname_of(type)); }

Describer::Describer() {
  texts_.emplace_back();  // id 0: none
  const char* names[kGetters] = {"dtype", "shape", "requires_grad", "is_cpu", "is_cuda", "device"};
  for (int i = 0; i < kGetters; ++i) getters_[i].name = interned(names[i]);
  training_ = interned("training");
  type_attr_ = interned("type");
  enter_ = interned("__enter__");
  exit_ = interned("__exit__");
  cpu_ = text_id("cpu"), cuda_ = text_id("cuda"), error_ = text_id("error"), cut_ = text_id("cut");
  int_ = text_id("int"), float_ = text_id("float"), str_ = text_id("str");
  list_ = text_id("list"), tuple_ = text_id("tuple"), set_ = text_id("set"), dict_ = text_id("dict");
  unknown_ = text_id("unknown"), empty_ = text_id(""), parameter_name_ = text_id("Parameter");
}

uint32_t Describer::text_id(std::string_view text) {
  if (auto it = text_ids_.find(text); it != text_ids_.end()) return it->second;
  const auto id = static_cast<uint32_t>(texts_.size());
  texts_.emplace_back(text);
  text_ids_.emplace(std::string(text), id);
  return id;
}

PyObject* Describer::Getter::read(PyObject* object) const {
  if (descriptor) {
    const PyGetSetDef* def = reinterpret_cast<PyGetSetDescrObject*>(descriptor.get())->d_getset;
    return def->get(object, def->closure);
  }
  return PyObject_GetAttr(object, name);
}

void Describer::set_tensor_types(PyObject* tensor, PyObject* parameter) {
  tensor_.share_unless_none(tensor);
  parameter_.share_unless_none(parameter);
  for (Getter& getter : getters_) {
    getter.descriptor.reset();
    PyObject* found = tensor_ ? _PyType_Lookup(reinterpret_cast<PyTypeObject*>(tensor), getter.name) : nullptr;  // Borrowed
    if (found && Py_IS_TYPE(found, &PyGetSetDescr_Type) &&
        reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset->get) {
      getter.descriptor.share_unless_none(found);
    }
  }
  forget_types();
}

bool Describer::asks_gradient(PyObject* object) const {
  if (!tensor_ || !PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(tensor_.get()))) return false;
  Owned on(getters_[kGrad].read(object));
  if (!on) PyErr_Clear();
  return on.get() == Py_True;
}

void Describer::set_module_type(PyObject* module) {
  module_.share_unless_none(module);
  forget_types();
}

void Describer::set_torch_function_guard(PyObject* depth, PyObject* disable) {
  mode_depth_.share_unless_none(depth);
  disable_.share_unless_none(disable);
}

void Describer::forget_types() {
  auto old = std::move(types_);
  types_.clear();
  for (auto& [type, info] : old) Py_XDECREF(info.weak);
}

int Describer::traverse(visitproc visit, void* arg) const {
  for (const Owned* ref : {&tensor_, &parameter_, &module_, &mode_depth_, &disable_}) {
    if (int stop = ref->visit(visit, arg)) return stop;
  }
  return 0;
}

void Describer::clear() {
  forget_types();
  for (Owned* ref : {&tensor_, &parameter_, &module_, &mode_depth_, &disable_}) ref->reset();
  for (Getter& getter : getters_) getter.descriptor.reset();
  dtypes_.clear();
}

Describer::TypeInfo Describer::type_info(PyTypeObject* type) {
  auto* object = reinterpret_cast<PyObject*>(type);
  if (auto it = types_.find(type); it != types_.end()) {
    if (weakly_is(it->second.weak, object)) return it->second;
    PyObject* dead = it->second.weak;
    types_.erase(it);
    Py_DECREF(dead);
  }
  TypeInfo info;
  const auto is = [type](const Owned& base) {
    return base && PyType_IsSubtype(type, reinterpret_cast<PyTypeObject*>(base.get()));
  };
  const std::string text = type_text(type);
  if (is_tap_type(type)) {
    info.kind = Kind::Tap;
  } else if (is(tensor_)) {
    info.kind = Kind::Tensor;
    info.name = object == tensor_.get() ? 0 : text_id(name_of(type));
  } else if (is(module_)) {
    info.kind = Kind::Module;
    info.text = text_id(module_class(type));
  } else if (PyType_FastSubclass(type, Py_TPFLAGS_LIST_SUBCLASS)) {
    info.kind = Kind::List;
  } else if (PyType_FastSubclass(type, Py_TPFLAGS_TUPLE_SUBCLASS)) {
    info.kind = Kind::Tuple;
  } else if (PyType_FastSubclass(type, Py_TPFLAGS_DICT_SUBCLASS)) {
    info.kind = Kind::Dict;
  } else if (PyType_IsSubtype(type, &PySet_Type) || PyType_IsSubtype(type, &PyFrozenSet_Type)) {
    info.kind = Kind::Set;
  } else if (PyType_FastSubclass(type, Py_TPFLAGS_UNICODE_SUBCLASS)) {
    info.kind = Kind::Str;
  } else if (PyType_FastSubclass(type, Py_TPFLAGS_TYPE_SUBCLASS)) {
    info.kind = Kind::Type;
  } else if (PyType_IsSubtype(type, &PyFloat_Type)) {
    info.kind = Kind::Float;
  } else if (type == &PyFunction_Type) {
    info.kind = Kind::Function;
  } else if (PyType_IsSubtype(type, &PyCFunction_Type)) {
    info.kind = Kind::Builtin;
  } else if (type == &PyMethod_Type) {
    info.kind = Kind::Method;
  } else if (type == &PyMethodDescr_Type || type == &PyWrapperDescr_Type) {
    info.kind = Kind::MethodDescriptor;
  } else if (text == "torch.dtype" || text == "torch.device" || text == "torch.layout" ||
             text == "torch.memory_format" || text == "torch.qscheme") {
    info.kind = Kind::Constant;
  } else if (text == "numpy.ndarray") {
    info.kind = Kind::NumpyArray;
  } else if (enum_entries(type)) {
    info.kind = Kind::BoundEnum;
  }
  if (!info.text) info.text = text_id(text);
  info.weak = PyWeakref_NewRef(object, nullptr);
  if (!info.weak) {
    PyErr_Clear();
    return info;  // not cacheable, still right
  }
  if (types_.size() >= kMaxTypes) forget_types();
  if (auto [it, fresh] = types_.try_emplace(type, info); !fresh) {  // another thread was faster
    std::swap(it->second, info);
    Py_XDECREF(info.weak);
    return it->second;
  }
  return info;
}

uint32_t Describer::dtype_id(PyObject* dtype) {
  if (auto it = dtypes_.find(dtype); it != dtypes_.end()) return it->second.second;
  Owned text(PyObject_Str(dtype));
  if (!text) {
    swallow_error();
    return unknown_;
  }
  std::string out = utf8(text.get());
  if (out.starts_with("torch.")) out.erase(0, 6);
  const uint32_t id = text_id(out);
  if (dtypes_.size() < kMaxDtypes) dtypes_.try_emplace(dtype, Owned::share(dtype), id);
  return id;
}

// Builds one key. Lives on the stack of one call.
class Encoder {
 public:
  Encoder(Describer& describer, Key& key, Detail detail) : d_(describer), k_(key), detail_(detail) {}
  ~Encoder() {
    if (!guard_) return;
    PyObject* none[4] = {guard_.get(), Py_None, Py_None, Py_None};
    Owned done(PyObject_VectorcallMethod(d_.exit_, none, 4, nullptr));
    if (!done) swallow_error();
  }

  void value(PyObject* o, int depth) {
    if (++leaves_ > kMaxLeaves) return left_out(d_.cut_);
    const size_t mark = k_.size();
    if (try_value(o, depth) && !PyErr_Occurred()) return;
    swallow_error();
    k_.truncate(mark);
    left_out(d_.error_);
  }

 private:
  using Kind = Describer::Kind;

  void left_out(uint32_t text) {
    k_.put('e');
    k_.put(text);
  }
  bool scalars() const { return detail_ < Detail::NoScalars; }

  bool try_value(PyObject* o, int depth) {
    if (o == Py_None) return k_.put('n'), true;
    if (o == Py_True) return k_.put('t'), true;
    if (o == Py_False) return k_.put('f'), true;
    PyTypeObject* type = Py_TYPE(o);
    auto* type_object = reinterpret_cast<PyObject*>(type);
    if (type_object == d_.tensor_.get()) return tensor(o, 0, true);
    if (type_object == d_.parameter_.get()) return tensor(o, d_.parameter_name_, true);
    if (PyLong_CheckExact(o)) return integer(o);
    if (PyFloat_CheckExact(o)) return real(o);
    if (PyUnicode_CheckExact(o)) return string(o);
    if (PyTuple_CheckExact(o)) return sequence(o, d_.tuple_, depth);
    if (PyList_CheckExact(o)) return sequence(o, d_.list_, depth);
    if (PyDict_CheckExact(o)) return mapping(o, depth);
    const Describer::TypeInfo info = d_.type_info(type);
    switch (info.kind) {
      case Kind::Tensor: return tensor(o, info.name, false);
      case Kind::Module: return module(o, info.text);
      case Kind::List: return sequence(o, d_.list_, depth);
      case Kind::Tuple: return sequence(o, d_.tuple_, depth);
      case Kind::Dict: return mapping(o, depth);
      case Kind::Set: return set(o, depth);
      case Kind::Str: return string(o);
      case Kind::Float: return real(o);
      case Kind::Constant: return constant(o);
      case Kind::Type: return function_text(type_text(reinterpret_cast<PyTypeObject*>(o)));
      case Kind::Function: case Kind::Builtin: case Kind::MethodDescriptor: case Kind::Method: case Kind::Tap:
        return function(o, info, 0);
      case Kind::NumpyArray: return numpy(o);
      case Kind::BoundEnum: return bound_enum(o, info.text);
      case Kind::Object: break;
    }
    return object(o, info.text);
  }

  bool integer(PyObject* o) {
    if (!scalars()) return left_out(d_.int_), true;
    int overflow = 0;
    const long long small = PyLong_AsLongLongAndOverflow(o, &overflow);
    if (!overflow) {
      k_.put('i');
      k_.put(static_cast<int64_t>(small));
      return true;
    }
    const unsigned long long big = overflow > 0 ? PyLong_AsUnsignedLongLong(o) : 0;
    if (overflow < 0 || PyErr_Occurred()) {
      PyErr_Clear();
      return left_out(d_.int_), true;
    }
    k_.put('u');
    k_.put(static_cast<uint64_t>(big));
    return true;
  }

  bool real(PyObject* o) {
    if (!scalars()) return left_out(d_.float_), true;
    double x = PyFloat_AS_DOUBLE(o);
    if (std::isnan(x)) x = std::nan("");  // one key for all payloads
    k_.put('d');
    k_.put(x);
    return true;
  }

  bool string(PyObject* o) {
    if (!scalars()) return left_out(d_.str_), true;
    k_.put('s');
    k_.put_text(o, kMaxText);
    return true;
  }

  // Tuple or list, raw items. A list may change under us if a getter lets go of the GIL: size is read each time.
  bool sequence(PyObject* o, uint32_t name, int depth) {
    if (depth >= kMaxDepth) return left_out(name), true;
    k_.put('L');
    k_.put(static_cast<uint32_t>(PySequence_Fast_GET_SIZE(o)));
    const size_t count_at = k_.size();
    k_.put(uint8_t{0});
    size_t n = 0;
    for (; n < kMaxSequence && static_cast<Py_ssize_t>(n) < PySequence_Fast_GET_SIZE(o); ++n) {
      Owned item = Owned::share(PySequence_Fast_GET_ITEM(o, n));
      value(item.get(), depth + 1);
    }
    k_.at(count_at) = static_cast<char>(n);
    return true;
  }

  // A set has no order, so its items are shown only where sorting is exact: all str, or all int.
  bool set(PyObject* o, int depth) {
    if (depth >= kMaxDepth) return left_out(d_.set_), true;
    const Py_ssize_t size = PySet_GET_SIZE(o);
    Owned items(PyList_New(0));
    if (!items) return false;
    if (size <= 64) {
      Owned it(PySet_Type.tp_iter(o));
      if (!it) return false;
      bool all_str = true, all_int = true;
      while (PyObject* item = Py_TYPE(it.get())->tp_iternext(it.get())) {
        Owned held(item);
        all_str = all_str && PyUnicode_CheckExact(item);
        all_int = all_int && PyLong_CheckExact(item);
        if (!all_str && !all_int) break;
        if (PyList_Append(items.get(), item) < 0) return false;
      }
      if (PyErr_Occurred()) return false;
      if (!all_str && !all_int) {
        if (PyList_SetSlice(items.get(), 0, PyList_GET_SIZE(items.get()), nullptr) < 0) return false;
      } else if (PyList_Sort(items.get()) < 0) {
        return false;
      }
    }
    k_.put('L');
    k_.put(static_cast<uint32_t>(size));
    const size_t n = std::min<size_t>(kMaxSequence, static_cast<size_t>(PyList_GET_SIZE(items.get())));
    k_.put(static_cast<uint8_t>(n));
    for (size_t i = 0; i < n; ++i) value(PyList_GET_ITEM(items.get(), i), depth + 1);
    return true;
  }

  bool mapping(PyObject* o, int depth) {
    if (depth >= kMaxDepth) return left_out(d_.dict_), true;
    // Collected first: describing an item may let go of the GIL and the dict may change.
    std::array<std::pair<Owned, Owned>, kMaxMapping> items;
    size_t n = 0;
    Py_ssize_t position = 0;
    PyObject *key, *item;  // Borrowed
    while (n < kMaxMapping && PyDict_Next(o, &position, &key, &item)) {
      if (!PyUnicode_CheckExact(key)) continue;
      items[n++] = {Owned::share(key), Owned::share(item)};
    }
    k_.put('D');
    k_.put(static_cast<uint32_t>(PyDict_Size(o)));
    k_.put(static_cast<uint8_t>(n));
    for (size_t i = 0; i < n; ++i) {
      k_.put_text(items[i].first.get(), kMaxText);
      value(items[i].second.get(), depth + 1);
    }
    return true;
  }

  bool constant(PyObject* o) {
    Owned text(PyObject_Str(o));
    if (!text) return false;
    k_.put('y');
    k_.put(d_.text_id(utf8(text.get(), kMaxText)));
    return true;
  }

  bool bound_enum(PyObject* o, uint32_t text) {
    Py_ssize_t position = 0;
    PyObject *name, *entry;  // Borrowed; nothing in the loop runs Python code
    PyObject* entries = enum_entries(Py_TYPE(o));
    while (entries && PyDict_Next(entries, &position, &name, &entry)) {
      if (!PyTuple_Check(entry) || !PyUnicode_Check(name)) continue;
      if (PyTuple_GET_SIZE(entry) == 0 || PyTuple_GET_ITEM(entry, 0) != o) continue;
      k_.put('y');
      k_.put(d_.text_id(d_.text(text) + "." + utf8(name, kMaxText)));
      return true;
    }
    return object(o, text);
  }

  bool function_text(const std::string& text) {
    k_.put('F');
    // Cut at a code point, not inside one.
    size_t n = std::min(text.size(), kMaxFunctionText);
    while (n > 0 && n < text.size() && (text[n] & 0xC0) == 0x80) --n;
    k_.put_text(std::string_view(text).substr(0, n));
    return true;
  }

  bool function(PyObject* o, Describer::TypeInfo info, int hops) {
    switch (info.kind) {
      case Kind::Function: {
        auto* f = reinterpret_cast<PyFunctionObject*>(o);
        const bool named = f->func_module && PyUnicode_CheckExact(f->func_module);
        return function_text(joined(named ? utf8(f->func_module) : "", utf8(f->func_qualname)));
      }
      case Kind::Builtin: {
        auto* f = reinterpret_cast<PyCFunctionObject*>(o);
        const bool named = f->m_module && PyUnicode_CheckExact(f->m_module);
        return function_text(joined(named ? utf8(f->m_module) : "", f->m_ml->ml_name));
      }
      case Kind::MethodDescriptor: {
        auto* f = reinterpret_cast<PyDescrObject*>(o);
        return function_text(type_text(f->d_type) + "." + utf8(f->d_name));
      }
      case Kind::Method: case Kind::Tap: {
        PyObject* inner = info.kind == Kind::Tap ? tap_target(o) : PyMethod_GET_FUNCTION(o);  // Borrowed
        const Describer::TypeInfo next = d_.type_info(Py_TYPE(inner));
        if (hops < 8) return function(inner, next, hops + 1);
        return object(inner, next.text);
      }
      case Kind::Type: return function_text(type_text(reinterpret_cast<PyTypeObject*>(o)));
      default: return object(o, info.text);
    }
  }

  bool object(PyObject* o, uint32_t text) {
    k_.put('O');
    k_.put(text);
    k_.put(tracked(o));
    const size_t count_at = k_.size();
    k_.put(uint8_t{0});
    Owned dict(instance_dict(o));
    if (!dict) return true;
    size_t n = 0;
    Py_ssize_t position = 0;
    PyObject *key, *item;  // Borrowed; nothing below runs Python code
    while (n < kMaxAttributes && PyDict_Next(dict.get(), &position, &key, &item)) {
      if (!PyUnicode_CheckExact(key) || PyUnicode_GET_LENGTH(key) > static_cast<Py_ssize_t>(kMaxText)) continue;
      const bool text_value = PyUnicode_CheckExact(item);
      if (!(item == Py_None || PyBool_Check(item) || (text_value && scalars()))) continue;
      if (text_value && PyUnicode_GET_LENGTH(item) > static_cast<Py_ssize_t>(kMaxText)) continue;
      k_.put_text(key, kMaxText);
      try_value(item, kMaxDepth);
      ++n;
    }
    k_.at(count_at) = static_cast<char>(n);
    return true;
  }

  bool module(PyObject* o, uint32_t text) {
    k_.put('M');
    k_.put(text);
    k_.put(tracked(o));
    uint8_t training = 2;
    Owned dict(instance_dict(o));
    if (dict) {
      PyObject* value = PyDict_GetItemWithError(dict.get(), d_.training_);  // Borrowed
      if (value == Py_True) training = 1;
      if (value == Py_False) training = 0;
    }
    k_.put(training);
    return true;
  }

  uint32_t tracked(PyObject* o) const {
    const auto it = d_.tracked_.find(reinterpret_cast<uintptr_t>(o));
    return it == d_.tracked_.end() ? 0 : it->second;
  }

  // Dims that are not exact ints (SymInt) are -1.
  void dims(PyObject* shape) {
    if (detail_ >= Detail::NoDims || !shape || !PyTuple_Check(shape)) return k_.put(kNoDims);
    const Py_ssize_t n = std::min<Py_ssize_t>(PyTuple_GET_SIZE(shape), kNoDims - 1);
    k_.put(static_cast<uint8_t>(n));
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* dim = PyTuple_GET_ITEM(shape, i);  // Borrowed
      int64_t value = -1;
      if (PyLong_CheckExact(dim)) value = PyLong_AsLongLong(dim);
      if (value == -1) PyErr_Clear();
      k_.put(value);
    }
  }

  PyObject* read(int which, PyObject* o) {  // New reference or NULL, no error set
    PyObject* out = d_.getters_[which].read(o);
    if (!out) swallow_error();
    return out;
  }
  bool reads_true(int which, PyObject* o) {
    Owned out(read(which, o));
    return out.get() == Py_True;
  }

  bool tensor(PyObject* o, uint32_t class_name, bool exact) {
    quiet(exact);
    k_.put('T');
    Owned dtype(read(Describer::kDtype, o));
    k_.put(dtype ? d_.dtype_id(dtype.get()) : d_.unknown_);
    k_.put(device(o));
    k_.put(class_name);
    k_.put(tracked(o));
    k_.put(static_cast<uint8_t>(reads_true(Describer::kGrad, o)));
    Owned shape(detail_ < Detail::NoDims ? read(Describer::kShape, o) : nullptr);
    dims(shape.get());
    return true;
  }

  uint32_t device(PyObject* o) {
    // Two booleans are 40 ns each, `device.type` is 275 ns.
    if (reads_true(Describer::kIsCpu, o)) return d_.cpu_;
    if (reads_true(Describer::kIsCuda, o)) return d_.cuda_;
    Owned device(read(Describer::kDevice, o));
    Owned type(device ? PyObject_GetAttr(device.get(), d_.type_attr_) : nullptr);
    if (!type || !PyUnicode_Check(type.get())) {
      swallow_error();
      return d_.empty_;
    }
    return d_.text_id(utf8(type.get(), kMaxText));
  }

  // Switch `__torch_function__` off for the rest of this key, once, where a getter would call it.
  void quiet(bool exact) {
    if (guard_ || !d_.disable_) return;
    if (exact) {
      if (mode_checked_ || !d_.mode_depth_) return;
      mode_checked_ = true;
      Owned depth(PyObject_CallNoArgs(d_.mode_depth_.get()));
      if (!depth || !PyLong_Check(depth.get()) || PyLong_AsLong(depth.get()) <= 0) return swallow_error();
    }
    Owned guard(PyObject_CallNoArgs(d_.disable_.get()));
    PyObject* self = guard.get();
    Owned entered(self ? PyObject_VectorcallMethod(d_.enter_, &self, 1, nullptr) : nullptr);
    if (!entered) return swallow_error();
    guard_ = std::move(guard);
  }

  bool numpy(PyObject* o) {
    Owned dtype(PyObject_GetAttrString(o, "dtype"));
    Owned name(dtype ? PyObject_GetAttrString(dtype.get(), "name") : nullptr);
    Owned shape(PyObject_GetAttrString(o, "shape"));
    if (!name || !PyUnicode_Check(name.get()) || !shape) return false;
    k_.put('A');
    k_.put(d_.text_id("numpy." + utf8(name.get(), kMaxText)));
    dims(shape.get());
    return true;
  }

  Describer& d_;
  Key& k_;
  Detail detail_;
  int leaves_ = 0;
  bool mode_checked_ = false;
  Owned guard_;
};

void Describer::call(Key& key, PyObject* const* args, Py_ssize_t n_args, PyObject* kwnames, Detail detail) {
  key.clear();
  Encoder encoder(*this, key, detail);
  const auto limit = static_cast<Py_ssize_t>(kMaxArguments);
  const Py_ssize_t n = std::min(n_args, limit);
  key.put('(');
  key.put(static_cast<uint8_t>(n));
  for (Py_ssize_t i = 0; i < n; ++i) encoder.value(args[i], 0);
  const Py_ssize_t n_named = kwnames ? std::min(PyTuple_GET_SIZE(kwnames), limit) : 0;
  key.put(static_cast<uint8_t>(n_named));
  for (Py_ssize_t i = 0; i < n_named; ++i) {
    key.put_text(PyTuple_GET_ITEM(kwnames, i), kMaxText);
    encoder.value(args[n_args + i], 0);
  }
}

void Describer::value(Key& key, PyObject* object, Detail detail) {
  key.clear();
  Encoder(*this, key, detail).value(object, 0);
}

namespace {

class Renderer {
 public:
  Renderer(const Describer& describer, std::string_view key) : d_(describer), p_(key.data()) {}

  void leaf() {
    const char tag = take<char>();
    switch (tag) {
      case 'n': out += "null"; break;
      case 't': out += "true"; break;
      case 'f': out += "false"; break;
      case 'i': out += std::to_string(take<int64_t>()); break;
      case 'u': out += std::to_string(take<uint64_t>()); break;
      case 'd': real(take<double>()); break;
      case 's': quote(text()); break;
      case 'y': field("{\"y\":", take<uint32_t>()), out += '}'; break;
      case 'F': out += "{\"f\":", quote(text()), out += '}'; break;
      case 'e': field("{\"e\":", take<uint32_t>()), out += '}'; break;
      case 'T': tensor(); break;
      case 'A':
        field("{\"T\":", take<uint32_t>());
        dims();
        out += '}';
        break;
      case 'M': module(); break;
      case 'L': {
        const auto length = take<uint32_t>();
        out += "{\"L\":[";
        items(take<uint8_t>());
        out += "],\"n\":" + std::to_string(length) + "}";
        break;
      }
      case 'D': {
        const auto length = take<uint32_t>();
        out += "{\"D\":{";
        pairs(take<uint8_t>());
        out += "},\"n\":" + std::to_string(length) + "}";
        break;
      }
      case 'O':
        field("{\"O\":", take<uint32_t>());
        if (const auto name = take<uint32_t>()) field(",\"v\":", name);
        out += ",\"a\":{";
        pairs(take<uint8_t>());
        out += "}}";
        break;
      case '(':
        out += "{\"a\":[";
        items(take<uint8_t>());
        out += "],\"k\":{";
        pairs(take<uint8_t>());
        out += "}}";
        break;
      default: out += "{\"e\":\"error\"}"; break;
    }
  }

  std::string out;

 private:
  template <typename T>
  T take() {
    T value;
    std::memcpy(&value, p_, sizeof value);
    p_ += sizeof value;
    return value;
  }
  std::string_view text() {
    const auto n = take<uint16_t>();
    std::string_view view(p_, n);
    p_ += n;
    return view;
  }
  void field(const char* head, uint32_t id) {
    out += head;
    quote(d_.text(id));
  }
  void items(int n) {
    for (int i = 0; i < n; ++i) {
      if (i) out += ',';
      leaf();
    }
  }
  void pairs(int n) {
    for (int i = 0; i < n; ++i) {
      if (i) out += ',';
      quote(text());
      out += ':';
      leaf();
    }
  }
  void dims() {
    const int n = take<uint8_t>();
    if (n == kNoDims) {
      out += ",\"s\":null";
      return;
    }
    out += ",\"s\":[";
    for (int i = 0; i < n; ++i) {
      if (i) out += ',';
      out += std::to_string(take<int64_t>());
    }
    out += ']';
  }
  void tensor() {
    field("{\"T\":", take<uint32_t>());
    const auto device = take<uint32_t>(), class_name = take<uint32_t>(), name = take<uint32_t>();
    const bool grad = take<uint8_t>();
    dims();
    field(",\"d\":", device);
    if (grad) out += ",\"g\":1";
    if (class_name) field(",\"c\":", class_name);
    if (name) field(",\"v\":", name);
    out += '}';
  }
  void module() {
    field("{\"M\":", take<uint32_t>());
    if (const auto path = take<uint32_t>()) field(",\"p\":", path);
    if (const auto training = take<uint8_t>(); training < 2) out += training ? ",\"t\":1" : ",\"t\":0";
    out += '}';
  }
  void real(double x) {
    if (std::isnan(x)) {
      out += "\"nan\"";
    } else if (std::isinf(x)) {
      out += x > 0 ? "\"inf\"" : "\"-inf\"";
    } else {
      char* text = PyOS_double_to_string(x, 'r', 0, Py_DTSF_ADD_DOT_0, nullptr);
      out += text ? text : "0.0";
      PyMem_Free(text);
    }
  }
  void quote(std::string_view value) {
    out += '"';
    for (const char c : value) {
      switch (c) {
        case '"': out += "\\\""; break;
        case '\\': out += "\\\\"; break;
        case '\n': out += "\\n"; break;
        case '\r': out += "\\r"; break;
        case '\t': out += "\\t"; break;
        case '\b': out += "\\b"; break;
        case '\f': out += "\\f"; break;
        default:
          if (static_cast<unsigned char>(c) < 0x20) {
            char escaped[8];
            std::snprintf(escaped, sizeof escaped, "\\u%04x", c);
            out += escaped;
          } else {
            out += c;
          }
      }
    }
    out += '"';
  }

  const Describer& d_;
  const char* p_;
};

}  // namespace

std::string Describer::render(std::string_view key) const {
  Renderer renderer(*this, key);
  renderer.leaf();
  return std::move(renderer.out);
}

}  // namespace proctor
