// What torch tensors hold, read through their Python attributes and the address of their memory: no header of torch, no operator of torch.
//
// A step looks at some dozens of tensors a dozen times; in Python each look at one took as long as hashing it. Only plain tensors are read here:
// `torch.Tensor` or `torch.nn.Parameter` itself, dense, on the CPU, with storage behind every element. Of any other the answer says so, and
// Python decides (`instrument/observe/content.py`), so a rule of what may be read is never less strict here than there.
//
// The caller keeps TorchFunctionModes off. GIL: needed; released while many bytes are hashed. Threads: no state after construction.
#pragma once

#include <pybind11/pybind11.h>

namespace proctor {

void bind_tensors(pybind11::module_& m);

}  // namespace proctor
