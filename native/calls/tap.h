// The tap: stands where a Python function stood, calls through to it, and appends one row to its recorder.
//
// Cost over the bare call (Python 3.11, torch 2.13 CPU, one loaded machine): disabled +16 ns for `f(1)` (wall, best of
// 7), +3 ns where the interpreter cannot inline the bare call either; a row with one int +0.2 µs, with two tensor
// arguments +0.6 µs, probes, site and signatures included (thread CPU time, medians of 15 paired rounds). It is a
// vectorcall C type and not a Python wrapper: a recording closure costs 0.8 µs, and its clock calls break graphs.
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
