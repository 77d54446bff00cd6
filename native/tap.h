// The tap: stands where a Python function stood, calls through to it, and appends one row to its recorder.
//
// Cost: pass-through while the recorder is disabled; measured numbers are in benchmarks/tap.py. It is a vectorcall C
// type and not a Python wrapper because a closure costs 0.8 µs and breaks torch.compile (findings: native §1).
// To everybody else a tap is the function it wraps: `__class__`, attributes, hash, equality, pickling and Dynamo
// (`_torchdynamo_inline`) all lead to the wrapped callable. `tapped` and `is_tap` are ours.
//
// Two types, because "binds as a method" is a flag of the type: `Tap` around what does not bind (builtin functions,
// classes), `MethodTap`, a subclass, around what does (functions, method descriptors).
// Threads: under the GIL. The user's exception passes as the same object; ours go to `Recorder.on_error` and nowhere else.
#pragma once

#include <pybind11/pybind11.h>

namespace proctor {

void bind_tap(pybind11::module_& m);

}  // namespace proctor
