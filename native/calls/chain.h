// The hooks of one function as one: called by a tap dozens of times in a step, so the way from the tap to each hook is native.
//
// A hook is (label, always, function). One without a label guards itself and runs in any case; its error goes to the tap. One with a label is a
// probe's: it runs where rows are wanted (`wants`, asked once, behind the hooks before it, which may begin a step) or `always`, unless its label
// is in `off` or in `over`; its error goes to `takes(label, error)`, and on to the tap where that says no.
// Where a TorchFunctionMode or a TorchDispatchMode of the program's is on (`modes` count them), `aside(run, arguments)` runs them without it; so it does
// where an argument of the call, or its result, is of a class with a `__torch_function__` of its own, as a class of tensors may have.
// Where such an argument is no tensor, what it is only the program's code could tell; behind a `dispatched` function no probe's hook runs then.
// GIL: needed. Threads: no state after construction.
#pragma once

#include <pybind11/pybind11.h>

namespace proctor {

void bind_chain(pybind11::module_& m);

}  // namespace proctor
