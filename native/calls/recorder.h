// The recorder: rows of finished calls, names, contexts, call sites, and the stack of open calls of every thread.
//
// Rows are columns of exactly the dtypes of `invariants.schema.CALLS`; `drain` hands the arrays over without a copy.
// Threads: everything is under the GIL. A call's span lives on the stack of its own thread; code that may let go of
// the GIL (resolvers, hooks, getters) never holds an iterator or a reference into a container across that point.
// Fork: `disable_in_child` forgets rows and open spans; a call that was open in the parent writes nothing in the child.
#pragma once

#include <ctime>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

#include "describe.h"
#include "pyref.h"

namespace proctor {

enum CallFlag : uint8_t { kRaised = 1, kRoot = 2, kThread = 4 };  // invariants.schema.CallFlag
enum NameKind : int { kFunction, kSite, kSignature, kVariable, kMeta, kPlace, kNameKinds };  // invariants.schema.Name

constexpr size_t kFirstRows = 16 * 1024;          // 16 Ki rows = 784 KiB, doubled when full
constexpr size_t kDefaultCapacity = 4'000'000;    // undrained rows, about 190 MiB
constexpr int kMaxFrames = 24;                    // frames walked to the user's code
constexpr size_t kMaxCodes = 1 << 16;             // cached code objects; beyond, the cache starts again
constexpr size_t kMaxContexts = 1 << 12;          // cached (base, grad, autocast, outer); old bases never come back
constexpr size_t kNoScalarsAbove = 128;           // distinct signatures of one tap
constexpr size_t kNoDimsAbove = 1024;
constexpr size_t kNothingAbove = 4096;

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

struct Span {
  uint32_t seq = 0, parent = 0, fn = 0, site = 0, ctx = 0, args = 0;
  int64_t t = 0;
  void* frame = nullptr;  // Borrowed, compared only: the caller's frame object, alive as long as the span
  uint8_t flags = 0;
  uint8_t outer = 0;      // autocast text in force around the children
  bool module = false;
  bool synthetic = false;
};

struct ThreadState {
  uint64_t token = 0;  // which thread; operating-system ids come back, tokens do not
  std::vector<Span> stack;
  int modules = 0;     // open module calls, recorded or not; the tap counts them
  Key key;
};

// Per operating-system thread, shared by all recorders.
struct Tls {
  uint64_t token = 0;
  int inside = 0;  // > 0: our own code runs, taps pass through
  const void* dispatching = nullptr;  // the innermost tap of C code that is being called; compared, never followed
  uint64_t recorder = 0;
  ThreadState* state = nullptr;
};
Tls& tls();

class Inside {
 public:
  explicit Inside(Tls& tls) : tls_(tls) { ++tls_.inside; }
  ~Inside() { --tls_.inside; }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  Tls& tls_;
};

// Distinct signatures of one side (arguments, result) of one tap.
class Signatures {
 public:
  Detail detail() const {
    const size_t n = ids_.size();
    if (n <= kNoScalarsAbove) return Detail::Full;
    if (n <= kNoDimsAbove) return Detail::NoScalars;
    return n <= kNothingAbove ? Detail::NoDims : Detail::Nothing;
  }
  // 0: not seen by this tap.
  uint32_t find(std::string_view key) {
    if (last_id_ && key == last_key_) return last_id_;
    const auto it = ids_.find(key);
    if (it == ids_.end()) return 0;
    last_key_ = it->first;
    return last_id_ = it->second;
  }
  void add(std::string_view key, uint32_t id) { ids_.emplace(std::string(key), id); }

 private:
  TextMap<uint32_t> ids_;
  std::string_view last_key_;  // into `ids_`, whose nodes never move
  uint32_t last_id_ = 0;
};

class Rows {
 public:
  Rows() = default;
  ~Rows() { release(); }
  Rows(const Rows&) = delete;
  Rows& operator=(const Rows&) = delete;
  Rows(Rows&& other) noexcept { *this = std::move(other); }
  Rows& operator=(Rows&& other) noexcept;

  bool push(const Span& span, uint32_t ret, int64_t dur);
  size_t size() const { return size_; }

  static constexpr int kWords = 7;  // seq parent fn site ctx args ret
  uint32_t* words[kWords] = {};     // malloc'ed; the drained array frees it
  int64_t* t = nullptr;
  int64_t* dur = nullptr;
  uint8_t* flags = nullptr;

 private:
  bool grow();
  void release();
  size_t size_ = 0, room_ = 0;
};

// What is noted while nobody looks (`asleep.h`).
struct Asleep {
  struct Open {  // a collective that has not returned
    const Tls* thread = nullptr;
    unsigned long ident = 0;
    uint32_t fn = 0;
    int64_t since = 0;
    Owned group, args, names;  // all arguments, and the names of those at the end
  };
  const Tls* owner = nullptr;  // the thread that fell asleep
  unsigned long ident = 0;     // of it
  int backwards = 0, updates = 0;  // that are open
  int64_t backward_since = 0;      // 0: none is open
  uint64_t told = 0, backwards_done = 0;
  std::string acts;
  std::vector<uintptr_t> who;
  struct Usual {  // an update of a cycle of them, with the acts before it
    std::string acts;
    std::vector<uintptr_t> who;
    uintptr_t optimizer = 0;
  };
  std::vector<Usual> usual;
  size_t next = 0;                 // which of them comes now
  uint64_t passed = 0, limit = 0;  // such updates since the last time that was told, and how many there may be
  std::vector<std::pair<Owned, uint64_t>> collectives;  // by group
  std::vector<Open> open;
  Owned tell;
};

class Recording {
 public:
  Recording();
  ~Recording();

  ThreadState& thread(Tls& tls);
  // Function of this thread's innermost open span; 0 without one.
  uint32_t innermost_fn(Tls& tls) {
    const ThreadState& state = thread(tls);
    return state.stack.empty() ? 0 : state.stack.back().fn;
  }
  // Opens a span and returns its seq.
  uint32_t open(ThreadState& thread, uint32_t fn, bool module, bool synthetic);
  // Read step, phase and modes again for the span at this depth: its hook may have begun a new step.
  void refresh_context(ThreadState& thread, size_t at);
  // Takes back the span that was opened last under this seq; it writes no row.
  void discard(ThreadState& thread, uint32_t seq);
  void close(ThreadState& thread, uint32_t seq, uint32_t ret, bool raised, int64_t end_ns);
  uint32_t call_signature(ThreadState& thread, Signatures& seen, PyObject* const* args, Py_ssize_t n_args, PyObject* kwnames);
  uint32_t value_signature(ThreadState& thread, Signatures& seen, PyObject* object);
  uint32_t intern(int kind, std::string_view text);
  uint32_t module_code(PyTypeObject* type, uint32_t fallback);
  void fail();  // hand the current exception to `on_error`, swallow what comes back
  void forget();
  void set_library_prefixes(std::vector<std::string> prefixes);
  void write(const Span& span, uint32_t ret, int64_t dur);

  int traverse(visitproc visit, void* arg) const;
  void clear();

  Describer describer;
  Rows rows;
  uint32_t seq = 0, ctx = 0;
  size_t capacity = kDefaultCapacity;
  uint64_t dropped = 0, main_token = 0;
  struct Named {
    int kind;
    uint32_t id;
    std::string text;
  };
  std::vector<Named> fresh_names;
  Owned resolver, is_grad, is_autocast, autocast_dtype, any_autocast, on_error, module_namer;
  std::vector<Owned> devices;
  Asleep asleep;

 private:
  struct Code {
    Owned code;
    bool user = false;
    std::unordered_map<int, uint32_t> sites;  // by last instruction
  };
  uint32_t site(const Span& parent, void** caller);
  uint32_t context(uint8_t around, uint8_t* outer);
  uint8_t autocast();
  Code& code_info(PyCodeObject* code, PyFrameObject* frame);
  uint32_t remember(Signatures& seen, std::string_view key);

  uint64_t uid_;
  std::vector<std::string> library_prefixes_;
  std::unordered_map<std::thread::id, std::unique_ptr<ThreadState>> threads_;
  TextMap<uint32_t> names_[kNameKinds];
  TextMap<uint32_t> by_key_;  // signature key → signature id
  std::unordered_map<uint64_t, uint32_t> contexts_;
  std::vector<std::string> autocasts_{""};
  std::unordered_map<PyCodeObject*, Code> codes_;
  std::unordered_map<PyTypeObject*, std::pair<Owned, uint32_t>> module_codes_;
};

struct Recorder {
  PyObject_HEAD
  bool enabled, muted, asleep;  // muted: calls are recorded, and no values
  Recording* r;  // Owned
};
extern PyTypeObject* recorder_type;

bool add_recorder_type(PyObject* module);

}  // namespace proctor
