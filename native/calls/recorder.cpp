#include "recorder.h"

#include "asleep.h"

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdlib>

namespace proctor {

namespace py = pybind11;

Tls& tls() {
  thread_local Tls state;
  return state;
}

namespace {

// Tokens and recorder ids are handed out under the GIL.
uint64_t next_token = 0;
uint64_t next_uid = 0;

uint64_t token_of(Tls& tls) {
  if (!tls.token) tls.token = ++next_token;
  return tls.token;
}

template <typename T>
bool resize(T*& column, size_t room) {
  auto* grown = static_cast<T*>(std::realloc(column, room * sizeof(T)));
  if (grown) column = grown;
  return grown;
}

}  // namespace

// -- rows ---------------------------------------------------------------------------------------------------

Rows& Rows::operator=(Rows&& other) noexcept {
  if (this == &other) return *this;
  release();
  for (int i = 0; i < kWords; ++i) words[i] = std::exchange(other.words[i], nullptr);
  t = std::exchange(other.t, nullptr);
  dur = std::exchange(other.dur, nullptr);
  flags = std::exchange(other.flags, nullptr);
  size_ = std::exchange(other.size_, 0);
  room_ = std::exchange(other.room_, 0);
  return *this;
}

void Rows::release() {
  for (auto& column : words) std::free(std::exchange(column, nullptr));
  std::free(std::exchange(t, nullptr));
  std::free(std::exchange(dur, nullptr));
  std::free(std::exchange(flags, nullptr));
  size_ = room_ = 0;
}

bool Rows::grow() {
  const size_t room = room_ ? 2 * room_ : kFirstRows;
  for (auto& column : words) {
    if (!resize(column, room)) return false;
  }
  if (!resize(t, room) || !resize(dur, room) || !resize(flags, room)) return false;
  room_ = room;
  return true;
}

bool Rows::push(const Span& span, uint32_t ret, int64_t duration) {
  if (size_ == room_ && !grow()) return false;
  const size_t i = size_++;
  words[0][i] = span.seq;
  words[1][i] = span.parent;
  words[2][i] = span.fn;
  words[3][i] = span.site;
  words[4][i] = span.ctx;
  words[5][i] = span.args;
  words[6][i] = ret;
  t[i] = span.t;
  dur[i] = duration;
  flags[i] = span.flags;
  return true;
}

// -- recording ----------------------------------------------------------------------------------------------

Recording::Recording() : uid_(++next_uid) { main_token = token_of(tls()); }
Recording::~Recording() = default;

ThreadState& Recording::thread(Tls& tls) {
  if (tls.recorder == uid_) return *tls.state;
  auto& state = threads_[std::this_thread::get_id()];
  if (!state) state = std::make_unique<ThreadState>();
  if (state->token != token_of(tls)) {  // the id of a thread that ended
    state->token = tls.token;
    state->stack.clear();
    state->modules = 0;
  }
  tls.recorder = uid_;
  tls.state = state.get();
  return *state;
}

uint32_t Recording::open(ThreadState& thread, uint32_t fn, bool module, bool synthetic) {
  Span span;
  span.seq = ++seq;
  span.fn = fn;
  span.module = module;
  span.synthetic = synthetic;
  // A copy: a probe or the collector may run Python code, and that may begin() another span and move the stack.
  const Span parent = thread.stack.empty() ? Span() : thread.stack.back();
  span.parent = parent.seq;
  if (module && thread.modules == 1) span.flags |= kRoot;
  if (thread.token != main_token) span.flags |= kThread;
  span.site = site(parent, synthetic ? nullptr : &span.frame);
  span.ctx = context(parent.outer, &span.outer);
  thread.stack.push_back(span);
  return span.seq;
}

void Recording::discard(ThreadState& thread, uint32_t seq) {
  if (!thread.stack.empty() && thread.stack.back().seq == seq) thread.stack.pop_back();
}

void Recording::refresh_context(ThreadState& thread, size_t at) {
  const uint8_t around = at > 0 ? thread.stack[at - 1].outer : 0;
  uint8_t outer = 0;
  const uint32_t code = context(around, &outer);  // may run Python code: the stack may have moved
  if (at < thread.stack.size()) {
    thread.stack[at].ctx = code;
    thread.stack[at].outer = outer;
  }
}

void Recording::close(ThreadState& thread, uint32_t seq_, uint32_t ret, bool raised, int64_t end_ns) {
  auto& stack = thread.stack;
  size_t i = stack.size();
  while (i > 0 && stack[i - 1].seq != seq_) --i;
  if (i == 0) return;  // forgotten by a fork, or not ours
  --i;
  Span span = stack[i];
  if (raised) span.flags |= kRaised;
  if (!span.synthetic) {
    // Synthetic spans that were begun inside and never ended close with the call around them.
    for (size_t j = stack.size() - 1; j > i; --j) {
      if (stack[j].synthetic) write(stack[j], 0, end_ns - stack[j].t);
    }
    stack.resize(i);
  } else {
    stack.erase(stack.begin() + static_cast<std::ptrdiff_t>(i));
  }
  write(span, ret, end_ns - span.t);
}

void Recording::write(const Span& span, uint32_t ret, int64_t dur) {
  if (rows.size() >= capacity || !rows.push(span, ret, dur)) ++dropped;
}

uint32_t Recording::intern(int kind, std::string_view text) {
  auto& names = names_[kind];
  if (auto it = names.find(text); it != names.end()) return it->second;
  const auto id = static_cast<uint32_t>(names.size() + 1);
  names.emplace(std::string(text), id);
  fresh_names.push_back({kind, id, std::string(text)});
  return id;
}

uint32_t Recording::remember(Signatures& seen, std::string_view key) {
  uint32_t id;
  if (auto it = by_key_.find(key); it != by_key_.end()) {
    id = it->second;
  } else {
    id = intern(kSignature, describer.render(key));
    by_key_.emplace(std::string(key), id);
  }
  seen.add(key, id);
  return id;
}

uint32_t Recording::call_signature(ThreadState& thread, Signatures& seen, PyObject* const* args, Py_ssize_t n_args,
                                   PyObject* kwnames) {
  const Detail detail = seen.detail();
  if (detail == Detail::Nothing) return intern(kSignature, R"({"e":"many"})");
  describer.call(thread.key, args, n_args, kwnames, detail);
  const uint32_t id = seen.find(thread.key.view());
  return id ? id : remember(seen, thread.key.view());
}

uint32_t Recording::value_signature(ThreadState& thread, Signatures& seen, PyObject* object) {
  const Detail detail = seen.detail();
  if (detail == Detail::Nothing) return intern(kSignature, R"({"e":"many"})");
  describer.value(thread.key, object, detail);
  const uint32_t id = seen.find(thread.key.view());
  return id ? id : remember(seen, thread.key.view());
}

void Recording::fail() {
  if (!PyErr_Occurred() || rearm_interrupt()) return;
  if (!on_error) return PyErr_Clear();
  const Owned error(take_error());
  Owned callback = Owned::share(on_error.get());
  Owned done(error ? PyObject_CallOneArg(callback.get(), error.get()) : nullptr);
  if (!done) swallow_error();
}

void Recording::forget() {
  rows = Rows();
  fresh_names.clear();
  dropped = 0;
  for (auto& [id, state] : threads_) {
    state->stack.clear();
    state->modules = 0;
  }
  main_token = token_of(tls());
}

uint32_t Recording::module_code(PyTypeObject* type, uint32_t fallback) {
  auto* object = reinterpret_cast<PyObject*>(type);
  if (auto it = module_codes_.find(type); it != module_codes_.end()) {
    if (weakly_is(it->second.first.get(), object)) return it->second.second;
  }
  if (!module_namer) return fallback;
  Owned callback = Owned::share(module_namer.get());
  Owned code(PyObject_CallOneArg(callback.get(), object));
  const unsigned long value = code ? PyLong_AsUnsignedLong(code.get()) : 0;
  if (PyErr_Occurred()) {
    fail();
    return fallback;
  }
  Owned weak(PyWeakref_NewRef(object, nullptr));
  if (weak) {
    module_codes_[type] = {std::move(weak), static_cast<uint32_t>(value)};
  } else {
    PyErr_Clear();
  }
  return static_cast<uint32_t>(value);
}

uint8_t Recording::autocast() {
  if (any_autocast) {
    Owned any(PyObject_CallNoArgs(any_autocast.get()));
    if (any.get() == Py_False) return 0;
    if (!any) {
      fail();
      any_autocast.reset();
    }
  }
  for (size_t i = 0; i < devices.size(); ++i) {
    Owned device = Owned::share(devices[i].get());
    Owned on(PyObject_CallOneArg(is_autocast.get(), device.get()));
    if (!on) {  // a device type that this torch does not know: ask no more
      fail();
      if (i < devices.size()) devices.erase(devices.begin() + static_cast<std::ptrdiff_t>(i--));
      continue;
    }
    if (on.get() != Py_True) continue;
    Owned dtype(PyObject_CallOneArg(autocast_dtype.get(), device.get()));
    if (!dtype) {
      fail();
      return 0;
    }
    const std::string text = describer.text(describer.dtype_id(dtype.get()));
    for (size_t j = 0; j < autocasts_.size(); ++j) {
      if (autocasts_[j] == text) return static_cast<uint8_t>(j);
    }
    if (autocasts_.size() > 255) return 0;
    autocasts_.push_back(text);
    return static_cast<uint8_t>(autocasts_.size() - 1);
  }
  return 0;
}

uint32_t Recording::context(uint8_t around, uint8_t* outer) {
  bool grad = true;
  uint8_t here = 0;
  if (is_grad) {
    Owned on(PyObject_CallNoArgs(is_grad.get()));
    if (!on) {
      fail();
      is_grad.reset();
    }
    grad = on.get() != Py_False;
    here = autocast();
  }
  *outer = here ? here : around;
  if (!resolver) return ctx;
  const uint32_t base = ctx;
  const uint64_t key = static_cast<uint64_t>(base) << 32 | static_cast<uint64_t>(grad) << 16 | here << 8 | *outer;
  if (auto it = contexts_.find(key); it != contexts_.end()) return it->second;
  uint32_t code = base;
  Owned callback = Owned::share(resolver.get());
  Owned result(PyObject_CallFunction(callback.get(), "IOss", base, grad ? Py_True : Py_False,
                                     autocasts_[here].c_str(), autocasts_[*outer].c_str()));
  if (result) code = static_cast<uint32_t>(PyLong_AsUnsignedLongMask(result.get()));
  if (PyErr_Occurred()) {
    fail();
    code = base;
  }
  if (contexts_.size() >= kMaxContexts) contexts_.clear();
  contexts_[key] = code;
  return code;
}

Recording::Code& Recording::code_info(PyCodeObject* code, PyFrameObject* frame) {
  if (auto it = codes_.find(code); it != codes_.end()) return it->second;
  if (codes_.size() >= kMaxCodes) {
    auto old = std::move(codes_);
    codes_.clear();
  }
  Code info;
  info.code = Owned::share(reinterpret_cast<PyObject*>(code));
  const std::string file = PyUnicode_Check(code->co_filename) ? utf8(code->co_filename) : "";
  info.user = !file.starts_with("<frozen");
  for (const auto& prefix : library_prefixes_) info.user = info.user && !file.starts_with(prefix);
  // Our own package, wherever an editable install keeps its sources.
  Owned globals(PyFrame_GetGlobals(frame));
  PyObject* name = globals && PyDict_Check(globals.get()) ? PyDict_GetItemString(globals.get(), "__name__") : nullptr;  // Borrowed
  if (name && PyUnicode_CheckExact(name)) {
    const std::string module = utf8(name, 64);
    info.user = info.user && module != "proctor" && !module.starts_with("proctor.");
  }
  return codes_.emplace(code, std::move(info)).first->second;
}

void Recording::set_library_prefixes(std::vector<std::string> prefixes) {
  library_prefixes_ = std::move(prefixes);
  auto old = std::move(codes_);
  codes_.clear();
}

// The nearest frame of the user's code. `caller` gets the frame object that the call came from.
uint32_t Recording::site(const Span& parent, void** caller) {
  Owned frame(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
  if (caller) *caller = frame.get();
  for (int i = 0; i < kMaxFrames && frame; ++i) {
    // The walk reached the frame that made the enclosing call, and that call is still running: same site.
    if (i > 0 && parent.frame == frame.get()) return parent.site;
    auto* f = reinterpret_cast<PyFrameObject*>(frame.get());
    PyCodeObject* code = PyFrame_GetCode(f);  // New reference
    Owned held(reinterpret_cast<PyObject*>(code));
    Code& info = code_info(code, f);
    if (info.user) {
      uint32_t& id = info.sites[PyFrame_GetLasti(f)];
      if (!id) {
        const std::string file = PyUnicode_Check(code->co_filename) ? utf8(code->co_filename) : "?";
        id = intern(kSite, file + ":" + std::to_string(PyFrame_GetLineNumber(f)));
      }
      return id;
    }
    frame.reset(reinterpret_cast<PyObject*>(PyFrame_GetBack(f)));
  }
  return 0;
}

int Recording::traverse(visitproc visit, void* arg) const {
  for (const Owned* ref : {&resolver, &is_grad, &is_autocast, &autocast_dtype, &any_autocast, &on_error, &module_namer, &asleep.tell}) {
    if (int stop = ref->visit(visit, arg)) return stop;
  }
  return describer.traverse(visit, arg);
}

void Recording::clear() {
  for (Owned* ref : {&resolver, &is_grad, &is_autocast, &autocast_dtype, &any_autocast, &on_error, &module_namer, &asleep.tell}) ref->reset();
  describer.clear();
}

// -- the Python type ----------------------------------------------------------------------------------------

PyTypeObject* recorder_type = nullptr;

namespace {

Recorder* cast(PyObject* self) { return reinterpret_cast<Recorder*>(self); }
Recording& of(PyObject* self) { return *cast(self)->r; }

PyObject* new_recorder(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {nullptr};
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, ":Recorder", const_cast<char**>(names))) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (!self) return nullptr;
  cast(self)->enabled = cast(self)->muted = cast(self)->asleep = false;
  cast(self)->r = new Recording();
  return self;
}

int traverse_recorder(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return cast(self)->r ? of(self).traverse(visit, arg) : 0;
}

int clear_recorder(PyObject* self) {
  cast(self)->enabled = cast(self)->asleep = false;
  if (cast(self)->r) of(self).clear();
  return 0;
}

void dealloc_recorder(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  PyObject_GC_UnTrack(self);
  delete std::exchange(cast(self)->r, nullptr);
  type->tp_free(self);
  Py_DECREF(type);
}

bool u32(PyObject* value, uint32_t* out) {
  const unsigned long number = PyLong_AsUnsignedLong(value);
  if (PyErr_Occurred()) return false;
  if (number > UINT32_MAX) {
    PyErr_SetString(PyExc_OverflowError, "expected a number below 2**32");
    return false;
  }
  *out = static_cast<uint32_t>(number);
  return true;
}

#define READ(name, expression) \
  PyObject* get_##name(PyObject* self, void*) { return expression; }
READ(enabled, PyBool_FromLong(cast(self)->enabled))
READ(muted, PyBool_FromLong(cast(self)->muted))
READ(asleep, PyBool_FromLong(cast(self)->asleep))
READ(ctx, PyLong_FromUnsignedLong(of(self).ctx))
READ(capacity, PyLong_FromSize_t(of(self).capacity))
READ(dropped, PyLong_FromUnsignedLongLong(of(self).dropped))
READ(pending, PyLong_FromSize_t(of(self).rows.size()))
READ(current_seq, PyLong_FromUnsignedLong(of(self).seq))
#undef READ

PyObject* get_current_call(PyObject* self, void*) {
  const auto& stack = of(self).thread(tls()).stack;
  return PyLong_FromUnsignedLong(stack.empty() ? 0 : stack.back().seq);
}

int deletable(PyObject* value) {
  if (!value) PyErr_SetString(PyExc_AttributeError, "cannot delete this attribute");
  return value ? 0 : -1;
}

template <bool Recorder::* Switch>
int set_switch(PyObject* self, PyObject* value, void*) {
  if (deletable(value) < 0) return -1;
  const int on = PyObject_IsTrue(value);
  if (on < 0) return -1;
  cast(self)->*Switch = on;
  return 0;
}

int set_ctx(PyObject* self, PyObject* value, void*) {
  return deletable(value) < 0 || !u32(value, &of(self).ctx) ? -1 : 0;
}

int set_capacity(PyObject* self, PyObject* value, void*) {
  if (deletable(value) < 0) return -1;
  const size_t rows = PyLong_AsSize_t(value);
  if (PyErr_Occurred()) return -1;
  of(self).capacity = rows;
  return 0;
}

template <Owned Recording::* Slot>
PyObject* get_callback(PyObject* self, void*) {
  PyObject* value = (of(self).*Slot).get();
  return Py_NewRef(value ? value : Py_None);
}

template <Owned Recording::* Slot>
int set_callback(PyObject* self, PyObject* value, void*) {
  if (value && value != Py_None && !PyCallable_Check(value)) {
    PyErr_SetString(PyExc_TypeError, "expected a callable or None");
    return -1;
  }
  (of(self).*Slot).share_unless_none(value);
  return 0;
}

PyObject* set_context_resolver(PyObject* self, PyObject* callable) {
  if (set_callback<&Recording::resolver>(self, callable, nullptr) < 0) return nullptr;
  Py_RETURN_NONE;
}

PyObject* set_probes(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"is_grad_enabled", "is_autocast_enabled", "get_autocast_dtype", "device_types",
                                "is_any_autocast_enabled", nullptr};
  PyObject *grad, *autocast, *dtype, *devices, *any = Py_None;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOO!|O:set_probes", const_cast<char**>(names), &grad, &autocast,
                                   &dtype, &PyTuple_Type, &devices, &any)) {
    return nullptr;
  }
  Recording& r = of(self);
  r.is_grad.share_unless_none(grad);
  r.is_autocast.share_unless_none(autocast);
  r.autocast_dtype.share_unless_none(dtype);
  r.any_autocast.share_unless_none(any);
  std::vector<Owned> fresh;
  if (r.is_autocast && r.autocast_dtype) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(devices); ++i) fresh.push_back(Owned::share(PyTuple_GET_ITEM(devices, i)));
  }
  r.devices = std::move(fresh);
  Py_RETURN_NONE;
}

PyObject* set_tensor_types(PyObject* self, PyObject* args) {
  PyObject *tensor, *parameter = Py_None;
  if (!PyArg_ParseTuple(args, "O!|O:set_tensor_types", &PyType_Type, &tensor, &parameter)) return nullptr;
  if (parameter != Py_None && !PyType_Check(parameter)) return PyErr_Format(PyExc_TypeError, "parameter_type must be a class");
  of(self).describer.set_tensor_types(tensor, parameter);
  Py_RETURN_NONE;
}

PyObject* set_module_type(PyObject* self, PyObject* type) {
  if (!PyType_Check(type)) return PyErr_Format(PyExc_TypeError, "expected a class");
  of(self).describer.set_module_type(type);
  Py_RETURN_NONE;
}

PyObject* set_torch_function_guard(PyObject* self, PyObject* args) {
  PyObject *depth, *disable;
  if (!PyArg_ParseTuple(args, "OO:set_torch_function_guard", &depth, &disable)) return nullptr;
  of(self).describer.set_torch_function_guard(depth, disable);
  Py_RETURN_NONE;
}

PyObject* set_library_prefixes(PyObject* self, PyObject* prefixes) {
  Owned items(PySequence_Tuple(prefixes));
  if (!items) return nullptr;
  std::vector<std::string> texts;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(items.get()); ++i) {
    PyObject* item = PyTuple_GET_ITEM(items.get(), i);
    if (!PyUnicode_Check(item)) return PyErr_Format(PyExc_TypeError, "prefixes must be str");
    texts.push_back(utf8(item));
  }
  of(self).set_library_prefixes(std::move(texts));
  Py_RETURN_NONE;
}

bool parse_id(PyObject* value, uintptr_t* out) {
  *out = reinterpret_cast<uintptr_t>(PyLong_AsVoidPtr(value));
  return !PyErr_Occurred();
}

PyObject* track(PyObject* self, PyObject* args) {
  PyObject *id, *name;
  uintptr_t address;
  if (!PyArg_ParseTuple(args, "OU:track", &id, &name) || !parse_id(id, &address)) return nullptr;
  of(self).describer.track(address, utf8(name));
  Py_RETURN_NONE;
}

PyObject* untrack(PyObject* self, PyObject* id) {
  uintptr_t address;
  if (!parse_id(id, &address)) return nullptr;
  of(self).describer.untrack(address);
  Py_RETURN_NONE;
}

PyObject* set_tracked_names(PyObject* self, PyObject* names) {
  if (!PyDict_Check(names)) return PyErr_Format(PyExc_TypeError, "expected a dict of id to name");
  std::vector<std::pair<uintptr_t, std::string>> items;
  Py_ssize_t position = 0;
  PyObject *id, *name;  // Borrowed
  while (PyDict_Next(names, &position, &id, &name)) {
    uintptr_t address;
    if (!parse_id(id, &address)) return nullptr;
    if (!PyUnicode_Check(name)) return PyErr_Format(PyExc_TypeError, "names must be str");
    items.emplace_back(address, utf8(name));
  }
  Describer& describer = of(self).describer;
  describer.untrack_all();
  for (const auto& [address, text] : items) describer.track(address, text);
  Py_RETURN_NONE;
}

PyObject* intern(PyObject* self, PyObject* args) {
  int kind;
  PyObject* text;
  if (!PyArg_ParseTuple(args, "iU:intern", &kind, &text)) return nullptr;
  if (kind < 0 || kind >= kNameKinds) return PyErr_Format(PyExc_ValueError, "kind is %d, expected 0 to %d", kind, kNameKinds - 1);
  return PyLong_FromUnsignedLong(of(self).intern(kind, utf8(text)));
}

PyObject* drain_names(PyObject* self, PyObject*) {
  auto names = std::exchange(of(self).fresh_names, {});
  Owned list(PyList_New(static_cast<Py_ssize_t>(names.size())));
  if (!list) return nullptr;
  for (size_t i = 0; i < names.size(); ++i) {
    PyObject* row = Py_BuildValue("iIs#", names[i].kind, names[i].id, names[i].text.data(),
                                  static_cast<Py_ssize_t>(names[i].text.size()));
    if (!row) return nullptr;
    PyList_SET_ITEM(list.get(), static_cast<Py_ssize_t>(i), row);
  }
  return list.release();
}

template <typename T>
py::array column(T*& data, size_t n) {
  T* owned = std::exchange(data, nullptr);
  if (!n) {
    std::free(owned);
    return py::array_t<T>(0);
  }
  py::capsule free_it(owned, [](void* p) { std::free(p); });
  return py::array_t<T>(static_cast<py::ssize_t>(n), owned, free_it);
}

PyObject* drain(PyObject* self, PyObject*) {
  try {
    Rows rows = std::move(of(self).rows);
    const size_t n = rows.size();
    static const char* names[Rows::kWords] = {"seq", "parent", "fn", "site", "ctx", "args", "ret"};
    py::dict out;
    for (int i = 0; i < Rows::kWords; ++i) out[names[i]] = column(rows.words[i], n);
    out["t"] = column(rows.t, n);
    out["dur"] = column(rows.dur, n);
    out["flags"] = column(rows.flags, n);
    return out.release().ptr();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

PyObject* open_spans(PyObject* self, PyObject*) {
  const auto stack = of(self).thread(tls()).stack;  // a copy: building the list may run the collector
  Owned list(PyList_New(0));
  if (!list) return nullptr;
  for (const Span& span : stack) {
    Owned row(Py_BuildValue("IIL", span.seq, span.fn, static_cast<long long>(span.t)));
    if (!row || PyList_Append(list.get(), row.get()) < 0) return nullptr;
  }
  return list.release();
}

PyObject* begin(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"fn", "args_sig", nullptr};
  unsigned int fn, args_sig = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I|I:begin", const_cast<char**>(names), &fn, &args_sig)) return nullptr;
  if (!cast(self)->enabled) return PyLong_FromLong(0);
  Inside inside(tls());
  Recording& r = of(self);
  ThreadState& thread = r.thread(tls());
  const uint32_t seq = r.open(thread, fn, false, true);
  thread.stack.back().args = args_sig;
  thread.stack.back().t = now_ns();
  return PyLong_FromUnsignedLong(seq);
}

PyObject* end(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"seq", "ret_sig", "raised", nullptr};
  unsigned int seq, ret_sig = 0;
  int raised = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "I|Ip:end", const_cast<char**>(names), &seq, &ret_sig, &raised)) return nullptr;
  if (seq) of(self).close(of(self).thread(tls()), seq, ret_sig, raised, now_ns());
  Py_RETURN_NONE;
}

PyObject* record_call(PyObject* self, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"fn", "args_sig", "ret_sig", "dur_ns", nullptr};
  unsigned int fn, args_sig, ret_sig;
  long long dur = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "III|L:record_call", const_cast<char**>(names), &fn, &args_sig, &ret_sig, &dur)) {
    return nullptr;
  }
  if (!cast(self)->enabled) return PyLong_FromLong(0);
  Inside inside(tls());
  Recording& r = of(self);
  ThreadState& thread = r.thread(tls());
  const uint32_t seq = r.open(thread, fn, false, true);
  const int64_t now = now_ns();
  thread.stack.back().args = args_sig;
  thread.stack.back().t = now - dur;
  r.close(thread, seq, ret_sig, false, now);
  return PyLong_FromUnsignedLong(seq);
}

PyObject* wants_values(PyObject* self, PyObject*) { return PyBool_FromLong(cast(self)->enabled && !cast(self)->muted); }

PyObject* disable_in_child(PyObject* self, PyObject*) {
  cast(self)->enabled = cast(self)->asleep = false;
  tls().inside = 0;
  of(self).forget();
  Py_RETURN_NONE;
}

template <typename F>
PyCFunction method(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"set_context_resolver", set_context_resolver, METH_O, nullptr},
    {"set_probes", method(set_probes), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"set_tensor_types", set_tensor_types, METH_VARARGS, nullptr},
    {"set_module_type", set_module_type, METH_O, nullptr},
    {"set_torch_function_guard", set_torch_function_guard, METH_VARARGS, nullptr},
    {"set_library_prefixes", set_library_prefixes, METH_O, nullptr},
    {"set_tracked_names", set_tracked_names, METH_O, nullptr},
    {"track", track, METH_VARARGS, nullptr},
    {"untrack", untrack, METH_O, nullptr},
    {"intern", intern, METH_VARARGS, nullptr},
    {"drain_names", drain_names, METH_NOARGS, nullptr},
    {"drain", drain, METH_NOARGS, nullptr},
    {"open_spans", open_spans, METH_NOARGS, nullptr},
    {"begin", method(begin), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"end", method(end), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"record_call", method(record_call), METH_VARARGS | METH_KEYWORDS, nullptr},
    {"disable_in_child", disable_in_child, METH_NOARGS, nullptr},
    {"wants_values", wants_values, METH_NOARGS, nullptr},
    {"sleep", recorder_sleep, METH_O, nullptr},
    {"wake", recorder_wake, METH_NOARGS, nullptr},
    {"expect", recorder_expect, METH_VARARGS, nullptr},
    {"open_acts", recorder_open_acts, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef attributes[] = {
    {"enabled", get_enabled, set_switch<&Recorder::enabled>, nullptr, nullptr},
    {"muted", get_muted, set_switch<&Recorder::muted>, nullptr, nullptr},
    {"asleep", get_asleep, nullptr, nullptr, nullptr},
    {"ctx", get_ctx, set_ctx, nullptr, nullptr},
    {"capacity", get_capacity, set_capacity, nullptr, nullptr},
    {"dropped", get_dropped, nullptr, nullptr, nullptr},
    {"pending", get_pending, nullptr, nullptr, nullptr},
    {"current_seq", get_current_seq, nullptr, nullptr, nullptr},
    {"current_call", get_current_call, nullptr, nullptr, nullptr},
    {"on_error", get_callback<&Recording::on_error>, set_callback<&Recording::on_error>, nullptr, nullptr},
    {"module_namer", get_callback<&Recording::module_namer>, set_callback<&Recording::module_namer>, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_doc, const_cast<char*>("Rows of calls, names and contexts of this process. Created disabled.")},
    {Py_tp_new, reinterpret_cast<void*>(new_recorder)},
    {Py_tp_dealloc, reinterpret_cast<void*>(dealloc_recorder)},
    {Py_tp_traverse, reinterpret_cast<void*>(traverse_recorder)},
    {Py_tp_clear, reinterpret_cast<void*>(clear_recorder)},
    {Py_tp_methods, methods},
    {Py_tp_getset, attributes},
    {0, nullptr},
};

PyType_Spec spec = {"proctor.native._native.Recorder", sizeof(Recorder), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};

}  // namespace

bool add_recorder_type(PyObject* module) {
  recorder_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  return recorder_type && PyModule_AddObjectRef(module, "Recorder", reinterpret_cast<PyObject*>(recorder_type)) == 0;
}

}  // namespace proctor
