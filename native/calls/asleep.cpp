#include "asleep.h"

namespace proctor {

namespace {

constexpr size_t kMostActs = 1 << 16;  // between two updates: an evaluation of some ten thousand batches

PyObject* training_name() {
  static PyObject* name = PyUnicode_InternFromString("training");
  return name;
}

PyObject* group_name() {
  static PyObject* name = PyUnicode_InternFromString("group");
  return name;
}

bool again_is_the_same(char act) { return act == 'F' || act == 'P' || act == 'E' || act == 'M' || act == 'D' || act == 'X'; }

void note(Asleep& a, char act) {
  if (!a.acts.empty() && a.acts.back() == act && again_is_the_same(act)) return;
  if (a.acts.size() >= kMostActs) {
    a.acts.back() = 'X';
    return;
  }
  a.acts.push_back(act);
}

void note_who(Asleep& a, char act, const ActCall& call) {
  if (PyVectorcall_NARGS(call.nargsf) < 1 || a.acts.size() >= kMostActs) return note(a, 'X');
  a.acts.push_back(act);
  a.who.push_back(reinterpret_cast<uintptr_t>(call.args[0]));
}

PyObject* through(const ActCall& call) { return PyObject_Vectorcall(call.wrapped, call.args, call.nargsf, call.kwnames); }

// F, P or E. The user's module may answer by code of its own, which may fail: that is theirs to see in their own call.
char forward_of(Recording& r, Tls& tls, const ActCall& call) {
  Inside inside(tls);
  ErrorStash users;
  Owned training(PyVectorcall_NARGS(call.nargsf) > 0 ? PyObject_GetAttr(call.args[0], training_name()) : nullptr);
  const int on = training ? PyObject_IsTrue(training.get()) : 0;
  Owned grad(on > 0 && r.is_grad ? PyObject_CallNoArgs(r.is_grad.get()) : nullptr);
  const bool trains = on > 0 && grad.get() == Py_True;
  bool probes = false;
  for (Py_ssize_t i = 1; trains && !probes && i < PyVectorcall_NARGS(call.nargsf); ++i) probes = r.describer.asks_gradient(call.args[i]);
  PyErr_Clear();
  users.restore();
  return probes ? 'P' : trains ? 'F' : 'E';
}

PyObject* noted(const Asleep& a) {  // (acts, who), New reference
  Owned who(PyTuple_New(static_cast<Py_ssize_t>(a.who.size())));
  if (!who) return nullptr;
  for (size_t i = 0; i < a.who.size(); ++i) {
    PyObject* id = PyLong_FromVoidPtr(reinterpret_cast<void*>(a.who[i]));
    if (!id) return nullptr;
    PyTuple_SET_ITEM(who.get(), static_cast<Py_ssize_t>(i), id);
  }
  return Py_BuildValue("s#O", a.acts.data(), static_cast<Py_ssize_t>(a.acts.size()), who.get());
}

void forget_acts(Asleep& a) {
  a.acts.clear();
  a.who.clear();
}

bool is_usual(const Asleep& a, const ActCall& call) {
  if (!a.limit || PyVectorcall_NARGS(call.nargsf) < 1) return false;
  const Asleep::Usual& usual = a.usual[a.next];
  return reinterpret_cast<uintptr_t>(call.args[0]) == usual.optimizer && a.acts == usual.acts && a.who == usual.who;
}

void expect_nothing(Asleep& a) {
  a.usual.clear();
  a.next = 0;
  a.limit = 0;
}

void tell(Recorder& recorder, Tls& tls, const ActCall& call, Told kind) {
  Recording& r = *recorder.r;
  Inside inside(tls);
  ErrorStash users;
  const Py_ssize_t n = PyVectorcall_NARGS(call.nargsf);
  Owned args(PyTuple_New(n));
  for (Py_ssize_t i = 0; args && i < n; ++i) PyTuple_SET_ITEM(args.get(), i, Py_NewRef(call.args[i]));
  Owned acts(noted(r.asleep));
  Owned teller = Owned::share(r.asleep.tell.get());
  forget_acts(r.asleep);
  expect_nothing(r.asleep);
  const auto passed = static_cast<unsigned long long>(std::exchange(r.asleep.passed, 0));
  Owned done(args && acts && teller ? PyObject_CallFunction(teller.get(), "OOOiK", args.get(), PyTuple_GET_ITEM(acts.get(), 0),
                                                            PyTuple_GET_ITEM(acts.get(), 1), static_cast<int>(kind), passed)
                                    : nullptr);
  if (!done) {
    recorder.asleep = false;
    if (PyErr_Occurred()) r.fail();
  }
  PyErr_Clear();
  users.restore();
}

PyObject* forward(Recorder& recorder, Tls& tls, const ActCall& call) {
  Recording& r = *recorder.r;
  ThreadState& thread = r.thread(tls);
  if (++thread.modules == 1 && &tls == r.asleep.owner && !r.asleep.backwards) {
    const char act = r.asleep.updates ? 'X' : forward_of(r, tls, call);
    note(r.asleep, act);
  }
  PyObject* result = through(call);
  if (thread.modules > 0) --thread.modules;
  return result;
}

PyObject* backward(Recorder& recorder, const ActCall& call) {
  Asleep& a = recorder.r->asleep;
  if (!a.backwards++) {
    note(a, a.updates ? 'X' : 'B');
    a.backward_since = now_ns();
    ++a.backwards_done;
  }
  PyObject* result = through(call);
  if (a.backwards > 0 && !--a.backwards) a.backward_since = 0;
  return result;
}

PyObject* update(Recorder& recorder, Tls& tls, const ActCall& call) {
  Asleep& a = recorder.r->asleep;
  if (a.updates++) note_who(a, 'I', call);
  PyObject* result = through(call);
  if (a.updates > 0 && !--a.updates) {  // also where something has ended the sleep meanwhile: nobody else tells of this update
    ++a.told;
    if (is_usual(a, call)) {
      forget_acts(a);
      a.next = (a.next + 1) % a.usual.size();
      if (++a.passed >= a.limit) tell(recorder, tls, call, kPassed);
    } else {
      tell(recorder, tls, call, kUpdated);
    }
  }
  return result;
}

PyObject* scaled(Recorder& recorder, Tls& tls, const ActCall& call) {
  Asleep& a = recorder.r->asleep;
  const uint64_t before = a.told;
  PyObject* result = through(call);
  if (result && a.told == before && !a.updates && recorder.asleep) tell(recorder, tls, call, kSkipped);
  return result;
}

// The group that a collective is given; Borrowed, None where it is left to torch.
PyObject* group_of(const ActCall& call) {
  const Py_ssize_t n = PyVectorcall_NARGS(call.nargsf);
  const Py_ssize_t named = call.kwnames ? PyTuple_GET_SIZE(call.kwnames) : 0;
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* name = PyTuple_GET_ITEM(call.kwnames, i);
    if (name == group_name() || PyUnicode_Compare(name, group_name()) == 0) return call.args[n + i];
  }
  return call.group_at >= 0 && call.group_at < n ? call.args[call.group_at] : Py_None;
}

PyObject* collective(Recorder& recorder, Tls& tls, const ActCall& call) {
  Asleep& a = recorder.r->asleep;
  for (const auto& open : a.open) {
    if (open.thread == &tls) return through(call);  // inside another one, which says it all
  }
  PyObject* group = group_of(call);
  bool counted = false;
  for (auto& [known, count] : a.collectives) {
    if (known.get() == group) {
      ++count;
      counted = true;
      break;
    }
  }
  if (!counted) a.collectives.emplace_back(Owned::share(group), 1);
  Asleep::Open mine;
  mine.thread = &tls;
  mine.ident = PyThread_get_thread_ident();
  mine.fn = call.fn;
  mine.since = now_ns();
  mine.group = Owned::share(group);
  const Py_ssize_t all = PyVectorcall_NARGS(call.nargsf) + (call.kwnames ? PyTuple_GET_SIZE(call.kwnames) : 0);
  mine.args = Owned(PyTuple_New(all));
  for (Py_ssize_t i = 0; mine.args && i < all; ++i) PyTuple_SET_ITEM(mine.args.get(), i, Py_NewRef(call.args[i]));
  if (!mine.args) PyErr_Clear();
  mine.names = Owned::share(call.kwnames);
  a.open.push_back(std::move(mine));
  PyObject* result = through(call);
  for (size_t i = a.open.size(); i > 0; --i) {
    if (a.open[i - 1].thread == &tls) {
      Asleep::Open held = std::move(a.open[i - 1]);  // goes when the list is whole again
      a.open.erase(a.open.begin() + static_cast<std::ptrdiff_t>(i - 1));
      break;
    }
  }
  return result;
}

}  // namespace

bool call_asleep(Recorder& recorder, Tls& tls, const ActCall& call, PyObject** result) {
  Asleep& a = recorder.r->asleep;
  const bool mine = &tls == a.owner;
  switch (call.act) {
    case kForward:
      *result = forward(recorder, tls, call);
      return true;
    case kCollective:
      *result = collective(recorder, tls, call);
      return true;
    case kQuiet:
    case kNone:
      *result = through(call);
      return true;
    case kFetch:
      *result = through(call);
      if (*result && mine) note(a, 'D');
      return true;
    default:
      break;
  }
  if (!mine) {
    if (a.backwards > 0) {  // of autograd's own threads
      *result = through(call);
      return true;
    }
    tell(recorder, tls, call, kForeign);
    recorder.asleep = false;
    return false;
  }
  switch (call.act) {
    case kBackward:
      *result = backward(recorder, call);
      break;
    case kUpdate:
      *result = update(recorder, tls, call);
      break;
    case kScaled:
      *result = scaled(recorder, tls, call);
      break;
    default:
      if (!a.updates) {
        if (call.act == kClear) {
          note_who(a, 'Z', call);
        } else {
          note(a, 'M');
        }
      }
      *result = through(call);
  }
  return true;
}

namespace {
Recorder& of(PyObject* self) { return *reinterpret_cast<Recorder*>(self); }
}  // namespace

PyObject* recorder_sleep(PyObject* self, PyObject* tell) {
  if (!PyCallable_Check(tell)) return PyErr_Format(PyExc_TypeError, "expected a callable");
  Asleep fresh;
  fresh.owner = &tls();
  fresh.ident = PyThread_get_thread_ident();
  fresh.tell = Owned::share(tell);
  Asleep old = std::exchange(of(self).r->asleep, std::move(fresh));
  of(self).asleep = true;
  Py_RETURN_TRUE;
}

PyObject* recorder_wake(PyObject* self, PyObject*) {
  of(self).asleep = false;
  Asleep& a = of(self).r->asleep;
  Owned acts(noted(a));
  Owned counts(PyList_New(0));
  if (!acts || !counts) return nullptr;
  for (const auto& [group, count] : a.collectives) {
    Owned row(Py_BuildValue("OK", group.get(), static_cast<unsigned long long>(count)));
    if (!row || PyList_Append(counts.get(), row.get()) < 0) return nullptr;
  }
  forget_acts(a);
  const auto backwards = static_cast<unsigned long long>(std::exchange(a.backwards_done, 0));
  const auto passed = static_cast<unsigned long long>(std::exchange(a.passed, 0));
  expect_nothing(a);
  auto groups = std::exchange(a.collectives, {});
  return Py_BuildValue("OOKOiK", PyTuple_GET_ITEM(acts.get(), 0), PyTuple_GET_ITEM(acts.get(), 1), backwards, counts.get(),
                       a.backwards + a.updates, passed);
}

PyObject* recorder_expect(PyObject* self, PyObject* args) {
  PyObject* cycle;
  unsigned long long limit;
  if (!PyArg_ParseTuple(args, "O!K:expect", &PyTuple_Type, &cycle, &limit)) return nullptr;
  std::vector<Asleep::Usual> usual;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(cycle); ++i) {
    const char* acts;
    Py_ssize_t length;
    PyObject *update = PyTuple_GET_ITEM(cycle, i), *who, *optimizer;
    if (!PyTuple_Check(update)) return PyErr_Format(PyExc_TypeError, "an update is (acts, who, optimizer)");
    if (!PyArg_ParseTuple(update, "s#O!O:expect", &acts, &length, &PyTuple_Type, &who, &optimizer)) return nullptr;
    Asleep::Usual one;
    one.acts.assign(acts, static_cast<size_t>(length));
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(who); ++j) {
      one.who.push_back(reinterpret_cast<uintptr_t>(PyLong_AsVoidPtr(PyTuple_GET_ITEM(who, j))));
    }
    one.optimizer = reinterpret_cast<uintptr_t>(PyLong_AsVoidPtr(optimizer));
    if (PyErr_Occurred()) return nullptr;
    usual.push_back(std::move(one));
  }
  Asleep& a = of(self).r->asleep;
  a.limit = usual.empty() ? 0 : limit;
  a.usual = std::move(usual);
  a.next = 0;
  Py_RETURN_NONE;
}

PyObject* recorder_open_acts(PyObject* self, PyObject*) {
  const Asleep& a = of(self).r->asleep;
  Owned list(PyList_New(0));
  if (!list) return nullptr;
  for (const auto& open : a.open) {
    Owned row(Py_BuildValue("IOOLk", open.fn, open.args ? open.args.get() : Py_None, open.names ? open.names.get() : Py_None,
                            static_cast<long long>(open.since), open.ident));
    if (!row || PyList_Append(list.get(), row.get()) < 0) return nullptr;
  }
  return Py_BuildValue("LkO", static_cast<long long>(of(self).asleep ? a.backward_since : 0), a.ident, list.get());
}

}  // namespace proctor
