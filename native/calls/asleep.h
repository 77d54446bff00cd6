// Steps that nobody looks at: no hook runs in them. What the program does is noted here in one byte an act, and told when an update ends.
//
// Acts of the thread that fell asleep, as a string, in their order (the same act twice in a row is noted once where that means the same):
//   F E  an outermost module is called: training with gradients, or not      B  a backward that no other contains
//   P    as F, and a tensor that it is given requires a gradient: an attack on an input, or a critic that is given what an actor made
//   Z    an optimizer clears gradients; its address is in `who`              M  a module does
//   D    a loader gave a batch        I  an optimizer is called by another's update; its address is in `who`
//   X    something that cannot be followed in this way (a model or a backward within an update, too many acts)
// `tell(args, acts, who, kind, passed)` is called behind an update that no other contains, behind a loss scaler that skipped one, and before an
// act of another thread that trains, for which everything is awake again.
// Where updates come in a cycle, `expect` says so: then so many go by that are only counted (`passed`), and nothing of ours runs in Python. What is
// told ends that; whoever is told says anew what to expect.
// Collectives are counted by their group, and the calls that are open can be asked for by another thread.
// Threads: under the GIL. Cost: 50 to 150 ns an act (benchmarks/budget_cost.py), 25 ns where an act needs no note.
#pragma once

#include <string>
#include <vector>

#include "recorder.h"

namespace proctor {

enum Act : uint8_t { kNone, kForward, kBackward, kUpdate, kClear, kClearModule, kFetch, kScaled, kCollective, kQuiet, kActs };
enum Told : int { kUpdated, kSkipped, kForeign, kPassed };

struct ActCall {  // one call of a tap
  Act act;
  int group_at;       // position of a collective's group among its arguments, -1: it has none
  uint32_t fn;
  PyObject* wrapped;  // Borrowed
  PyObject* const* args;
  size_t nargsf;
  PyObject* kwnames;
};

// Calls through, noting the act. False: not done, everything is awake, and the call has yet to be made.
bool call_asleep(Recorder& recorder, Tls& tls, const ActCall& call, PyObject** result);

// Methods of the recorder's type.
PyObject* recorder_sleep(PyObject* self, PyObject* tell);
PyObject* recorder_wake(PyObject* self, PyObject*);
PyObject* recorder_expect(PyObject* self, PyObject* args);
PyObject* recorder_open_acts(PyObject* self, PyObject*);

}  // namespace proctor
